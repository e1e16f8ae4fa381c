//! Feature bits and configuration space (virtio 1.2, 5.2.3 and 5.2.4).

use sidecore_block::Geometry;
use sidecore_units::SECTOR_BYTES;

use crate::features;

/// Feature bits of virtio-blk.
pub mod feature {
    /// The largest size of a segment is in `size_max`.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// The largest number of segments in a request is in `seg_max`.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The device is read-only.
    pub const RO: u64 = 1 << 5;
    /// The block size is in `blk_size`.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Flush is supported.
    pub const FLUSH: u64 = 1 << 9;
    /// The physical block size and the best I/O sizes are known.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may switch the cache mode by `writeback`.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// There are several queues.
    pub const MQ: u64 = 1 << 12;
    /// Discard is supported.
    pub const DISCARD: u64 = 1 << 13;
    /// Write zeroes is supported.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Bytes of configuration space: up to and with `write_zeroes_may_unmap`.
pub const CONFIG_BYTES: usize = 60;

/// Offset of `writeback`, the one byte that a driver may write.
pub(crate) const WRITEBACK_OFFSET: u32 = 32;

/// Largest range of one discard or write-zeroes request in bytes: a store
/// carries it out in one go, and its neighbours on the sidecore wait.
pub(crate) const MAX_CLEAR_BYTES: u64 = 16 << 20;

/// How a disk presents itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlkOptions {
    /// Number of queues, 1 to 64.
    pub queues: u16,
    /// Most data segments in a request.
    pub seg_max: u32,
    /// Largest segment in bytes; `None` for no limit.
    pub size_max_bytes: Option<u32>,
    /// What GET_ID answers: at most 20 bytes, no terminator needed (5.2.6).
    pub serial: String,
    /// Whether packed rings are offered.
    pub packed: bool,
    /// Whether the guest sees a read-only disk, though the store may not be.
    pub read_only: bool,
    /// The cache mode until a driver chooses another (5.2.5.2): true is
    /// write-back, and with false each write is durable before it completes.
    pub write_cache: bool,
}

impl Default for BlkOptions {
    fn default() -> Self {
        Self {
            queues: 1,
            seg_max: 126,
            size_max_bytes: None,
            serial: String::new(),
            packed: false,
            read_only: false,
            write_cache: true,
        }
    }
}

impl BlkOptions {
    /// The feature bits to offer for a store of this geometry.
    #[must_use]
    pub fn features(&self, geometry: &Geometry) -> u64 {
        let mut bits = features::VERSION_1
            | features::INDIRECT_DESC
            | features::EVENT_IDX
            | feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::TOPOLOGY
            | feature::FLUSH
            | feature::CONFIG_WCE;
        let mut offer = |bit: u64, condition: bool| {
            if condition {
                bits |= bit;
            }
        };
        let writable = !(self.read_only || geometry.read_only);
        offer(feature::RO, !writable);
        offer(feature::SIZE_MAX, self.size_max_bytes.is_some());
        offer(feature::MQ, self.queues > 1);
        offer(feature::DISCARD, writable && geometry.discard);
        offer(feature::WRITE_ZEROES, writable && geometry.write_zeroes);
        offer(features::RING_PACKED, self.packed);
        bits
    }

    /// The configuration space.
    #[must_use]
    pub fn config(&self, geometry: &Geometry, writeback: bool) -> [u8; CONFIG_BYTES] {
        let block_bytes = u64::from(geometry.block_bytes);
        let sectors_per_block = u32::try_from(block_bytes / SECTOR_BYTES).unwrap_or(1);
        let physical_exponent = geometry
            .physical_block_bytes
            .checked_div(geometry.block_bytes)
            .and_then(u32::checked_ilog2)
            .and_then(|exponent| u8::try_from(exponent).ok())
            .unwrap_or(0);
        let blocks_per_physical = 1_u16.checked_shl(physical_exponent.into()).unwrap_or(1);
        let clear_sectors = u32::try_from(MAX_CLEAR_BYTES / SECTOR_BYTES).unwrap_or(u32::MAX);
        let (discard, zeroes) = (u32::from(geometry.discard), u32::from(geometry.write_zeroes));

        let mut fields = Fields::default();
        fields.put(&(geometry.capacity_bytes / SECTOR_BYTES).to_le_bytes()); // capacity
        fields.put(&self.size_max_bytes.unwrap_or(0).to_le_bytes()); // size_max
        fields.put(&self.seg_max.to_le_bytes()); // seg_max
        fields.put(&[0; 4]); // geometry: cylinders, heads, sectors
        fields.put(&geometry.block_bytes.to_le_bytes()); // blk_size
        fields.put(&[physical_exponent, 0]); // physical_block_exp, alignment_offset
        fields.put(&blocks_per_physical.to_le_bytes()); // min_io_size
        fields.put(&0_u32.to_le_bytes()); // opt_io_size: no preference
        fields.put(&[u8::from(writeback), 0]); // writeback, unused0
        fields.put(&self.queues.to_le_bytes()); // num_queues
        fields.put(&(clear_sectors.saturating_mul(discard)).to_le_bytes()); // max_discard_sectors
        fields.put(&discard.to_le_bytes()); // max_discard_seg
        fields.put(&sectors_per_block.to_le_bytes()); // discard_sector_alignment
        fields.put(&(clear_sectors.saturating_mul(zeroes)).to_le_bytes()); // max_write_zeroes_sectors
        fields.put(&zeroes.to_le_bytes()); // max_write_zeroes_seg
        fields.put(&[u8::from(geometry.write_zeroes), 0, 0, 0]); // write_zeroes_may_unmap
        fields.bytes
    }
}

/// The configuration space as it is filled, field by field in its order.
struct Fields {
    bytes: [u8; CONFIG_BYTES],
    len_bytes: usize,
}

impl Default for Fields {
    fn default() -> Self {
        Self { bytes: [0; CONFIG_BYTES], len_bytes: 0 }
    }
}

impl Fields {
    fn put(&mut self, field: &[u8]) {
        let end = self.len_bytes.saturating_add(field.len());
        if let Some(place) = self.bytes.get_mut(self.len_bytes..end) {
            place.copy_from_slice(field);
        }
        self.len_bytes = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets as 5.2.4 lists them.
    #[test]
    fn every_field_is_at_its_offset() {
        let mut geometry = Geometry::new(1 << 30, 512);
        geometry.physical_block_bytes = 4096;
        let options = BlkOptions { queues: 4, size_max_bytes: Some(65536), ..BlkOptions::default() };
        let config = options.config(&geometry, true);
        let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
        assert_eq!(word(0), 1 << 21, "capacity");
        assert_eq!(word(8), 65536, "size_max");
        assert_eq!(word(12), 126, "seg_max");
        assert_eq!(word(20), 512, "blk_size");
        assert_eq!(config[24], 3, "physical_block_exp");
        assert_eq!(config[26], 8, "min_io_size");
        assert_eq!(config[WRITEBACK_OFFSET as usize], 1, "writeback");
        assert_eq!(config[34], 4, "num_queues");
        assert_eq!(word(36), 32768, "max_discard_sectors");
        assert_eq!(word(40), 1, "max_discard_seg");
        assert_eq!(word(44), 1, "discard_sector_alignment");
        assert_eq!(word(48), 32768, "max_write_zeroes_sectors");
        assert_eq!(word(52), 1, "max_write_zeroes_seg");
        assert_eq!(config[56], 1, "write_zeroes_may_unmap");
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_writes() {
        let mut geometry = Geometry::new(1 << 20, 512);
        geometry.read_only = true;
        let bits = BlkOptions::default().features(&geometry);
        assert_ne!(bits & feature::RO, 0);
        assert_eq!(bits & (feature::DISCARD | feature::WRITE_ZEROES), 0);
        assert_eq!(bits & features::RING_PACKED, 0, "opt-in");
    }
}
