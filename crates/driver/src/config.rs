//! The device's configuration space (virtio 1.2, 5.2.4) and the feature bits that matter here.

/// Feature bits, as numbers with one bit set.
pub mod features {
    /// The device says how many pieces a request may have.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// The device says how large its blocks are.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Flush.
    pub const FLUSH: u64 = 1 << 9;
    /// The device says how its blocks lie on its medium.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may choose between write-back and write-through.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// More than one queue.
    pub const MQ: u64 = 1 << 12;
    /// Discard.
    pub const DISCARD: u64 = 1 << 13;
    /// Write zeroes.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Indirect descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notification suppression by index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// vhost-user's own: protocol features are there.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// Packed rings.
    pub const RING_PACKED: u64 = 1 << 34;
}

/// What the device says of itself.
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

impl BlkConfig {
    /// Bytes of the configuration space up to the last field that this driver knows.
    pub(crate) const BYTES: usize = 60;

    /// Takes the fields apart.
    pub(crate) fn parse(raw: &[u8; Self::BYTES]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        Self {
            capacity_sectors: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            seg_max: u32_at(12),
            block_bytes: u32_at(20),
            write_back: raw[32] != 0,
            queues: u16_at(34),
            max_discard_sectors: u32_at(36),
            max_discard_ranges: u32_at(40),
            max_write_zeroes_sectors: u32_at(48),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_taken_from_its_own_bytes() {
        let mut raw = [0; BlkConfig::BYTES];
        for (at, byte) in raw.iter_mut().enumerate() {
            *byte = at as u8 + 1;
        }
        let config = BlkConfig::parse(&raw);
        assert_eq!(config.capacity_sectors, 0x0807_0605_0403_0201);
        assert_eq!((config.seg_max, config.block_bytes), (0x100f_0e0d, 0x1817_1615));
        assert_eq!((config.queues, config.max_discard_sectors), (0x2423, 0x2827_2625));
        assert_eq!((config.max_discard_ranges, config.max_write_zeroes_sectors), (0x2c2b_2a29, 0x3433_3231));
    }
}
