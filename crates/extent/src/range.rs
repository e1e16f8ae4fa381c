//! Ranges of virtual blocks, and what maps them to physical ones.

use sidecore_units::{Plba, Vlba};

use crate::arithmetic;

/// Physical blocks have numbers below this: the uppermost bit of an extent pointer's last word says
/// whether the extent is shared, and a word of ones is no extent.
pub const MAX_PHYSICAL_BLOCKS: u64 = (1 << 63) - 1;

/// Consecutive virtual blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockRange {
    /// The first one.
    pub first: Vlba,
    /// How many there are.
    pub count: u64,
}

impl BlockRange {
    /// `count` blocks from `first` on.
    #[must_use]
    pub const fn new(first: Vlba, count: u64) -> Self {
        Self { first, count }
    }

    /// The blocks from `first` to before `end`; none if `end` is not behind.
    #[must_use]
    pub const fn between(first: Vlba, end: Vlba) -> Self {
        Self { first, count: end.0.saturating_sub(first.0) }
    }

    /// The block after the last one, `None` if there is no such number.
    #[must_use]
    #[inline]
    pub fn end(self) -> Option<Vlba> {
        arithmetic::end(self.first.0, self.count).map(Vlba)
    }

    /// Whether there is no block in it.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether `block` is one of these.
    #[must_use]
    #[inline]
    pub fn contains(self, block: Vlba) -> bool {
        arithmetic::offset_of(self.first.0, self.count, block.0, 1).is_some()
    }

    /// Whether all of `other` is in here; an empty range is, if it begins here.
    #[must_use]
    #[inline]
    pub fn contains_range(self, other: Self) -> bool {
        arithmetic::offset_of(self.first.0, self.count, other.first.0, other.count).is_some()
    }

    /// The blocks that are in both, `None` if there are none.
    #[must_use]
    #[inline]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let (first, count) = arithmetic::intersect(self.first.0, self.count, other.first.0, other.count)?;
        Some(Self::new(Vlba(first), count))
    }

    /// The first `count` blocks (or all, if there are fewer) and the others.
    #[must_use]
    pub fn split(self, count: u64) -> (Self, Self) {
        let head = count.min(self.count);
        // The tail of a range that runs past the last number is clipped there.
        let tail = Vlba(self.first.0.saturating_add(head));
        (Self::new(self.first, head), Self::new(tail, self.count.saturating_sub(head)))
    }
}

/// Consecutive virtual blocks that lie on consecutive physical ones: the *extent pointer* of thesis
/// figure 5.1b.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The first virtual block.
    pub first: Vlba,
    /// How many blocks.
    pub count: u64,
    /// Where the first one lies.
    pub physical: Plba,
    /// Whether somebody else refers to these blocks as well, a snapshot for instance: they are read
    /// there, and written elsewhere.
    pub shared: bool,
}

impl Extent {
    /// The virtual blocks.
    #[must_use]
    pub const fn range(self) -> BlockRange {
        BlockRange::new(self.first, self.count)
    }

    /// The part for the blocks that are also in `range`, `None` if there are none or the extent
    /// runs past the last block number.
    #[must_use]
    pub fn clip(self, range: BlockRange) -> Option<Self> {
        let part = self.range().intersect(range)?;
        let physical = arithmetic::displace(self.first.0, self.count, self.physical.0, part.first.0, part.count)?;
        Some(Self { first: part.first, count: part.count, physical: Plba(physical), shared: self.shared })
    }

    /// Whether `next` begins where this one ends, on both sides, so that the two could be one.
    #[must_use]
    pub fn continues_in(self, next: Self) -> bool {
        self.shared == next.shared
            && self.range().end() == Some(next.first)
            && arithmetic::end(self.physical.0, self.count) == Some(next.physical.0)
    }
}

/// What becomes of a virtual block (thesis 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mapping {
    /// It lies on the store.
    Mapped {
        /// Where the piece's first block lies.
        physical: Plba,
        /// Whether it is to be written elsewhere, see [`Extent::shared`].
        shared: bool,
    },
    /// It was never written: reads as zeros.
    Hole,
    /// The tree does not know; the hypervisor does.
    Pruned,
}

/// A part of a request that is translated alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The virtual blocks.
    pub range: BlockRange,
    /// What becomes of them.
    pub mapping: Mapping,
}
