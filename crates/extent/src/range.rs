//! Ranges of virtual blocks, and their mappings to physical blocks.

use sidecore_units::{Plba, Vlba};

use crate::arithmetic;

/// The limit of physical block numbers: the uppermost bit of an extent pointer's last word marks a
/// shared extent, and a word of ones is no extent.
pub const MAX_PHYSICAL_BLOCKS: u64 = (1 << 63) - 1;

/// Consecutive virtual blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockRange {
    /// The first block.
    pub first: Vlba,
    /// The number of blocks.
    pub count: u64,
}

impl BlockRange {
    /// `count` blocks from `first` on.
    #[must_use]
    pub const fn new(first: Vlba, count: u64) -> Self {
        Self { first, count }
    }

    /// The blocks from `first` to before `end`; empty if `end` is not behind `first`.
    #[must_use]
    pub const fn between(first: Vlba, end: Vlba) -> Self {
        Self { first, count: end.0.saturating_sub(first.0) }
    }

    /// The block after the last one, `None` if it exceeds the largest number.
    #[must_use]
    #[inline]
    pub fn end(self) -> Option<Vlba> {
        arithmetic::end(self.first.0, self.count).map(Vlba)
    }

    /// Whether the range has no blocks.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether `block` is in the range.
    #[must_use]
    #[inline]
    pub fn contains(self, block: Vlba) -> bool {
        arithmetic::offset_of(self.first.0, self.count, block.0, 1).is_some()
    }

    /// Whether all of `other` is in the range; an empty range is, if its start is.
    #[must_use]
    #[inline]
    pub fn contains_range(self, other: Self) -> bool {
        arithmetic::offset_of(self.first.0, self.count, other.first.0, other.count).is_some()
    }

    /// The blocks in both ranges, `None` if there are none.
    #[must_use]
    #[inline]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let (first, count) =
            arithmetic::intersect(self.first.0, self.count, other.first.0, other.count)?;
        Some(Self::new(Vlba(first), count))
    }

    /// The first `count` blocks (or all, if there are fewer) and the rest.
    #[must_use]
    pub fn split(self, count: u64) -> (Self, Self) {
        let head = count.min(self.count);
        // The tail of a range that runs past the last number is clipped there.
        let tail = Vlba(self.first.0.saturating_add(head));
        (Self::new(self.first, head), Self::new(tail, self.count.saturating_sub(head)))
    }
}

/// Consecutive virtual blocks mapped to consecutive physical ones: the *extent pointer* of thesis
/// figure 5.1b.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The first virtual block.
    pub first: Vlba,
    /// The number of blocks.
    pub count: u64,
    /// The place of the first block.
    pub physical: Plba,
    /// Whether another volume or a snapshot refers to these blocks too: they are read in place, and
    /// written elsewhere.
    pub shared: bool,
}

impl Extent {
    /// The virtual blocks.
    #[must_use]
    pub const fn range(self) -> BlockRange {
        BlockRange::new(self.first, self.count)
    }

    /// The part of the extent in `range`, `None` if there is none or the extent runs past the last
    /// block number.
    #[must_use]
    pub fn clip(self, range: BlockRange) -> Option<Self> {
        let part = self.range().intersect(range)?;
        let physical = arithmetic::displace(
            self.first.0,
            self.count,
            self.physical.0,
            part.first.0,
            part.count,
        )?;
        Some(Self {
            first: part.first,
            count: part.count,
            physical: Plba(physical),
            shared: self.shared,
        })
    }

    /// Whether `next` begins where this extent ends, on both sides, so that the two can be merged.
    #[must_use]
    pub fn continues_in(self, next: Self) -> bool {
        self.shared == next.shared
            && self.range().end() == Some(next.first)
            && arithmetic::end(self.physical.0, self.count) == Some(next.physical.0)
    }
}

/// The mapping of a virtual block (thesis 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mapping {
    /// The block is on the store.
    Mapped {
        /// The place of the piece's first block.
        physical: Plba,
        /// Whether a write must go elsewhere, see [`Extent::shared`].
        shared: bool,
    },
    /// The block was never written, and reads as zeros.
    Hole,
    /// The mapping is not in the tree; the hypervisor has it.
    Pruned,
}

/// A part of a request with one mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The virtual blocks.
    pub range: BlockRange,
    /// Their mapping.
    pub mapping: Mapping,
}
