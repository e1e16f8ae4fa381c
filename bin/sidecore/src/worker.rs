//! A command in a process of its own: it may wait where no signal reaches it, for instance for a file whose filesystem does
//! not answer.

use std::env;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use crate::interrupt::Interrupt;

/// Set in the environment of a worker.
const WORKER: &str = "SIDECORE_WORKER";
/// How long a worker may take to clean up after a signal.
const GRACE: Duration = Duration::from_secs(2);
/// How often the worker and signals are looked for.
const LOOK: Duration = Duration::from_millis(50);

/// How a worker ended.
pub(crate) enum Ended {
    Done(ExitStatus),
    /// Not in time after a signal. It was killed, and executes nothing more.
    Stuck {
        pid: u32,
        /// It has [said](say_begun) that it has made something.
        has_begun: bool,
    },
}

/// Whether this process is a worker. It ends with the process that started it.
pub(crate) fn is_worker() -> Result<bool> {
    let is_worker = env::var_os(WORKER).is_some();
    if is_worker {
        set_parent_process_death_signal(Some(Signal::TERM))?;
    }
    Ok(is_worker)
}

/// Says to the process that started this one that there is something to be taken back from now on.
pub(crate) fn say_begun() -> Result<()> {
    rustix::io::write(rustix::stdio::stdin(), &[1])?;
    Ok(())
}

/// Runs this command in a worker, and passes a signal on to it.
pub(crate) fn run() -> Result<Ended> {
    let interrupt = Interrupt::listen()?;
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(env::current_exe()?);
    command.args(env::args_os().skip(1)).env(WORKER, "1").stdin(OwnedFd::from(theirs));
    let mut child = command.spawn()?;
    let mut interrupted: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Ended::Done(status));
        }
        match interrupted {
            None if interrupt.check().is_err() => {
                interrupted = Some(Instant::now());
                kill_process(Pid::from_child(&child), Signal::TERM)?;
            }
            Some(since) if since.elapsed() >= GRACE => break,
            _ => {}
        }
        std::thread::sleep(LOOK);
    }
    child.kill()?;
    ours.set_nonblocking(true)?;
    let has_begun = ours.read(&mut [0]).is_ok_and(|count| count == 1);
    Ok(Ended::Stuck { pid: child.id(), has_begun })
}
