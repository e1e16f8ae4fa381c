//! The daemon: `sidecored --config FILE`. See docs/sidecored.md.
#![forbid(unsafe_code)]

mod log;
mod owner;
mod service;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::Parser;
use sidecore_assembly::Assembly;
use sidecore_assembly::spec::LOST_STORE;
use sidecore_control::{Api, Config, Depth, Socket};
use sidecore_linux::{
    EndRequest, EndRequests, HeldSignals, ignore_file_size_signal, on_reservation_conflict,
};

use log::Log;
use service::Service;

/// The exit code for a faulty configuration: nothing was started.
const BAD_CONFIG: u8 = 2;

/// The exit code after a later signal, which ended the daemon before the end in order.
const ABORTED: u8 = 3;

/// The exit code after an end in which an IOhost was away, and requests or writes were given up.
const GAVE_UP: u8 = 4;

/// Serves disks to virtual machines over vhost-user and vfio-user sockets, from polling sidecores.
#[derive(Parser)]
#[command(name = "sidecored", version, after_help = AFTER_HELP)]
struct Arguments {
    /// The configuration file, in TOML; docs/config.md lists its keys.
    #[arg(long, short, value_name = "FILE")]
    config: PathBuf,
}

const AFTER_HELP: &str = "\
The configuration is checked to the end before anything is started, and every fault is reported \
with its place and remedy. When all sockets listen, the line `ready: N devices` appears on the \
standard output. The log goes to the standard error.

SIGTERM and SIGINT end the daemon in order: no more connections, queues stopped when what is in \
flight is done, volumes' metadata written, files flushed, sockets removed. Signals within two \
seconds of the first mean the same; a later signal ends the daemon at once. While an IOhost is \
away, the end waits five seconds for the requests and unflushed writes of its devices.

Environment:
  RUST_LOG   how much to log: error, warn, info (the default), debug; or by part, as in \
`warn,sidecore_vhost_user=debug`
  NOTIFY_SOCKET, LISTEN_FDS, LISTEN_FDNAMES, LISTEN_PID
             set by a service manager, systemd or `sidecore keep`: see docs/restart.md
  SIDECORE_EPOCH, SIDECORE_EPOCH_SERIES, SIDECORE_FENCE
             set by `sidecore own`: see docs/sidecore.md

Exit codes:
  0  ended in order by a signal
  1  could not start, or could not go on
  2  the configuration or the command line is wrong; nothing was started
  3  ended at once by a later signal
  4  ended by a signal while an IOhost was away: the log names what was given up
  5  ended at once: another program has written to a controller's store, or another host has
     reserved a disk

Examples:
  sidecore check disks.toml              list the faults of a configuration
  sidecored --config disks.toml          serve its disks
  sidecore --socket /run/sidecore/control.sock list
";

/// An event that the main thread waits for.
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
    let mut config = match Config::load(&arguments.config, Depth::Start) {
        Ok(config) => config,
        Err(problems) => {
            let count = problems.list.len();
            eprintln!(
                "{problems}\nsidecored: {count} fault{}, nothing was started",
                if count == 1 { "" } else { "s" }
            );
            return ExitCode::from(BAD_CONFIG);
        }
    };
    let ended = owner::from_environment().and_then(|owner| {
        config.spec.owner = owner;
        if owner.is_some() && owner::is_fenced_by_reservations()? {
            on_reservation_conflict(end_fenced);
        }
        run(&config, service)
    });
    log.report();
    match ended {
        Ok(code) => code,
        Err(error) => {
            eprintln!("sidecored: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Ends an owner whose disk another host has reserved: that host answers its guests.
fn end_fenced() {
    tracing::error!(
        "ended at once: a disk has refused a request, because another host has reserved it: this \
         owner was fenced"
    );
    std::process::exit(LOST_STORE.into());
}

/// Raises the limit of open files to its maximum: each running queue has three descriptors, and the
/// usual limit of 1024 is for programs that use select.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) =
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

fn run(config: &Config, mut service: Service) -> Result<ExitCode> {
    // The socket is bound first: a second daemon of this configuration ends here, before it touches
    // a store.
    let socket = Socket::bind(&config.control_socket, &config.control_access)?;
    // A signal that ended the daemon between taking the exported devices and exporting them again
    // would lose them: signals are held for that time.
    let held = service
        .has_exported()
        .then(HeldSignals::hold)
        .transpose()
        .context("cannot hold signals")?;
    let mut exported = service.take_exported();
    let assembly = Assembly::take_over(&config.spec, &mut exported);
    service.forget_kept();
    // On an error, devices not yet resumed are exported again, for the next daemon.
    let assembly = Arc::new(assembly.inspect_err(|_| service.export(exported))?);
    assembly.serve_late()?;
    assembly.serve_patterns()?;
    assembly.serve_schedules()?;
    let (events, received) = mpsc::channel();
    let api = {
        let (assembly, events) = (Arc::clone(&assembly), events.clone());
        let signalled = move || drop(events.send(Event::Signalled(Instant::now())));
        Api::start(socket, assembly, signalled).context("cannot start the control API")
    };
    let api = api.inspect_err(|_| {
        if service.keeps() {
            service.export(assembly.hand_over());
        }
    })?;
    drop(held);
    announce(config.spec.devices.len());
    service.ready();
    tracing::info!(control = %config.control_socket.display(), "serving");

    // No receive can fail: this function holds a sender.
    let mut requests = EndRequests::default();
    if let Ok(Event::Signalled(at)) = received.recv() {
        requests.receive(at);
    }
    tracing::info!("draining");
    service.stopping();
    let drained = Arc::clone(&assembly);
    let drain = std::thread::spawn(move || {
        if service.keeps() {
            service.export(drained.hand_over());
        } else {
            drained.drain();
        }
        let _ = events.send(Event::Drained);
    });
    while let Ok(Event::Signalled(at)) = received.recv() {
        if requests.receive(at) == EndRequest::AtOnce {
            tracing::error!("ended at once by a later signal, with requests in flight");
            // The sockets' files stay; the next daemon replaces them.
            std::process::exit(ABORTED.into());
        }
        tracing::info!("one more signal, which means the same as the first");
    }
    let _ = drain.join();
    drop(api);
    if !assembly.given_up().is_empty() {
        tracing::error!("ended without an IOhost that is away");
        return Ok(ExitCode::from(GAVE_UP));
    }
    tracing::info!("ended in order");
    Ok(ExitCode::SUCCESS)
}

/// Prints the line that tells scripts that clients can connect.
fn announce(count: usize) {
    let mut out = io::stdout().lock();
    // The pipe may be closed, which is no reason to end. Scripts look for this line, so it stays
    // the same for one device.
    let _ = writeln!(out, "ready: {count} devices");
    let _ = out.flush();
}
