//! A ring of slot numbers in shared memory, with one producer and one consumer.
//!
//! An entry is one word, which carries the number of the ring's round besides the slot. So the
//! consumer finds out by the entry itself whether it is there, and no index has to be read: an idle
//! ring costs a look at one cache line that the consumer has, and an entry is one line on its way.

use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_memory::Words;

const SLOT_SHIFT: u32 = 32;
const ROUND_SHIFT: u32 = 48;

/// The contents of an entry, without the round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub slot: u16,
    pub len_bytes: u32,
}

impl Entry {
    const fn to_bits(self, round: u64) -> u64 {
        (round << ROUND_SHIFT) | ((self.slot as u64) << SLOT_SHIFT) | self.len_bytes as u64
    }

    const fn from_bits(bits: u64) -> Self {
        Self { slot: (bits >> SLOT_SHIFT) as u16, len_bytes: bits as u32 }
    }
}

/// One side's place in a ring.
#[derive(Debug)]
pub(super) struct Cursor {
    /// As many as a power of two.
    words: Words<AtomicU64>,
    mask: u64,
    shift: u32,
    next: u64,
    /// Entries that were staged and not published.
    staged: u64,
    /// The first of them.
    first: Entry,
}

impl Cursor {
    /// The beginning of a ring of zeros. `words` are as many as a power of two.
    pub fn new(words: Words<AtomicU64>) -> Self {
        let count = words.words().len() as u64;
        Self {
            words,
            mask: count.saturating_sub(1),
            shift: count.trailing_zeros(),
            next: 0,
            staged: 0,
            first: Entry { slot: 0, len_bytes: 0 },
        }
    }

    fn word(&self, position: u64) -> Option<&AtomicU64> {
        self.words.get(usize::try_from(position & self.mask).ok()?)
    }

    /// The number of the round at a position. It is never zero in the first round, and differs from
    /// that of the rounds before and after.
    const fn round(&self, position: u64) -> u64 {
        position.wrapping_shr(self.shift).wrapping_add(1) & 0xffff
    }

    /// The next entry, read once.
    #[inline]
    fn peek(&self) -> Option<Entry> {
        // Acquire: the frame, and the entries behind this one that were published with it, are read
        // after it.
        let bits = self.word(self.next)?.load(Ordering::Acquire);
        (bits >> ROUND_SHIFT == self.round(self.next)).then_some(Entry::from_bits(bits))
    }

    /// Whether there are so many entries to take, at least one.
    #[inline]
    pub fn has(&self, count: u64) -> bool {
        // They are published in their order.
        let last = self.next.wrapping_add(count.saturating_sub(1));
        let bits = self.word(last).map_or(0, |word| word.load(Ordering::Relaxed));
        bits >> ROUND_SHIFT == self.round(last)
    }

    /// Whether there is an entry to take.
    #[inline]
    pub fn has_next(&self) -> bool {
        self.peek().is_some()
    }

    /// Takes the next entry.
    #[inline]
    pub fn take(&mut self) -> Option<Entry> {
        let entry = self.peek()?;
        self.next = self.next.wrapping_add(1);
        Some(entry)
    }

    /// Adds an entry, for which the ring has room: a slot is in one place only, and the ring has as
    /// many entries as there are slots. The consumer sees it after [`publish`](Self::publish).
    ///
    /// The first one is stored last, and by that all of them: a consumer that watches it does not
    /// take the cache line away between one entry and the next.
    #[inline]
    pub fn stage(&mut self, entry: Entry) {
        if self.staged == 0 {
            self.first = entry;
        } else {
            self.store(self.next.wrapping_add(self.staged), entry, Ordering::Relaxed);
        }
        self.staged = self.staged.wrapping_add(1);
    }

    /// Publishes the staged entries.
    #[inline]
    pub fn publish(&mut self) {
        if self.staged > 0 {
            // Release: everything written before is seen by a consumer that sees this entry.
            self.store(self.next, self.first, Ordering::Release);
            self.next = self.next.wrapping_add(self.staged);
            self.staged = 0;
        }
    }

    #[inline]
    fn store(&self, position: u64, entry: Entry, order: Ordering) {
        if let Some(word) = self.word(position) {
            word.store(entry.to_bits(self.round(position)), order);
        }
    }
}

#[cfg(test)]
mod tests {
    use sidecore_memory::{SharedPages, UserAddress};

    use super::*;

    fn ring(entries: usize) -> (Cursor, Cursor, SharedPages) {
        let pages = SharedPages::new("ring", 4096).unwrap();
        let words = || Words::new(pages.memory(), UserAddress(0), entries, 8).unwrap();
        (Cursor::new(words()), Cursor::new(words()), pages)
    }

    fn entry(number: u32) -> Entry {
        Entry { slot: number as u16, len_bytes: !number }
    }

    fn publish(producer: &mut Cursor, entries: &[Entry]) {
        entries.iter().for_each(|entry| producer.stage(*entry));
        producer.publish();
    }

    #[test]
    fn entries_come_out_in_order_over_more_rounds_than_an_entry_can_count() {
        let (mut producer, mut consumer, _pages) = ring(2);
        for number in 0..200_000 {
            assert!(!consumer.has_next());
            let entries = [entry(number), entry(number + 1)];
            publish(&mut producer, &entries[..1 + (number % 2) as usize]);
            assert_eq!(consumer.take(), Some(entry(number)));
            if number % 2 == 1 {
                assert_eq!(consumer.take(), Some(entry(number + 1)));
            }
            assert_eq!(consumer.take(), None);
        }
    }

    #[test]
    fn an_empty_batch_publishes_nothing_and_a_full_ring_comes_out_whole() {
        let (mut producer, mut consumer, _pages) = ring(8);
        publish(&mut producer, &[]);
        assert_eq!(consumer.take(), None);
        let all: Vec<_> = (0..8).map(entry).collect();
        for _ in 0..3 {
            publish(&mut producer, &all);
            assert!(all.iter().all(|entry| consumer.take() == Some(*entry)));
            assert_eq!(consumer.take(), None);
        }
    }

    #[test]
    fn words_of_a_hostile_producer_are_taken_once_in_a_round() {
        let (_, mut consumer, pages) = ring(4);
        let words = Words::<AtomicU64>::new(pages.memory(), UserAddress(0), 4, 8).unwrap();
        for word in words.words() {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        assert_eq!(consumer.take(), None, "another round");
        for word in words.words() {
            word.store((1 << ROUND_SHIFT) | 0xffff_ffff_ffff, Ordering::Relaxed);
        }
        let taken = std::iter::from_fn(|| consumer.take()).count();
        assert_eq!(taken, 4, "the second round has another number");
    }
}
