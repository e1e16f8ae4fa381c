//! The device's side of a split virtqueue (virtio 1.2, 2.7).

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use sidecore_memory::{DirtyLog, GuestAddress, GuestMemory, RegionHint, copy};
use sidecore_spec_virtio::split::{self, NO_INTERRUPT, NO_NOTIFY, Tail};
use sidecore_spec_virtio::{MAX_QUEUE_SIZE, descriptor};

use crate::cell::{Words, descriptor_words};
use crate::indirect::IndirectTable;
use crate::log::AreaLog;
use crate::{Chain, Descriptor, RingError, RingLayout, RingState, Token};

/// How many requests ahead of the one being taken its header is fetched.
const PREFETCH_DISTANCE: u16 = 6;

/// While polling with EVENT_IDX, avail_event is left behind the driver and
/// moved up this often, so that the 16-bit index never comes round to it.
const EVENT_REFRESH: u16 = 1 << 14;
/// How far behind it is left at most. The driver looks at it after it has published entries, and
/// the device may have taken them by then: it has to be behind all of them.
const EVENT_LAG_MAX: u16 = 1 << 13;

#[derive(Debug)]
pub(crate) struct SplitDevice {
    /// Two words a descriptor: address; length, flags and next.
    descriptors: Words<AtomicU64>,
    /// flags, idx, ring, used_event.
    avail: Words<AtomicU16>,
    /// The same bytes twice: flags, idx and avail_event as 16-bit words,
    used: Words<AtomicU16>,
    /// and the elements (id, length) as 32-bit words, from the second one on.
    used_elements: Words<AtomicU32>,
    size: u16,
    event_idx: bool,
    indirect: bool,
    /// Next entry of the available ring to take.
    next_avail: u16,
    /// The driver's index as last seen.
    seen_avail: u16,
    /// Next entry of the used ring to write.
    next_used: u16,
    /// The value of `next_used` that the driver can see.
    published_used: u16,
    /// `published_used` when a call was last considered.
    called_used: u16,
    in_flight: u16,
    /// Where avail_event was last put while polling.
    event_at: u16,
    /// Where writes to the used area are logged, while the guest migrates.
    log: Option<AreaLog>,
}

impl SplitDevice {
    pub(crate) fn new(
        memory: &GuestMemory,
        layout: &RingLayout,
        state: RingState,
    ) -> Result<Self, RingError> {
        let size = layout.size;
        if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
            return Err(RingError::BadSize { size });
        }
        // 2.7: the event words follow the rings whether they were negotiated or not.
        let (avail_bytes, used_bytes) = (split::avail_bytes(size), split::used_bytes(size));
        let elements_end = split::used_entry_offset(size);
        let used = Words::<AtomicU16>::in_bytes(
            memory,
            layout.device_area,
            used_bytes,
            split::USED_ALIGN_BYTES,
        )?;
        let next_used = used.at(split::INDEX_OFFSET).map_or(0, |idx| idx.load(Ordering::Acquire));
        Ok(Self {
            descriptors: descriptor_words(memory, layout)?,
            avail: Words::in_bytes(
                memory,
                layout.driver_area,
                avail_bytes,
                split::AVAIL_ALIGN_BYTES,
            )?,
            used,
            used_elements: Words::in_bytes(
                memory,
                layout.device_area,
                elements_end,
                split::USED_ALIGN_BYTES,
            )?,
            size,
            event_idx: layout.event_idx,
            indirect: layout.indirect,
            next_avail: state.next_avail,
            seen_avail: state.next_avail,
            next_used,
            published_used: next_used,
            called_used: next_used,
            in_flight: 0,
            event_at: state.next_avail,
            log: None,
        })
    }

    pub(crate) fn set_log(&mut self, log: Option<&DirtyLog>) {
        self.log = log.and_then(|log| AreaLog::of(log, &self.used));
    }

    /// Marks a part of the used area, which was written.
    #[inline]
    fn mark(&self, offset_bytes: usize, len_bytes: usize) {
        if let Some(log) = &self.log {
            log.mark(offset_bytes, len_bytes);
        }
    }

    pub(crate) fn state(&self) -> RingState {
        RingState { next_avail: self.next_avail, next_used: self.next_used }
    }

    pub(crate) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Offset of the entry for `index` in the available ring.
    #[inline(always)]
    fn avail_entry(&self, index: u16) -> usize {
        split::avail_entry_offset(index & self.size.wrapping_sub(1))
    }

    /// Whether there is something to take, looking at the ring if need be.
    #[inline]
    fn has_available(
        &mut self,
        memory: &GuestMemory,
        hint: &mut RegionHint,
    ) -> Result<bool, RingError> {
        if self.next_avail != self.seen_avail {
            return Ok(true);
        }
        let Some(idx) = self.avail.at(split::INDEX_OFFSET) else {
            return Ok(false);
        };
        // Acquire: the entries that the index announces are read after it.
        let idx = u16::from_le(idx.load(Ordering::Acquire));
        // The entry is mostly on another line than the index: have both on
        // their way at once instead of one after the other.
        copy::prefetch_for_read(self.avail.address_at(self.avail_entry(self.next_avail)));
        if idx == self.next_avail {
            return Ok(false);
        }
        let offered = idx.wrapping_sub(self.next_avail);
        if offered > self.size.saturating_sub(self.in_flight) {
            return Err(RingError::IndexJump {
                from: self.next_avail,
                to: idx,
                in_flight: self.in_flight,
                size: self.size,
            });
        }
        self.seen_avail = idx;
        if offered > 1 {
            // `pop` fetches further headers as it comes closer to them.
            for ahead in 0..PREFETCH_DISTANCE.min(offered) {
                self.prefetch_header(ahead, memory, hint);
            }
        }
        Ok(true)
    }

    #[inline]
    pub(crate) fn pop(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
        hint: &mut RegionHint,
    ) -> Result<Option<Token>, RingError> {
        if !self.has_available(memory, hint)? {
            return Ok(None);
        }
        self.prefetch_header(PREFETCH_DISTANCE, memory, hint);
        let head = self.head(self.next_avail);
        self.walk(head, memory, chain, hint)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        self.in_flight = self.in_flight.wrapping_add(1);
        Ok(Some(Token { id: head, entries: 1 }))
    }

    #[inline]
    pub(crate) fn pop_each(
        &mut self,
        memory: &GuestMemory,
        hint: &mut RegionHint,
        is_writable: bool,
        limit: usize,
        mut take: impl FnMut(Token, Descriptor) -> bool,
    ) -> Result<usize, RingError> {
        if limit == 0 || !self.has_available(memory, hint)? {
            return Ok(0);
        }
        let available = usize::from(self.seen_avail.wrapping_sub(self.next_avail));
        let limit = limit.min(available);
        let mut taken = 0_usize;
        while taken < limit {
            if let Some(ahead) = available.checked_sub(taken)
                && ahead > usize::from(PREFETCH_DISTANCE)
            {
                let head = self.head(self.next_avail.wrapping_add(PREFETCH_DISTANCE));
                let word = usize::from(head).wrapping_mul(2);
                copy::prefetch_for_read(self.descriptors.address_of(word));
            }
            let head = self.head(self.next_avail);
            let word = usize::from(head).wrapping_mul(2);
            let words = self.descriptors.words().get(word..word.wrapping_add(2));
            let Some([address, tail]) = words else { break };
            let address = GuestAddress(u64::from_le(address.load(Ordering::Relaxed)));
            let tail = Tail::from_word(u64::from_le(tail.load(Ordering::Relaxed)));
            let shape = descriptor::NEXT | descriptor::INDIRECT | descriptor::WRITE;
            let wanted = if is_writable { descriptor::WRITE } else { 0 };
            if tail.flags & shape != wanted || tail.len_bytes == 0 {
                break;
            }
            let descriptor = Descriptor { address, len_bytes: tail.len_bytes };
            if !take(Token { id: head, entries: 1 }, descriptor) {
                break;
            }
            self.next_avail = self.next_avail.wrapping_add(1);
            self.in_flight = self.in_flight.wrapping_add(1);
            taken = taken.wrapping_add(1);
        }
        Ok(taken)
    }

    #[inline(always)]
    fn head(&self, index: u16) -> u16 {
        self.avail
            .at(self.avail_entry(index))
            .map_or(0, |entry| u16::from_le(entry.load(Ordering::Relaxed)))
    }

    /// Fetches the header of the request `ahead` places from here, if there is one. What is read
    /// here is a hint and nothing else: it is read again, and checked, when that request is taken.
    #[inline]
    fn prefetch_header(&self, ahead: u16, memory: &GuestMemory, hint: &mut RegionHint) {
        if self.seen_avail.wrapping_sub(self.next_avail) <= ahead {
            return;
        }
        let word = usize::from(self.head(self.next_avail.wrapping_add(ahead))).wrapping_mul(2);
        if let Some(address) = self.descriptors.get(word) {
            let address = GuestAddress(u64::from_le(address.load(Ordering::Relaxed)));
            // The rest of the chain is mostly next to its head, and its third descriptor on another
            // line.
            copy::prefetch_for_read(self.descriptors.address_of(word.wrapping_add(4)));
            // For writing, because the status byte is mostly on the header's
            // line (Linux' struct virtblk_req).
            memory.prefetch_for_write(address, hint);
        }
    }

    /// Follows the chain from `head` (2.7.5).
    #[inline]
    fn walk(
        &self,
        head: u16,
        memory: &GuestMemory,
        chain: &mut Chain,
        hint: &mut RegionHint,
    ) -> Result<(), RingError> {
        chain.clear();
        let mut index = head;
        loop {
            let word = usize::from(index).wrapping_mul(2);
            let (Some(address), Some(tail)) =
                (self.descriptors.get(word), self.descriptors.get(word.wrapping_add(1)))
            else {
                return Err(RingError::DescriptorOutOfRange {
                    index: u32::from(index),
                    size: u32::from(self.size),
                });
            };
            let address = GuestAddress(u64::from_le(address.load(Ordering::Relaxed)));
            let tail = Tail::from_word(u64::from_le(tail.load(Ordering::Relaxed)));
            if tail.flags & descriptor::INDIRECT != 0 {
                if !self.indirect {
                    return Err(RingError::IndirectNotNegotiated);
                }
                if tail.flags & descriptor::NEXT != 0 {
                    return Err(RingError::IndirectWithNext);
                }
                // 2.7.5.3.2: the WRITE flag of this descriptor is ignored.
                return walk_indirect(
                    IndirectTable::new(address, tail.len_bytes)?,
                    memory,
                    chain,
                    hint,
                );
            }
            let descriptor = Descriptor { address, len_bytes: tail.len_bytes };
            chain.push(descriptor, tail.flags & descriptor::WRITE != 0)?;
            if tail.flags & descriptor::NEXT == 0 {
                return Ok(());
            }
            index = tail.next;
        }
    }

    #[inline]
    pub(crate) fn complete(&mut self, token: &Token, written_bytes: u32) {
        let at = split::used_entry_offset(self.next_used & self.size.wrapping_sub(1));
        let len_at = at.wrapping_add(split::USED_LEN_OFFSET);
        if let (Some(id), Some(len)) = (self.used_elements.at(at), self.used_elements.at(len_at)) {
            id.store(u32::from(token.id).to_le(), Ordering::Relaxed);
            len.store(written_bytes.to_le(), Ordering::Relaxed);
            self.mark(at, split::USED_ENTRY_BYTES);
        }
        self.next_used = self.next_used.wrapping_add(1);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    pub(crate) fn abandon(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    #[inline]
    pub(crate) fn put_back(&mut self) {
        self.next_avail = self.next_avail.wrapping_sub(1);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    #[inline]
    pub(crate) fn publish(&mut self) {
        if let Some(idx) = self.used.at(split::INDEX_OFFSET) {
            // Release: status, data and elements are visible before it.
            idx.store(self.next_used.to_le(), Ordering::Release);
            self.mark(split::INDEX_OFFSET, size_of::<u16>());
        }
        self.published_used = self.next_used;
    }

    pub(crate) fn take_call(&mut self) -> bool {
        // The index must be visible before the driver's wish is read, or both
        // sides could miss each other (2.7.7.2).
        fence(Ordering::SeqCst);
        let old = std::mem::replace(&mut self.called_used, self.published_used);
        if self.event_idx {
            let event = self
                .avail
                .at(split::avail_entry_offset(self.size))
                .map_or(0, |event| u16::from_le(event.load(Ordering::Relaxed)));
            need_event(event, self.published_used, old)
        } else {
            let flags = self
                .avail
                .at(split::FLAGS_OFFSET)
                .map_or(0, |flags| u16::from_le(flags.load(Ordering::Relaxed)));
            old != self.published_used && flags & NO_INTERRUPT == 0
        }
    }

    pub(crate) fn arm_kicks(
        &mut self,
        memory: &GuestMemory,
        hint: &mut RegionHint,
    ) -> Result<bool, RingError> {
        if self.event_idx {
            self.set_avail_event(self.next_avail);
        } else if let Some(flags) = self.used.at(split::FLAGS_OFFSET) {
            flags.store(0, Ordering::Relaxed);
            self.mark(split::FLAGS_OFFSET, size_of::<u16>());
        }
        // Arm, then look again: a request offered before the driver could see
        // the wish would otherwise sleep with us (2.7.10.2).
        fence(Ordering::SeqCst);
        self.has_available(memory, hint)
    }

    pub(crate) fn suppress_kicks(&mut self) {
        if self.event_idx {
            self.event_at = self.next_avail;
            let lag = self.size.min(EVENT_LAG_MAX);
            self.set_avail_event(self.next_avail.wrapping_sub(lag).wrapping_sub(1));
        } else if let Some(flags) = self.used.at(split::FLAGS_OFFSET) {
            flags.store(NO_NOTIFY.to_le(), Ordering::Relaxed);
            self.mark(split::FLAGS_OFFSET, size_of::<u16>());
        }
    }

    /// Keeps the kicks suppressed while the 16-bit index goes round.
    #[inline]
    pub(crate) fn keep_suppressed(&mut self) {
        if self.event_idx && self.next_avail.wrapping_sub(self.event_at) >= EVENT_REFRESH {
            self.suppress_kicks();
        }
    }

    fn set_avail_event(&self, index: u16) {
        let at = split::used_entry_offset(self.size);
        if let Some(event) = self.used.at(at) {
            event.store(index.to_le(), Ordering::Relaxed);
            self.mark(at, size_of::<u16>());
        }
    }
}

/// Follows an indirect table (2.7.5.3).
fn walk_indirect(
    table: IndirectTable,
    memory: &GuestMemory,
    chain: &mut Chain,
    hint: &mut RegionHint,
) -> Result<(), RingError> {
    let mut index = 0_u32;
    loop {
        let (address, tail) = table.read(index, memory, hint)?;
        let tail = Tail::from_word(tail);
        if tail.flags & descriptor::INDIRECT != 0 {
            return Err(RingError::NestedIndirect);
        }
        // The chain's own limit ends a loop in the table.
        chain.push(
            Descriptor { address, len_bytes: tail.len_bytes },
            tail.flags & descriptor::WRITE != 0,
        )?;
        if tail.flags & descriptor::NEXT == 0 {
            return Ok(());
        }
        index = u32::from(tail.next);
    }
}

/// Whether going from `old` to `new` passes `event` (2.7.7.2, 2.7.10.1).
#[inline]
pub(crate) const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
