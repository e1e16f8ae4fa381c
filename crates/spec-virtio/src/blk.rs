//! The block device (5.2).

use sidecore_units::layout;

/// Feature bits of a block device (5.2.3).
pub mod feature {
    /// The largest size of a segment is in `size_max`.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// The largest number of segments in a request is in `seg_max`.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The device is read-only.
    pub const RO: u64 = 1 << 5;
    /// The block size is in `blk_size`.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// The device takes flushes.
    pub const FLUSH: u64 = 1 << 9;
    /// The physical block size and the best I/O sizes are in the configuration space.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may switch the cache mode by `writeback`.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// The number of queues is in `num_queues`.
    pub const MQ: u64 = 1 << 12;
    /// The device takes discards.
    pub const DISCARD: u64 = 1 << 13;
    /// The device takes writes of zeros.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Request types (5.2.6).
pub mod request_type {
    /// VIRTIO_BLK_T_IN: read.
    pub const IN: u32 = 0;
    /// VIRTIO_BLK_T_OUT: write.
    pub const OUT: u32 = 1;
    /// VIRTIO_BLK_T_FLUSH.
    pub const FLUSH: u32 = 4;
    /// VIRTIO_BLK_T_GET_ID: the device's name, [`ID_BYTES`](super::ID_BYTES) long.
    pub const GET_ID: u32 = 8;
    /// VIRTIO_BLK_T_DISCARD.
    pub const DISCARD: u32 = 11;
    /// VIRTIO_BLK_T_WRITE_ZEROES.
    pub const WRITE_ZEROES: u32 = 13;
}

/// Values of a request's status byte (5.2.6).
pub mod status {
    /// VIRTIO_BLK_S_OK.
    pub const OK: u8 = 0;
    /// VIRTIO_BLK_S_IOERR.
    pub const IOERR: u8 = 1;
    /// VIRTIO_BLK_S_UNSUPP.
    pub const UNSUPP: u8 = 2;
}

/// Size of the answer to GET_ID, padded with zeros (5.2.6).
pub const ID_BYTES: usize = 20;

/// Flag of a [`Range`]: the device may deallocate what it zeroes (5.2.6).
pub const UNMAP: u32 = 1;

/// Offset of the request type in a [`RequestHeader`].
pub const KIND_OFFSET: usize = 0;
/// Offset of the sector in a [`RequestHeader`].
pub const SECTOR_OFFSET: usize = 8;

/// Offset of `writeback`, the one field of [`Config`] that a driver may write.
pub const WRITEBACK_OFFSET: u32 = 32;

layout! {
    /// The header of a request (5.2.6); data and a status byte follow.
    pub struct RequestHeader: 16 {
        /// See [`request_type`].
        pub kind: u32 = KIND_OFFSET,
        /// The first sector, of 512 bytes.
        pub sector: u64 = SECTOR_OFFSET,
    }
}

layout! {
    /// The data of a discard or of a write of zeros (5.2.6).
    pub struct Range: 16 {
        /// The first sector, of 512 bytes.
        pub sector: u64 = 0,
        /// How many sectors.
        pub sectors: u32 = 8,
        /// [`UNMAP`].
        pub flags: u32 = 12,
    }
}

layout! {
    /// The configuration space (5.2.4), up to and with `write_zeroes_may_unmap`.
    pub struct Config: 60 {
        /// Size of the disk in sectors of 512 bytes.
        pub capacity: u64 = 0,
        /// Largest segment in bytes.
        pub size_max: u32 = 8,
        /// Most segments in a request.
        pub seg_max: u32 = 12,
        /// Block size in bytes.
        pub blk_size: u32 = 20,
        /// Logical blocks in a physical one, as a power of two.
        pub physical_block_exp: u8 = 24,
        /// Smallest good I/O size in blocks.
        pub min_io_size: u16 = 26,
        /// Best I/O size in blocks; 0 for no preference.
        pub opt_io_size: u32 = 28,
        /// 1 in write-back mode, 0 in write-through mode.
        pub writeback: u8 = WRITEBACK_OFFSET as usize,
        /// Number of queues.
        pub num_queues: u16 = 34,
        /// Most sectors in one discard.
        pub max_discard_sectors: u32 = 36,
        /// Most ranges in one discard.
        pub max_discard_seg: u32 = 40,
        /// Alignment of discards in sectors.
        pub discard_sector_alignment: u32 = 44,
        /// Most sectors in one write of zeros.
        pub max_write_zeroes_sectors: u32 = 48,
        /// Most ranges in one write of zeros.
        pub max_write_zeroes_seg: u32 = 52,
        /// 1 if a write of zeros may deallocate.
        pub write_zeroes_may_unmap: u8 = 56,
    }
}
