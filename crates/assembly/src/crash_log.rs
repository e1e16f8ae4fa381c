//! The log in memory that keeps answered changes of a store's mappings when this process dies.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore_controller::Answered;
use sidecore_linux::{MemoryFile, boot_id};
use sidecore_volume::{LogMemory, LogPlace, Survives};

use crate::spec::{
    ControllerSpec, CrashLogSpec, FileOptions, HostFileOptions, StoreKind, StoreSpec,
};

/// The log of one store, in a file on tmpfs.
#[derive(Debug)]
struct LogFile(MemoryFile);

impl LogMemory for LogFile {
    fn words(&self) -> usize {
        self.0.words().len()
    }

    fn load(&self, index: usize) -> u64 {
        self.0.words().get(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, index: usize, word: u64) {
        if let Some(place) = self.0.words().get(index) {
            place.store(word, Ordering::Release);
        }
    }

    fn survives(&self) -> Survives {
        Survives::Process
    }

    fn discard(&self) {
        if let Err(error) = self.0.remove() {
            tracing::warn!(
                log = %self.0.path().display(),
                "a closed store's empty log cannot be removed: {error}"
            );
        }
    }
}

/// Chooses where the answered changes of a controller are kept, whose store ends in `bottom`.
pub(crate) fn answered(spec: &ControllerSpec, bottom: Option<&StoreSpec>) -> Answered {
    let path = match bottom.map(|bottom| &bottom.kind) {
        Some(
            StoreKind::File(FileOptions { path, read_only: false, .. })
            | StoreKind::HostFile(HostFileOptions { path, read_only: false, .. }),
        ) => path,
        // The store ends with the process, or is never changed.
        _ => return Answered::WithTheStore,
    };
    // A boot without an id equals no boot: no log is missed, and none is replayed.
    let boot = boot_id().unwrap_or_else(|error| {
        tracing::warn!(controller = spec.name, "the id of this boot cannot be read: {error}");
        [0; 16]
    });
    let Some(log) = &spec.crash_log else { return Answered::WhenDurable(boot) };
    match open(path, log, boot) {
        Ok((memory, place)) => Answered::InLog(memory, place),
        Err(error) => {
            tracing::warn!(
                controller = spec.name,
                "writes to fresh blocks are answered when their mappings are durable, which takes \
                 longer, because the log in memory cannot be opened: {}: {error}; set `crash_log` \
                 to a directory on tmpfs",
                log.directory.display()
            );
            Answered::WhenDurable(boot)
        }
    }
}

fn open(
    path: &Path,
    log: &CrashLogSpec,
    boot: [u8; 16],
) -> io::Result<(Arc<dyn LogMemory>, LogPlace)> {
    let place = place(path, boot)?;
    let file = MemoryFile::open(&log.directory, &name(&place), log.size_bytes)?;
    Ok((Arc::new(LogFile(file)), place))
}

/// The identity of the store in the file at `path`: its device and inode.
fn place(path: &Path, boot: [u8; 16]) -> io::Result<LogPlace> {
    let metadata = std::fs::metadata(path)?;
    let (device, inode) = match metadata.file_type().is_block_device() {
        true => (metadata.rdev(), 0),
        false => (metadata.dev(), metadata.ino()),
    };
    Ok(LogPlace { device, inode, boot })
}

fn name(place: &LogPlace) -> String {
    format!("{:x}-{:x}.log", place.device, place.inode)
}
