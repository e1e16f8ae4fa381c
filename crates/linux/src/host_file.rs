//! The places of a file's blocks on the block device below its filesystem.
//!
//! The thesis (5.2) lets the hypervisor's filesystem decide where a virtual disk's blocks are, and
//! passes the filesystem's map to the device. Linux reveals the map (FIEMAP), but guarantees
//! nothing: the map is undefined while the filesystem is mounted, and the filesystem may move
//! blocks whenever a process asks for it. A [`HostFile`] establishes the conditions under which the
//! map holds all the same:
//!
//! * The filesystem never moves blocks by itself (ext4 and xfs), and the file is plain: not
//!   compressed, encrypted, shared with another file, journaled with its data, and so on. All
//!   others are refused with the reason.
//! * No other process has the file open. A lease guarantees that ([`LeaseState`]), and signals when
//!   another process wants to open the file: then direct access has to end
//!   ([`HostFile::release_lease`]), and I/O goes through the filesystem ([`HostFile::file_store`]),
//!   which is always correct. Without an open file no process can share, move, defragment or
//!   truncate its blocks.
//! * The page cache holds no page of the file: all I/O is direct, and only whole blocks are
//!   punched.
//! * Blocks that are allocated but not yet written are holes; they become extents by being written
//!   through the filesystem ([`HostFile::allocate`]).
//!
//! # Remaining risks
//!
//! The kernel takes the lease away after `lease-break-time`. A process that could not run for so
//! long (stopped, or its machine suspended) notices only afterwards. Freezing the filesystem
//! (fsfreeze) does not stop I/O that bypasses the filesystem.

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
/// The stores of a host file keep the file and its lease, so drop them first: otherwise the break
/// of the lease would go unnoticed.
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

    /// The filesystem's block size in bytes: the unit of extents.
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The node of the block device below the file.
    #[must_use]
    pub fn device_path(&self) -> &Path {
        &self.device.path
    }

    /// The open block device (`O_DIRECT`), not exclusively: a filesystem is mounted on it.
    #[must_use]
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.file.as_fd()
    }

    /// A store of the whole block device. Only the extents of [`HostFile::extents`] belong to the
    /// file, and only under the lease. The store does not discard.
    #[must_use]
    pub fn device_store(&self) -> Arc<FileStore> {
        Arc::clone(&self.device_store)
    }

    /// A store of the file, through its filesystem: correct with and without the lease. The store
    /// does not discard ([`HostFile::punch`] does), and zeroes by writing.
    #[must_use]
    pub fn file_store(&self) -> Arc<FileStore> {
        Arc::clone(&self.file_store)
    }

    /// Appends the extents of a range of the file, in order, cut to the range. Parts of the range
    /// without an extent read as zeros. The extents are valid for as long as the lease is held and
    /// no part of the range is allocated, punched or written through the filesystem.
    ///
    /// # Errors
    /// [`HostFileError::Extent`] if a part of the range must not be accessed on the device,
    /// [`HostFileError::LeaseGone`] if another process is about to open the file: use the file's
    /// store instead. [`HostFileError::BadRange`], and the kernel's errors. On an error no extent
    /// is appended.
    pub fn extents(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        extents: &mut Vec<HostExtent>,
    ) -> Result<(), HostFileError> {
        let before = extents.len();
        let read = self.read_map(offset_bytes, len_bytes, extents).and_then(|()| {
            match self.lease.look() {
                LeaseState::Held => Ok(()),
                _ => Err(HostFileError::LeaseGone { path: self.path.clone() }),
            }
        });
        if read.is_err() {
            extents.truncate(before);
        }
        read
    }

    /// Checks that the extents of a range are still the `expected` ones, which came from
    /// [`HostFile::extents`] for the same range or for consecutive parts of it.
    ///
    /// # Errors
    /// [`HostFileError::Moved`] if they differ, and those of [`HostFile::extents`].
    pub fn verify(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        expected: &[HostExtent],
    ) -> Result<(), HostFileError> {
        let mut now = Vec::new();
        self.extents(offset_bytes, len_bytes, &mut now)?;
        match extent::first_difference(expected, &now) {
            None => Ok(()),
            Some(offset_bytes) => {
                Err(HostFileError::Moved { path: self.path.clone(), offset_bytes })
            }
        }
    }

    /// Makes all writes durable, direct ones and those through the filesystem.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn sync(&self) -> Result<(), HostFileError> {
        let device = rustix::fs::fdatasync(&self.device.file);
        let file = rustix::fs::fdatasync(self.lease.as_fd());
        device.map_err(|error| kernel("sync", &self.device.path, error.into()))?;
        file.map_err(|error| kernel("sync", &self.path, error.into()))
    }

    /// The state of the lease.
    #[must_use]
    pub fn lease_state(&self) -> LeaseState {
        self.lease.look()
    }

    /// A descriptor that is readable after the lease has ceased to be held, until
    /// [`HostFile::drain_lease_events`].
    #[must_use]
    pub fn lease_events(&self) -> BorrowedFd<'_> {
        self.lease.broken().as_fd()
    }

    /// Makes [`HostFile::lease_events`] wait for the next event. Returns whether an event was
    /// pending.
    pub fn drain_lease_events(&self) -> bool {
        self.lease.broken().drain() > 0
    }

    /// Gives the lease up. Call when no direct I/O is in flight. A process that waits for the file
    /// continues, and finds the directly written data in it. From here on only the file's store may
    /// be used.
    ///
    /// # Errors
    /// The data could not be made durable, or pages stay in the page cache; the lease is given up
    /// all the same.
    pub fn release_lease(&self) -> Result<(), HostFileError> {
        let settled = self.sync().and_then(|()| self.drop_cache());
        let released = self
            .lease
            .release()
            .map_err(|source| kernel("release the lease on", &self.path, source));
        settled.and(released)
    }

    /// Takes the lease again after [`HostFile::release_lease`]. Once the lease is held, calls
    /// `settle`, which returns when no request of this process is in flight through the filesystem;
    /// then makes the written data durable and checks the file. Earlier extents are invalid.
    ///
    /// # Errors
    /// [`HostFileError::InUse`] while another process has the file open: try again later.
    /// [`HostFileError::LeaseGone`] if the lease was broken and not released. All errors of
    /// [`HostFile::open`] if the file has changed; then no lease is held.
    pub fn try_lease_again(&self, settle: impl FnOnce()) -> Result<(), HostFileError> {
        if self.lease.look() == LeaseState::Held {
            return Ok(());
        }
        self.lease.take().map_err(|error| open::lease_refusal(&self.path, error))?;
        settle();
        let checked = self.check_attributes_again().and_then(|()| self.check_mappable());
        if checked.is_err() {
            // The check's error is returned, not that of the release.
            let _ = self.lease.release();
        }
        checked
    }

    /// Checks, under the lease, the attributes that another process could have changed.
    fn check_attributes_again(&self) -> Result<(), HostFileError> {
        kind::check_attributes(self.lease.as_fd(), &self.path)?;
        kind::check_flags(self.lease.as_fd(), self.kind, &self.path)?;
        let stat = rustix::fs::fstat(self.lease.as_fd())
            .map_err(|error| kernel("inspect", &self.path, error.into()))?;
        let is_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if is_bytes < self.size_bytes {
            return Err(HostFileError::Shrunk {
                path: self.path.clone(),
                was_bytes: self.size_bytes,
                is_bytes,
            });
        }
        Ok(())
    }

    /// Checks, under the lease, that the file's data is on the device only, and that each of its
    /// extents can be used.
    fn check_mappable(&self) -> Result<(), HostFileError> {
        self.drop_cache()?;
        let mut extents = Vec::new();
        self.extents(0, self.size_bytes, &mut extents)?;
        let Some(first) = extents.first() else { return Ok(()) };
        let agrees = self.device.agrees(&self.lease.as_fd(), first);
        if !agrees.map_err(|source| kernel("compare", &self.path, source))? {
            return Err(HostFileError::Disagrees {
                path: self.path.clone(),
                device: self.device.path.clone(),
            });
        }
        Ok(())
    }

    fn drop_cache(&self) -> Result<(), HostFileError> {
        match cache::sync_and_drop(self.lease.as_fd(), self.size_bytes) {
            Ok(0) => Ok(()),
            Ok(cached_bytes) => {
                Err(HostFileError::StillCached { path: self.path.clone(), cached_bytes })
            }
            Err(source) => Err(kernel("sync", &self.path, source)),
        }
    }

    /// Like [`HostFile::extents`], with and without a lease.
    fn read_map(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        extents: &mut Vec<HostExtent>,
    ) -> Result<(), HostFileError> {
        let end = offset_bytes.checked_add(len_bytes).filter(|end| *end <= self.size_bytes);
        let end = end.ok_or_else(|| self.bad_range(offset_bytes, len_bytes))?;
        fiemap::written_extents(
            self.lease.as_fd(),
            offset_bytes..end,
            self.device.size_bytes,
            extents,
        )
        .map_err(|error| match error {
            MapError::Kernel(source) => kernel("map", &self.path, source),
            MapError::Flaw { offset_bytes, flaw } => {
                HostFileError::Extent { path: self.path.clone(), offset_bytes, flaw }
            }
        })
    }

    fn bad_range(&self, offset_bytes: u64, len_bytes: u64) -> HostFileError {
        HostFileError::BadRange {
            path: self.path.clone(),
            offset_bytes,
            len_bytes,
            block_bytes: self.block_bytes,
        }
    }
}

fn kernel(action: &'static str, path: &Path, source: io::Error) -> HostFileError {
    HostFileError::Kernel { action, path: path.into(), source }
}

#[cfg(test)]
mod tests;
