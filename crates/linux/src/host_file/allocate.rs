//! Allocating a host file's blocks, and freeing them.

use std::io::IoSlice;
use std::os::fd::AsFd;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{HostFile, HostFileError};
use crate::file::ZEROS;

/// The largest number of zero pieces in one write: 1 MiB.
const ZERO_PIECES: usize = 16;

impl HostFile {
    /// Makes the whole range written blocks: holes, and blocks that were only reserved, become
    /// zeros on the device, with the filesystem's knowledge and durably. Written data stays as it
    /// is. The filesystem chooses the blocks, at the first write to a part of the disk (thesis
    /// 5.3), and [`HostFile::extents`] then returns them.
    ///
    /// This writes through the filesystem, so it does not need the lease. No other write to the
    /// range may be in progress.
    ///
    /// # Errors
    /// [`HostFileError::NoSpace`]: some of the range may have been allocated, and is zeros.
    /// [`HostFileError::BadRange`], [`HostFileError::ReadOnly`], and the kernel's errors.
    pub fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), HostFileError> {
        self.check_writable(offset_bytes, len_bytes)?;
        let gaps = self.gaps(offset_bytes, len_bytes)?;
        if gaps.is_empty() {
            return Ok(());
        }
        // All gaps are allocated first, so that a full filesystem is found before the first write.
        for &(offset_bytes, len_bytes) in &gaps {
            match rustix::fs::fallocate(
                self.lease.as_fd(),
                FallocateFlags::KEEP_SIZE,
                offset_bytes,
                len_bytes,
            ) {
                // Without support for allocation, the write allocates.
                Ok(()) | Err(Errno::OPNOTSUPP) => {}
                Err(error) => return Err(self.no_space_or("allocate", error)),
            }
        }
        for &(offset_bytes, len_bytes) in &gaps {
            self.write_zeros(offset_bytes, len_bytes)?;
        }
        rustix::fs::fdatasync(self.lease.as_fd())
            .map_err(|error| self.no_space_or("sync", error))?;
        match self.gaps(offset_bytes, len_bytes)?.first() {
            None => Ok(()),
            Some(&(offset_bytes, _)) => {
                Err(HostFileError::Moved { path: self.path.clone(), offset_bytes })
            }
        }
    }

    /// Returns the range's blocks to the filesystem. Then the range reads as zeros.
    ///
    /// The blocks may belong to another file before this returns: no I/O to them may be in flight,
    /// and no user may still have their place.
    ///
    /// # Errors
    /// [`HostFileError::BadRange`], [`HostFileError::ReadOnly`], and the kernel's errors.
    pub fn punch(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), HostFileError> {
        // The filesystem would zero a partial block in the page cache.
        self.check_writable(offset_bytes, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self.lease.as_fd(), how, offset_bytes, len_bytes)
            .map_err(|error| self.no_space_or("punch a hole in", error))
    }

    /// Returns the parts of the range (offset and length) without written blocks.
    fn gaps(&self, offset_bytes: u64, len_bytes: u64) -> Result<Vec<(u64, u64)>, HostFileError> {
        let mut extents = Vec::new();
        self.read_map(offset_bytes, len_bytes, &mut extents)?;
        let mut gaps = Vec::new();
        let mut at = offset_bytes;
        for extent in &extents {
            if extent.logical_bytes > at {
                gaps.push((at, extent.logical_bytes - at));
            }
            at = extent.logical_bytes + extent.len_bytes;
        }
        let end = offset_bytes + len_bytes;
        if at < end {
            gaps.push((at, end - at));
        }
        Ok(gaps)
    }

    fn write_zeros(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), HostFileError> {
        let mut done = 0;
        while done < len_bytes {
            let mut rest = len_bytes - done;
            let pieces: [IoSlice<'_>; ZERO_PIECES] = std::array::from_fn(|_| {
                let len = rest.min(ZEROS.0.len() as u64);
                rest -= len;
                IoSlice::new(&ZEROS.0[..len as usize])
            });
            match rustix::io::pwritev(self.lease.as_fd(), &pieces, offset_bytes + done) {
                Ok(0) => return Err(self.no_space_or("write to", Errno::IO)),
                Ok(written) => done += written as u64,
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.no_space_or("write to", error)),
            }
        }
        Ok(())
    }

    fn check_writable(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), HostFileError> {
        if self.read_only {
            return Err(HostFileError::ReadOnly { path: self.path.clone() });
        }
        let is_whole = (offset_bytes | len_bytes).is_multiple_of(u64::from(self.block_bytes));
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if is_whole && end <= self.size_bytes => Ok(()),
            _ => Err(self.bad_range(offset_bytes, len_bytes)),
        }
    }

    fn no_space_or(&self, action: &'static str, error: Errno) -> HostFileError {
        match error {
            Errno::NOSPC | Errno::DQUOT => {
                HostFileError::NoSpace { path: self.path.clone(), quota: error == Errno::DQUOT }
            }
            error => {
                HostFileError::Kernel { action, path: self.path.clone(), source: error.into() }
            }
        }
    }
}
