//! vfio-user, the protocol that hands a PCI function to a VMM in another process: QEMU's
//! docs/interop/vfio-user.rst, whose sections are cited here by their titles.
//!
//! The protocol uses the machine's own byte order. The layouts are little-endian, as all machines
//! are that Sidecore runs on.

use sidecore_units::{codes, layout};

const _: () =
    assert!(cfg!(target_endian = "little"), "the layouts below are in the machine's byte order");

/// The major version, which has to be the same at both ends ("VFIO_USER_VERSION").
pub const VERSION_MAJOR: u16 = 0;
/// The minor version, of which the smaller one counts.
pub const VERSION_MINOR: u16 = 1;

/// Header flags: the bits of the message type ("Header").
pub const TYPE_MASK: u32 = 0xf;
/// Message type: a command.
pub const TYPE_COMMAND: u32 = 0;
/// Message type: a reply.
pub const TYPE_REPLY: u32 = 1;
/// Header flags: the sender waits for no reply.
pub const FLAG_NO_REPLY: u32 = 1 << 4;
/// Header flags: the command failed, and the header has an errno value.
pub const FLAG_ERROR: u32 = 1 << 5;

codes! {
    /// The commands of either end ("Commands").
    pub enum Command: u16, "VFIO_USER_", "command" {
        Version = 1 "VERSION",
        DmaMap = 2 "DMA_MAP",
        DmaUnmap = 3 "DMA_UNMAP",
        DeviceGetInfo = 4 "DEVICE_GET_INFO",
        DeviceGetRegionInfo = 5 "DEVICE_GET_REGION_INFO",
        DeviceGetRegionIoFds = 6 "DEVICE_GET_REGION_IO_FDS",
        DeviceGetIrqInfo = 7 "DEVICE_GET_IRQ_INFO",
        DeviceSetIrqs = 8 "DEVICE_SET_IRQS",
        RegionRead = 9 "REGION_READ",
        RegionWrite = 10 "REGION_WRITE",
        DmaRead = 11 "DMA_READ",
        DmaWrite = 12 "DMA_WRITE",
        DeviceReset = 13 "DEVICE_RESET",
        DirtyPages = 14 "DIRTY_PAGES",
        RegionWriteMulti = 15 "REGION_WRITE_MULTI",
        DeviceFeature = 16 "DEVICE_FEATURE",
        MigDataRead = 17 "MIG_DATA_READ",
        MigDataWrite = 18 "MIG_DATA_WRITE",
    }
}

layout! {
    /// The header of a message ("Header").
    pub struct MessageHeader: 16 {
        /// The sender's own; the reply repeats it.
        pub id: u16 = 0,
        /// See [`Command`].
        pub command: u16 = 2,
        /// Size of the message, the header included.
        pub size_bytes: u32 = 4,
        /// Type and flags.
        pub flags: u32 = 8,
        /// An errno value, in an error reply.
        pub errno: u32 = 12,
    }
}

layout! {
    /// The start of a VERSION; JSON follows.
    pub struct VersionHeader: 4 {
        /// [`VERSION_MAJOR`].
        pub major: u16 = 0,
        /// [`VERSION_MINOR`].
        pub minor: u16 = 2,
    }
}

layout! {
    /// DMA_MAP: memory that the device may access; its file comes beside the message, if it has
    /// one.
    pub struct DmaMap: 32 {
        /// Size of this structure.
        pub argsz: u32 = 0,
        /// `vfio::DMA_MAP_FLAG_*`.
        pub flags: u32 = 4,
        /// Where in the file it begins.
        pub offset_bytes: u64 = 8,
        /// Its first address.
        pub address: u64 = 16,
        /// Its size.
        pub len_bytes: u64 = 24,
    }
}

layout! {
    /// DMA_UNMAP: memory that the device may not access any longer.
    pub struct DmaUnmap: 24 {
        /// Room for the reply, which is this structure again.
        pub argsz: u32 = 0,
        /// `vfio::DMA_UNMAP_FLAG_*`.
        pub flags: u32 = 4,
        /// Its first address.
        pub address: u64 = 8,
        /// Its size.
        pub len_bytes: u64 = 16,
    }
}

layout! {
    /// DEVICE_GET_INFO: the device.
    pub struct DeviceInfo: 16 {
        /// Room for the reply; in the reply, what it needs.
        pub argsz: u32 = 0,
        /// `vfio::DEVICE_FLAGS_*`.
        pub flags: u32 = 4,
        /// How many regions there are.
        pub regions: u32 = 8,
        /// How many kinds of interrupts there are.
        pub irqs: u32 = 12,
    }
}

layout! {
    /// DEVICE_GET_REGION_INFO: a region; capabilities may follow.
    pub struct RegionInfoHeader: 32 {
        /// Room for the reply; in the reply, what all of it needs.
        pub argsz: u32 = 0,
        /// `vfio::REGION_INFO_FLAG_*`.
        pub flags: u32 = 4,
        /// Which region.
        pub index: u32 = 8,
        /// Offset of the first capability, or 0.
        pub capability_offset: u32 = 12,
        /// Its size.
        pub len_bytes: u64 = 16,
        /// Where in the file the region would begin.
        pub offset_bytes: u64 = 24,
    }
}

layout! {
    /// The start of any capability of a region.
    pub struct CapabilityHeader: 8 {
        /// Which capability.
        pub id: u16 = 0,
        /// Its version.
        pub version: u16 = 2,
        /// Offset of the next capability, or 0.
        pub next: u32 = 4,
    }
}

layout! {
    /// The start of the sparse-mmap capability of a region; the areas follow.
    pub struct SparseHeader: 16 {
        /// [`vfio::REGION_INFO_CAP_SPARSE_MMAP`](crate::vfio::REGION_INFO_CAP_SPARSE_MMAP).
        pub id: u16 = 0,
        /// 1.
        pub version: u16 = 2,
        /// Offset of the next capability, or 0.
        pub next: u32 = 4,
        /// How many areas follow.
        pub areas: u32 = 8,
    }
}

layout! {
    /// A part of a region that can be mapped.
    pub struct SparseArea: 16 {
        /// Where in the region it begins; in the file, that much behind the region's offset.
        pub offset_bytes: u64 = 0,
        /// Its size.
        pub len_bytes: u64 = 8,
    }
}

layout! {
    /// DEVICE_GET_IRQ_INFO: a kind of interrupts.
    pub struct IrqInfo: 16 {
        /// Room for the reply; in the reply, what it needs.
        pub argsz: u32 = 0,
        /// `vfio::IRQ_INFO_*`.
        pub flags: u32 = 4,
        /// Which kind.
        pub index: u32 = 8,
        /// How many of the kind there are.
        pub count: u32 = 12,
    }
}

layout! {
    /// The start of a DEVICE_SET_IRQS; data may follow, and eventfds come beside the message.
    pub struct IrqSetHeader: 20 {
        /// Size of the payload.
        pub argsz: u32 = 0,
        /// One of `vfio::IRQ_SET_DATA_*` and one of `vfio::IRQ_SET_ACTION_*`.
        pub flags: u32 = 4,
        /// Which kind.
        pub index: u32 = 8,
        /// The first of them.
        pub start: u32 = 12,
        /// How many.
        pub count: u32 = 16,
    }
}

layout! {
    /// The start of a REGION_READ or REGION_WRITE; what is written, or was read, follows.
    pub struct AccessHeader: 16 {
        /// First byte.
        pub offset_bytes: u64 = 0,
        /// Which region.
        pub region: u32 = 8,
        /// How many bytes.
        pub count: u32 = 12,
    }
}
