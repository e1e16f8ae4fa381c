//! The device's side of a packed virtqueue (virtio 1.2, 2.8).

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use sidecore_memory::{DirtyLog, GuestAddress, GuestMemory, RegionHint};
use sidecore_spec_virtio::packed::{
    self, AVAIL, EVENT_DESCRIPTOR, EVENT_DISABLE, EVENT_ENABLE, Tail, USED, WRAP,
};
use sidecore_spec_virtio::{MAX_QUEUE_SIZE, descriptor};

use crate::cell::{Words, descriptor_words, event_words};
use crate::indirect::IndirectTable;
use crate::log::AreaLog;
use crate::split::need_event;
use crate::{Chain, Descriptor, RingError, RingLayout, RingState, Token};

/// A place in the ring, and which lap it is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) index: u16,
    pub(crate) wrap: bool,
}

impl Position {
    pub(crate) fn from_bits(bits: u16) -> Self {
        Self { index: bits & !WRAP, wrap: bits & WRAP != 0 }
    }

    pub(crate) fn to_bits(self) -> u16 {
        self.index | if self.wrap { WRAP } else { 0 }
    }

    /// Moves on by `entries`, at most one lap.
    #[inline(always)]
    pub(crate) fn advance(&mut self, entries: u16, size: u16) {
        // Both are at most 32768, so the sum fits.
        let next = self.index.wrapping_add(entries);
        if next >= size {
            self.index = next.wrapping_sub(size);
            self.wrap = !self.wrap;
        } else {
            self.index = next;
        }
    }

    /// Moves back by `entries`, at most one lap.
    #[inline(always)]
    fn retreat(&mut self, entries: u16, size: u16) {
        if entries > self.index {
            self.index = self.index.wrapping_add(size);
            self.wrap = !self.wrap;
        }
        self.index = self.index.wrapping_sub(entries);
    }
}

#[derive(Debug)]
pub(crate) struct PackedDevice {
    /// Two words a descriptor: address; length, id and flags.
    descriptors: Words<AtomicU64>,
    /// The driver's notification wishes: offset and wrap, flags.
    driver_event: Words<AtomicU16>,
    /// The device's notification wishes.
    device_event: Words<AtomicU16>,
    size: u16,
    event_idx: bool,
    indirect: bool,
    next_avail: Position,
    next_used: Position,
    /// `next_used` when a call was last considered.
    called_used: u16,
    /// Entries given back since.
    uncalled_entries: u16,
    /// Descriptors taken and not yet given back.
    in_flight_entries: u16,
    in_flight: u16,
    /// Where writes to the descriptors and to the device's event area are logged, while the guest
    /// migrates.
    log: Option<[AreaLog; 2]>,
}

impl PackedDevice {
    pub(crate) fn new(
        memory: &GuestMemory,
        layout: &RingLayout,
        state: RingState,
    ) -> Result<Self, RingError> {
        let size = layout.size;
        if size == 0 || size > MAX_QUEUE_SIZE {
            return Err(RingError::BadSize { size });
        }
        let next_avail = Position::from_bits(state.next_avail);
        let next_used = Position::from_bits(state.next_used);
        for position in [next_avail, next_used] {
            if position.index >= size {
                return Err(RingError::BadPosition { position: position.index, size });
            }
        }
        Ok(Self {
            descriptors: descriptor_words(memory, layout)?,
            driver_event: event_words(memory, layout.driver_area)?,
            device_event: event_words(memory, layout.device_area)?,
            size,
            event_idx: layout.event_idx,
            indirect: layout.indirect,
            next_avail,
            next_used,
            called_used: next_used.index,
            uncalled_entries: 0,
            in_flight_entries: 0,
            in_flight: 0,
            log: None,
        })
    }

    pub(crate) fn set_log(&mut self, log: Option<&DirtyLog>) {
        self.log = log.and_then(|log| {
            Some([AreaLog::of(log, &self.descriptors)?, AreaLog::of(log, &self.device_event)?])
        });
    }

    pub(crate) fn state(&self) -> RingState {
        RingState { next_avail: self.next_avail.to_bits(), next_used: self.next_used.to_bits() }
    }

    pub(crate) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// The tail of the descriptor at `position`, if the driver has made it
    /// available (2.8.1: AVAIL is this lap's counter and USED is not).
    #[inline(always)]
    fn available_at(&self, position: Position) -> Option<Tail> {
        let word = usize::from(position.index).wrapping_mul(2).wrapping_add(1);
        // Acquire: the address is read after the flags that announce it.
        let tail = u64::from_le(self.descriptors.get(word)?.load(Ordering::Acquire));
        let tail = Tail::from_word(tail);
        let avail = tail.flags & AVAIL != 0;
        let used = tail.flags & USED != 0;
        (avail == position.wrap && used != position.wrap).then_some(tail)
    }

    #[inline]
    pub(crate) fn pop(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
        hint: &mut RegionHint,
    ) -> Result<Option<Token>, RingError> {
        let Some(mut tail) = self.available_at(self.next_avail) else {
            return Ok(None);
        };
        chain.clear();
        let mut position = self.next_avail;
        let mut entries = 0_u16;
        let id = loop {
            entries = entries.wrapping_add(1);
            if self.in_flight_entries.saturating_add(entries) > self.size {
                return Err(RingError::Overcommitted { size: self.size });
            }
            let word = usize::from(position.index).wrapping_mul(2);
            let address = self
                .descriptors
                .get(word)
                .map_or(0, |address| u64::from_le(address.load(Ordering::Relaxed)));
            if tail.flags & descriptor::INDIRECT != 0 {
                if !self.indirect {
                    return Err(RingError::IndirectNotNegotiated);
                }
                if tail.flags & descriptor::NEXT != 0 || entries > 1 {
                    // 2.8.19: an indirect descriptor stands alone.
                    return Err(RingError::IndirectWithNext);
                }
                let table = IndirectTable::new(GuestAddress(address), tail.len_bytes)?;
                walk_indirect(table, memory, chain, hint)?;
            } else {
                let descriptor =
                    Descriptor { address: GuestAddress(address), len_bytes: tail.len_bytes };
                chain.push(descriptor, tail.flags & descriptor::WRITE != 0)?;
            }
            position.advance(1, self.size);
            if tail.flags & descriptor::NEXT == 0 {
                break tail.id;
            }
            // The rest of a chain became visible with its first descriptor
            // (2.8.6), so its own flags need no order.
            let word = usize::from(position.index).wrapping_mul(2).wrapping_add(1);
            let word = self
                .descriptors
                .get(word)
                .map_or(0, |tail| u64::from_le(tail.load(Ordering::Relaxed)));
            tail = Tail::from_word(word);
        };
        self.next_avail = position;
        self.in_flight_entries = self.in_flight_entries.wrapping_add(entries);
        self.in_flight = self.in_flight.wrapping_add(1);
        Ok(Some(Token { id, entries }))
    }

    #[inline]
    pub(crate) fn pop_each(
        &mut self,
        is_writable: bool,
        limit: usize,
        mut take: impl FnMut(Token, Descriptor) -> bool,
    ) -> usize {
        let mut taken = 0_usize;
        while taken < limit
            && self.in_flight_entries < self.size
            && let Some(tail) = self.available_at(self.next_avail)
        {
            let shape = descriptor::NEXT | descriptor::INDIRECT | descriptor::WRITE;
            let wanted = if is_writable { descriptor::WRITE } else { 0 };
            if tail.flags & shape != wanted || tail.len_bytes == 0 {
                break;
            }
            let word = usize::from(self.next_avail.index).wrapping_mul(2);
            let Some(address) = self.descriptors.get(word) else { break };
            let address = GuestAddress(u64::from_le(address.load(Ordering::Relaxed)));
            let descriptor = Descriptor { address, len_bytes: tail.len_bytes };
            if !take(Token { id: tail.id, entries: 1 }, descriptor) {
                break;
            }
            self.next_avail.advance(1, self.size);
            self.in_flight_entries = self.in_flight_entries.wrapping_add(1);
            self.in_flight = self.in_flight.wrapping_add(1);
            taken = taken.wrapping_add(1);
        }
        taken
    }

    #[inline]
    pub(crate) fn complete(&mut self, token: &Token, written_bytes: u32) {
        self.write_used(self.next_used, token, written_bytes);
        self.returned(token);
    }

    #[inline]
    pub(crate) fn complete_together(&mut self, done: &mut Vec<(Token, u32)>) {
        let mut position = self.next_used;
        done.iter().for_each(|(token, _)| position.advance(token.entries, self.size));
        // The driver looks at the first one first, so that is written last.
        for (token, written_bytes) in done.iter().rev() {
            position.retreat(token.entries, self.size);
            self.write_used(position, token, *written_bytes);
        }
        done.drain(..).for_each(|(token, _)| self.returned(&token));
    }

    #[inline(always)]
    fn write_used(&self, position: Position, token: &Token, written_bytes: u32) {
        let flags = if position.wrap { AVAIL | USED } else { 0 };
        let word = usize::from(position.index).wrapping_mul(2).wrapping_add(1);
        let tail = Tail { len_bytes: written_bytes, id: token.id, flags };
        if let Some(slot) = self.descriptors.get(word) {
            // Release: status and data are visible before the flags.
            slot.store(tail.to_word().to_le(), Ordering::Release);
            if let Some([descriptors, _]) = &self.log {
                descriptors.mark(word.wrapping_mul(size_of::<u64>()), size_of::<u64>());
            }
        }
    }

    /// Moves past the entries of a request that the driver has got back.
    #[inline(always)]
    fn returned(&mut self, token: &Token) {
        self.next_used.advance(token.entries, self.size);
        self.in_flight_entries = self.in_flight_entries.saturating_sub(token.entries);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.uncalled_entries = self.uncalled_entries.saturating_add(token.entries);
    }

    pub(crate) fn abandon(&mut self, token: &Token) {
        self.in_flight_entries = self.in_flight_entries.saturating_sub(token.entries);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    #[inline]
    pub(crate) fn put_back(&mut self, token: &Token) {
        self.next_avail.retreat(token.entries, self.size);
        self.abandon(token);
    }

    pub(crate) fn take_call(&mut self) -> bool {
        // As in the split ring: completions first, then the driver's wish.
        fence(Ordering::SeqCst);
        let old = std::mem::replace(&mut self.called_used, self.next_used.index);
        let entries = std::mem::take(&mut self.uncalled_entries);
        if entries == 0 {
            return false;
        }
        let load = |offset: usize| {
            self.driver_event
                .at(offset)
                .map_or(0, |word| u16::from_le(word.load(Ordering::Relaxed)))
        };
        let wish = load(packed::EVENT_FLAGS_OFFSET);
        if wish != EVENT_DESCRIPTOR || !self.event_idx {
            return wish != EVENT_DISABLE;
        }
        if entries >= self.size {
            // A lap or more: wherever the event is, it was passed. Positions alone could not tell.
            return true;
        }
        // Bring the event and the old position onto the lap of the new one.
        let event = Position::from_bits(load(packed::EVENT_POSITION_OFFSET));
        let new = self.next_used.index;
        let old = if new <= old { old.wrapping_sub(self.size) } else { old };
        let event_index = if event.wrap == self.next_used.wrap {
            event.index
        } else {
            event.index.wrapping_sub(self.size)
        };
        need_event(event_index, new, old)
    }

    pub(crate) fn arm_kicks(&mut self) -> bool {
        if self.event_idx {
            self.set_device_event(Some(self.next_avail.to_bits()), EVENT_DESCRIPTOR);
        } else {
            self.set_device_event(None, EVENT_ENABLE);
        }
        fence(Ordering::SeqCst);
        self.available_at(self.next_avail).is_some()
    }

    pub(crate) fn suppress_kicks(&mut self) {
        self.set_device_event(None, EVENT_DISABLE);
    }

    fn set_device_event(&self, offset_wrap: Option<u16>, wish: u16) {
        if let (Some(bits), Some(word)) =
            (offset_wrap, self.device_event.at(packed::EVENT_POSITION_OFFSET))
        {
            word.store(bits.to_le(), Ordering::Relaxed);
        }
        if let Some(word) = self.device_event.at(packed::EVENT_FLAGS_OFFSET) {
            // Release: the driver must not see the wish with an old offset.
            word.store(wish.to_le(), Ordering::Release);
        }
        if let Some([_, device_event]) = &self.log {
            device_event.mark(0, packed::EVENT_BYTES);
        }
    }
}

/// Reads an indirect table: all of it, in order (2.8.7).
fn walk_indirect(
    table: IndirectTable,
    memory: &GuestMemory,
    chain: &mut Chain,
    hint: &mut RegionHint,
) -> Result<(), RingError> {
    for index in 0..table.count() {
        let (address, tail) = table.read(index, memory, hint)?;
        let tail = Tail::from_word(tail);
        if tail.flags & descriptor::INDIRECT != 0 {
            return Err(RingError::NestedIndirect);
        }
        chain.push(
            Descriptor { address, len_bytes: tail.len_bytes },
            tail.flags & descriptor::WRITE != 0,
        )?;
    }
    Ok(())
}
