//! Why a file cannot be mapped onto the device below its filesystem.

use std::io;
use std::path::PathBuf;

use crate::FileError;

/// The property of an extent that forbids direct I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtentFlaw {
    /// Its blocks belong to another file as well.
    #[error("it shares its blocks with another file (reflink): make a copy of its own with cp --reflink=never")]
    Shared,
    /// It has no place on the device yet.
    #[error("the filesystem has not decided where to put it, though it was asked to")]
    Delayed,
    /// The bytes on the device are not the file's: compressed or encrypted.
    #[error("it is stored compressed or encrypted")]
    Encoded,
    /// It is among the filesystem's own data.
    #[error("it is stored inside the inode or another block (inline_data): make the file larger or copy it elsewhere")]
    Inline,
    /// It does not begin or end at a block.
    #[error("it is not aligned to blocks")]
    NotAligned,
    /// The filesystem does not say where it is.
    #[error("the filesystem does not say where it is")]
    Unknown,
    /// The filesystem says something that this program does not know of.
    #[error("the filesystem marks it with unknown flags {0:#x}")]
    UnknownFlags(u32),
    /// It is not on the device.
    #[error("it ends past the end of the block device")]
    OutsideDevice,
    /// The filesystem's list of extents makes no sense.
    #[error("the filesystem lists its extents out of order")]
    OutOfOrder,
}

/// Why a [`HostFile`](crate::HostFile) is refused, or one of its operations.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostFileError {
    /// The kernel refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Kernel {
        /// The failed action.
        action: &'static str,
        /// The file or device.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// It cannot be a disk at all.
    #[error(transparent)]
    Store(#[from] FileError),
    /// It is not a regular file.
    #[error("{} is not a regular file: a block device needs no mapping, serve it as it is", path.display())]
    NotRegular {
        /// The path given.
        path: PathBuf,
    },
    /// The filesystem's blocks are not on one device, or do not stay there.
    #[error(
        "{} is on {name}: {why}; put the file on ext4 or xfs, or serve it as an ordinary file",
        path.display()
    )]
    Filesystem {
        /// The file.
        path: PathBuf,
        /// The filesystem's name, or its number.
        name: String,
        /// The reason why the path is refused.
        why: &'static str,
    },
    /// The file has a property that forbids going around the filesystem.
    #[error("{} {property}: {remedy}", path.display())]
    Property {
        /// The file.
        path: PathBuf,
        /// The property that is not supported.
        property: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// Some of its extents cannot be used.
    #[error("{} cannot be mapped at byte {offset_bytes}: {flaw}", path.display())]
    Extent {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset_bytes: u64,
        /// The extent's flaw.
        flaw: ExtentFlaw,
    },
    /// Another process has the file open, so there is no lease on it.
    #[error("another program has {} open (fuser -v shows which): close it there first", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// The program may have ended: its requests in flight hold the file as well.
        may_have_ended: bool,
    },
    /// Only its owner, or a process with `CAP_LEASE`, may have a lease on it.
    #[error("no leave to take a lease on {}: run as the file's owner, or with CAP_LEASE", path.display())]
    MayNotLease {
        /// The file.
        path: PathBuf,
    },
    /// There are no leases here.
    #[error(
        "no lease can be had on {}: the filesystem has none, or they are switched off (sysctl fs.leases-enable)",
        path.display()
    )]
    NoLeases {
        /// The file.
        path: PathBuf,
    },
    /// The lease on it is being broken, or was given up.
    #[error("the lease on {} is gone: another process opens it", path.display())]
    LeaseGone {
        /// The file.
        path: PathBuf,
    },
    /// The block device below has no node in `/dev`.
    #[error(
        "no node in /dev is the block device {major}:{minor}, on which {} lies: in a container, pass the device in",
        path.display()
    )]
    NoDevice {
        /// The file.
        path: PathBuf,
        /// The device's major number.
        major: u32,
        /// The device's minor number.
        minor: u32,
    },
    /// The block device below may not be opened.
    #[error(
        "cannot open {}, the block device on which the file lies: {source}; this takes root or the group that owns the \
         device, and in a container its leave",
        device.display()
    )]
    DeviceDenied {
        /// The device.
        device: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The kernel lets no process write to a device with a mounted filesystem.
    #[error(
        "the kernel forbids writing to {} while it is mounted (CONFIG_BLK_DEV_WRITE_MOUNTED=n): boot with \
         bdev_allow_write_mounted=1, or serve the file as an ordinary one",
        device.display()
    )]
    WriteMounted {
        /// The device.
        device: PathBuf,
    },
    /// The device does not hold the file's bytes where the filesystem says.
    #[error(
        "{} does not hold the bytes of {} where the filesystem says: the wrong device, or one more layer in between",
        device.display(),
        path.display()
    )]
    Disagrees {
        /// The file.
        path: PathBuf,
        /// The device.
        device: PathBuf,
    },
    /// Pages of it stay in the page cache.
    #[error("{cached_bytes} bytes of {} stay in the page cache, though they were dropped", path.display())]
    StillCached {
        /// The file.
        path: PathBuf,
        /// How much.
        cached_bytes: u64,
    },
    /// The filesystem is full.
    #[error("no space for {}: {}", path.display(), if *quota { "its quota is used up" } else { "the filesystem is full" })]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Whether it is a quota that is used up.
        quota: bool,
    },
    /// It was opened for reading.
    #[error("{} is read-only", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
    },
    /// A range does not begin and end at the filesystem's blocks, or is not in the file.
    #[error(
        "bytes {offset_bytes} to {offset_bytes}+{len_bytes} of {} are not whole blocks of {block_bytes} bytes in it",
        path.display()
    )]
    BadRange {
        /// The file.
        path: PathBuf,
        /// Where the range begins.
        offset_bytes: u64,
        /// Its length.
        len_bytes: u64,
        /// The filesystem's block size.
        block_bytes: u32,
    },
    /// It became smaller.
    #[error("{} was truncated from {was_bytes} to {is_bytes} bytes", path.display())]
    Shrunk {
        /// The file.
        path: PathBuf,
        /// Its size when it was opened.
        was_bytes: u64,
        /// Its size now.
        is_bytes: u64,
    },
    /// Its blocks are not where they were.
    #[error("the blocks of {} at byte {offset_bytes} are not where they were", path.display())]
    Moved {
        /// The file.
        path: PathBuf,
        /// The first byte of which this is so.
        offset_bytes: u64,
    },
}
