//! The entries of nodes (thesis figure 5.1b).

use std::ops::Deref;

use sidecore_units::{Plba, Vlba};

use crate::arithmetic;
use crate::range::{BlockRange, Extent};

/// In place of a first physical block: this part is pruned.
pub(crate) const PRUNED: u64 = u64::MAX;
/// In place of a next node pointer: the subtree is pruned.
pub(crate) const NULL: u64 = 0;
/// The extent's *shared* mark, beside its first physical block.
const SHARED: u64 = 1 << 63;

/// Fills a node after its last entry. A search finds its key behind all blocks.
pub(crate) const UNUSED: Entry = Entry { first: u64::MAX, count: 0, value: NULL };

/// A node pointer or an extent pointer, depending on the kind of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// First logical block: the key.
    pub(crate) first: u64,
    /// The number of blocks. Of a node pointer: from the first mapped or pruned block below it to
    /// the last one, with the holes between.
    pub(crate) count: u64,
    /// Next node pointer, or first physical block and shared mark.
    pub(crate) value: u64,
}

impl Entry {
    /// An extent pointer. All physical blocks of `extent` are below
    /// [`MAX_PHYSICAL_BLOCKS`](crate::MAX_PHYSICAL_BLOCKS), so that no extent looks like
    /// [`PRUNED`].
    pub(crate) fn of(extent: Extent) -> Self {
        let shared = if extent.shared { SHARED } else { 0 };
        Self { first: extent.first.0, count: extent.count, value: extent.physical.0 | shared }
    }

    /// An entry for `first..end`, unless that is empty.
    pub(crate) fn between(first: u64, end: u64, value: u64) -> Option<Self> {
        (first < end).then(|| Self { first, count: end.saturating_sub(first), value })
    }

    /// The block after the last one. Words of a corrupt node may exceed the last number; saturating
    /// is then as good as any answer.
    #[inline]
    pub(crate) fn end(self) -> u64 {
        arithmetic::reach(self.first, self.count)
    }

    /// This extent pointer for translations, if its blocks, virtual and physical, end within 64
    /// bits: those of a corrupt node may not.
    #[inline]
    pub(crate) fn bounded(self) -> Option<Bounded> {
        arithmetic::end(self.first, self.count)?;
        arithmetic::end(self.physical(), self.count)?;
        Some(Bounded(self))
    }

    /// The first physical block of an extent pointer.
    #[inline]
    pub(crate) fn physical(self) -> u64 {
        self.value & !SHARED
    }

    /// The shared mark of an extent pointer.
    #[inline]
    pub(crate) fn shared(self) -> bool {
        self.value & SHARED != 0
    }

    /// The extent of an extent pointer.
    #[inline]
    pub(crate) fn extent(self) -> Extent {
        Extent {
            first: Vlba(self.first),
            count: self.count,
            physical: Plba(self.physical()),
            shared: self.shared(),
        }
    }
}

/// An extent pointer whose blocks, virtual and physical, end within 64 bits. That is checked once,
/// by [`Entry::bounded`], and not again at each hit of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounded(Entry);

impl Bounded {
    /// Contains no block.
    pub(crate) const EMPTY: Self = Self(UNUSED);

    /// The physical place of `range`, if the extent contains all of it.
    #[inline]
    pub(crate) fn locate(self, range: BlockRange) -> Option<Plba> {
        let Entry { first, count, .. } = self.0;
        arithmetic::displace_within(first, count, self.physical(), range.first.0, range.count)
            .map(Plba)
    }
}

impl Deref for Bounded {
    type Target = Entry;

    #[inline]
    fn deref(&self) -> &Entry {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_that_runs_past_the_last_number_is_not_used() {
        let entry = |first, count, physical| Entry { first, count, value: physical };
        for bounded in [entry(5, 10, 0), entry(u64::MAX - 10, 10, 7), UNUSED] {
            assert_eq!(bounded.bounded(), Some(Bounded(bounded)));
        }
        assert_eq!(UNUSED.bounded(), Some(Bounded::EMPTY));
        // The shared mark is no part of the physical block.
        let shared = entry(5, 10, 100 | SHARED).bounded().unwrap();
        assert_eq!(shared.locate(BlockRange::new(Vlba(7), 8)), Some(Plba(102)));
        assert_eq!(shared.locate(BlockRange::new(Vlba(7), 9)), None);
        for corrupt in [entry(u64::MAX - 9, 10, 7), entry(0, u64::MAX, 1), entry(1, u64::MAX, 0)] {
            assert_eq!(corrupt.bounded(), None, "{corrupt:?}");
        }
    }
}
