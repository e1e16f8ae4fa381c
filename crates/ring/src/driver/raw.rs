//! Any word of a ring, for tests which play a hostile guest.

use sidecore_memory::{GuestMemory, MemoryError};
use sidecore_spec_virtio::descriptor::{self, LEN_OFFSET};
use sidecore_spec_virtio::packed::{self, EVENT_FLAGS_OFFSET, EVENT_POSITION_OFFSET};
use sidecore_spec_virtio::split::{
    self, FLAGS_OFFSET, INDEX_OFFSET, USED_LEN_OFFSET, avail_entry_offset, used_entry_offset,
};

use super::{Areas, SharedMemory};
use crate::layout::{RingFormat, RingLayout};

/// A descriptor of either format, as it lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest address of the buffer.
    pub address: u64,
    /// Its size in bytes.
    pub len_bytes: u32,
    /// Those of [`descriptor`], or any other bits.
    pub flags: u16,
    /// The next descriptor's index (split), or the buffer's id (packed).
    pub next_or_id: u16,
}

/// Reads and writes any word of a ring, with no check but that it lies in the ring: **for tests**.
/// A write outside of the ring does nothing, and a read gives zero.
///
/// Shares the ring's memory with its other users; make it before or after the
/// [`DriverRing`](super::DriverRing) of the same layout, which clears the ring when it is made.
#[derive(Clone, Debug)]
pub struct RawRing {
    format: RingFormat,
    size: u16,
    descriptors: SharedMemory,
    driver: SharedMemory,
    device: SharedMemory,
}

impl RawRing {
    /// The ring that `layout` names; its contents stay as they are. The size may be any.
    ///
    /// # Errors
    /// An area is not in `memory`, or not aligned.
    pub fn new(memory: &GuestMemory, layout: &RingLayout) -> Result<Self, MemoryError> {
        let Areas { descriptor, driver, device } = Areas::find(memory, layout)?;
        Ok(Self {
            format: layout.format,
            size: layout.size,
            descriptors: descriptor,
            driver,
            device,
        })
    }

    /// The descriptor area, the driver area (available ring or driver event suppression) and the
    /// device area (used ring or device event suppression), to write bytes at will.
    #[must_use]
    pub fn areas(&self) -> [&SharedMemory; 3] {
        [&self.descriptors, &self.driver, &self.device]
    }

    /// Entries of the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Reads descriptor `index`.
    #[must_use]
    pub fn descriptor(&self, index: u16) -> RawDescriptor {
        let at = usize::from(index).wrapping_mul(descriptor::BYTES);
        let (flags, next_or_id) = self.descriptor_offsets();
        RawDescriptor {
            address: self.descriptors.load_u64(at),
            len_bytes: self.descriptors.load_u32(at.wrapping_add(LEN_OFFSET)),
            flags: self.descriptors.load_u16(at.wrapping_add(flags)),
            next_or_id: self.descriptors.load_u16(at.wrapping_add(next_or_id)),
        }
    }

    /// Writes descriptor `index`, the flags last.
    pub fn set_descriptor(&self, index: u16, descriptor: RawDescriptor) {
        let at = usize::from(index).wrapping_mul(descriptor::BYTES);
        let (flags, next_or_id) = self.descriptor_offsets();
        self.descriptors.store_u64(at, descriptor.address);
        self.descriptors.store_u32(at.wrapping_add(LEN_OFFSET), descriptor.len_bytes);
        self.descriptors.store_u16(at.wrapping_add(next_or_id), descriptor.next_or_id);
        self.descriptors.store_u16_release(at.wrapping_add(flags), descriptor.flags);
    }

    /// Offsets of a descriptor's flags, and of its next descriptor or buffer id.
    fn descriptor_offsets(&self) -> (usize, usize) {
        match self.format {
            RingFormat::Split => (split::DESCRIPTOR_FLAGS_OFFSET, split::DESCRIPTOR_NEXT_OFFSET),
            RingFormat::Packed => (packed::DESCRIPTOR_FLAGS_OFFSET, packed::DESCRIPTOR_ID_OFFSET),
        }
    }

    /// Split: the available ring's flags.
    #[must_use]
    pub fn available_flags(&self) -> u16 {
        self.driver.load_u16(FLAGS_OFFSET)
    }

    /// Split: writes the available ring's flags.
    pub fn set_available_flags(&self, flags: u16) {
        self.driver.store_u16(FLAGS_OFFSET, flags);
    }

    /// Split: the available index.
    #[must_use]
    pub fn available_index(&self) -> u16 {
        self.driver.load_u16_acquire(INDEX_OFFSET)
    }

    /// Split: writes the available index, after everything written before.
    pub fn set_available_index(&self, index: u16) {
        self.driver.store_u16_release(INDEX_OFFSET, index);
    }

    /// Split: entry `position` (below the size) of the available ring.
    #[must_use]
    pub fn available_entry(&self, position: u16) -> u16 {
        self.driver.load_u16(avail_entry_offset(position))
    }

    /// Split: writes entry `position` (below the size) of the available ring.
    pub fn set_available_entry(&self, position: u16, head: u16) {
        self.driver.store_u16(avail_entry_offset(position), head);
    }

    /// Split: `used_event`, where the driver wants a call.
    #[must_use]
    pub fn used_event(&self) -> u16 {
        self.driver.load_u16(avail_entry_offset(self.size))
    }

    /// Split: writes `used_event`.
    pub fn set_used_event(&self, index: u16) {
        self.driver.store_u16(avail_entry_offset(self.size), index);
    }

    /// Split: the used ring's flags.
    #[must_use]
    pub fn used_flags(&self) -> u16 {
        self.device.load_u16(FLAGS_OFFSET)
    }

    /// Split: writes the used ring's flags.
    pub fn set_used_flags(&self, flags: u16) {
        self.device.store_u16(FLAGS_OFFSET, flags);
    }

    /// Split: the used index.
    #[must_use]
    pub fn used_index(&self) -> u16 {
        self.device.load_u16_acquire(INDEX_OFFSET)
    }

    /// Split: writes the used index, after everything written before.
    pub fn set_used_index(&self, index: u16) {
        self.device.store_u16_release(INDEX_OFFSET, index);
    }

    /// Split: entry `position` (below the size) of the used ring: id and bytes written.
    #[must_use]
    pub fn used_entry(&self, position: u16) -> (u32, u32) {
        let at = used_entry_offset(position);
        (self.device.load_u32(at), self.device.load_u32(at.wrapping_add(USED_LEN_OFFSET)))
    }

    /// Split: writes entry `position` (below the size) of the used ring.
    pub fn set_used_entry(&self, position: u16, id: u32, written_bytes: u32) {
        let at = used_entry_offset(position);
        self.device.store_u32(at, id);
        self.device.store_u32(at.wrapping_add(USED_LEN_OFFSET), written_bytes);
    }

    /// Split: `avail_event`, where the device wants a kick.
    #[must_use]
    pub fn available_event(&self) -> u16 {
        self.device.load_u16(used_entry_offset(self.size))
    }

    /// Split: writes `avail_event`.
    pub fn set_available_event(&self, index: u16) {
        self.device.store_u16(used_entry_offset(self.size), index);
    }

    /// Packed: the driver's event suppression: descriptor and wrap counter, flags.
    #[must_use]
    pub fn driver_event(&self) -> (u16, u16) {
        (self.driver.load_u16(EVENT_POSITION_OFFSET), self.driver.load_u16(EVENT_FLAGS_OFFSET))
    }

    /// Packed: writes the driver's event suppression.
    pub fn set_driver_event(&self, descriptor_and_wrap: u16, flags: u16) {
        self.driver.store_u16(EVENT_POSITION_OFFSET, descriptor_and_wrap);
        self.driver.store_u16_release(EVENT_FLAGS_OFFSET, flags);
    }

    /// Packed: the device's event suppression: descriptor and wrap counter, flags.
    #[must_use]
    pub fn device_event(&self) -> (u16, u16) {
        (self.device.load_u16(EVENT_POSITION_OFFSET), self.device.load_u16(EVENT_FLAGS_OFFSET))
    }

    /// Packed: writes the device's event suppression.
    pub fn set_device_event(&self, descriptor_and_wrap: u16, flags: u16) {
        self.device.store_u16(EVENT_POSITION_OFFSET, descriptor_and_wrap);
        self.device.store_u16_release(EVENT_FLAGS_OFFSET, flags);
    }
}
