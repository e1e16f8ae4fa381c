//! Feature bits and configuration space (virtio 1.2, 5.2.3 and 5.2.4).

use sidecore_block::Geometry;
use sidecore_spec_virtio::blk::{Config, feature};
use sidecore_spec_virtio::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED, VERSION_1};
use sidecore_units::SECTOR_BYTES;

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
    /// The answer to GET_ID: at most 20 bytes, no terminator needed (5.2.6).
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
        let mut bits = VERSION_1
            | INDIRECT_DESC
            | EVENT_IDX
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
        offer(RING_PACKED, self.packed);
        bits
    }

    /// The configuration space.
    #[must_use]
    pub fn config(&self, geometry: &Geometry, writeback: bool) -> [u8; Config::BYTES] {
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

        let config = Config {
            capacity: geometry.capacity_bytes / SECTOR_BYTES,
            size_max: self.size_max_bytes.unwrap_or(0),
            seg_max: self.seg_max,
            blk_size: geometry.block_bytes,
            physical_block_exp: physical_exponent,
            min_io_size: blocks_per_physical,
            opt_io_size: 0,
            writeback: u8::from(writeback),
            num_queues: self.queues,
            max_discard_sectors: clear_sectors.saturating_mul(discard),
            max_discard_seg: discard,
            discard_sector_alignment: sectors_per_block,
            max_write_zeroes_sectors: clear_sectors.saturating_mul(zeroes),
            max_write_zeroes_seg: zeroes,
            write_zeroes_may_unmap: u8::from(geometry.write_zeroes),
        };
        config.encode()
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
        let options =
            BlkOptions { queues: 4, size_max_bytes: Some(65536), ..BlkOptions::default() };
        let config = options.config(&geometry, true);
        let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
        assert_eq!(word(0), 1 << 21, "capacity");
        assert_eq!(word(8), 65536, "size_max");
        assert_eq!(word(12), 126, "seg_max");
        assert_eq!(word(20), 512, "blk_size");
        assert_eq!(config[24], 3, "physical_block_exp");
        assert_eq!(config[26], 8, "min_io_size");
        assert_eq!(config[32], 1, "writeback");
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
        assert_eq!(bits & RING_PACKED, 0, "opt-in");
    }
}
