//! Checks of this machine's CPUs, memory and files, for a configuration that has not been started.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sidecore_block::BlockDevice;
use sidecore_controller::PhysicalDisk;
use sidecore_linux::{FileError, FileOptions, FileStore, cpu};
use sidecore_units::CoreId;
use sidecore_volume::Content;

/// The CPUs that this process may use.
///
/// # Errors
/// The kernel's error.
pub fn allowed_cpus() -> io::Result<Vec<CoreId>> {
    cpu::allowed_cores()
}

/// Files that threads of [`in_time`] look at, whose locks these threads may hold.
static LOOKED_AT: (Mutex<Vec<PathBuf>>, Condvar) = (Mutex::new(Vec::new()), Condvar::new());

/// Runs a job for each of these files, side by side. `None` stands for a job that takes longer than
/// `patience`. Such a job continues, and a store that is opened on its file waits for the job.
#[must_use]
pub fn in_time<T, F>(patience: Duration, jobs: Vec<(PathBuf, F)>) -> Vec<Option<T>>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    let (sender, receiver) = channel();
    let mut results: Vec<Option<T>> = jobs.iter().map(|_| None).collect();
    let mut in_flight = 0_usize;
    for (index, (path, job)) in jobs.into_iter().enumerate() {
        let sender = sender.clone();
        let look = Look::at(path);
        let thread = std::thread::Builder::new().name("look-at-file".to_owned()).spawn(move || {
            let result = job();
            drop(look);
            // The receiver is dropped when the patience has ended.
            let _ = sender.send((index, result));
        });
        in_flight = in_flight.saturating_add(usize::from(thread.is_ok()));
    }
    let start = Instant::now();
    while in_flight > 0 {
        let Ok((index, result)) = receiver.recv_timeout(patience.saturating_sub(start.elapsed()))
        else {
            break;
        };
        in_flight = in_flight.saturating_sub(1);
        if let Some(place) = results.get_mut(index) {
            *place = Some(result);
        }
    }
    results
}

/// Blocks the calling thread until no thread of [`in_time`] is looking at a file.
pub(crate) fn until_looked_at(path: &Path) {
    let (paths, changed) = &LOOKED_AT;
    let mut paths = paths.lock().unwrap_or_else(PoisonError::into_inner);
    while paths.iter().any(|other| other == path) {
        paths = changed.wait(paths).unwrap_or_else(PoisonError::into_inner);
    }
}

/// An entry of [`LOOKED_AT`] until its drop.
struct Look(PathBuf);

impl Look {
    fn at(path: PathBuf) -> Self {
        LOOKED_AT.0.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        Self(path)
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        let mut paths = LOOKED_AT.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = paths.iter().position(|path| *path == self.0) {
            paths.swap_remove(at);
        }
        LOOKED_AT.1.notify_all();
    }
}

/// Opens and locks a file as a store would, and closes it. Requests in flight of a dead daemon are
/// no error, because they end.
///
/// # Errors
/// The reason for which a store cannot be opened on the file.
pub fn try_file(options: &FileOptions) -> Result<(), FileError> {
    match FileStore::open(&FileOptions { predecessor_timeout: Duration::ZERO, ..options.clone() }) {
        Err(FileError::Predecessor { .. }) => Ok(()),
        tried => tried.map(drop),
    }
}

/// The reason for which a controller cannot own a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// The reason and the remedy.
    pub message: String,
    /// Whether the file holds volumes but is unreadable or damaged. Such a file is the right one,
    /// so only its own controller stays closed.
    pub is_damaged: bool,
}

/// Checks a file that a controller is to own: the file has volumes, or is blank and may be
/// formatted. Writes nothing.
///
/// # Errors
/// The reason for which the controller cannot own the file, and the remedy.
pub fn try_controller(options: &FileOptions, may_format: bool) -> Result<(), Unfit> {
    let path = options.path.display();
    let wrong = |message: String| Err(Unfit { message, is_damaged: false });
    let damaged = |message: String| Unfit { message, is_damaged: true };
    let store: Arc<dyn BlockDevice> = match FileStore::open(&FileOptions {
        predecessor_timeout: Duration::ZERO,
        ..options.clone()
    }) {
        Err(FileError::Predecessor { .. }) => return Ok(()),
        Err(error) => return wrong(error.to_string()),
        Ok(store) => Arc::new(store),
    };
    let mut disk =
        PhysicalDisk::open(&store).map_err(|error| damaged(format!("{path}: {error}")))?;
    let format = format!("`sidecore controller format {path}`");
    match sidecore_volume::probe(&mut disk)
        .map_err(|error| damaged(format!("{path} cannot be read: {error}")))?
    {
        Content::Ours => sidecore_volume::probe_size(&mut disk)
            .map_err(|error| damaged(format!("{path}: {error}"))),
        Content::Blank if may_format => Ok(()),
        Content::Blank => wrong(format!(
            "{path} is blank; format it with {format}, or set `format = \"blank\"` in its \
             controller"
        )),
        Content::Foreign(what) => wrong(format!(
            "{path} holds {what}; choose another file, or overwrite this one with {format} and \
             `--force`"
        )),
        Content::Unknown => wrong(format!(
            "{path} holds data that Sidecore does not know; choose another file, or overwrite this \
             one with {format} and `--force`"
        )),
    }
}

/// The memory that can be used without reclaim from other programs, free huge pages included.
/// `None` if the kernel does not report it.
#[must_use]
pub fn available_memory_bytes() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let huge_kib = field("HugePages_Free")
        .zip(field("Hugepagesize"))
        .map_or(0, |(count, kib)| count.saturating_mul(kib));
    Some(field("MemAvailable")?.saturating_add(huge_kib).saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    #[test]
    fn there_are_cpus_and_memory() {
        assert!(!super::allowed_cpus().unwrap().is_empty());
        assert!(super::available_memory_bytes().unwrap() > 1 << 20);
    }
}
