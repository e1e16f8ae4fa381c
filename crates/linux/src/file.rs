//! The file store: blocks in a regular file or a block device.
//!
//! # I/O model
//!
//! Each channel has an io_uring of its own. [`submit`](BlockChannel::submit) turns requests into
//! submissions and enters the kernel once for all of them; [`poll`](BlockChannel::poll) reads
//! completions from memory that it shares with the kernel, and enters it only when the kernel says
//! that it has work to finish on this thread.
//!
//! The kernel gets guest memory directly; a request is copied through a bounce buffer only if
//! direct I/O cannot take the guest's alignment.
//!
//! # Guarantees
//!
//! * Each flush is an `fdatasync`.
//! * A transfer that is larger than a block device's limit is split here, into portions that are in
//!   flight together.
//! * A transfer that the kernel cuts short is continued until it is complete or the file ends.
//! * The file belongs to this store alone: the store holds a lock on it that QEMU respects as well,
//!   and a writable block device is opened exclusively.
//! * No request of a process that has ended is in flight to the file: see [`claim`].

mod bounce;
mod buffers;
mod channel;
mod claim;
mod error;
mod overlap;
mod requests;
pub(crate) mod ring;
mod slot;
mod target;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sidecore_block::{BlockChannel, BlockDevice, Geometry};
use sidecore_reactor::CoreContext;

pub use error::FileError;
pub use overlap::stacked_on;

use channel::FileChannel;
use target::Target;

pub(crate) use channel::ZEROS;
pub(crate) use claim::{try_claim, unclaim};
pub(crate) use target::Owner;

/// The file to open, and the way to open it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// A regular file or a block device.
    pub path: PathBuf,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The disk's block size in bytes. `None` for the smallest possible: 512, or the size that the
    /// device or direct I/O to the file needs.
    pub block_bytes: Option<u32>,
    /// Whether to bypass the host's page cache, if the filesystem can.
    pub direct: bool,
    /// The longest time that opening waits for requests of an ended process that served the file.
    pub predecessor_timeout: Duration,
}

impl FileOptions {
    /// The default wait: longer than Linux lets a command to a disk take (30 s) before it resets
    /// the disk.
    pub const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(60);

    /// Options for a writable file with direct I/O and the smallest block size.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            block_bytes: None,
            direct: true,
            predecessor_timeout: Self::PREDECESSOR_TIMEOUT,
        }
    }
}

/// A disk in a file or on a block device.
#[derive(Debug)]
pub struct FileStore {
    target: Arc<Target>,
}

impl FileStore {
    /// Opens and locks the file. Blocks the calling thread while requests of a dead process are in
    /// flight to it, for [`FileOptions::predecessor_timeout`] at most.
    ///
    /// # Errors
    /// The file is missing, in use, neither a file nor a block device, empty, or of a size that is
    /// not a whole number of blocks.
    pub fn open(options: &FileOptions) -> Result<Self, FileError> {
        Ok(Self { target: Arc::new(Target::open(options)?) })
    }

    /// Makes a store over a descriptor that was opened with `O_DIRECT` and that `owner` holds.
    /// Nothing is opened or locked: `options` give the store's name in messages, and whether writes
    /// are refused. The store does not discard, and leaves no data in the page cache.
    pub(crate) fn over(
        file: OwnedFd,
        owner: Arc<dyn Owner>,
        options: &FileOptions,
    ) -> Result<Self, FileError> {
        Ok(Self { target: Arc::new(Target::over(file, owner, options)?) })
    }

    /// Whether I/O bypasses the page cache: false if `options` or the filesystem do not allow it.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.target.direct.is_some()
    }
}

impl BlockDevice for FileStore {
    fn geometry(&self) -> Geometry {
        self.target.geometry
    }

    fn open_channel(&self, _core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(FileChannel::open(Arc::clone(&self.target), depth)?))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.target.allocate(offset_bytes, len_bytes)
    }
}

#[cfg(test)]
mod tests;
