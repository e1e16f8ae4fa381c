//! The packed ring (virtio 1.2, 2.8), driver's side.

use sidecore_spec_virtio::descriptor::{self, INDIRECT, LEN_OFFSET, NEXT};
use sidecore_spec_virtio::packed::{
    AVAIL, DESCRIPTOR_FLAGS_OFFSET, DESCRIPTOR_ID_OFFSET, EVENT_DESCRIPTOR, EVENT_DISABLE,
    EVENT_ENABLE, EVENT_FLAGS_MASK, EVENT_FLAGS_OFFSET, EVENT_POSITION_OFFSET, Tail, USED,
};

use super::table::{Tables, direction};
use super::{Areas, Buffer, DriverError, Flights, Shape, SharedMemory, Used};
use crate::layout::{RingFormat, RingLayout};
use crate::packed::Position;
use crate::split::need_event;

/// A chain is kept here as described and written into the ring at every push, because its place
/// there moves on.
#[derive(Debug)]
pub(crate) struct PackedRing {
    descriptors: SharedMemory,
    driver_event: SharedMemory,
    device_event: SharedMemory,
    tables: Option<Tables>,
    size: u16,
    shape: Shape,
    event_idx: bool,
    pub(crate) flights: Flights,
    /// `buffers_per_slot` for each slot; the first alone, with `tables`.
    chains: Box<[Buffer]>,
    /// Entries of the ring that each slot takes.
    entries: Box<[u16]>,
    next_available: Position,
    next_used: Position,
    /// The first head that was pushed since the last publish: the device stops at it until its
    /// flags are written.
    held_back: Option<(usize, u16)>,
    /// Entries published since the last settled answer about a kick.
    unkicked: u16,
    unpublished: u16,
}

impl PackedRing {
    pub(crate) fn new(
        areas: Areas,
        layout: &RingLayout,
        shape: Shape,
        tables: Option<Tables>,
    ) -> Self {
        let start = Position { index: 0, wrap: true };
        let buffers = usize::from(shape.slots).wrapping_mul(usize::from(shape.buffers_per_slot));
        Self {
            descriptors: areas.descriptor,
            driver_event: areas.driver,
            device_event: areas.device,
            tables,
            size: layout.size,
            shape,
            event_idx: layout.event_idx,
            flights: Flights::new(shape.slots),
            chains: vec![Buffer::default(); buffers].into(),
            entries: vec![0; usize::from(shape.slots)].into(),
            next_available: start,
            next_used: start,
            held_back: None,
            unkicked: 0,
            unpublished: 0,
        }
    }

    pub(crate) fn describe(&mut self, slot: u16, chain: &[Buffer]) -> Result<(), DriverError> {
        self.flights.check_chain(slot, chain.len(), self.shape.buffers_per_slot)?;
        let table =
            self.tables.as_ref().map(|tables| [tables.write(slot, chain, RingFormat::Packed)]);
        let chain = table.as_ref().map_or(chain, |table| &table[..]);
        let first = usize::from(slot).wrapping_mul(usize::from(self.shape.buffers_per_slot));
        for (kept, buffer) in self.chains.iter_mut().skip(first).zip(chain) {
            *kept = *buffer;
        }
        if let Some(entries) = self.entries.get_mut(usize::from(slot)) {
            *entries = u16::try_from(chain.len()).unwrap_or(0);
        }
        self.flights.described(slot);
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, slot: u16) -> Result<(), DriverError> {
        self.flights.depart(slot)?;
        let entries = self.entries.get(usize::from(slot)).copied().unwrap_or(0);
        let first = usize::from(slot).wrapping_mul(usize::from(self.shape.buffers_per_slot));
        let end = first.wrapping_add(usize::from(entries));
        let kind = if self.tables.is_some() { INDIRECT } else { 0 };
        let mut head = None;
        let mut left = entries;
        for buffer in self.chains.get(first..end).unwrap_or(&[]) {
            left = left.wrapping_sub(1);
            let available = if self.next_available.wrap { AVAIL } else { USED };
            let link = if left > 0 { NEXT } else { 0 };
            let word = available | direction(*buffer) | link | kind;
            let at = usize::from(self.next_available.index).wrapping_mul(descriptor::BYTES);
            self.descriptors.store_u64(at, buffer.address);
            self.descriptors.store_u32(at.wrapping_add(LEN_OFFSET), buffer.len_bytes);
            self.descriptors.store_u16(at.wrapping_add(DESCRIPTOR_ID_OFFSET), slot);
            if head.is_none() {
                head = Some((at.wrapping_add(DESCRIPTOR_FLAGS_OFFSET), word));
            } else {
                self.descriptors.store_u16(at.wrapping_add(DESCRIPTOR_FLAGS_OFFSET), word);
            }
            self.next_available.advance(1, self.size);
        }
        // The head goes last: it makes the chain available (2.8.21.1).
        if let Some((at, word)) = head {
            if self.held_back.is_none() {
                self.held_back = head;
            } else {
                self.descriptors.store_u16_release(at, word);
            }
        }
        self.unpublished = self.unpublished.wrapping_add(entries);
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        if let Some((at, word)) = self.held_back.take() {
            self.descriptors.store_u16_release(at, word);
            self.unkicked = self.unkicked.saturating_add(self.unpublished);
            self.unpublished = 0;
        }
    }

    /// With `certain`, what is not wanted now is settled; else it may be asked again.
    #[inline(always)]
    pub(crate) fn kick_wanted(&mut self, certain: bool) -> bool {
        if self.unkicked == 0 {
            return false;
        }
        let suppression = self.device_event.load_u32(0);
        #[allow(clippy::cast_possible_truncation)] // taking the two halves apart
        let (event, mode) = (suppression as u16, (suppression >> 16) as u16 & EVENT_FLAGS_MASK);
        let wanted = match mode {
            EVENT_DISABLE => false,
            EVENT_DESCRIPTOR if self.event_idx => {
                // Both indices in the terms of the driver's present round.
                let event = Position::from_bits(event);
                let lag = if event.wrap == self.next_available.wrap { 0 } else { self.size };
                let event = event.index.wrapping_sub(lag);
                let new = self.next_available.index.wrapping_sub(self.unpublished);
                need_event(event, new, new.wrapping_sub(self.unkicked))
            }
            _ => true,
        };
        if wanted || certain {
            self.unkicked = 0;
        }
        wanted
    }

    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Result<Option<Used>, DriverError> {
        let tail = self.next_tail();
        if !self.is_used(tail) {
            return Ok(None);
        }
        let slot = self.flights.land(u32::from(tail.id))?;
        let entries = self.entries.get(usize::from(slot)).copied().unwrap_or(0);
        self.next_used.advance(entries, self.size);
        Ok(Some(Used { slot, written_bytes: tail.len_bytes }))
    }

    #[inline(always)]
    pub(crate) fn has_used(&self) -> bool {
        self.is_used(self.next_tail())
    }

    pub(crate) fn arm_calls(&mut self) {
        if self.event_idx {
            self.driver_event.store_u16(EVENT_POSITION_OFFSET, self.next_used.to_bits());
            self.driver_event.store_u16_release(EVENT_FLAGS_OFFSET, EVENT_DESCRIPTOR);
        } else {
            self.driver_event.store_u16(EVENT_FLAGS_OFFSET, EVENT_ENABLE);
        }
    }

    pub(crate) fn suppress_calls(&mut self) {
        self.driver_event.store_u16(EVENT_FLAGS_OFFSET, EVENT_DISABLE);
    }

    /// Length, id and flags of the entry that the device writes next, in one read.
    #[inline(always)]
    fn next_tail(&self) -> Tail {
        let at = usize::from(self.next_used.index).wrapping_mul(descriptor::BYTES);
        Tail::from_word(self.descriptors.load_u64_acquire(at.wrapping_add(LEN_OFFSET)))
    }

    /// An entry is used when both bits equal the wrap counter (2.8.1), and is nothing while nothing
    /// is in flight.
    #[inline(always)]
    fn is_used(&self, tail: Tail) -> bool {
        let available = tail.flags & AVAIL != 0;
        let used = tail.flags & USED != 0;
        available == used && used == self.next_used.wrap && self.flights.count() > 0
    }
}
