//! Entries of submission and completion queues (3.3.3), and fields of their dwords.

use sidecore_units::layout;

/// Size of a submission queue's entry (3.3.3.1); log2 of it is CC.IOSQES.
pub const COMMAND_BYTES: usize = 64;
/// log2 of [`COMMAND_BYTES`].
pub const COMMAND_BYTES_LOG2: u32 = 6;
/// Size of a completion queue's entry (3.3.3.2); log2 of it is CC.IOCQES.
pub const COMPLETION_BYTES: usize = 16;
/// log2 of [`COMPLETION_BYTES`].
pub const COMPLETION_BYTES_LOG2: u32 = 4;
/// Most entries of a queue (3.3.3.1).
pub const MAX_ENTRIES: u32 = 1 << 16;

/// The NSID that names all namespaces (3.2.1.2).
pub const BROADCAST_NSID: u32 = 0xFFFF_FFFF;

/// Dword 0: where FUSE begins, two bits (figure 91).
pub const FUSE_SHIFT: u32 = 8;
/// FUSE: the first of two fused commands.
pub const FUSE_FIRST: u32 = 0b01;
/// FUSE: the second of two fused commands.
pub const FUSE_SECOND: u32 = 0b10;
/// Dword 0: where PSDT begins, two bits (figure 91).
pub const PSDT_SHIFT: u32 = 14;
/// PSDT: the data pointer is an SGL descriptor, the metadata pointer the address of a buffer.
pub const PSDT_SGL: u32 = 0b01;
/// PSDT: both pointers are SGL descriptors.
pub const PSDT_SGL_WITH_METADATA_SEGMENT: u32 = 0b10;

/// Byte offset of the metadata pointer (3.3.3.1).
pub const METADATA_POINTER_OFFSET: usize = 16;
/// Byte offset of the data pointer (3.3.3.1): two PRP entries or one SGL descriptor.
pub const DATA_POINTER_OFFSET: usize = 24;

/// Size of an entry of a PRP list (4.1.1).
pub const PRP_BYTES: usize = 8;
/// Size of an SGL descriptor (4.1.2).
pub const SGL_DESCRIPTOR_BYTES: usize = 16;

/// SGL descriptor types (figure 107), in the upper half of a descriptor's last byte.
pub mod sgl {
    /// Data Block.
    pub const DATA_BLOCK: u8 = 0x0;
    /// Bit Bucket.
    pub const BIT_BUCKET: u8 = 0x1;
    /// Segment.
    pub const SEGMENT: u8 = 0x2;
    /// Last Segment.
    pub const LAST_SEGMENT: u8 = 0x3;
}

/// Dword 11 of Create I/O Completion Queue and Create I/O Submission Queue: the queue is
/// contiguous (5.4 and 5.5, PC).
pub const CONTIGUOUS: u32 = 1;
/// Dword 11 of Create I/O Completion Queue: the queue interrupts (5.4, IEN).
pub const INTERRUPTS_ENABLED: u32 = 1 << 1;

/// Dword 12 of Read, Write and others: bypass caches (NVM command set 1.0, 3.2, FUA).
pub const FORCE_UNIT_ACCESS: u32 = 1 << 30;
/// Dword 12 of Read, Write and others: protection information (NVM command set 1.0, 3.2, PRINFO).
pub const PROTECTION_INFORMATION: u32 = 0b1111 << 26;
/// Dword 12 of Write Zeroes: the blocks may be deallocated (NVM command set 1.0, 3.2.8, DEAC).
pub const DEALLOCATE: u32 = 1 << 25;
/// Dword 12 of Write: a directive's type (NVM command set 1.0, 3.2.6, DTYPE).
pub const DIRECTIVE_TYPE: u32 = 0b1111 << 20;
/// Dword 11 of Dataset Management: deallocate (NVM command set 1.0, 3.2.3, AD).
pub const ATTRIBUTE_DEALLOCATE: u32 = 1 << 2;
/// Most ranges of a Dataset Management (NVM command set 1.0, 3.2.3).
pub const MAX_RANGES: usize = 256;

layout! {
    /// A range of Dataset Management (NVM command set 1.0, 3.2.3).
    pub struct DatasetRange: 16 {
        /// Context attributes.
        pub attributes: u32 = 0,
        /// How many blocks.
        pub blocks: u32 = 4,
        /// The first block.
        pub lba: u64 = 8,
    }
}
