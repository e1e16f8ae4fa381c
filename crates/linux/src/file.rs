//! The file store: blocks in a regular file or a block device.
//!
//! # I/O model
//!
//! Each channel has an io_uring of its own. [`submit`](BlockChannel::submit) turns requests into
//! submissions and enters the kernel once for all of them; [`poll`](BlockChannel::poll) reads
//! completions from memory that it shares with the kernel, and enters it only when the kernel says
//! that it has work to finish on this thread.
//!
//! Guest memory is handed to the kernel as it is; a request is copied through
//! a bounce buffer only where direct I/O cannot take the guest's alignment.
//!
//! # Guarantees
//!
//! * A flush is an `fdatasync`, always.
//! * A transfer that is larger than what a block device takes at once is cut
//!   here, into portions that are under way together.
//! * A transfer that the kernel cuts short is continued until it is whole or nothing more comes.
//! * The file is this store's alone: it holds a lock on it that also QEMU
//!   respects, and a writable block device is opened exclusively.
//! * No request of a process that has ended is left on it: see [`claim`].

mod bounce;
mod buffers;
mod channel;
mod claim;
mod error;
mod ongoing;
mod overlap;
mod ring;
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
    /// The disk's block size in bytes; found out if not given: 512, or what
    /// the device or direct I/O to the file asks for.
    pub block_bytes: Option<u32>,
    /// Whether to go around the host's page cache where the filesystem can.
    pub direct: bool,
    /// How long opening waits for requests of a process that served the file and has ended.
    pub predecessor_timeout: Duration,
}

impl FileOptions {
    /// The wait unless told otherwise: longer than Linux lets a command to a
    /// disk take (30 s) before it resets the disk.
    pub const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(60);

    /// Writable and direct, with the block size found out.
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
    /// Opens and locks it. Blocks the calling thread while requests of a dead
    /// process are left on it, for [`FileOptions::predecessor_timeout`] at most.
    ///
    /// # Errors
    /// It is missing, in use, neither a file nor a block device, empty, or of
    /// a size that is not a whole number of blocks.
    pub fn open(options: &FileOptions) -> Result<Self, FileError> {
        Ok(Self { target: Arc::new(Target::open(options)?) })
    }

    /// A store over a descriptor that was opened with `O_DIRECT` and that `owner` holds; nothing is
    /// opened or locked, and `options` say what it is called and whether writes are refused. It
    /// does not discard, and leaves nothing in the page cache.
    pub(crate) fn over(file: OwnedFd, owner: Arc<dyn Owner>, options: &FileOptions) -> Result<Self, FileError> {
        Ok(Self { target: Arc::new(Target::over(file, owner, options)?) })
    }

    /// Whether I/O goes around the page cache: false if that was not asked for
    /// or the filesystem cannot.
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
