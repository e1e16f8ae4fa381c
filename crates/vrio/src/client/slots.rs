//! A slot at the client: the attempts of one request.

use sidecore_units::Nanos;

use super::ClientOptions;
use crate::segmentation::low_bits;
use crate::{Rule, Segmentation};

/// A slot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// The number of the request, or of the last one.
    pub(super) sequence: u32,
    pub(super) entry: Option<u16>,
    pub(super) attempt: u16,
    pub(super) cut: Segmentation,
    /// Segments of a read that have arrived.
    pub(super) received: u64,
    /// Segments of a write that are to be sent.
    pub(super) segments: u64,
    /// A frame without data is to be sent.
    pub(super) owes_frame: bool,
    /// The IOhost is to say how far the request is.
    pub(super) asks: bool,
    /// The slot is in the list of those that have something to send.
    pub(super) is_listed: bool,
    /// When the last frame of the attempt was sent.
    pub(super) sent_at: Nanos,
    /// When the next attempt begins.
    pub(super) due: Nanos,
    pub(super) timeout: Nanos,
    /// The last segment of a read has arrived and earlier ones have not: at `due` these are lost,
    /// and the path is not.
    pub(super) has_gap: bool,
    /// The IOhost has the request: it was not lost.
    pub(super) is_acknowledged: bool,
    /// The attempt's round trip was measured.
    pub(super) is_measured: bool,
    /// Frames that the request asks for.
    pub(super) asked_frames: u32,
    /// Attempts before this one.
    pub(super) tries: u32,
}

impl Slot {
    /// Whether something is to be sent.
    pub(super) const fn owes(&self) -> bool {
        self.segments != 0 || self.owes_frame
    }

    /// The attempt was sent. Returns when it times out.
    #[inline]
    pub(super) fn sent(&mut self, now: Nanos) -> Nanos {
        self.sent_at = now;
        self.due = now.after(self.timeout);
        self.due
    }

    /// Begins the next attempt.
    pub(super) fn next_attempt(&mut self, has_payload: bool, options: &ClientOptions) {
        self.attempt = self.attempt.wrapping_add(1);
        self.tries = self.tries.saturating_add(1);
        self.is_measured = false;
        self.asks = true;
        if !std::mem::take(&mut self.has_gap) {
            self.timeout = Nanos(self.timeout.0.saturating_mul(2)).min(options.timing.max_timeout);
        }
        if !has_payload {
            if options.neglected.keeps(Rule::Attempts) {
                self.received = self.cut.whole_blocks(self.received);
            }
            self.owes_frame = true;
        } else if self.cut.count() == 1 && !self.is_acknowledged {
            self.segments = self.cut.all();
        } else {
            // Asks for what is missing, instead of sending everything again.
            self.owes_frame = true;
        }
    }
}

/// The slots that have no request.
#[derive(Debug)]
pub(super) struct FreeSlots {
    /// A bit for each slot that is free.
    words: Vec<u64>,
}

impl FreeSlots {
    /// Room for `slots`, none of which is free.
    pub(super) fn new(slots: usize) -> Self {
        Self { words: vec![0; slots.div_ceil(64)] }
    }

    /// Makes the first `count` slots free, and no others.
    pub(super) fn reset(&mut self, count: u16) {
        let mut left = u32::from(count);
        for word in &mut self.words {
            *word = low_bits(left.min(64));
            left = left.saturating_sub(64);
        }
    }

    /// The lowest free slot, if it is below `limit`.
    pub(super) fn lowest(&self, limit: u16) -> Option<u16> {
        let (index, word) = (0_u16..).zip(&self.words).find(|(_, word)| **word != 0)?;
        let bit = u16::try_from(word.trailing_zeros()).ok()?;
        Some(index.wrapping_mul(64).wrapping_add(bit)).filter(|slot| *slot < limit)
    }

    /// The first slot from `first` on that is not free; perhaps one that does not exist.
    pub(super) fn next_taken(&self, first: u16) -> Option<u16> {
        let mut mask = u64::MAX.wrapping_shl(u32::from(first % 64));
        for (index, word) in (0_u16..).zip(&self.words).skip(usize::from(first / 64)) {
            let taken = !*word & mask;
            if taken != 0 {
                let bit = u16::try_from(taken.trailing_zeros()).ok()?;
                return Some(index.wrapping_mul(64).wrapping_add(bit));
            }
            mask = u64::MAX;
        }
        None
    }

    pub(super) fn take(&mut self, slot: u16) {
        if let Some(word) = self.words.get_mut(usize::from(slot / 64)) {
            *word &= !1_u64.wrapping_shl(u32::from(slot % 64));
        }
    }

    pub(super) fn give(&mut self, slot: u16) {
        if let Some(word) = self.words.get_mut(usize::from(slot / 64)) {
            *word |= 1_u64.wrapping_shl(u32::from(slot % 64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_are_not_free_are_found_in_their_order() {
        let mut free = FreeSlots::new(192);
        free.reset(192);
        assert_eq!((free.next_taken(0), free.next_taken(200)), (None, None));
        for slot in [0, 63, 64, 130, 191] {
            free.take(slot);
        }
        let mut found = Vec::new();
        while let Some(slot) = free.next_taken(found.last().map_or(0, |last| last + 1)) {
            found.push(slot);
        }
        assert_eq!(found, [0, 63, 64, 130, 191]);
    }

    #[test]
    fn the_lowest_free_slot_comes_first() {
        let mut free = FreeSlots::new(130);
        assert_eq!(free.lowest(u16::MAX), None);
        free.reset(100);
        for slot in 0..100 {
            assert_eq!(free.lowest(u16::MAX), Some(slot));
            free.take(slot);
        }
        assert_eq!(free.lowest(u16::MAX), None);
        free.give(99);
        free.give(64);
        assert_eq!((free.lowest(65), free.lowest(64)), (Some(64), None));
        free.reset(0);
        assert_eq!(free.lowest(u16::MAX), None);
    }
}
