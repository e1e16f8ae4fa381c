//! A command in a process of its own: that process may wait where no signal reaches it, for instance for a file whose
//! filesystem does not answer.

use std::env;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use sidecore_control::{Client, ClientError};

use crate::bound;
use crate::disk::temporary_name;
use crate::interrupt::Interrupt;

/// Set in the environment of a worker: the number of the process that started it.
const WORKER: &str = "SIDECORE_WORKER";
/// How long a worker may take to clean up after a signal.
const GRACE: Duration = Duration::from_secs(2);
/// How often the worker and signals are looked for.
const LOOK: Duration = Duration::from_millis(50);
/// More than the name of a volume has.
const NAME_MAX_BYTES: usize = 256;

/// Whether this process is a worker. It ends with the process that started it.
pub(crate) fn is_worker() -> Result<bool> {
    let Some(parent) = env::var_os(WORKER) else { return Ok(false) };
    bound::end_with(&parent, Signal::TERM)?;
    Ok(true)
}

/// Names a volume to the process that started this one: it deletes that volume if this process can not.
pub(crate) fn say_begun(volume: &str) -> Result<()> {
    rustix::io::write(rustix::stdio::stdin(), volume.as_bytes())?;
    Ok(())
}

/// Runs this command in a worker, and passes a signal on to it. If the worker is killed, or does not end in time after a
/// signal because the filesystem of `image` does not answer, this process takes back what the worker has begun.
pub(crate) fn run(client: &Client, controller: &str, image: &Path) -> Result<()> {
    let interrupt = Interrupt::listen()?;
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(env::current_exe()?);
    command.args(env::args_os().skip(1)).env(WORKER, std::process::id().to_string()).stdin(OwnedFd::from(theirs));
    let mut child = command.spawn()?;
    let ended = wait(&mut child, &interrupt)?;
    if let Some(code) = ended.and_then(|status| status.code()) {
        // The worker has said why, if it failed.
        return if code == 0 { Ok(()) } else { std::process::exit(code) };
    }
    child.kill()?;
    ours.set_nonblocking(true)?;
    let mut name = [0; NAME_MAX_BYTES];
    let length = ours.read(&mut name).unwrap_or(0);
    let pid = child.id();
    take_back(client, controller, pid, &String::from_utf8_lossy(&name[..length]))?;
    let left = format!("a directory .sidecore-{pid}-* may be left");
    if let Some(signal) = ended.and_then(|status| status.signal()) {
        bail!(
            "process {pid}, which had the image open, was ended by signal {signal}; what was begun has been taken back, but {left}"
        );
    }
    bail!(
        "interrupted; what was begun has been taken back, but {} does not answer: process {pid} is gone only when it \
         does, and {left}",
        image.display()
    )
}

/// Waits for the worker; `None` if it does not end in time after a signal.
fn wait(child: &mut Child, interrupt: &Interrupt) -> Result<Option<ExitStatus>> {
    let mut interrupted: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        match interrupted {
            None if interrupt.check().is_err() => {
                interrupted = Some(Instant::now());
                kill_process(Pid::from_child(child), Signal::TERM)?;
            }
            Some(since) if since.elapsed() >= GRACE => return Ok(None),
            _ => {}
        }
        std::thread::sleep(LOOK);
    }
}

/// Removes a worker's device and the volume that it [named](say_begun), unless the worker has done so.
fn take_back(client: &Client, controller: &str, pid: u32, volume: &str) -> Result<()> {
    let _ = client.remove_device(&temporary_name(pid));
    if volume.is_empty() {
        return Ok(());
    }
    match client.delete_volume(controller, volume) {
        Err(ClientError::Denied { status: 404, .. }) => Ok(()),
        result => result.with_context(|| format!("the unfinished volume \"{volume}\" is still there")),
    }
}
