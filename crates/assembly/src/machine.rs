//! What this machine has: looked at before anything is started.

use std::io;
use std::sync::Arc;

use sidecore_block::BlockDevice;
use sidecore_controller::PhysicalDisk;
use sidecore_linux::{FileError, FileOptions, FileStore, cpu};
use sidecore_units::CoreId;
use sidecore_volume::Content;

/// The CPUs that this process may use.
///
/// # Errors
/// The kernel's.
pub fn allowed_cpus() -> io::Result<Vec<CoreId>> {
    cpu::allowed_cores()
}

/// Opens and locks a file as a store would, and lets go of it again.
///
/// # Errors
/// Why it cannot be served.
pub fn try_file(options: &FileOptions) -> Result<(), FileError> {
    FileStore::open(options).map(drop)
}

/// The same for a file that a controller is to own: whether it has volumes, or is blank if it may be formatted.
/// Writes nothing.
///
/// # Errors
/// Why it cannot be served, and what to do.
pub fn try_controller(options: &FileOptions, may_format: bool) -> Result<(), String> {
    let path = options.path.display();
    let store: Arc<dyn BlockDevice> = Arc::new(FileStore::open(options).map_err(|error| error.to_string())?);
    let mut disk = PhysicalDisk::open(&store).map_err(|error| format!("{path}: {error}"))?;
    let format = format!("`sidecore controller format {path}`");
    match sidecore_volume::probe(&mut disk).map_err(|error| format!("{path} cannot be read: {error}"))? {
        Content::Ours => sidecore_volume::probe_size(&mut disk).map_err(|error| format!("{path}: {error}")),
        Content::Blank if may_format => Ok(()),
        Content::Blank => {
            Err(format!("{path} is blank; format it with {format}, or set `format = \"blank\"` in its controller"))
        }
        Content::Foreign(what) => Err(format!(
            "{path} holds {what}; choose another file, or use `--force` with {format} if that is not needed any more"
        )),
        Content::Unknown => Err(format!(
            "{path} holds something that is no volumes; choose another file, or use `--force` with {format} if that is \
             not needed any more"
        )),
    }
}

/// Memory that can be had without taking it from anybody, free huge pages included; `None` if the kernel does not say.
#[must_use]
pub fn available_memory_bytes() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let huge_kib =
        field("HugePages_Free").zip(field("Hugepagesize")).map_or(0, |(count, kib)| count.saturating_mul(kib));
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
