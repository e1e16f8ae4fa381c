//! Why a file cannot be a disk.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why [`FileStore::open`](crate::FileStore::open) refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The kernel refused to open, lock or inspect it.
    #[error("cannot {action} {}: {source}", path.display())]
    Kernel {
        /// The failed action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// Another device or program uses it.
    #[error("{} is in use by another device or program", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// Its bytes are also those of a file or device that is in use.
    #[error("{} has the same bytes as {}, which is in use by another device or program", path.display(), other.display())]
    Overlaps {
        /// The file.
        path: PathBuf,
        /// The file or device that is in use.
        other: PathBuf,
    },
    /// Requests of a process that served it and has ended are still in flight.
    #[error(
        "{} has requests in flight of a process that has ended, which may still write to it; they did not complete \
         within {} s (`predecessor_timeout_s`): try again when the disk below answers",
        path.display(), waited.as_secs()
    )]
    Predecessor {
        /// The file.
        path: PathBuf,
        /// For how long they were waited for.
        waited: Duration,
    },
    /// It is a directory, a socket or the like.
    #[error("{} is neither a regular file nor a block device", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// It has no bytes.
    #[error("{} is empty: give it a size first (truncate --size=1G)", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Its size is not a whole number of blocks.
    #[error(
        "{} has {size_bytes} bytes, which is not a multiple of the block size {block_bytes}: \
         round it up (truncate --size=%{block_bytes}) or choose a smaller block_size",
        path.display()
    )]
    PartialBlock {
        /// The file.
        path: PathBuf,
        /// Its size.
        size_bytes: u64,
        /// The disk's block size.
        block_bytes: u32,
    },
    /// The block size is not a power of two between 512 and 65536.
    #[error("a block size of {block_bytes} bytes: it must be a power of two from 512 to 65536")]
    BadBlockSize {
        /// The size asked for.
        block_bytes: u32,
    },
    /// The device below cannot be accessed in blocks this small.
    #[error(
        "{} cannot be accessed in blocks of {block_bytes} bytes: use block_size = {needed_bytes}, or direct = false \
         for a regular file",
        path.display()
    )]
    BlockTooSmall {
        /// The file.
        path: PathBuf,
        /// The size asked for.
        block_bytes: u32,
        /// The smallest possible one.
        needed_bytes: u32,
    },
}
