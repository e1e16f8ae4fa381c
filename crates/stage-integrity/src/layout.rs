//! The places of metadata and data on the store.
//!
//! | start | size | content |
//! | --- | --- | --- |
//! | 0 | 4 KiB | the header |
//! | 4 KiB | 4 KiB | its copy |
//! | 8 KiB | 2 × slots × unit | the intents, in two halves |
//! | next 4 KiB | units of tags | the tags |
//! | next 4 KiB | blocks | the data |
//!
//! A *unit* is the size of a write of metadata: the physical block of the store when it was made.

use sidecore_block::Geometry;

use crate::tag::{SECTOR_BYTES, TAGS_PER_SECTOR};

/// Bytes of a copy of the header, and the alignment of the areas.
pub(crate) const COPY_BYTES: u64 = 4096;
/// Copies of the header.
pub(crate) const COPIES: u64 = 2;
/// The largest block, and the largest unit.
const MOST_BYTES: u32 = 4096;
/// Slots of a half of the journal that suffice for any load.
const USUAL_SLOTS: u64 = 1024;
const LEAST_SLOTS: u64 = 8;
const MOST_SLOTS: u32 = 1 << 20;
/// The part of a store that its journal takes at most.
const JOURNAL_PART: u64 = 128;
/// More blocks than any store has.
const MOST_BLOCKS: u64 = 1 << 48;

/// The sizes that a store was made with. The rest follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of a block of the disk: the unit of checksums.
    pub block_bytes: u32,
    /// Bytes of a write of metadata.
    pub unit_bytes: u32,
    /// Slots for intents in each half of the journal.
    pub slots: u32,
    /// Blocks of the disk.
    pub blocks: u64,
}

fn is_size(bytes: u32) -> bool {
    bytes.is_power_of_two() && (SECTOR_BYTES as u32..=MOST_BYTES).contains(&bytes)
}

fn aligned(bytes: u64) -> u64 {
    bytes.div_ceil(COPY_BYTES).saturating_mul(COPY_BYTES)
}

impl Layout {
    /// The layout with the most blocks on a store of this geometry. `None` if there is no room, or
    /// a size cannot be.
    pub(crate) fn of(below: &Geometry, block_bytes: u32, slots: Option<u32>) -> Option<Self> {
        let unit_bytes = below.physical_block_bytes.max(below.block_bytes).min(MOST_BYTES);
        let part = below.capacity_bytes / JOURNAL_PART;
        let usual = part.checked_div(unit_bytes.into())?.clamp(LEAST_SLOTS, USUAL_SLOTS);
        let slots = slots.unwrap_or(u32::try_from(usual).ok()?);
        let mut layout = Self { block_bytes, unit_bytes, slots, blocks: 1 };
        if !is_size(block_bytes) || below.block_bytes > block_bytes {
            return None;
        }
        let size = u64::from(block_bytes);
        // With tags for more blocks than there is room for.
        layout.blocks = below.capacity_bytes.checked_div(size)?;
        layout.blocks = below.capacity_bytes.checked_sub(layout.data_at())?.checked_div(size)?;
        layout.is_sound().then_some(layout)
    }

    /// Whether the sizes are such as [`of`](Self::of) makes.
    pub(crate) fn is_sound(&self) -> bool {
        is_size(self.block_bytes)
            && is_size(self.unit_bytes)
            && (1..=MOST_SLOTS).contains(&self.slots)
            && (1..MOST_BLOCKS).contains(&self.blocks)
    }

    /// The size of the disk in bytes.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes.into())
    }

    /// The size that the store has at least, in bytes.
    #[must_use]
    pub fn store_bytes(&self) -> u64 {
        self.data_at().saturating_add(self.capacity_bytes())
    }

    /// The start of the data in bytes.
    #[must_use]
    pub fn data_at(&self) -> u64 {
        aligned(self.tags_at().saturating_add(self.units().saturating_mul(self.unit_bytes.into())))
    }

    /// The start of the intents.
    pub(crate) fn journal_at() -> u64 {
        COPIES.saturating_mul(COPY_BYTES)
    }

    pub(crate) fn journal_bytes(&self) -> u64 {
        u64::from(self.slots).saturating_mul(2).saturating_mul(self.unit_bytes.into())
    }

    /// The start of the tags.
    pub(crate) fn tags_at(&self) -> u64 {
        aligned(Self::journal_at().saturating_add(self.journal_bytes()))
    }

    /// Sectors of a unit.
    pub(crate) fn sectors_per_unit(&self) -> u64 {
        u64::from(self.unit_bytes).checked_div(SECTOR_BYTES as u64).unwrap_or(0)
    }

    /// Tags of a unit.
    pub(crate) fn tags_per_unit(&self) -> u64 {
        self.sectors_per_unit().saturating_mul(TAGS_PER_SECTOR)
    }

    /// Units of tags.
    pub(crate) fn units(&self) -> u64 {
        self.blocks.div_ceil(self.tags_per_unit().max(1))
    }

    /// The start of a block on the store.
    pub(crate) fn at(&self, block: u64) -> u64 {
        self.data_at().saturating_add(block.saturating_mul(self.block_bytes.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_fits_its_store_and_leaves_little_of_it_unused() {
        for (store_bytes, block_bytes, below) in [
            (4_u64 << 20, 4096, 512),
            (1 << 20, 512, 512),
            (1 << 40, 4096, 4096),
            ((1 << 30) + 512, 2048, 512),
        ] {
            let geometry = Geometry::new(store_bytes, below);
            let layout = Layout::of(&geometry, block_bytes, None).unwrap();
            assert!(layout.store_bytes() <= store_bytes, "{layout:?}");
            let unused = store_bytes - layout.store_bytes();
            assert!(unused < u64::from(block_bytes) + store_bytes / 64 + 8192, "{unused} unused");
            assert!(layout.units() * layout.tags_per_unit() >= layout.blocks);
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        let small = Geometry::new(16 << 10, 512);
        assert_eq!(Layout::of(&small, 512, None), None, "no room");
        let store = |block_bytes| Geometry::new(4 << 20, block_bytes);
        for (below, block_bytes, slots) in [
            (512, 256, None),
            (512, 8192, None),
            (512, 1000, None),
            (4096, 512, None),
            (512, 512, Some(0)),
        ] {
            assert_eq!(Layout::of(&store(below), block_bytes, slots), None, "{block_bytes}");
        }
        let good = Layout::of(&store(512), 4096, None).unwrap();
        for bad in [
            Layout { block_bytes: 0, ..good },
            Layout { unit_bytes: 8192, ..good },
            Layout { slots: u32::MAX, ..good },
            Layout { blocks: 0, ..good },
            Layout { blocks: u64::MAX, ..good },
        ] {
            assert!(!bad.is_sound(), "{bad:?}");
        }
    }
}
