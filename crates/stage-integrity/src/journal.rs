//! The journal's slots and eras, and the right to make a checkpoint.
//!
//! The slots are in two halves. Writes of an *era* use those of one half. A checkpoint begins the
//! next era, waits until the writes of the last one have ended, and has their tags on the store
//! before that half is used again. So at most one half is in use when a checkpoint begins.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// An era, by its lowest bit.
pub(crate) type Parity = usize;

/// See the module. Channels of all sidecores share it and take no lock.
pub(crate) struct Journal {
    /// The era, and in the lower half the next slot of it.
    cursor: AtomicU64,
    slots: u32,
    /// Parts of writes that have not ended, by the parity of their era.
    in_flight: [AtomicUsize; 2],
    is_taken: AtomicBool,
    /// Checkpoints that have begun.
    begun: AtomicU64,
    /// The number of the last checkpoint that has ended well.
    ended: AtomicU64,
    /// A checkpoint has failed: nothing is written any more.
    has_failed: AtomicBool,
    /// Only an intent knows what a block may have.
    has_unsettled: AtomicBool,
}

fn parity_of(cursor: u64) -> Parity {
    usize::from(cursor >> 32 & 1 != 0)
}

impl Journal {
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            cursor: AtomicU64::new(0),
            slots,
            in_flight: [AtomicUsize::new(0), AtomicUsize::new(0)],
            is_taken: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            has_unsettled: AtomicBool::new(false),
        }
    }

    /// Takes a slot for a part of a write, which [`leave`](Self::leave) ends. Returns the era, and
    /// the slot's number on the store. `None` if the half is full.
    pub(crate) fn enter(&self) -> Option<(Parity, u64)> {
        loop {
            let seen = self.cursor.load(Ordering::Acquire);
            if seen & u64::from(u32::MAX) >= u64::from(self.slots) {
                return None;
            }
            let parity = parity_of(seen);
            // Counted before the slot is taken, so that a checkpoint that sees the slot taken waits
            // for the part.
            self.join(parity);
            let changed = self.cursor.compare_exchange(
                seen,
                seen.saturating_add(1),
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            if changed.is_ok() {
                let half = (parity as u64).saturating_mul(self.slots.into());
                return Some((parity, half.saturating_add(seen & u64::from(u32::MAX))));
            }
            self.leave(parity);
        }
    }

    /// Counts another part of a slot, one of whose parts has not ended.
    pub(crate) fn join(&self, parity: Parity) {
        if let Some(count) = self.in_flight.get(parity) {
            count.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Ends a part. Its tags are marked.
    pub(crate) fn leave(&self, parity: Parity) {
        if let Some(count) = self.in_flight.get(parity) {
            count.fetch_sub(1, Ordering::AcqRel);
        }
    }

    pub(crate) fn is_drained(&self, parity: Parity) -> bool {
        self.in_flight.get(parity).is_none_or(|count| count.load(Ordering::Acquire) == 0)
    }

    /// Takes the right to make a checkpoint, and its number.
    pub(crate) fn begin(&self) -> Option<u64> {
        if self.is_taken.swap(true, Ordering::AcqRel) {
            return None;
        }
        Some(self.begun.fetch_add(1, Ordering::AcqRel).saturating_add(1))
    }

    /// Begins an era. Returns the parity of the last one. Only the
    /// checkpoint may call it.
    pub(crate) fn turn(&self) -> Parity {
        let turned = self.cursor.fetch_update(Ordering::AcqRel, Ordering::Acquire, |seen| {
            Some((seen >> 32).wrapping_add(1) << 32)
        });
        parity_of(turned.unwrap_or_else(|seen| seen))
    }

    /// Ends a checkpoint.
    pub(crate) fn end(&self, number: u64, has_succeeded: bool) {
        if has_succeeded {
            self.ended.store(number, Ordering::Release);
        } else {
            self.fail();
        }
        self.is_taken.store(false, Ordering::Release);
    }

    /// Has all later writes and flushes fail.
    pub(crate) fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
    }

    /// Begins anew: no part is in flight, and no intent in a slot counts.
    pub(crate) fn restart(&self) {
        self.cursor.store(0, Ordering::Relaxed);
        self.in_flight.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        self.is_taken.store(false, Ordering::Relaxed);
        self.has_unsettled.store(false, Ordering::Relaxed);
        self.has_failed.store(false, Ordering::Release);
    }

    /// Notes that the effect of a write is not known: its intent decides when the store is opened
    /// again, if its slot is not used before.
    #[cold]
    pub(crate) fn leave_unsettled(&self) {
        self.has_unsettled.store(true, Ordering::Release);
    }

    /// Whether the store should be opened again.
    pub(crate) fn is_doubtful(&self) -> bool {
        self.has_failed() || self.has_unsettled.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// The checkpoints that have begun. One with a greater number has all writes that have ended.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    /// The number of the last checkpoint that has ended well.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eras_use_the_halves_in_turn() {
        let journal = Journal::new(2);
        assert_eq!(journal.enter(), Some((0, 0)));
        assert_eq!(journal.enter(), Some((0, 1)));
        assert_eq!(journal.enter(), None);
        assert_eq!(journal.begin(), Some(1));
        assert_eq!(journal.begin(), None, "one at a time");
        assert_eq!(journal.turn(), 0);
        assert_eq!(journal.enter(), Some((1, 2)));
        assert!(!journal.is_drained(0));
        journal.leave(0);
        journal.leave(0);
        assert!(journal.is_drained(0) && !journal.is_drained(1));
        journal.end(1, true);
        assert_eq!((journal.ended(), journal.begin(), journal.turn()), (1, Some(2), 1));
        assert_eq!(journal.enter(), Some((0, 0)));
        journal.end(2, false);
        assert!(journal.has_failed());
        assert_eq!(journal.ended(), 1);
        journal.restart();
        journal.leave_unsettled();
        assert!(journal.is_doubtful() && !journal.has_failed());
        journal.restart();
        assert!(!journal.is_doubtful() && journal.is_drained(0));
        assert_eq!((journal.enter(), journal.begin()), (Some((0, 0)), Some(3)));
    }
}
