//! The tags of all blocks, in memory.
//!
//! Channels of all sidecores share the table and take no lock. A block that is written, or read
//! without writes beside it, is *held* by one part of a request.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::tag::Tag;

/// A part of a request has the block.
const HELD: u64 = 1 << 63;
/// The tag is being changed: its two words may not belong together.
const CHANGING: u64 = 1 << 62;

/// See the module.
pub(crate) struct Tags {
    /// Two words for each block: checksum, and generation with bits of memory.
    words: Box<[AtomicU64]>,
    /// A bit for each unit of tags that differs from the store's.
    dirty: Box<[AtomicU64]>,
    /// A bit for each unit whose tags were taken to be written, and may not be durable. Only a
    /// checkpoint and the opening of the store change it.
    unsure: Box<[AtomicU64]>,
    tags_per_unit: u64,
}

pub(crate) fn zeros(count: u64) -> Option<Box<[AtomicU64]>> {
    let count = usize::try_from(count).ok()?;
    let mut words = Vec::new();
    words.try_reserve_exact(count).ok()?;
    words.resize_with(count, || AtomicU64::new(0));
    Some(words.into_boxed_slice())
}

impl Tags {
    /// A table for so many blocks. `None` without the memory.
    pub(crate) fn new(blocks: u64, tags_per_unit: u64) -> Option<Self> {
        let units = blocks.div_ceil(tags_per_unit.max(1));
        Some(Self {
            words: zeros(blocks.checked_mul(2)?)?,
            dirty: zeros(units.div_ceil(64))?,
            unsure: zeros(units.div_ceil(64))?,
            tags_per_unit: tags_per_unit.max(1),
        })
    }

    #[inline]
    fn words(&self, block: u64) -> Option<(&AtomicU64, &AtomicU64)> {
        let at = usize::try_from(block).ok()?.checked_mul(2)?;
        match self.words.get(at..at.checked_add(2)?)? {
            [sum, word] => Some((sum, word)),
            _ => None,
        }
    }

    /// The checksum of a block as of now: that of the last write that has ended.
    #[inline]
    pub(crate) fn sum(&self, block: u64) -> Option<u64> {
        let (sum, _) = self.words(block)?;
        Some(sum.load(Ordering::Acquire))
    }

    /// The tag of a block: of the last write that has ended.
    pub(crate) fn get(&self, block: u64) -> Option<Tag> {
        let (sum, word) = self.words(block)?;
        loop {
            let before = word.load(Ordering::Acquire);
            let sum = sum.load(Ordering::Relaxed);
            fence(Ordering::Acquire);
            if before & CHANGING == 0 && word.load(Ordering::Relaxed) == before {
                return Some(Tag::from_words(sum, before));
            }
            std::hint::spin_loop();
        }
    }

    /// Holds a block. `None` if another part has it.
    #[inline]
    pub(crate) fn hold(&self, block: u64) -> Option<Tag> {
        let (sum, word) = self.words(block)?;
        let before = word.fetch_or(HELD, Ordering::AcqRel);
        (before & HELD == 0).then(|| Tag::from_words(sum.load(Ordering::Relaxed), before))
    }

    /// Ends a hold.
    #[inline]
    pub(crate) fn release(&self, block: u64) {
        if let Some((_, word)) = self.words(block) {
            word.fetch_and(!HELD, Ordering::AcqRel);
        }
    }

    /// Sets the tag of a block while no channel uses the store. The block is not held then.
    pub(crate) fn put(&self, block: u64, tag: Tag) {
        let Some((sum_place, word_place)) = self.words(block) else { return };
        let (sum, word) = tag.words();
        sum_place.store(sum, Ordering::Release);
        word_place.store(word, Ordering::Release);
    }

    /// Sets the tag of a block that the caller holds. The hold stays.
    #[inline]
    pub(crate) fn set(&self, block: u64, tag: Tag) {
        let Some((sum_place, word_place)) = self.words(block) else { return };
        let (sum, word) = tag.words();
        let held = word_place.load(Ordering::Relaxed) & HELD;
        word_place.fetch_or(CHANGING, Ordering::Relaxed);
        fence(Ordering::Release);
        sum_place.store(sum, Ordering::Release);
        word_place.store(word | held, Ordering::Release);
    }

    /// Notes that the tag of a block differs from the store's.
    #[inline]
    pub(crate) fn mark(&self, block: u64) {
        let unit = block.checked_div(self.tags_per_unit).unwrap_or(0);
        if let Some((word, bit)) = self.dirty_bit(unit) {
            // Always a change of the word: it orders the tag before the look of a checkpoint.
            word.fetch_or(bit, Ordering::AcqRel);
        }
    }

    /// Removes all marks but those of units that may not be durable: after a failed flush the
    /// kernel shows such a unit as it was written, may drop it, and has its next flush succeed.
    pub(crate) fn mark_unsure(&self) {
        for (dirty, unsure) in self.dirty.iter().zip(&self.unsure) {
            dirty.store(unsure.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// The units that were taken are durable.
    pub(crate) fn are_durable(&self) {
        self.unsure.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    fn dirty_bit(&self, unit: u64) -> Option<(&AtomicU64, u64)> {
        let word = self.dirty.get(usize::try_from(unit / 64).ok()?)?;
        Some((word, 1 << (unit % 64)))
    }

    /// Takes the mark of the first dirty unit from `from` on.
    pub(crate) fn take_dirty(&self, from: u64) -> Option<u64> {
        let mut index = usize::try_from(from / 64).ok()?;
        let mut mask = u64::MAX << (from % 64);
        while let Some(word) = self.dirty.get(index) {
            let marks = word.load(Ordering::Acquire) & mask;
            if marks != 0 {
                let bit = marks & marks.wrapping_neg();
                word.fetch_and(!bit, Ordering::AcqRel);
                if let Some(word) = self.unsure.get(index) {
                    word.fetch_or(bit, Ordering::Relaxed);
                }
                let first = (index as u64).saturating_mul(64);
                return Some(first.saturating_add(bit.trailing_zeros().into()));
            }
            (index, mask) = (index.saturating_add(1), u64::MAX);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tag::Sums;

    #[test]
    fn a_block_is_held_once_and_shows_its_tag_meanwhile() {
        let tags = Tags::new(100, 31).unwrap();
        let tag = Tag::fresh(&Sums::new(&[1; 16], 512), 7).next(77);
        tags.put(7, tag);
        assert_eq!(tags.hold(7), Some(tag));
        assert_eq!((tags.hold(7), tags.get(7), tags.sum(7)), (None, Some(tag), Some(77)));
        tags.set(7, tag.next(78));
        assert_eq!((tags.hold(7), tags.sum(7)), (None, Some(78)), "the hold stays");
        tags.release(7);
        assert_eq!(tags.hold(7), Some(tag.next(78)));
        tags.put(7, tag);
        assert_eq!(tags.hold(7), Some(tag), "a new tag is not held");
        assert_eq!((tags.hold(100), tags.get(100)), (None, None));
    }

    #[test]
    fn marks_are_taken_once_each_in_order() {
        let tags = Tags::new(31 * 200, 31).unwrap();
        for block in [31 * 70, 31 * 64 - 1, 0, 31 * 199, 5] {
            tags.mark(block);
        }
        let mut taken = Vec::new();
        let mut from = 0;
        while let Some(unit) = tags.take_dirty(from) {
            taken.push(unit);
            from = unit + 1;
        }
        assert_eq!(taken, [0, 63, 70, 199]);
        tags.are_durable();
        tags.mark(31 * 64);
        assert_eq!(tags.take_dirty(0), Some(64));
        tags.mark(5);
        tags.mark_unsure();
        assert_eq!(tags.take_dirty(0), Some(64), "it may not be durable");
        assert_eq!(tags.take_dirty(0), None);
        tags.are_durable();
        tags.mark_unsure();
        assert_eq!(tags.take_dirty(0), None);
    }
}
