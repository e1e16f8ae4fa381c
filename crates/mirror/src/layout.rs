//! The places of a leg's metadata and data.
//!
//! | bytes | contents |
//! | --- | --- |
//! | 0 | two slots of the header, of 4 KiB each |
//! | 8192 | the map of dirty regions, in blocks of 4 KiB |
//! | `data_bytes` on | the mirror's bytes |

use sidecore_block::Geometry;

use crate::error::LegError;
use crate::map::REGIONS_PER_BLOCK;

/// The unit in which metadata is written.
pub(crate) const BLOCK_BYTES: usize = 4096;
/// Slots of the header.
pub(crate) const SLOTS: u64 = 2;
/// The most regions of a mirror, whose map has then 9 blocks.
pub(crate) const MAX_REGIONS: u64 = 1 << 18;
/// The smallest region.
pub(crate) const MIN_REGION_BYTES: u64 = 4096;
/// The largest region: a write of it for a copy is one request.
pub(crate) const MAX_REGION_BYTES: u64 = 1 << 40;
/// The region of a small mirror, unless told otherwise.
const REGION_BYTES: u64 = 1 << 20;
/// The data starts at a multiple of this, or of a region if that is smaller.
const DATA_ALIGN_BYTES: u64 = 1 << 20;

/// Sizes of a mirror, which are fixed when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The mirror's size.
    pub capacity_bytes: u64,
    /// The unit of its reads and writes.
    pub block_bytes: u32,
    /// The unit in which legs are compared and copied: a power of two.
    pub region_bytes: u64,
    /// The start of the mirror's bytes on each leg.
    pub data_bytes: u64,
}

impl Layout {
    /// The layout of a mirror whose smallest leg has `leg_bytes`; `None` if that is too small, or
    /// the region is no power of two, or so small that there would be too many.
    #[must_use]
    pub fn of(leg_bytes: u64, block_bytes: u32, region_bytes: Option<u64>) -> Option<Self> {
        // Whole blocks, so that the sizes follow from those of the layout alone.
        let leg_bytes = leg_bytes & !u64::from(block_bytes).wrapping_sub(1);
        let fits = |region_bytes: u64| leg_bytes.div_ceil(region_bytes.max(1)) <= MAX_REGIONS;
        let region_bytes = match region_bytes {
            Some(region_bytes) => region_bytes,
            None => {
                let mut region_bytes = REGION_BYTES;
                while !fits(region_bytes) {
                    region_bytes = region_bytes.checked_mul(2)?;
                }
                region_bytes
            }
        };
        let is_sound = region_bytes.is_power_of_two()
            && (MIN_REGION_BYTES..=MAX_REGION_BYTES).contains(&region_bytes)
            && region_bytes >= u64::from(block_bytes)
            && fits(region_bytes);
        if !is_sound {
            return None;
        }
        let blocks = leg_bytes.div_ceil(region_bytes).div_ceil(REGIONS_PER_BLOCK);
        let metadata_bytes = SLOTS.saturating_add(blocks).saturating_mul(BLOCK_BYTES as u64);
        let data_bytes = metadata_bytes.next_multiple_of(DATA_ALIGN_BYTES.min(region_bytes));
        let room = leg_bytes.checked_sub(data_bytes)?;
        (room > 0).then_some(Self { capacity_bytes: room, block_bytes, region_bytes, data_bytes })
    }

    /// Whether the sizes are such as [`of`](Self::of) makes.
    pub(crate) fn is_sound(&self) -> bool {
        let is_block = matches!(self.block_bytes, 512..=4096) && self.block_bytes.is_power_of_two();
        is_block
            && self.capacity_bytes.checked_add(self.data_bytes).is_some_and(|leg_bytes| {
                Self::of(leg_bytes, self.block_bytes, Some(self.region_bytes)) == Some(*self)
            })
    }

    /// Whether a store of this geometry can be a leg.
    pub(crate) fn takes(&self, geometry: &Geometry) -> Result<(), LegError> {
        if geometry.read_only {
            return Err(LegError::ReadOnly);
        }
        if geometry.capacity_bytes < self.leg_bytes() {
            let (has_bytes, needs_bytes) = (geometry.capacity_bytes, self.leg_bytes());
            return Err(LegError::TooSmall { has_bytes, needs_bytes });
        }
        if geometry.block_bytes > self.block_bytes {
            let (has_bytes, needs_bytes) = (geometry.block_bytes, self.block_bytes);
            return Err(LegError::Blocks { has_bytes, needs_bytes });
        }
        Ok(())
    }

    /// The bytes that a leg's store needs.
    #[must_use]
    pub fn leg_bytes(&self) -> u64 {
        self.data_bytes.saturating_add(self.capacity_bytes)
    }

    /// The number of regions.
    #[must_use]
    pub fn regions(&self) -> usize {
        usize::try_from(self.capacity_bytes.div_ceil(self.region_bytes.max(1))).unwrap_or(0)
    }

    /// The first region of a range, and the one behind its last.
    #[inline]
    pub(crate) fn regions_of(&self, offset_bytes: u64, len_bytes: u64) -> (usize, usize) {
        let shift = self.region_bytes.trailing_zeros();
        let last = offset_bytes.saturating_add(len_bytes.saturating_sub(1));
        let region = |at: u64| usize::try_from(at.checked_shr(shift).unwrap_or(0)).unwrap_or(0);
        (region(offset_bytes), region(last).saturating_add(1))
    }

    /// The start and size of a region in the mirror.
    pub(crate) fn range_of(&self, region: usize) -> (u64, u64) {
        let start = (region as u64).saturating_mul(self.region_bytes);
        (start, self.capacity_bytes.saturating_sub(start).min(self.region_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_leaves_room_for_the_metadata_and_is_sound() {
        for (leg_bytes, block_bytes, region_bytes) in [
            (4 << 20, 512, None),
            (64 << 10, 512, Some(4096)),
            (1 << 40, 4096, None),
            ((1 << 30) + 512, 4096, Some(1 << 16)),
        ] {
            let layout = Layout::of(leg_bytes, block_bytes, region_bytes).unwrap();
            assert!(layout.is_sound(), "{layout:?}");
            assert!(layout.leg_bytes() <= leg_bytes && layout.regions() as u64 <= MAX_REGIONS);
            let blocks = (layout.regions() as u64).div_ceil(REGIONS_PER_BLOCK);
            assert!(layout.data_bytes >= 8192 + blocks * 4096, "{layout:?}");
            let last = layout.regions() - 1;
            let (start, len_bytes) = layout.range_of(last);
            assert_eq!(start + len_bytes, layout.capacity_bytes);
            assert_eq!(layout.regions_of(start, len_bytes), (last, last + 1));
        }
        let large = Layout::of(1 << 40, 4096, None).unwrap();
        assert_eq!(large.region_bytes, 4 << 20);
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for (leg_bytes, region_bytes) in [
            (8192, Some(4096)),
            (1 << 20, Some(3 << 12)),
            (1 << 20, Some(2048)),
            (1 << 40, Some(4096)),
            (1 << 20, None),
            (u64::MAX, Some(u64::MAX)),
        ] {
            assert_eq!(Layout::of(leg_bytes, 512, region_bytes), None, "{leg_bytes}");
        }
        let good = Layout::of(4 << 20, 512, None).unwrap();
        for bad in [
            Layout { block_bytes: 0, ..good },
            Layout { block_bytes: 8192, ..good },
            Layout { region_bytes: 0, ..good },
            Layout { data_bytes: 4096, ..good },
            Layout { capacity_bytes: u64::MAX, ..good },
        ] {
            assert!(!bad.is_sound(), "{bad:?}");
        }
    }

    #[test]
    fn a_range_touches_the_regions_of_its_first_and_last_byte() {
        let layout = Layout::of(64 << 20, 512, None).unwrap();
        let region = layout.region_bytes;
        assert_eq!(layout.regions_of(region - 512, 512), (0, 1));
        assert_eq!(layout.regions_of(region - 512, 1024), (0, 2));
        assert_eq!(layout.regions_of(region, 3 * region), (1, 4));
    }
}
