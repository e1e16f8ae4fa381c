//! The errors of opening a file as a disk.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The reason why [`FileStore::open`](crate::FileStore::open) failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The kernel refused to open, lock or inspect the file.
    #[error("cannot {action} {}: {source}", path.display())]
    Kernel {
        /// The action that failed, as a verb.
        action: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// Another device or program uses the file.
    #[error("{} is in use by another device or program", path.display())]
    Busy {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file shares bytes with a file or device that is in use.
    #[error(
        "{} has the same bytes as {}, which is in use by another device or program",
        path.display(),
        other.display()
    )]
    Overlaps {
        /// The path of the file.
        path: PathBuf,
        /// The file or device that is in use.
        other: PathBuf,
    },
    /// Requests of an ended process that served the file are still in flight.
    #[error(
        "{} has requests in flight of a process that has ended, which may still write to it; they \
         did not complete within {} s (`predecessor_timeout_s`): try again when the disk below \
         answers",
        path.display(), waited.as_secs()
    )]
    Predecessor {
        /// The path of the file.
        path: PathBuf,
        /// The time that was waited for them.
        waited: Duration,
    },
    /// The path names a directory, a socket or the like.
    #[error("{} is neither a regular file nor a block device", path.display())]
    NotAFile {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file is empty.
    #[error("{} is empty: give it a size first (truncate --size=1G)", path.display())]
    Empty {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file's size is not a whole number of blocks.
    #[error(
        "{} has {size_bytes} bytes, which is not a multiple of the block size {block_bytes}: \
         round it up (truncate --size=%{block_bytes}) or choose a smaller block_size",
        path.display()
    )]
    PartialBlock {
        /// The path of the file.
        path: PathBuf,
        /// The file's size in bytes.
        size_bytes: u64,
        /// The disk's block size.
        block_bytes: u32,
    },
    /// The block size is not a power of two between 512 and 65536.
    #[error("a block size of {block_bytes} bytes: it must be a power of two from 512 to 65536")]
    BadBlockSize {
        /// The requested size in bytes.
        block_bytes: u32,
    },
    /// The device below cannot be accessed in blocks this small.
    #[error(
        "{} cannot be accessed in blocks of {block_bytes} bytes: use block_size = {needed_bytes}, \
         or direct = false for a regular file",
        path.display()
    )]
    BlockTooSmall {
        /// The path of the file.
        path: PathBuf,
        /// The requested size in bytes.
        block_bytes: u32,
        /// The smallest possible size.
        needed_bytes: u32,
    },
}
