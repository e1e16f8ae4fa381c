//! The guest's side of a virtqueue, in user space.
//!
//! [`DriverRing`] is what a guest's kernel does, made for speed: a request lives in a *slot*, whose
//! chain of buffers is described once ([`DriverRing::describe`]) and sent as often as one likes
//! ([`DriverRing::push`]). In a split ring the descriptors then stay as they are, in both sides'
//! caches, and a request costs one entry of the available ring.
//!
//! [`nvme`] has the same for the queues of an NVMe controller.
//!
//! [`RawRing`] writes any word of a ring, for tests which play a hostile guest. [`SharedMemory`] is
//! how code without `unsafe` reads and writes what the descriptors point at.
//!
//! ```
//! use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};
//! use sidecore_ring::driver::{Buffer, DriverRing};
//! use sidecore_ring::{RingFormat, RingLayout};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
//! # let file = std::fs::File::from(file);
//! # file.set_len(1 << 20)?;
//! let memory = GuestMemory::map(vec![RegionSpec {
//!     guest_address: GuestAddress(0),
//!     user_address: UserAddress(0x10_0000),
//!     len_bytes: 1 << 20,
//!     file: file.into(),
//!     file_offset_bytes: 0,
//! }])?;
//! let layout = RingLayout::compact(UserAddress(0x10_0000), RingFormat::Split, 64);
//! let mut ring = DriverRing::new(&memory, &layout, 32, 2, None)?;
//! ring.describe(7, &[Buffer::to_device(0x8000, 16), Buffer::from_device(0x9000, 1)])?;
//! ring.push(7)?;
//! ring.publish();
//! assert!(ring.kick_wanted(), "kicks are not suppressed");
//! assert!(ring.pop()?.is_none(), "and no device is here to answer");
//! # Ok(())
//! # }
//! ```

pub mod nvme;
mod packed;
mod raw;
mod shared;
mod split;
mod table;

#[cfg(test)]
mod tests;

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError, UserAddress, Window};
use sidecore_spec_virtio::{
    MAX_QUEUE_SIZE, descriptor, packed as packed_spec, split as split_spec,
};

use crate::layout::{RingFormat, RingLayout};

pub use raw::{RawDescriptor, RawRing};
pub use shared::{CopyHow, SharedMemory};

/// One buffer of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Where the device finds it, in guest addresses.
    pub address: u64,
    /// Its size in bytes.
    pub len_bytes: u32,
    /// Whether the device writes it; else it reads it.
    pub device_writes: bool,
}

impl Buffer {
    /// A buffer that the device reads.
    #[must_use]
    pub const fn to_device(address: u64, len_bytes: u32) -> Self {
        Self { address, len_bytes, device_writes: false }
    }

    /// A buffer that the device writes.
    #[must_use]
    pub const fn from_device(address: u64, len_bytes: u32) -> Self {
        Self { address, len_bytes, device_writes: true }
    }
}

/// A request that the device is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Its slot.
    pub slot: u16,
    /// How many bytes the device says it wrote.
    pub written_bytes: u32,
}

/// An error of this driver, its user or its device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The layout's size is not one that the format allows, or the slots do not fit in it.
    #[error("{slots} slots of {buffers_per_slot} buffers do not fit a ring of {size} entries")]
    Size {
        /// Entries of the ring.
        size: u16,
        /// Slots asked for.
        slots: u16,
        /// Buffers each.
        buffers_per_slot: u16,
    },
    /// An area of the ring is not in the memory.
    #[error("the ring is not in the memory: {0}")]
    Memory(#[from] MemoryError),
    /// There is no such slot.
    #[error("no slot {slot}")]
    NoSuchSlot {
        /// The slot.
        slot: u16,
    },
    /// The slot's request is still with the device.
    #[error("slot {slot} is in flight")]
    InFlight {
        /// The slot.
        slot: u16,
    },
    /// A chain of no buffers, or of more than a slot has.
    #[error("a chain of {buffers} buffers, a slot has between 1 and {buffers_per_slot}")]
    Chain {
        /// Buffers in the chain.
        buffers: usize,
        /// Most that a slot holds.
        buffers_per_slot: u16,
    },
    /// The device completed something that it was not given.
    #[error("the device completed {id}, which is not in flight")]
    NotInFlight {
        /// The identifier in the used element.
        id: u32,
    },
    /// The device's used index is ahead of everything that it was given.
    #[error("the device completed more requests than it was given")]
    TooManyUsed,
}

/// Memory for the tables of indirect descriptors: [`IndirectTables::bytes`] of it.
#[derive(Clone, Debug)]
pub struct IndirectTables {
    /// The memory as mapped here.
    pub window: Window,
    /// The same in guest addresses.
    pub guest_address: GuestAddress,
}

impl IndirectTables {
    /// Bytes that the tables of `slots` slots of `buffers_per_slot` buffers need.
    #[must_use]
    pub fn bytes(slots: u16, buffers_per_slot: u16) -> usize {
        usize::from(slots)
            .saturating_mul(usize::from(buffers_per_slot))
            .saturating_mul(descriptor::BYTES)
    }
}

/// A compact way to lay out a ring's three areas, the descriptor area first. Every area starts on a
/// cache line, so that the two sides' words do not share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAreas {
    /// Size of the descriptor area, in bytes.
    pub descriptor_bytes: usize,
    /// Size of the driver area (available ring), in bytes.
    pub driver_bytes: usize,
    /// Size of the device area (used ring), in bytes.
    pub device_bytes: usize,
    /// Where the driver area starts.
    pub driver_offset_bytes: usize,
    /// Where the device area starts.
    pub device_offset_bytes: usize,
    /// Bytes in all, a multiple of the cache line.
    pub total_bytes: usize,
}

impl RingAreas {
    /// The areas of a ring of `size` entries (virtio 1.2, 2.7 and 2.8).
    #[must_use]
    pub fn of(format: RingFormat, size: u16) -> Self {
        let entries = usize::from(size);
        let descriptor_bytes = entries.saturating_mul(descriptor::BYTES);
        let (driver_bytes, device_bytes) = match format {
            RingFormat::Split => (split_spec::avail_bytes(size), split_spec::used_bytes(size)),
            RingFormat::Packed => (packed_spec::EVENT_BYTES, packed_spec::EVENT_BYTES),
        };
        let line = |bytes: usize| bytes.next_multiple_of(sidecore_memory::copy::CACHE_LINE_BYTES);
        let driver_offset_bytes = line(descriptor_bytes);
        let device_offset_bytes = driver_offset_bytes.saturating_add(line(driver_bytes));
        let total_bytes = device_offset_bytes.saturating_add(line(device_bytes));
        Self {
            descriptor_bytes,
            driver_bytes,
            device_bytes,
            driver_offset_bytes,
            device_offset_bytes,
            total_bytes,
        }
    }
}

impl RingLayout {
    /// The layout of [`RingAreas`] from this address on, without the features of rings.
    #[must_use]
    pub fn compact(start: UserAddress, format: RingFormat, size: u16) -> Self {
        let areas = RingAreas::of(format, size);
        let at = |offset_bytes: usize| UserAddress(start.0.saturating_add(offset_bytes as u64));
        Self {
            format,
            size,
            descriptor_area: start,
            driver_area: at(areas.driver_offset_bytes),
            device_area: at(areas.device_offset_bytes),
            event_idx: false,
            indirect: false,
        }
    }
}

/// A ring's three areas, as windows.
pub(crate) struct Areas {
    pub descriptor: SharedMemory,
    pub driver: SharedMemory,
    pub device: SharedMemory,
}

impl Areas {
    pub(crate) fn find(memory: &GuestMemory, layout: &RingLayout) -> Result<Self, MemoryError> {
        let sizes = RingAreas::of(layout.format, layout.size);
        let (driver_align, device_align) = match layout.format {
            RingFormat::Split => (split_spec::AVAIL_ALIGN_BYTES, split_spec::USED_ALIGN_BYTES),
            RingFormat::Packed => (packed_spec::EVENT_ALIGN_BYTES, packed_spec::EVENT_ALIGN_BYTES),
        };
        let find = |at: UserAddress, len_bytes, align_bytes| {
            memory.window(at, len_bytes, align_bytes).map(SharedMemory::new)
        };
        Ok(Self {
            descriptor: find(
                layout.descriptor_area,
                sizes.descriptor_bytes,
                descriptor::ALIGN_BYTES,
            )?,
            driver: find(layout.driver_area, sizes.driver_bytes, driver_align)?,
            device: find(layout.device_area, sizes.device_bytes, device_align)?,
        })
    }
}

/// The guest's side of one virtqueue of either format.
#[derive(Debug)]
pub struct DriverRing(Format);

#[derive(Debug)]
enum Format {
    Split(split::SplitRing),
    Packed(packed::PackedRing),
}

macro_rules! either {
    ($self:ident, $ring:ident => $what:expr) => {
        match &$self.0 {
            Format::Split($ring) => $what,
            Format::Packed($ring) => $what,
        }
    };
    (mut $self:ident, $ring:ident => $what:expr) => {
        match &mut $self.0 {
            Format::Split($ring) => $what,
            Format::Packed($ring) => $what,
        }
    };
}

impl DriverRing {
    /// Makes an empty ring in the areas that `layout` names, which it overwrites, for requests in
    /// `slots` slots of at most `buffers_per_slot` buffers. With `tables`, the chains are tables of
    /// indirect descriptors there, and a request takes one entry of the ring; the layout must then
    /// say that the device knows them.
    ///
    /// Calls are suppressed; [`DriverRing::arm_calls`] asks for one.
    ///
    /// # Errors
    /// [`DriverError::Size`] when all slots in flight at once would not fit;
    /// [`DriverError::Memory`] when an area is not in `memory`.
    pub fn new(
        memory: &GuestMemory,
        layout: &RingLayout,
        slots: u16,
        buffers_per_slot: u16,
        tables: Option<IndirectTables>,
    ) -> Result<Self, DriverError> {
        let size = layout.size;
        let wrong = DriverError::Size { size, slots, buffers_per_slot };
        let entries_per_slot = if tables.is_some() { 1 } else { usize::from(buffers_per_slot) };
        let fits = usize::from(slots).saturating_mul(entries_per_slot) <= usize::from(size);
        let legal = size <= MAX_QUEUE_SIZE
            && (layout.format == RingFormat::Packed || size.is_power_of_two());
        if !fits
            || !legal
            || size == 0
            || slots == 0
            || buffers_per_slot == 0
            || (tables.is_some() && !layout.indirect)
        {
            return Err(wrong);
        }
        if tables
            .as_ref()
            .is_some_and(|t| t.window.len_bytes() < IndirectTables::bytes(slots, buffers_per_slot))
        {
            return Err(wrong);
        }
        let areas = Areas::find(memory, layout)?;
        for area in [&areas.descriptor, &areas.driver, &areas.device] {
            area.fill_zero();
        }
        let tables = tables.map(|tables| table::Tables::new(tables, buffers_per_slot));
        let shape = Shape { slots, buffers_per_slot };
        let mut ring = Self(match layout.format {
            RingFormat::Split => Format::Split(split::SplitRing::new(areas, layout, shape, tables)),
            RingFormat::Packed => {
                Format::Packed(packed::PackedRing::new(areas, layout, shape, tables))
            }
        });
        ring.suppress_calls();
        Ok(ring)
    }

    /// Says of what buffers the requests in `slot` consist, from the next [`DriverRing::push`] on.
    ///
    /// # Errors
    /// A slot that does not exist or is in flight; a chain of no buffers, or of too many.
    #[inline]
    pub fn describe(&mut self, slot: u16, chain: &[Buffer]) -> Result<(), DriverError> {
        either!(mut self, ring => ring.describe(slot, chain))
    }

    /// Queues the request in `slot`; the device sees it at the next [`DriverRing::publish`].
    ///
    /// # Errors
    /// A slot that does not exist, is in flight or was never described.
    #[inline]
    pub fn push(&mut self, slot: u16) -> Result<(), DriverError> {
        either!(mut self, ring => ring.push(slot))
    }

    /// Shows the device everything that was pushed.
    #[inline]
    pub fn publish(&mut self) {
        either!(mut self, ring => ring.publish());
    }

    /// Whether the device wants a kick for what was published since the last true answer of this,
    /// or the last answer at all. To be asked after every publish by a driver that then sleeps.
    #[must_use]
    #[inline]
    pub fn kick_wanted(&mut self) -> bool {
        // The published index must be seen before the wish is read (virtio 1.2, 2.7.13.4.1), or a
        // device that falls asleep just now and this driver miss each other.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        either!(mut self, ring => ring.kick_wanted(true))
    }

    /// As [`DriverRing::kick_wanted`] without the fence, which costs a round trip between the
    /// cores: a false answer may be wrong, so the caller must ask the other way before long. For a
    /// driver that polls for its completion and can ask again while there is none.
    #[must_use]
    #[inline]
    pub fn kick_wanted_soon(&mut self) -> bool {
        either!(mut self, ring => ring.kick_wanted(false))
    }

    /// Takes the next completed request, if there is one.
    ///
    /// # Errors
    /// The device completed what it was not given: the ring is of no use any more.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Used>, DriverError> {
        either!(mut self, ring => ring.pop())
    }

    /// Asks for a call at the next completion. True if one is there already, for which no call may
    /// ever come: the caller must take it instead of sleeping.
    #[must_use]
    pub fn arm_calls(&mut self) -> bool {
        either!(mut self, ring => ring.arm_calls());
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        either!(self, ring => ring.has_used())
    }

    /// Asks for no calls.
    pub fn suppress_calls(&mut self) {
        either!(mut self, ring => ring.suppress_calls());
    }

    /// Whether a completed request is there to be taken.
    #[must_use]
    #[inline]
    pub fn has_used(&self) -> bool {
        either!(self, ring => ring.has_used())
    }

    /// Whether the request in `slot` is with the device.
    #[must_use]
    pub fn is_in_flight(&self, slot: u16) -> bool {
        either!(self, ring => ring.flights.is_in_flight(slot))
    }

    /// How many requests are with the device, or pushed.
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> u16 {
        either!(self, ring => ring.flights.count())
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> u16 {
        either!(self, ring => ring.flights.slots())
    }
}

/// How many slots, and how long their chains may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub slots: u16,
    pub buffers_per_slot: u16,
}

/// Where each slot's request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flight {
    Undescribed,
    Here,
    WithDevice,
}

/// Which slots are with the device: what makes a wrong or repeated completion an error.
#[derive(Debug)]
pub(crate) struct Flights {
    slots: Box<[Flight]>,
    count: u16,
}

impl Flights {
    fn new(slots: u16) -> Self {
        Self { slots: vec![Flight::Undescribed; usize::from(slots)].into(), count: 0 }
    }

    fn check_chain(
        &self,
        slot: u16,
        buffers: usize,
        buffers_per_slot: u16,
    ) -> Result<(), DriverError> {
        if buffers == 0 || buffers > usize::from(buffers_per_slot) {
            return Err(DriverError::Chain { buffers, buffers_per_slot });
        }
        match self.slots.get(usize::from(slot)) {
            None => Err(DriverError::NoSuchSlot { slot }),
            Some(Flight::WithDevice) => Err(DriverError::InFlight { slot }),
            Some(_) => Ok(()),
        }
    }

    fn described(&mut self, slot: u16) {
        if let Some(flight) = self.slots.get_mut(usize::from(slot)) {
            *flight = Flight::Here;
        }
    }

    #[inline(always)]
    fn depart(&mut self, slot: u16) -> Result<(), DriverError> {
        match self.slots.get_mut(usize::from(slot)) {
            Some(flight @ Flight::Here) => {
                *flight = Flight::WithDevice;
                self.count = self.count.wrapping_add(1);
                Ok(())
            }
            Some(Flight::WithDevice) => Err(DriverError::InFlight { slot }),
            Some(Flight::Undescribed) => {
                Err(DriverError::Chain { buffers: 0, buffers_per_slot: 0 })
            }
            None => Err(DriverError::NoSuchSlot { slot }),
        }
    }

    #[inline(always)]
    fn land(&mut self, id: u32) -> Result<u16, DriverError> {
        let slot = u16::try_from(id).map_err(|_| DriverError::NotInFlight { id })?;
        match self.slots.get_mut(usize::from(slot)) {
            Some(flight @ Flight::WithDevice) => {
                *flight = Flight::Here;
                self.count = self.count.wrapping_sub(1);
                Ok(slot)
            }
            _ => Err(DriverError::NotInFlight { id }),
        }
    }

    fn is_in_flight(&self, slot: u16) -> bool {
        self.slots.get(usize::from(slot)) == Some(&Flight::WithDevice)
    }

    #[inline(always)]
    fn count(&self) -> u16 {
        self.count
    }

    fn slots(&self) -> u16 {
        u16::try_from(self.slots.len()).unwrap_or(u16::MAX)
    }
}
