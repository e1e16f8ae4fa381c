//! Tables of descriptors outside of the ring (virtio 1.2, 2.7.5.3 and 2.8.7).

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_spec_virtio::descriptor;

use crate::RingError;

/// [`descriptor::BYTES`], as descriptors count lengths.
const DESCRIPTOR_BYTES: u32 = descriptor::BYTES as u32;

/// An indirect table in guest memory, of a checked size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndirectTable {
    start: GuestAddress,
    count: u32,
}

impl IndirectTable {
    /// The table that a descriptor names, which must be a whole number of
    /// descriptors and not empty.
    pub(crate) fn new(start: GuestAddress, len_bytes: u32) -> Result<Self, RingError> {
        if len_bytes == 0 || !len_bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(RingError::IndirectSize { len_bytes });
        }
        Ok(Self { start, count: len_bytes / DESCRIPTOR_BYTES })
    }

    /// Descriptors in it.
    pub(crate) fn count(self) -> u32 {
        self.count
    }

    /// Reads a descriptor, once: its address, and its second word.
    pub(crate) fn read(
        self,
        index: u32,
        memory: &GuestMemory,
        hint: &mut RegionHint,
    ) -> Result<(GuestAddress, u64), RingError> {
        let outside = RingError::DescriptorOutOfRange { index, size: self.count };
        if index >= self.count {
            return Err(outside);
        }
        let offset = u64::from(index).wrapping_mul(u64::from(DESCRIPTOR_BYTES));
        let at = self.start.0.checked_add(offset).map(GuestAddress).ok_or(outside)?;
        let both = u128::from_le_bytes(memory.read_array(at, hint)?);
        #[allow(clippy::cast_possible_truncation)] // taking the two halves apart
        let (address, tail) = (both as u64, (both >> 64) as u64);
        Ok((GuestAddress(address), tail))
    }
}
