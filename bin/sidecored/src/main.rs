//! The daemon: `sidecored --config FILE`. See docs/sidecored.md.
#![forbid(unsafe_code)]

mod log;
mod service;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::Parser;
use sidecore_assembly::Assembly;
use sidecore_control::{Api, Config, Depth, Socket};
use sidecore_linux::{EndRequest, EndRequests, HeldSignals, ignore_file_size_signal};

use log::Log;
use service::Service;

/// The configuration is at fault; nothing was started.
const BAD_CONFIG: u8 = 2;

/// Ended by a later signal, before everything was in order.
const ABORTED: u8 = 3;

/// Serves disks to guests over vhost-user sockets, from polling sidecores.
#[derive(Parser)]
#[command(name = "sidecored", version, after_help = AFTER_HELP)]
struct Arguments {
    /// The configuration file, in TOML; docs/config.md lists its keys.
    #[arg(long, short, value_name = "FILE")]
    config: PathBuf,
}

const AFTER_HELP: &str = "\
The configuration is checked to the end before anything is started, and every fault is reported with its place and \
remedy. When all sockets listen, the line `ready: N devices` appears on the standard output. The log goes to the \
standard error.

SIGTERM and SIGINT end the daemon in order: no more connections, queues stopped when what is in flight is done, volumes' \
metadata written, files flushed, sockets removed. Signals within two seconds of the first mean the same; a later one ends \
it at once.

Environment:
  RUST_LOG   how much to log: error, warn, info (the default), debug; or by part, as in `warn,sidecore_vhost_user=debug`
  NOTIFY_SOCKET, LISTEN_FDS, LISTEN_FDNAMES, LISTEN_PID
             set by a service manager, systemd or `sidecore keep`: see docs/sidecored.md

Exit codes:
  0  ended in order by a signal
  1  could not start, or could not go on
  2  the configuration or the command line is wrong; nothing was started
  3  ended at once by a later signal

Examples:
  sidecore check disks.toml              see what is wrong with a configuration
  sidecored --config disks.toml          serve its disks
  sidecore --socket /run/sidecore/control.sock list
";

/// What the main thread waits for.
enum Event {
    Signalled(Instant),
    Drained,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let log = Log::start();
    let service = Service::find();
    raise_file_limit();
    if let Err(error) = ignore_file_size_signal() {
        tracing::warn!("a write past the limit of a file's size will end this process: {error}");
    }
    let config = match Config::load(&arguments.config, Depth::Start) {
        Ok(config) => config,
        Err(problems) => {
            let count = problems.list.len();
            eprintln!("{problems}\nsidecored: {count} fault{}, nothing was started", if count == 1 { "" } else { "s" });
            return ExitCode::from(BAD_CONFIG);
        }
    };
    let ended = run(&config, service);
    log.tell();
    match ended {
        Ok(code) => code,
        Err(error) => {
            eprintln!("sidecored: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Each running queue has three descriptors and the shell's usual limit is 1024, which is for programs that use select.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

fn run(config: &Config, mut service: Service) -> Result<ExitCode> {
    // First of all: a second daemon of this configuration ends here, before it touches a store.
    let socket = Socket::bind(&config.control_socket, &config.control_access)?;
    // Whoever ended it between the two would take what was left along: an end waits until it can be left again.
    let held = service.has_left().then(HeldSignals::hold).transpose().context("cannot hold signals")?;
    let mut left = service.take_left();
    let assembly = Assembly::take_over(&config.spec, &mut left);
    service.forget_kept();
    // What a daemon that cannot start has not gone on with is there for the next one.
    let assembly = Arc::new(assembly.inspect_err(|_| service.leave(left))?);
    assembly.serve_late()?;
    let (events, received) = mpsc::channel();
    let api = {
        let (assembly, events) = (Arc::clone(&assembly), events.clone());
        let signalled = move || drop(events.send(Event::Signalled(Instant::now())));
        Api::start(socket, assembly, signalled).context("cannot start the control API")
    };
    let api = api.inspect_err(|_| {
        if service.keeps() {
            service.leave(assembly.hand_over());
        }
    })?;
    drop(held);
    announce(config.spec.devices.len());
    service.ready();
    tracing::info!(control = %config.control_socket.display(), "serving");

    // Neither can fail to come: this function holds a sender.
    let mut requests = EndRequests::default();
    if let Ok(Event::Signalled(at)) = received.recv() {
        requests.receive(at);
    }
    tracing::info!("draining");
    service.stopping();
    let drain = std::thread::spawn(move || {
        if service.keeps() {
            service.leave(assembly.hand_over());
        } else {
            assembly.drain();
        }
        let _ = events.send(Event::Drained);
    });
    while let Ok(Event::Signalled(at)) = received.recv() {
        if requests.receive(at) == EndRequest::AtOnce {
            tracing::error!("ended at once by a later signal, with requests in flight");
            // The sockets' files stay behind; the next daemon replaces them.
            std::process::exit(ABORTED.into());
        }
        tracing::info!("one more signal, which means the same as the first");
    }
    let _ = drain.join();
    drop(api);
    tracing::info!("ended in order");
    Ok(ExitCode::SUCCESS)
}

/// For whoever waits to connect.
fn announce(count: usize) {
    let mut out = io::stdout().lock();
    // Nobody may be reading, which is no reason to end. Scripts look for this line, so it stays the same for one device.
    let _ = writeln!(out, "ready: {count} devices");
    let _ = out.flush();
}
