//! The split ring (virtio 1.2, 2.7), driver's side.

use sidecore_spec_virtio::descriptor;
use sidecore_spec_virtio::split::{
    FLAGS_OFFSET, INDEX_OFFSET, NO_INTERRUPT, NO_NOTIFY, USED_LEN_OFFSET, avail_entry_offset,
    used_entry_offset,
};

use super::table::{Tables, write_split};
use super::{Areas, Buffer, DriverError, Flights, Shape, SharedMemory, Used};
use crate::layout::{RingFormat, RingLayout};
use crate::split::need_event;

/// A slot's number is its head descriptor's number; the tails of the chains follow the heads. What
/// the device returns is thus the slot, with nothing to look up.
#[derive(Debug)]
pub(crate) struct SplitRing {
    descriptors: SharedMemory,
    available: SharedMemory,
    used: SharedMemory,
    tables: Option<Tables>,
    size: u16,
    shape: Shape,
    event_idx: bool,
    calls_suppressed: bool,
    pub(crate) flights: Flights,
    /// The available index, up to what was pushed, up to what was published, and up to which no
    /// kick is owed.
    pushed: u16,
    published: u16,
    kicked: u16,
    /// The used index, up to what was taken and as last read.
    taken: u16,
    seen: u16,
}

impl SplitRing {
    pub(crate) fn new(
        areas: Areas,
        layout: &RingLayout,
        shape: Shape,
        tables: Option<Tables>,
    ) -> Self {
        Self {
            descriptors: areas.descriptor,
            available: areas.driver,
            used: areas.device,
            tables,
            size: layout.size,
            shape,
            event_idx: layout.event_idx,
            calls_suppressed: false,
            flights: Flights::new(shape.slots),
            pushed: 0,
            published: 0,
            kicked: 0,
            taken: 0,
            seen: 0,
        }
    }

    pub(crate) fn describe(&mut self, slot: u16, chain: &[Buffer]) -> Result<(), DriverError> {
        self.flights.check_chain(slot, chain.len(), self.shape.buffers_per_slot)?;
        if let Some(tables) = &self.tables {
            let table = tables.write(slot, chain, RingFormat::Split);
            write_split(&self.descriptors, at(slot), table, descriptor::INDIRECT, 0);
        } else {
            let tails_per_slot = self.shape.buffers_per_slot.wrapping_sub(1);
            let mut next = self.shape.slots.wrapping_add(slot.wrapping_mul(tails_per_slot));
            let mut index = slot;
            let last = chain.len().wrapping_sub(1);
            for (number, buffer) in chain.iter().enumerate() {
                let (link, to) = if number < last { (descriptor::NEXT, next) } else { (0, 0) };
                write_split(&self.descriptors, at(index), *buffer, link, to);
                index = next;
                next = next.wrapping_add(1);
            }
        }
        self.flights.described(slot);
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, slot: u16) -> Result<(), DriverError> {
        self.flights.depart(slot)?;
        self.available.store_u16(avail_entry_offset(self.pushed & self.mask()), slot);
        self.pushed = self.pushed.wrapping_add(1);
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        if self.published != self.pushed {
            self.published = self.pushed;
            self.available.store_u16_release(INDEX_OFFSET, self.pushed);
        }
    }

    /// With `certain`, what is not wanted now is settled; else it may be asked again.
    #[inline(always)]
    pub(crate) fn kick_wanted(&mut self, certain: bool) -> bool {
        if self.kicked == self.published {
            return false;
        }
        let wanted = if self.event_idx {
            let event = self.used.load_u16(used_entry_offset(self.size));
            need_event(event, self.published, self.kicked)
        } else {
            self.used.load_u16(FLAGS_OFFSET) & NO_NOTIFY == 0
        };
        if wanted || certain {
            self.kicked = self.published;
        }
        wanted
    }

    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Result<Option<Used>, DriverError> {
        if self.seen == self.taken {
            self.seen = self.used.load_u16_acquire(INDEX_OFFSET);
            let fresh = self.seen.wrapping_sub(self.taken);
            if fresh == 0 {
                return Ok(None);
            }
            if fresh > self.flights.count() {
                self.seen = self.taken;
                return Err(DriverError::TooManyUsed);
            }
        }
        let at = used_entry_offset(self.taken & self.mask());
        // The used ring is aligned to four bytes only, so an element is two words.
        let (id, written_bytes) =
            (self.used.load_u32(at), self.used.load_u32(at.wrapping_add(USED_LEN_OFFSET)));
        self.taken = self.taken.wrapping_add(1);
        let slot = self.flights.land(id)?;
        if self.calls_suppressed && self.taken & 0x3fff == 0 {
            self.suppress_calls();
        }
        Ok(Some(Used { slot, written_bytes }))
    }

    #[inline(always)]
    pub(crate) fn has_used(&self) -> bool {
        self.seen != self.taken || self.used.load_u16_acquire(INDEX_OFFSET) != self.taken
    }

    pub(crate) fn arm_calls(&mut self) {
        self.calls_suppressed = false;
        if self.event_idx {
            self.available.store_u16(self.used_event(), self.taken);
        } else {
            self.available.store_u16(FLAGS_OFFSET, 0);
        }
    }

    pub(crate) fn suppress_calls(&mut self) {
        self.calls_suppressed = true;
        if self.event_idx {
            // There is no "never" (2.7.10): the event is put half a round away, and again before it
            // is reached.
            self.available.store_u16(self.used_event(), self.taken.wrapping_add(0x8000));
        } else {
            self.available.store_u16(FLAGS_OFFSET, NO_INTERRUPT);
        }
    }

    fn used_event(&self) -> usize {
        avail_entry_offset(self.size)
    }

    #[inline(always)]
    fn mask(&self) -> u16 {
        self.size.wrapping_sub(1)
    }
}

fn at(number: u16) -> usize {
    usize::from(number).wrapping_mul(descriptor::BYTES)
}
