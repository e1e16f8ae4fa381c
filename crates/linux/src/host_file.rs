//! Where the blocks of a file lie on the block device below its filesystem.
//!
//! The thesis (5.2) lets the hypervisor's filesystem decide where a virtual disk's blocks are, and
//! hands its map to the device. Linux gives the map away (FIEMAP), but promises nothing about it:
//! it is undefined while the filesystem is mounted, and the filesystem may move blocks whenever a
//! process asks it to. A [`HostFile`] establishes the conditions under which the map holds all the
//! same:
//!
//! * The filesystem is one that leaves blocks where they are (ext4 and xfs), and the file is plain:
//!   not compressed, encrypted, shared with another file, journaled with its data, and so on.
//!   Everything else is refused with the reason.
//! * No other process has the file open. A lease says so ([`LeaseState`]), and signals when another
//!   process wants to open it: then the direct path has to be left ([`HostFile::release_lease`]),
//!   and I/O goes through the filesystem ([`HostFile::file_store`]), which is always correct.
//!   Without an open file no process can share, move, defragment or truncate its blocks.
//! * The page cache holds nothing of it: all I/O is direct, and only whole blocks are punched.
//! * Blocks that are allocated but not yet written are holes; they become extents by being written
//!   through the filesystem ([`HostFile::allocate`]).
//!
//! # Remaining risks
//!
//! The kernel takes the lease away after `lease-break-time`. A process that could not run for so
//! long (stopped, or its machine suspended) finds out only afterwards. Freezing the filesystem
//! (fsfreeze) does not stop what goes around it.

mod allocate;
mod cache;
mod device;
mod error;
mod extent;
mod fiemap;
mod kind;
mod lease;
mod open;
mod watcher;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::FileStore;
use device::Device;
use fiemap::MapError;
use kind::Kind;
use lease::Lease;

pub use error::{ExtentFlaw, HostFileError};
pub use extent::HostExtent;
pub use lease::{LeaseState, lease_break_time};
pub use open::HostFileOptions;

/// A file whose blocks can be accessed on the device below its filesystem.
///
/// The stores that it gives away keep the file and its lease, so they are to be dropped first:
/// otherwise the break of the lease would go unnoticed.
#[derive(Debug)]
pub struct HostFile {
    path: PathBuf,
    read_only: bool,
    kind: Kind,
    size_bytes: u64,
    block_bytes: u32,
    lease: Arc<Lease>,
    device: Device,
    device_store: Arc<FileStore>,
    file_store: Arc<FileStore>,
}

impl HostFile {
    /// The file's size in bytes when it was opened: a multiple of [`HostFile::block_bytes`].
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The filesystem's block size in bytes: what extents are made of.
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The node of the block device that the file lies on.
    #[must_use]
    pub fn device_path(&self) -> &Path {
        &self.device.path
    }

    /// The open block device (`O_DIRECT`), not exclusively: a filesystem is mounted on it.
    #[must_use]
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.file.as_fd()
    }

    /// The whole block device. Only what [`HostFile::extents`] says belongs to
    /// the file, and only under the lease. It does not discard.
    #[must_use]
    pub fn device_store(&self) -> Arc<FileStore> {
        Arc::clone(&self.device_store)
    }

    /// The file, through its filesystem: correct with and without the lease.
    /// It does not discard ([`HostFile::punch`] does), and zeroes by writing.
    #[must_use]
    pub fn file_store(&self) -> Arc<FileStore> {
        Arc::clone(&self.file_store)
    }

    /// Appends the extents of a range of the file, in order, cut to the range; what is not among
    /// them reads as zeros. They are true for as long as the lease is held and nothing in the range
    /// is allocated, punched or written through the filesystem.
    ///
    /// # Errors
    /// [`HostFileError::Extent`] if a part of it must not be accessed on the device,
    /// [`HostFileError::LeaseGone`] if another process is about to open the file: take the file's
    /// store instead. [`HostFileError::BadRange`], and the kernel's. On an error nothing is
    /// appended.
    pub fn extents(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        extents: &mut Vec<HostExtent>,
    ) -> Result<(), HostFileError> {
        let before = extents.len();
        let read = self.read_map(offset_bytes, len_bytes, extents).and_then(|()| match self.lease.look() {
            LeaseState::Held => Ok(()),
            _ => Err(HostFileError::LeaseGone { path: self.path.clone() }),
        });
        if read.is_err() {
            extents.truncate(before);
        }
        read
    }

    /// Whether the extents of a range are still the `expected` ones, which came from
    /// [`HostFile::extents`] for the same range or for parts of it that follow each other.
    ///
    /// # Errors
    /// [`HostFileError::Moved`] if not, and those of [`HostFile::extents`].
    pub fn verify(&self, offset_bytes: u64, len_bytes: u64, expected: &[HostExtent]) -> Result<(), HostFileError> {
        let mut now = Vec::new();
        self.extents(offset_bytes, len_bytes, &mut now)?;
        match extent::first_difference(expected, &now) {
            None => Ok(()),
            Some(offset_bytes) => Err(HostFileError::Moved { path: self.path.clone(), offset_bytes }),
        }
    }

    /// Makes everything durable that was written either way.
    ///
    /// # Errors
    /// The kernel's.
    pub fn sync(&self) -> Result<(), HostFileError> {
        let device = rustix::fs::fdatasync(&self.device.file);
        let file = rustix::fs::fdatasync(self.lease.as_fd());
        device.map_err(|error| kernel("sync", &self.device.path, error.into()))?;
        file.map_err(|error| kernel("sync", &self.path, error.into()))
    }

    /// How the lease stands.
    #[must_use]
    pub fn lease_state(&self) -> LeaseState {
        self.lease.look()
    }

    /// Readable when the lease has ceased to be held; until [`HostFile::drain_lease_events`].
    #[must_use]
    pub fn lease_events(&self) -> BorrowedFd<'_> {
        self.lease.broken().as_fd()
    }

    /// Makes [`HostFile::lease_events`] wait for the next event; returns whether there was one.
    pub fn drain_lease_events(&self) -> bool {
        self.lease.broken().drain() > 0
    }

    /// Gives the lease up; to be called when no direct I/O is in flight. A process that waits for
    /// the file continues, and finds in it the data written directly. From here on only the file's
    /// store may be used.
    ///
    /// # Errors
    /// The data could not be made durable or the page cache not be emptied; the lease is given up
    /// all the same.
    pub fn release_lease(&self) -> Result<(), HostFileError> {
        let settled = self.sync().and_then(|()| self.drop_cache());
        let released = self.lease.release().map_err(|source| kernel("release the lease on", &self.path, source));
        settled.and(released)
    }

    /// Takes the lease again after [`HostFile::release_lease`]. Calls `settle` once the lease is
    /// held, which returns when no request of ours is in flight through the filesystem; then makes
    /// durable what was written and checks the file. Extents from before are not valid any more.
    ///
    /// # Errors
    /// [`HostFileError::InUse`] while another process has the file open: try again later.
    /// [`HostFileError::LeaseGone`] if it was broken and not released. All those of
    /// [`HostFile::open`] if the file has changed; there is no lease then.
    pub fn try_lease_again(&self, settle: impl FnOnce()) -> Result<(), HostFileError> {
        if self.lease.look() == LeaseState::Held {
            return Ok(());
        }
        self.lease.take().map_err(|error| open::lease_refusal(&self.path, error))?;
        settle();
        let checked = self.check_attributes_again().and_then(|()| self.check_mappable());
        if checked.is_err() {
            // The reason is the check's.
            let _ = self.lease.release();
        }
        checked
    }

    /// Under the lease: what could have been done to the open file.
    fn check_attributes_again(&self) -> Result<(), HostFileError> {
        kind::check_attributes(self.lease.as_fd(), &self.path)?;
        kind::check_flags(self.lease.as_fd(), self.kind, &self.path)?;
        let stat =
            rustix::fs::fstat(self.lease.as_fd()).map_err(|error| kernel("inspect", &self.path, error.into()))?;
        let is_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if is_bytes < self.size_bytes {
            return Err(HostFileError::Shrunk { path: self.path.clone(), was_bytes: self.size_bytes, is_bytes });
        }
        Ok(())
    }

    /// Under the lease: the file is on the device and nowhere else, and each
    /// of its extents can be used.
    fn check_mappable(&self) -> Result<(), HostFileError> {
        self.drop_cache()?;
        let mut extents = Vec::new();
        self.extents(0, self.size_bytes, &mut extents)?;
        let Some(first) = extents.first() else { return Ok(()) };
        let agrees = self.device.agrees(&self.lease.as_fd(), first);
        if !agrees.map_err(|source| kernel("compare", &self.path, source))? {
            return Err(HostFileError::Disagrees { path: self.path.clone(), device: self.device.path.clone() });
        }
        Ok(())
    }

    fn drop_cache(&self) -> Result<(), HostFileError> {
        match cache::sync_and_drop(self.lease.as_fd(), self.size_bytes) {
            Ok(0) => Ok(()),
            Ok(cached_bytes) => Err(HostFileError::StillCached { path: self.path.clone(), cached_bytes }),
            Err(source) => Err(kernel("sync", &self.path, source)),
        }
    }

    /// As [`HostFile::extents`], whether there is a lease or not.
    fn read_map(&self, offset_bytes: u64, len_bytes: u64, extents: &mut Vec<HostExtent>) -> Result<(), HostFileError> {
        let end = offset_bytes.checked_add(len_bytes).filter(|end| *end <= self.size_bytes);
        let end = end.ok_or_else(|| self.bad_range(offset_bytes, len_bytes))?;
        fiemap::written_extents(self.lease.as_fd(), offset_bytes..end, self.device.size_bytes, extents).map_err(
            |error| match error {
                MapError::Kernel(source) => kernel("map", &self.path, source),
                MapError::Flaw { offset_bytes, flaw } => {
                    HostFileError::Extent { path: self.path.clone(), offset_bytes, flaw }
                }
            },
        )
    }

    fn bad_range(&self, offset_bytes: u64, len_bytes: u64) -> HostFileError {
        HostFileError::BadRange { path: self.path.clone(), offset_bytes, len_bytes, block_bytes: self.block_bytes }
    }
}

fn kernel(action: &'static str, path: &Path, source: io::Error) -> HostFileError {
    HostFileError::Kernel { action, path: path.into(), source }
}

#[cfg(test)]
mod tests;
