//! `sidecore keep`: runs a daemon, and keeps the descriptors that it leaves for the next one.
//!
//! It is the small part of a service manager that a restart without the guests noticing needs, for hosts without
//! systemd, and speaks the same protocol: see `crates/linux/src/service_manager.rs` for the daemon's side.

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

/// How long a command that failed is left alone before it is started again.
const PAUSE: Duration = Duration::from_secs(1);

/// A command cannot be run: the shell's code for it.
const CANNOT_RUN: u8 = 127;

/// Runs COMMAND with a socket in $NOTIFY_SOCKET, keeps the descriptors that it sends there, and gives them to it when it
/// is started again.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// Keep at most this many descriptors; what comes beyond is closed.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..=16384))]
    max: u16,
    /// This is the new process already: become the command, unless that parent is gone.
    #[arg(long, hide = true)]
    child_of: Option<i32>,
    /// The daemon and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const AFTER_HELP: &str = "\
Signals:
  SIGHUP           restart: end COMMAND with SIGTERM, wait for it, start it again with what it left
  SIGTERM, SIGINT  the end: end COMMAND with SIGTERM, wait for it, close what is kept; within two seconds of the
                   first, another one means the same, and each later one is another SIGTERM to COMMAND

If COMMAND fails by itself, it is started again after a second with what is kept, at most five times in a minute.

Exit codes:
  that of COMMAND; 128 and the number of the signal that ended it; 1 if it fails too often; 127 if it cannot be run
";

/// What COMMAND is to do after its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// Nobody has asked it to end.
    None,
    Restart,
    End,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(parent) = arguments.child_of {
        return Ok(child::become_command(parent, &arguments.command));
    }
    let signals = Signals::listen().context("cannot handle signals")?;
    // A manager above this one is told when the first daemon is ready; what it cannot be told is no reason to fail.
    let above = ServiceManager::from_environment().unwrap_or_else(|error| {
        say(&error.to_string());
        None
    });
    let kept = Kept::new(arguments.max.into());
    child::raise_file_limit(arguments.max.into());
    let socket = NotifySocket::bind().context("cannot make a notification socket in the temporary directory")?;
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
            let (status, wish) = match self.run_once() {
                Ok(end) => end,
                // For a moment there may be no memory, or no process; to give up would cost the guests their disks.
                Err(error) if !self.kept.is_empty() => {
                    say(&format!("{error:#}"));
                    (ExitStatus::from_raw(1 << 8), Wish::None)
                }
                Err(error) => return Err(error),
            };
            match wish {
                Wish::End => return Ok(code(status)),
                Wish::None if status.success() => return Ok(code(status)),
                // With nothing to lose, a command that is not there is a mistake to report and not to repeat.
                Wish::None if status.code() == Some(CANNOT_RUN.into()) && self.kept.is_empty() => {
                    return Ok(code(status));
                }
                Wish::None if crashes.too_many(Instant::now()) => {
                    bail!("the command failed too often ({status}); {} descriptors are lost", self.kept.len());
                }
                Wish::None => {
                    say(&format!("the command failed ({status}) and is started again in a second"));
                    if self.pause()? == Wish::End {
                        return Ok(code(status));
                    }
                }
                Wish::Restart if !status.success() => {
                    say(&format!("the command did not end in order ({status}) and is started again"));
                }
                Wish::Restart => {}
            }
        }
    }

    /// Runs the command to its end; with what was asked for meanwhile.
    fn run_once(&mut self) -> Result<(ExitStatus, Wish)> {
        let mut child = Child::start(self.command, self.socket.path(), &self.kept)?;
        let (mut wish, mut requests) = (Wish::None, EndRequests::default());
        loop {
            wait([self.socket.as_fd(), self.signals.end(), self.signals.restart(), child.as_fd()], None)?;
            let ended = child.has_ended()?;
            if self.signals.take_end() {
                let request = requests.receive(Instant::now());
                // The command has had its signal already if it is to restart.
                if request == EndRequest::AtOnce || request == EndRequest::First && wish != Wish::Restart {
                    child.terminate()?;
                }
                wish = Wish::End;
                self.tell_above(ServiceManager::stopping);
            }
            if self.signals.take_restart() && wish == Wish::None {
                child.terminate()?;
                wish = Wish::Restart;
            }
            // What it sent before its end is in the socket when its end is seen.
            let more = self.read_messages(child.pid())?;
            if ended && !more {
                return Ok((child.wait()?, wish));
            }
        }
    }

    /// Waits before another try, unless a signal says what to do.
    fn pause(&mut self) -> Result<Wish> {
        let until = Instant::now() + PAUSE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            wait([self.signals.end(), self.signals.restart()], Some(left))?;
            if self.signals.take_end() {
                return Ok(Wish::End);
            }
            if self.signals.take_restart() || left.is_zero() {
                return Ok(Wish::None);
            }
        }
    }

    /// Does what some of the messages say. Whether there may be more.
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
                say("a message that did not come whole is ignored");
                continue;
            }
            self.obey(Message::parse(&datagram.bytes), datagram.fds);
        }
        Ok(true)
    }

    fn obey(&mut self, message: Message, fds: Vec<rustix::fd::OwnedFd>) {
        if message.ready {
            self.tell_above(ServiceManager::ready);
        }
        if message.remove {
            match &message.name {
                Some(name) => self.kept.remove(name),
                None => say("FDSTOREREMOVE=1 without a name is ignored"),
            }
        }
        // All that is not kept is closed here, which is also the answer to BARRIER=1.
        if message.store {
            for fd in fds {
                if let Err(reason) = self.kept.add(message.name.as_deref(), fd) {
                    say(&format!("a descriptor of {:?} is not kept: {reason}", message.name.as_deref().unwrap_or("")));
                }
            }
        }
    }

    fn tell_above(&self, what: impl FnOnce(&ServiceManager) -> io::Result<()>) {
        if let Some(above) = &self.above
            && let Err(error) = what(above)
        {
            say(&format!("cannot tell the service manager: {error}"));
        }
    }
}

/// Sleeps until one of these is readable, the time is over, or a signal has come.
fn wait<const N: usize>(fds: [rustix::fd::BorrowedFd<'_>; N], timeout: Option<Duration>) -> Result<()> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(&mut fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)), timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("cannot wait for the command"),
    }
}

/// As a shell has it.
fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| signal.saturating_add(128)));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// To the standard error, which may be closed: the descriptors are worth more than the words.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "sidecore keep: {text}");
}
