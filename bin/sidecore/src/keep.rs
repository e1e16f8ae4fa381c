//! `sidecore keep`: runs a daemon, and keeps the daemon's descriptors for the next one.
//!
//! On hosts without systemd, this command is the small part of a service manager that is needed for
//! restarts that guests do not notice. It speaks the same protocol as systemd: see
//! `crates/linux/src/service_manager.rs` for the daemon's side.

mod child;
mod crashes;
mod kept;
mod message;
mod notify;
mod signals;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use sidecore_linux::{EndRequest, EndRequests, ServiceManager};

use child::Child;
use crashes::Crashes;
use kept::Kept;
use message::Message;
use notify::NotifySocket;
use signals::Signals;

/// The pause before a failed command is started again.
const PAUSE: Duration = Duration::from_secs(1);

/// The exit code if the command cannot be run, as in shells.
const CANNOT_RUN: u8 = 127;

/// Runs COMMAND with a socket in $NOTIFY_SOCKET, keeps the descriptors that COMMAND sends there,
/// and passes them to COMMAND at its next start.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// Keep at most this many descriptors; further ones are closed.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=16384))]
    max: u16,
    /// Marks the new process, which becomes the command, unless this parent is gone.
    #[arg(long, hide = true)]
    child_of: Option<i32>,
    /// The daemon and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const AFTER_HELP: &str = "\
Signals:
  SIGHUP           restart: end COMMAND with SIGTERM, wait for it, start it again with \
the kept descriptors
  SIGTERM, SIGINT  the end: end COMMAND with SIGTERM, wait for it, close the kept descriptors; \
within two seconds of
                   the first, another signal means the same, and each later one is another SIGTERM \
to COMMAND

If COMMAND fails by itself, it is started again after a second with the kept descriptors, \
at most five times
in a minute.

Exit codes:
  that of COMMAND; 128 and the number of the signal that ended it; 1 if it fails too often; \
127 if it cannot be run
";

/// The action after the end of COMMAND.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Requested {
    /// No signal has asked COMMAND to end.
    None,
    Restart,
    End,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(parent) = arguments.child_of {
        return Ok(child::become_command(parent, &arguments.command));
    }
    let signals = Signals::listen().context("cannot handle signals")?;
    // A manager above this one is notified when the first daemon is ready; a failed notification is
    // no reason to end.
    let above = ServiceManager::from_environment().unwrap_or_else(|error| {
        say(&error.to_string());
        None
    });
    let kept = Kept::new(arguments.max.into());
    child::raise_file_limit(arguments.max.into());
    let socket = NotifySocket::bind()
        .context("cannot make a notification socket in the temporary directory")?;
    Keeper { command: &arguments.command, socket, signals, above, kept }.run()
}

struct Keeper<'a> {
    command: &'a [OsString],
    socket: NotifySocket,
    signals: Signals,
    above: Option<ServiceManager>,
    kept: Kept,
}

impl Keeper<'_> {
    fn run(mut self) -> Result<ExitCode> {
        let mut crashes = Crashes::default();
        loop {
            let (status, requested) = match self.run_once() {
                Ok(end) => end,
                // Memory or processes may be short for a moment; to give up would cost the guests
                // their disks.
                Err(error) if !self.kept.is_empty() => {
                    say(&format!("{error:#}"));
                    (ExitStatus::from_raw(1 << 8), Requested::None)
                }
                Err(error) => return Err(error),
            };
            match requested {
                Requested::End => return Ok(code(status)),
                Requested::None if status.success() => return Ok(code(status)),
                // Without kept descriptors, a command that does not exist is a mistake to report
                // and not to repeat.
                Requested::None
                    if status.code() == Some(CANNOT_RUN.into()) && self.kept.is_empty() =>
                {
                    return Ok(code(status));
                }
                Requested::None if crashes.too_many(Instant::now()) => {
                    bail!(
                        "the command failed too often ({status}); {} descriptors are lost",
                        self.kept.len()
                    );
                }
                Requested::None => {
                    say(&format!("the command failed ({status}) and is started again in a second"));
                    if self.pause()? == Requested::End {
                        return Ok(code(status));
                    }
                }
                Requested::Restart if !status.success() => {
                    say(&format!(
                        "the command did not end in order ({status}) and is started again"
                    ));
                }
                Requested::Restart => {}
            }
        }
    }

    /// Runs the command to its end. Returns its status, and the action that signals asked for
    /// meanwhile.
    fn run_once(&mut self) -> Result<(ExitStatus, Requested)> {
        let mut child = Child::start(self.command, self.socket.path(), &self.kept)?;
        let (mut requested, mut requests) = (Requested::None, EndRequests::default());
        loop {
            wait(
                [self.socket.as_fd(), self.signals.end(), self.signals.restart(), child.as_fd()],
                None,
            )?;
            let ended = child.has_ended()?;
            if self.signals.take_end() {
                let request = requests.receive(Instant::now());
                // For a restart, the command has had its signal already.
                if request == EndRequest::AtOnce
                    || request == EndRequest::First && requested != Requested::Restart
                {
                    child.terminate()?;
                }
                requested = Requested::End;
                self.notify_above(ServiceManager::stopping);
            }
            if self.signals.take_restart() && requested == Requested::None {
                child.terminate()?;
                requested = Requested::Restart;
            }
            // When the end of the command is seen, its last messages are in the socket.
            let more = self.read_messages(child.pid())?;
            if ended && !more {
                return Ok((child.wait()?, requested));
            }
        }
    }

    /// Waits before another start. A signal ends the pause, and its action is returned.
    fn pause(&mut self) -> Result<Requested> {
        let until = Instant::now() + PAUSE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            wait([self.signals.end(), self.signals.restart()], Some(left))?;
            if self.signals.take_end() {
                return Ok(Requested::End);
            }
            if self.signals.take_restart() || left.is_zero() {
                return Ok(Requested::None);
            }
        }
    }

    /// Handles some of the messages. Returns whether there may be more.
    fn read_messages(&mut self, from: Pid) -> Result<bool> {
        for _ in 0..notify::BATCH {
            let Some(datagram) = self.socket.receive()? else {
                return Ok(false);
            };
            if datagram.sender != Some(from) {
                say("a message of another process than the command is ignored");
                continue;
            }
            if datagram.truncated {
                say("a truncated message is ignored");
                continue;
            }
            self.handle(Message::parse(&datagram.bytes), datagram.fds);
        }
        Ok(true)
    }

    fn handle(&mut self, message: Message, fds: Vec<rustix::fd::OwnedFd>) {
        if message.ready {
            self.notify_above(ServiceManager::ready);
        }
        if message.remove {
            match &message.name {
                Some(name) => self.kept.remove(name),
                None => say("FDSTOREREMOVE=1 without a name is ignored"),
            }
        }
        // Descriptors that are not kept are closed here, which is also the answer to BARRIER=1.
        if message.store {
            for fd in fds {
                if let Err(reason) = self.kept.add(message.name.as_deref(), fd) {
                    say(&format!(
                        "a descriptor of {:?} is not kept: {reason}",
                        message.name.as_deref().unwrap_or("")
                    ));
                }
            }
        }
    }

    fn notify_above(&self, what: impl FnOnce(&ServiceManager) -> io::Result<()>) {
        if let Some(above) = &self.above
            && let Err(error) = what(above)
        {
            say(&format!("cannot tell the service manager: {error}"));
        }
    }
}

/// Sleeps until a descriptor is readable, the timeout is over, or a signal has come.
fn wait<const N: usize>(
    fds: [rustix::fd::BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> Result<()> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(&mut fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)), timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("cannot wait for the command"),
    }
}

/// The exit code for a status, as in shells.
fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| signal.saturating_add(128)));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Writes to the standard error, which may be closed: the descriptors matter more than the message.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "sidecore keep: {text}");
}
