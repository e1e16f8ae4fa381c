//! The entries of nodes (thesis figure 5.1b).

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

    /// The physical place of `range`, if the blocks of this extent pointer contain all of it.
    #[inline]
    pub(crate) fn locate(self, range: BlockRange) -> Option<Plba> {
        arithmetic::displace(self.first, self.count, self.physical(), range.first.0, range.count)
            .map(Plba)
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
