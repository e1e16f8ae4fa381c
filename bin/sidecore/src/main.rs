//! The command line: `sidecore list|stats|top|device|stage|volume|schedule|controller|remote|net|
//! mirror|integrity|luks|check|plan|keep|own|replay`. See docs/sidecore.md.
#![forbid(unsafe_code)]

mod bound;
mod controller;
mod dedup;
mod device;
mod disk;
mod export;
mod flags;
mod image;
mod import;
mod integrity;
mod interrupt;
mod keep;
mod list;
mod luks;
mod mirror;
mod net;
mod own;
mod pick;
mod plan;
mod progress;
mod qemu;
mod remote;
mod repair;
mod replay;
mod reservation;
mod salvage;
mod schedule;
mod stage;
mod stats;
mod table;
mod terminal;
mod top;
mod units;
mod volume;
mod worker;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};
use sidecore_control::config::DEFAULT_CONTROL_SOCKET;
use sidecore_control::{Client, Config, Depth};
use sidecore_linux::ignore_file_size_signal;

/// The exit code of a check that found faults.
const FAULTS: u8 = 2;

/// Shows the state of a running sidecored, manages its devices and volumes, and checks
/// configurations.
#[derive(Parser)]
#[command(name = "sidecore", version, after_help = AFTER_HELP)]
struct Arguments {
    /// The control socket of the daemon: `control_socket` in its configuration.
    #[arg(long, short, value_name = "PATH", default_value = DEFAULT_CONTROL_SOCKET, global = true)]
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Exit codes:
  0  done
  1  no daemon answers, or something else went wrong; the message says what to do
  2  a check found faults, a replay differences, or the command line is wrong
`keep` ends with the exit code of its command.

Examples:
  sidecore list                                what is served, and to whom
  sidecore stats vd0 --queues                  all counters of a disk and of its queues
  sidecore stats --json --since-start | jq '.devices[].name'
  sidecore top --interval 0.5                  live; q quits
  sidecore --socket /tmp/control.sock list     a daemon with another control socket
  sidecore check disks.toml                    before starting a daemon with it
  sidecore volume create root 20GiB
  sidecore volume import debian.qcow2 base
  sidecore volume clone base guest7
  sidecore device add vd7 /run/sidecore/vd7.sock --volume guest7
  sidecore stage add vd7 delay delay_us=100    while its guest uses it
  sidecore controller show                     space, translation, functions, events
  sidecore replay vd0.recording /run/sidecore/vd7.sock    reads only, without --write
  sidecore plan --example > rack.toml          then: sidecore plan rack.toml
  sidecore keep -- sidecored --config disks.toml    SIGHUP restarts it, and guests stay connected
";

#[derive(Subcommand)]
enum Command {
    /// List the disks: their kinds, their sidecores, their states.
    List {
        /// Print the control API's JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Show all counters since the daemon started, and the latencies of the last second.
    ///
    /// A latency is the time from taking a request off the ring to completing it.
    Stats(stats::Arguments),
    /// Watch rates live. Without a terminal, print the rates of one interval and end.
    ///
    /// In the view, q, Escape or Ctrl-C quits.
    Top {
        /// Seconds between two measurements, 0.1 to 60.
        #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = interval)]
        interval: Duration,
    },
    /// Add and remove disks while the daemon runs.
    Device(device::Arguments),
    /// Show the stages of a disk, and add and remove them while the disk is in use.
    Stage(stage::Arguments),
    /// Make, copy, change, check, import and export volumes.
    Volume(volume::Arguments),
    /// Show the schedules of snapshots, run them now, and replace them.
    Schedule(schedule::Arguments),
    /// Show controllers, and manage what concerns all volumes of a controller.
    Controller(controller::Arguments),
    /// Show links and remote devices, and manage the clients that use devices of this host.
    Remote(remote::Arguments),
    /// Show switches, their ports, and the addresses that they know.
    Net(net::Arguments),
    /// Show mirrors and their legs, make mirrors, and change their legs.
    Mirror(mirror::Arguments),
    /// Make stores with checksums.
    Integrity(integrity::Arguments),
    /// Make and check headers of encrypted disks.
    Luks(luks::Arguments),
    /// Give the requests of a recording to a device again, and compare results and data.
    ///
    /// Only reads and flushes, unless --write is given.
    Replay(replay::Arguments),
    /// Check a configuration without starting anything, and list all faults.
    Check {
        /// The configuration file.
        config: PathBuf,
        /// Check only the text, and not whether this machine has the CPUs, memory, files and
        /// sockets: for a configuration that is meant for another machine, or that a daemon is
        /// running with.
        #[arg(long)]
        text_only: bool,
        /// Also list what a daemon would do to start with it, in order.
        #[arg(long)]
        plan: bool,
    },
    /// Compare the prices of racks with and without IOhosts, and count the sidecores they need.
    Plan(plan::Arguments),
    /// Run a daemon and keep its descriptors during restarts, on hosts without systemd.
    Keep(keep::Arguments),
    /// Run a daemon on the one of several hosts that owns its stores, by a lease of etcd.
    Own(own::Arguments),
    /// Show and end the reservations of a disk, by which `own --fence-reservation` fences.
    Reservation(reservation::Arguments),
}

fn main() -> ExitCode {
    if let Some(code) = bound::become_program() {
        return code;
    }
    let arguments = Arguments::parse();
    // The commands of `keep` and `own` would inherit the ignored signal.
    if !matches!(arguments.command, Command::Keep(_) | Command::Own(_))
        && let Err(error) = ignore_file_size_signal()
    {
        eprintln!(
            "sidecore: a write past the limit of a file's size will end this program: {error}"
        );
    }
    let result = match arguments.command {
        Command::Check { config, text_only, plan } => {
            return check(&config, if text_only { Depth::Text } else { Depth::Machine }, plan);
        }
        Command::Integrity(arguments) => integrity::run(&arguments),
        Command::Luks(arguments) => luks::run(&arguments),
        Command::Mirror(mirror) => mirror::run(&arguments.socket, mirror),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Reservation(arguments) => reservation::run(&arguments),
        Command::Replay(arguments) => match replay::run(&arguments) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::List { json } => list::run(&arguments.socket, json),
        Command::Stats(stats) => with(&arguments.socket, |client| stats::run(client, &stats)),
        Command::Top { interval } => with(&arguments.socket, |client| top::run(client, interval)),
        Command::Device(device) => with(&arguments.socket, |client| device::run(client, device)),
        Command::Stage(stage) => with(&arguments.socket, |client| stage::run(client, stage)),
        Command::Schedule(schedule) => {
            with(&arguments.socket, |client| schedule::run(client, schedule))
        }
        Command::Net(net) => with(&arguments.socket, |client| net::run(client, net)),
        Command::Remote(remote) => with(&arguments.socket, |client| remote::run(client, remote)),
        Command::Controller(controller) => controller::run(&arguments.socket, controller),
        Command::Keep(keep) => match keep::run(&keep) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Own(own) => match own::run(&own, &arguments.socket) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Volume(volume) => match volume::run(&arguments.socket, volume) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sidecore: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn with(socket: &Path, command: impl FnOnce(&Client) -> Result<()>) -> Result<()> {
    command(&Client::new(socket)?)
}

/// Checks a configuration, and lists the actions of a start if they are asked for.
fn check(file: &Path, depth: Depth, with_plan: bool) -> ExitCode {
    let config = match Config::load(file, depth) {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("{problems}\nsidecore: {}", units::count(problems.list.len(), "fault"));
            return ExitCode::from(FAULTS);
        }
    };
    let devices = config.spec.devices.len();
    let mut text = format!("{}: fine, {}\n", file.display(), units::count(devices, "device"));
    match if with_plan { config.plan() } else { Ok(Vec::new()) } {
        Ok(plan) => text.extend(plan.iter().map(|action| format!("  {action}\n"))),
        Err(error) => {
            eprintln!("{}: {error}", file.display());
            return ExitCode::from(FAULTS);
        }
    }
    let _ = print(&text);
    ExitCode::SUCCESS
}

fn interval(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=60.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected seconds, from 0.1 to 60".to_owned()),
    }
}

/// Writes a value as JSON to the standard output.
fn print_json(thing: &impl serde::Serialize) -> Result<()> {
    Ok(print(&(serde_json::to_string_pretty(thing)? + "\n"))?)
}

/// Writes to the standard output. A closed pipe is no failure: its reader may have read enough, as
/// `head` does.
fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
