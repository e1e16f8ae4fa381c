//! What this machine has: looked at before anything is started.

use std::io;

use sidecore_linux::{FileError, FileOptions, FileStore, cpu};
use sidecore_units::CoreId;

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
