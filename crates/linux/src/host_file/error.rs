//! The errors of mapping a file onto the device below its filesystem.

use std::io;
use std::path::PathBuf;

use crate::FileError;

/// The property of an extent that forbids direct I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExtentFlaw {
    /// The extent's blocks belong to another file as well.
    #[error(
        "the extent shares its blocks with another file (reflink): make a separate copy with cp \
         --reflink=never"
    )]
    Shared,
    /// The extent has no place on the device yet.
    #[error("the filesystem has not chosen a place for the extent, although it was asked to")]
    Delayed,
    /// The bytes on the device are not the file's: compressed or encrypted.
    #[error("the extent is stored compressed or encrypted")]
    Encoded,
    /// The extent is among the filesystem's own data.
    #[error(
        "the data is stored inside the inode or another block (inline_data): make the file larger \
         or copy it elsewhere"
    )]
    Inline,
    /// The extent does not begin or end at a block.
    #[error("the extent is not aligned to blocks")]
    NotAligned,
    /// The filesystem does not reveal the extent's place.
    #[error("the filesystem does not report the place of the extent")]
    Unknown,
    /// The filesystem reports unknown flags.
    #[error("the filesystem marks the extent with unknown flags {0:#x}")]
    UnknownFlags(u32),
    /// The extent is outside of the device.
    #[error("the extent ends past the end of the block device")]
    OutsideDevice,
    /// The filesystem's list of extents is inconsistent.
    #[error("the filesystem lists its extents out of order")]
    OutOfOrder,
}

/// The reason why a [`HostFile`](crate::HostFile), or one of its operations, is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostFileError {
    /// A system call failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Kernel {
        /// The action that failed, as a verb.
        action: &'static str,
        /// The path of the file or device.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The path cannot be a disk at all.
    #[error(transparent)]
    Store(#[from] FileError),
    /// The path names no regular file.
    #[error(
        "{} is not a regular file: a block device needs no mapping, serve it as it is",
        path.display()
    )]
    NotRegular {
        /// The path as given.
        path: PathBuf,
    },
    /// The filesystem's blocks are not on one device, or may move.
    #[error(
        "{} is on {name}: {why}; put the file on ext4 or xfs, or serve it as an ordinary file",
        path.display()
    )]
    Filesystem {
        /// The path of the file.
        path: PathBuf,
        /// The filesystem's name, or its number.
        name: String,
        /// The reason why the path is refused.
        why: &'static str,
    },
    /// The file has a property that does not allow bypassing the filesystem.
    #[error("{} {property}: {remedy}", path.display())]
    Property {
        /// The path of the file.
        path: PathBuf,
        /// The property that is not supported.
        property: &'static str,
        /// The way to remove the property.
        remedy: &'static str,
    },
    /// Some of the file's extents cannot be used.
    #[error("{} cannot be mapped at byte {offset_bytes}: {flaw}", path.display())]
    Extent {
        /// The path of the file.
        path: PathBuf,
        /// The extent's start in the file, in bytes.
        offset_bytes: u64,
        /// The reason why the extent cannot be used.
        flaw: ExtentFlaw,
    },
    /// Another process has the file open, so a lease cannot be taken.
    #[error(
        "another program has {} open (fuser -v shows which): close it there first",
        path.display()
    )]
    InUse {
        /// The path of the file.
        path: PathBuf,
        /// Whether the program may have ended: its requests in flight keep the file open as well.
        may_have_ended: bool,
    },
    /// Only the file's owner, or a process with `CAP_LEASE`, may take a lease.
    #[error(
        "no leave to take a lease on {}: run as the file's owner, or with CAP_LEASE",
        path.display()
    )]
    MayNotLease {
        /// The path of the file.
        path: PathBuf,
    },
    /// The filesystem has no leases.
    #[error(
        "no lease can be had on {}: the filesystem has none, or they are switched off (sysctl \
         fs.leases-enable)",
        path.display()
    )]
    NoLeases {
        /// The path of the file.
        path: PathBuf,
    },
    /// The lease is being broken, or was given up.
    #[error("the lease on {} is gone: another process opens it", path.display())]
    LeaseGone {
        /// The path of the file.
        path: PathBuf,
    },
    /// The block device below has no node in `/dev`.
    #[error(
        "no node in /dev is the block device {major}:{minor}, on which {} lies: in a container, \
         pass the device in",
        path.display()
    )]
    NoDevice {
        /// The path of the file.
        path: PathBuf,
        /// The device's major number.
        major: u32,
        /// The device's minor number.
        minor: u32,
    },
    /// The block device below may not be opened.
    #[error(
        "cannot open {}, the block device on which the file lies: {source}; this takes root or the \
         group that owns the device, and in a container its leave",
        device.display()
    )]
    DeviceDenied {
        /// The path of the device's node.
        device: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The kernel lets no process write to a device with a mounted filesystem.
    #[error(
        "the kernel forbids writing to {} while it is mounted (CONFIG_BLK_DEV_WRITE_MOUNTED=n): \
         boot with bdev_allow_write_mounted=1, or serve the file as an ordinary one",
        device.display()
    )]
    WriteMounted {
        /// The path of the device's node.
        device: PathBuf,
    },
    /// The device does not hold the file's bytes at the place that the filesystem reports.
    #[error(
        "{} does not hold the bytes of {} where the filesystem says: the wrong device, or one more \
         layer in between",
        device.display(),
        path.display()
    )]
    Disagrees {
        /// The path of the file.
        path: PathBuf,
        /// The path of the device's node.
        device: PathBuf,
    },
    /// Pages of the file stay in the page cache.
    #[error(
        "{cached_bytes} bytes of {} stay in the page cache, though they were dropped",
        path.display()
    )]
    StillCached {
        /// The path of the file.
        path: PathBuf,
        /// The number of cached bytes.
        cached_bytes: u64,
    },
    /// The filesystem is full.
    #[error(
        "no space for {}: {}",
        path.display(),
        if *quota { "its quota is used up" } else { "the filesystem is full" }
    )]
    NoSpace {
        /// The path of the file.
        path: PathBuf,
        /// Whether a quota is used up, and not the filesystem.
        quota: bool,
    },
    /// The file was opened for reading.
    #[error("{} is read-only", path.display())]
    ReadOnly {
        /// The path of the file.
        path: PathBuf,
    },
    /// The range does not begin and end at the filesystem's blocks, or is not inside of the file.
    #[error(
        "bytes {offset_bytes} to {offset_bytes}+{len_bytes} of {} are not whole blocks of \
         {block_bytes} bytes in it",
        path.display()
    )]
    BadRange {
        /// The path of the file.
        path: PathBuf,
        /// The range's start in bytes.
        offset_bytes: u64,
        /// The range's length in bytes.
        len_bytes: u64,
        /// The filesystem's block size in bytes.
        block_bytes: u32,
    },
    /// The file became smaller.
    #[error("{} was truncated from {was_bytes} to {is_bytes} bytes", path.display())]
    Shrunk {
        /// The path of the file.
        path: PathBuf,
        /// The file's size when it was opened.
        was_bytes: u64,
        /// The file's size now.
        is_bytes: u64,
    },
    /// The file's blocks have moved.
    #[error("the blocks of {} at byte {offset_bytes} are not where they were", path.display())]
    Moved {
        /// The path of the file.
        path: PathBuf,
        /// The first byte whose block has moved.
        offset_bytes: u64,
    },
}
