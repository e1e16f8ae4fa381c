//! The map of dirty regions, as it lies on each leg.
//!
//! A block of 4 KiB has eight sectors, each with the bits of 4032 regions and a checksum, because a
//! sector is the unit that a power cut leaves whole. A sector that is not whole counts as dirty: a
//! region too many is copied, and none too few.

use twox_hash::XxHash3_64;

use crate::layout::BLOCK_BYTES;

/// Bytes of a sector.
const SECTOR_BYTES: usize = 512;
/// Bytes of bits in a sector; the checksum is behind them.
const BITS_BYTES: usize = SECTOR_BYTES - 8;
/// Regions of a sector.
const REGIONS_PER_SECTOR: usize = BITS_BYTES * 8;
/// Regions of a block.
pub(crate) const REGIONS_PER_BLOCK: u64 =
    (REGIONS_PER_SECTOR * (BLOCK_BYTES / SECTOR_BYTES)) as u64;

/// Regions in which legs may differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DirtyMap {
    /// A bit for each region, in bytes of whole blocks.
    bits: Vec<u8>,
    regions: usize,
    /// Makes the checksums those of one mirror.
    seed: u64,
}

impl DirtyMap {
    /// A map without dirty regions. `uuid` is the mirror's.
    pub(crate) fn new(regions: usize, uuid: &[u8; 16]) -> Self {
        let blocks = regions.div_ceil(REGIONS_PER_BLOCK as usize);
        let bytes = blocks.saturating_mul(BITS_BYTES).saturating_mul(BLOCK_BYTES / SECTOR_BYTES);
        Self { bits: vec![0; bytes], regions, seed: XxHash3_64::oneshot(uuid) }
    }

    /// The number of blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.regions.div_ceil(REGIONS_PER_BLOCK as usize)
    }

    /// The block of a region.
    pub(crate) fn block_of(region: usize) -> usize {
        region.checked_div(REGIONS_PER_BLOCK as usize).unwrap_or(0)
    }

    pub(crate) fn is_dirty(&self, region: usize) -> bool {
        self.bits.get(region / 8).is_some_and(|byte| byte & 1 << (region % 8) != 0)
    }

    pub(crate) fn set(&mut self, region: usize, is_dirty: bool) {
        if region >= self.regions {
            return;
        }
        if let Some(byte) = self.bits.get_mut(region / 8) {
            let bit = 1 << (region % 8);
            *byte = if is_dirty { *byte | bit } else { *byte & !bit };
        }
    }

    pub(crate) fn set_all(&mut self, is_dirty: bool) {
        (0..self.regions).for_each(|region| self.set(region, is_dirty));
    }

    /// Adds the dirty regions of another map of this mirror.
    pub(crate) fn add(&mut self, other: &Self) {
        self.bits.iter_mut().zip(&other.bits).for_each(|(byte, other)| *byte |= other);
    }

    /// The dirty regions, in order.
    pub(crate) fn dirty(&self) -> impl Iterator<Item = usize> {
        (0..self.regions).filter(|region| self.is_dirty(*region))
    }

    pub(crate) fn count(&self) -> usize {
        self.bits.iter().map(|byte| byte.count_ones() as usize).sum()
    }

    /// A block as it lies on a leg.
    pub(crate) fn encode(&self, block: usize) -> [u8; BLOCK_BYTES] {
        let mut bytes = [0; BLOCK_BYTES];
        let first = block.saturating_mul(BLOCK_BYTES / SECTOR_BYTES);
        for (index, sector) in bytes.chunks_exact_mut(SECTOR_BYTES).enumerate() {
            let number = first.saturating_add(index);
            let at = number.saturating_mul(BITS_BYTES);
            let bits = self.bits.get(at..).and_then(|rest| rest.get(..BITS_BYTES));
            let (place, sum) = sector.split_at_mut(BITS_BYTES);
            place.copy_from_slice(bits.unwrap_or(&[0; BITS_BYTES]));
            sum.copy_from_slice(&self.checksum(number, place).to_le_bytes());
        }
        bytes
    }

    /// Takes a block over from a leg. Returns the number of sectors that were not whole.
    pub(crate) fn decode(&mut self, block: usize, bytes: &[u8]) -> usize {
        let first = block.saturating_mul(BLOCK_BYTES / SECTOR_BYTES);
        let mut damaged = 0_usize;
        for (index, sector) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            let number = first.saturating_add(index);
            let (bits, sum) = sector.split_at(BITS_BYTES);
            let is_whole = self.checksum(number, bits).to_le_bytes() == sum;
            damaged = damaged.saturating_add(usize::from(!is_whole));
            let start = number.saturating_mul(REGIONS_PER_SECTOR);
            for bit in 0..REGIONS_PER_SECTOR {
                let is_set = bits.get(bit / 8).is_some_and(|byte| byte & 1 << (bit % 8) != 0);
                self.set(start.saturating_add(bit), is_set || !is_whole);
            }
        }
        damaged
    }

    fn checksum(&self, sector: usize, bits: &[u8]) -> u64 {
        XxHash3_64::oneshot_with_seed(self.seed ^ sector as u64, bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGIONS: usize = REGIONS_PER_BLOCK as usize + 100;

    fn example() -> DirtyMap {
        let mut map = DirtyMap::new(REGIONS, &[7; 16]);
        for region in [0, 1, REGIONS_PER_SECTOR - 1, REGIONS_PER_SECTOR, REGIONS - 1, REGIONS] {
            map.set(region, true);
        }
        map
    }

    #[test]
    fn what_is_written_is_read() {
        let map = example();
        assert_eq!((map.count(), map.blocks(), DirtyMap::block_of(REGIONS - 1)), (5, 2, 1));
        let mut read = DirtyMap::new(REGIONS, &[7; 16]);
        read.set(9, true);
        assert_eq!([0, 1].map(|block| read.decode(block, &map.encode(block))), [0, 0]);
        assert_eq!(read, map);
        assert!(map.dirty().eq([0, 1, REGIONS_PER_SECTOR - 1, REGIONS_PER_SECTOR, REGIONS - 1]));
        read.set_all(false);
        read.add(&map);
        assert_eq!(read, map);
    }

    #[test]
    fn a_sector_that_is_not_whole_counts_as_dirty_and_no_other() {
        let map = example();
        for bit in [0, 77, 4031, 4032, 4095] {
            let mut bytes = map.encode(0);
            bytes[SECTOR_BYTES + bit / 8] ^= 1 << (bit % 8);
            let mut read = DirtyMap::new(REGIONS, &[7; 16]);
            assert_eq!(read.decode(0, &bytes), 1);
            assert_eq!(read.count(), 3 + REGIONS_PER_SECTOR, "bit {bit}");
        }
    }

    #[test]
    fn a_sector_of_another_mirror_or_place_is_not_whole() {
        let map = example();
        let mut other = DirtyMap::new(REGIONS, &[8; 16]);
        assert_eq!(other.decode(0, &map.encode(0)), 8);
        let mut moved = DirtyMap::new(REGIONS, &[7; 16]);
        assert_eq!(moved.decode(0, &map.encode(1)), 8);
        assert_eq!(moved.decode(1, &[0; BLOCK_BYTES]), 8);
        assert_eq!(moved.count(), REGIONS);
    }
}
