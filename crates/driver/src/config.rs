//! The device's configuration space (virtio 1.2, 5.2.4) and the feature bits that matter here.

use sidecore_spec_virtio::blk::Config;

/// Feature bits, as numbers with one bit set.
pub mod features {
    pub use sidecore_spec_virtio::blk::feature::*;
    pub use sidecore_spec_virtio::feature::*;
    pub use sidecore_spec_virtio::vhost_user::PROTOCOL_FEATURES;
}

/// The device's configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkConfig {
    /// Size of the disk, in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Most pieces of one request's data; 0 if the device does not say.
    pub seg_max: u32,
    /// Size of its blocks in bytes; 0 if it does not say.
    pub block_bytes: u32,
    /// Whether it caches writes.
    pub write_back: bool,
    /// How many queues it has.
    pub queues: u16,
    /// Most sectors of one discard.
    pub max_discard_sectors: u32,
    /// Most ranges of one discard.
    pub max_discard_ranges: u32,
    /// Most sectors of one write of zeroes.
    pub max_write_zeroes_sectors: u32,
}

impl From<Config> for BlkConfig {
    fn from(config: Config) -> Self {
        Self {
            capacity_sectors: config.capacity,
            seg_max: config.seg_max,
            block_bytes: config.blk_size,
            write_back: config.writeback != 0,
            queues: config.num_queues,
            max_discard_sectors: config.max_discard_sectors,
            max_discard_ranges: config.max_discard_seg,
            max_write_zeroes_sectors: config.max_write_zeroes_sectors,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_taken_from_its_own_bytes() {
        let mut raw = [0; Config::BYTES];
        for (at, byte) in raw.iter_mut().enumerate() {
            *byte = at as u8 + 1;
        }
        let config = BlkConfig::from(Config::decode(&raw));
        assert_eq!(config.capacity_sectors, 0x0807_0605_0403_0201);
        assert_eq!((config.seg_max, config.block_bytes), (0x100f_0e0d, 0x1817_1615));
        assert_eq!((config.queues, config.max_discard_sectors), (0x2423, 0x2827_2625));
        assert_eq!(
            (config.max_discard_ranges, config.max_write_zeroes_sectors),
            (0x2c2b_2a29, 0x3433_3231)
        );
    }
}
