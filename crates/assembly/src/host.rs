//! A file of the host's filesystem as the controller's host function needs it: in blocks, not
//! bytes.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_block::BlockDevice;
use sidecore_controller::HostMap;
use sidecore_extent::{BlockRange, Extent};
use sidecore_linux::{HostExtent, HostFile, HostFileError};
use sidecore_units::{Plba, Vlba};

/// A file with its mapping and its lease.
pub(crate) struct MappedFile(HostFile);

impl MappedFile {
    pub(crate) fn new(file: HostFile) -> Self {
        Self(file)
    }

    /// The offset and length of a range in bytes.
    fn bytes(&self, range: BlockRange) -> io::Result<(u64, u64)> {
        let block_bytes = u64::from(self.0.block_bytes());
        let offset_bytes = range.first.0.checked_mul(block_bytes);
        let len_bytes = range.count.checked_mul(block_bytes);
        offset_bytes.zip(len_bytes).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
    }

    fn extent(&self, found: &HostExtent) -> Extent {
        // The filesystem's extents are whole blocks: [`HostFile`] refuses others.
        let shift = self.0.block_bytes().trailing_zeros();
        Extent {
            first: Vlba(found.logical_bytes >> shift),
            count: found.len_bytes >> shift,
            physical: Plba(found.physical_bytes >> shift),
            shared: false,
        }
    }
}

fn into_io(error: HostFileError) -> io::Error {
    match error {
        HostFileError::InUse { .. } | HostFileError::LeaseGone { .. } => {
            io::Error::new(io::ErrorKind::ResourceBusy, error)
        }
        HostFileError::NoSpace { .. } => io::Error::new(io::ErrorKind::StorageFull, error),
        HostFileError::Kernel { source, .. } if source.raw_os_error().is_some() => source,
        error => io::Error::other(error),
    }
}

impl HostMap for MappedFile {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn block_bytes(&self) -> u32 {
        self.0.block_bytes()
    }

    fn extents(&self, range: BlockRange, extents: &mut Vec<Extent>) -> io::Result<()> {
        let (offset_bytes, len_bytes) = self.bytes(range)?;
        let mut found = Vec::new();
        self.0.extents(offset_bytes, len_bytes, &mut found).map_err(into_io)?;
        extents.extend(found.iter().map(|extent| self.extent(extent)));
        Ok(())
    }

    fn allocate(&self, range: BlockRange) -> io::Result<()> {
        let (offset_bytes, len_bytes) = self.bytes(range)?;
        self.0.allocate(offset_bytes, len_bytes).map_err(into_io)
    }

    fn punch(&self, range: BlockRange) -> io::Result<()> {
        let (offset_bytes, len_bytes) = self.bytes(range)?;
        self.0.punch(offset_bytes, len_bytes).map_err(into_io)
    }

    fn wanted(&self) -> BorrowedFd<'_> {
        self.0.lease_events()
    }

    fn release(&self) -> io::Result<()> {
        self.0.release_lease().map_err(into_io)
    }

    fn retake(&self, settle: &mut dyn FnMut()) -> io::Result<()> {
        // Discards the event of the last lease; the next event belongs to the new lease.
        self.0.drain_lease_events();
        self.0.try_lease_again(settle).map_err(into_io)
    }

    fn device(&self) -> Arc<dyn BlockDevice> {
        self.0.device_store()
    }

    fn file(&self) -> Arc<dyn BlockDevice> {
        self.0.file_store()
    }
}
