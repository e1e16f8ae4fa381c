//! A command in a process of its own, because the process may wait where no signal reaches it, for
//! instance for a file whose filesystem does not answer.

use std::ffi::OsStr;
use std::io::{ErrorKind, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use sidecore_control::{Client, ClientError};

use crate::bound;
use crate::disk::temporary_name;
use crate::image::Workplace;
use crate::interrupt::Interrupt;

/// An environment variable of a worker: the number of its parent process.
const WORKER: &str = "SIDECORE_WORKER";
/// The time in which a worker may clean up after a signal.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval of checks for the worker's end and for signals.
const INTERVAL: Duration = Duration::from_millis(50);
/// The first byte of a message with the name of a new volume.
const VOLUME: u8 = b'v';
/// The first byte of a message with the path of a new directory.
const DIRECTORY: u8 = b'd';
/// The last byte of a message: neither a name nor a path contains it.
const END: u8 = 0;

/// Whether this process is a worker, which then ends with its parent.
pub(crate) fn is_worker() -> Result<bool> {
    let Some(parent) = env::var_os(WORKER) else { return Ok(false) };
    bound::end_with(&parent, Signal::TERM)?;
    Ok(true)
}

/// An object that a worker makes, and removes again at its end.
enum Made {
    Volume(String),
    Directory(PathBuf),
}

/// Announces a volume to the parent, which deletes the volume if this process cannot.
pub(crate) fn announce_volume(volume: &str) -> Result<()> {
    send(VOLUME, volume.as_bytes())
}

/// Makes a directory for this command alone, and announces it to the parent.
pub(crate) fn workplace(directory: &Path) -> Result<Workplace> {
    let place = Workplace::new(directory)?;
    send(DIRECTORY, place.path().as_os_str().as_bytes())?;
    Ok(place)
}

fn send(kind: u8, name: &[u8]) -> Result<()> {
    let message = [&[kind], name, &[END]].concat();
    let mut rest = message.as_slice();
    while !rest.is_empty() {
        let count = rustix::io::write(rustix::stdio::stdin(), rest)?;
        rest = rest.get(count..).unwrap_or_default();
    }
    Ok(())
}

/// Reads the messages that a worker has sent so far.
fn read_messages(mut from: UnixStream) -> Result<Vec<Made>> {
    from.set_nonblocking(true)?;
    let mut received = Vec::new();
    // The read ends with an error if the worker still has its end of the stream.
    let _ = from.read_to_end(&mut received);
    let made =
        received.split(|byte| *byte == END).filter_map(|message| match message.split_first()? {
            (&VOLUME, name) => Some(Made::Volume(String::from_utf8_lossy(name).into_owned())),
            (_, name) => Some(Made::Directory(OsStr::from_bytes(name).into())),
        });
    Ok(made.collect())
}

/// Runs this command in a worker, and passes signals on to it. If the worker is killed, or does not
/// end in time after a signal because the filesystem of `image` does not answer, this process
/// removes the unfinished objects of the worker.
pub(crate) fn run(client: &Client, controller: &str, image: &Path) -> Result<()> {
    let interrupt = Interrupt::listen()?;
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(env::current_exe()?);
    command
        .args(env::args_os().skip(1))
        .env(WORKER, std::process::id().to_string())
        .stdin(OwnedFd::from(theirs));
    let mut child = command.spawn()?;
    let ended = wait(&mut child, &interrupt)?;
    if let Some(code) = ended.and_then(|status| status.code()) {
        // A worker that failed has printed the reason.
        return if code == 0 { Ok(()) } else { std::process::exit(code) };
    }
    child.kill()?;
    let (pid, made) = (child.id(), read_messages(ours)?);
    clean_up(client, controller, pid, &made)?;
    let directories = made
        .iter()
        .filter_map(|made| if let Made::Directory(path) = made { Some(path) } else { None });
    if let Some(signal) = ended.and_then(|status| status.signal()) {
        for path in directories {
            remove(path);
        }
        bail!(
            "process {pid}, which had the image open, was ended by signal {signal}; the unfinished \
             work was removed"
        );
    }
    // The directories may be on the filesystem that does not answer.
    let left: String =
        directories.map(|path| format!("; {} may be left", path.display())).collect();
    bail!(
        "interrupted; the unfinished work was removed, but {} does not answer, and process {pid} \
         ends only when it does{left}",
        image.display()
    )
}

fn remove(directory: &Path) {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            eprintln!("sidecore: {} is still there: {error}", directory.display());
        }
        _ => {}
    }
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
            Some(since) if since.elapsed() >= CLEANUP_TIMEOUT => return Ok(None),
            _ => {}
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Removes a worker's device and volumes, unless the worker has removed them.
fn clean_up(client: &Client, controller: &str, pid: u32, made: &[Made]) -> Result<()> {
    let _ = client.remove_device(&temporary_name(pid));
    for volume in
        made.iter().filter_map(|made| if let Made::Volume(name) = made { Some(name) } else { None })
    {
        match client.delete_volume(controller, volume) {
            Ok(()) | Err(ClientError::Denied { status: 404, .. }) => {}
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("the unfinished volume \"{volume}\" is still there"));
            }
        }
    }
    Ok(())
}
