//! Identify (5.17): which structure, and the structures that controllers and drivers share.

use sidecore_units::layout;

/// Size of each structure.
pub const BYTES: usize = 4096;

/// Controller or Namespace Structure (figure 273).
pub mod cns {
    /// Identify Namespace.
    pub const NAMESPACE: u8 = 0x00;
    /// Identify Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active Namespace ID list.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace Identification Descriptor list.
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    /// I/O command set specific Identify Namespace.
    pub const COMMAND_SET_NAMESPACE: u8 = 0x05;
    /// I/O command set specific Identify Controller.
    pub const COMMAND_SET_CONTROLLER: u8 = 0x06;
    /// I/O command set specific Active Namespace ID list.
    pub const COMMAND_SET_ACTIVE_NAMESPACES: u8 = 0x07;
    /// I/O command set independent Identify Namespace.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    /// Allocated Namespace ID list.
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    /// Identify Namespace of an allocated namespace.
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    /// Controllers that a namespace is attached to.
    pub const ATTACHED_CONTROLLERS: u8 = 0x12;
    /// Controllers of the subsystem.
    pub const CONTROLLERS: u8 = 0x13;
    /// Primary Controller Capabilities.
    pub const PRIMARY_CAPABILITIES: u8 = 0x14;
    /// Secondary Controller list.
    pub const SECONDARY_CONTROLLERS: u8 = 0x15;
    /// I/O command set specific Allocated Namespace ID list.
    pub const COMMAND_SET_ALLOCATED_NAMESPACES: u8 = 0x1A;
    /// I/O command set specific Identify Namespace of an allocated namespace.
    pub const COMMAND_SET_ALLOCATED_NAMESPACE: u8 = 0x1B;
}

/// Optional Admin Command Support, [`Controller::oacs`].
pub mod oacs {
    /// Namespace Management and Namespace Attachment.
    pub const NAMESPACE_MANAGEMENT: u16 = 1 << 3;
    /// Virtualization Management.
    pub const VIRTUALIZATION_MANAGEMENT: u16 = 1 << 7;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER_CONFIG: u16 = 1 << 8;
}

/// [`Controller::cntrltype`] of an I/O controller.
pub const IO_CONTROLLER: u8 = 1;

/// Bits of [`Controller::sgls`] that say whether SGLs are supported at all.
pub const SGLS_SUPPORTED_MASK: u32 = 0b11;

layout! {
    /// Identify Controller (figure 275). The fields have the specification's names.
    pub struct Controller: 4096 {
        /// PCI Vendor ID.
        pub vid: u16 = 0,
        /// PCI Subsystem Vendor ID.
        pub ssvid: u16 = 2,
        /// Serial number, in ASCII, padded with spaces.
        pub sn: [u8; 20] = 4,
        /// Model number, in ASCII, padded with spaces.
        pub mn: [u8; 40] = 24,
        /// Firmware revision, in ASCII, padded with spaces.
        pub fr: [u8; 8] = 64,
        /// Controller Multi-path I/O and Namespace Sharing Capabilities.
        pub cmic: u8 = 76,
        /// Maximum Data Transfer Size: log2, in units of CAP.MPSMIN; 0 for no limit.
        pub mdts: u8 = 77,
        /// Controller ID.
        pub cntlid: u16 = 78,
        /// Version, as the property VS has it.
        pub ver: u32 = 80,
        /// Optional Asynchronous Events Supported.
        pub oaes: u32 = 92,
        /// Controller Type.
        pub cntrltype: u8 = 111,
        /// Optional Admin Command Support.
        pub oacs: u16 = 256,
        /// Abort Command Limit, counted from 0.
        pub acl: u8 = 258,
        /// Asynchronous Event Request Limit, counted from 0.
        pub aerl: u8 = 259,
        /// Firmware Updates.
        pub frmw: u8 = 260,
        /// Log Page Attributes.
        pub lpa: u8 = 261,
        /// Error Log Page Entries, counted from 0.
        pub elpe: u8 = 262,
        /// Warning Composite Temperature Threshold, in kelvins.
        pub wctemp: u16 = 266,
        /// Critical Composite Temperature Threshold, in kelvins.
        pub cctemp: u16 = 268,
        /// Total NVM Capacity, in bytes.
        pub tnvmcap: u128 = 280,
        /// Unallocated NVM Capacity, in bytes.
        pub unvmcap: u128 = 296,
        /// Keep Alive Support: the timer's granularity, in units of 100 ms.
        pub kas: u16 = 320,
        /// Submission Queue Entry Size: log2, the least in bits 3:0 and the most in bits 7:4.
        pub sqes: u8 = 512,
        /// Completion Queue Entry Size: log2, as in `sqes`.
        pub cqes: u8 = 513,
        /// Number of Namespaces: the highest NSID.
        pub nn: u32 = 516,
        /// Optional NVM Command Support.
        pub oncs: u16 = 520,
        /// Fused Operation Support.
        pub fuses: u16 = 522,
        /// Volatile Write Cache.
        pub vwc: u8 = 525,
        /// Atomic Compare & Write Unit in blocks, counted from 0.
        pub acwu: u16 = 532,
        /// SGL Support.
        pub sgls: u32 = 536,
        /// Maximum Number of Allowed Namespaces.
        pub mnan: u32 = 540,
        /// NVM Subsystem NVMe Qualified Name, in UTF-8, ended by a zero.
        pub subnqn: [u8; 256] = 768,
    }
}

layout! {
    /// An LBA format (NVM command set 1.0, 4.1.5).
    pub struct LbaFormat: 4 {
        /// Metadata Size in bytes.
        pub ms: u16 = 0,
        /// LBA Data Size: log2 of the bytes of a block.
        pub lbads: u8 = 2,
        /// Relative Performance.
        pub rp: u8 = 3,
    }
}

layout! {
    /// Identify Namespace (NVM command set 1.0, 4.1.5). The fields have the specification's names.
    pub struct Namespace: 4096 {
        /// Namespace Size in blocks.
        pub nsze: u64 = 0,
        /// Namespace Capacity in blocks.
        pub ncap: u64 = 8,
        /// Namespace Utilization in blocks.
        pub nuse: u64 = 16,
        /// Namespace Features.
        pub nsfeat: u8 = 24,
        /// Number of LBA Formats, counted from 0.
        pub nlbaf: u8 = 25,
        /// Formatted LBA Size: which format, low bits in 3:0 and high bits in 6:5.
        pub flbas: u8 = 26,
        /// Deallocate Logical Block Features.
        pub dlfeat: u8 = 33,
        /// Namespace Atomic Compare & Write Unit in blocks, counted from 0.
        pub nacwu: u16 = 38,
        /// NVM Capacity in bytes.
        pub nvmcap: u128 = 48,
        /// Namespace Preferred Write Granularity in blocks, counted from 0.
        pub npwg: u16 = 64,
        /// Namespace Preferred Write Alignment in blocks, counted from 0.
        pub npwa: u16 = 66,
        /// Namespace Preferred Deallocate Granularity in blocks, counted from 0.
        pub npdg: u16 = 68,
        /// Namespace Preferred Deallocate Alignment in blocks, counted from 0.
        pub npda: u16 = 70,
        /// Namespace Optimal Write Size in blocks, counted from 0.
        pub nows: u16 = 72,
        /// Namespace Attributes.
        pub nsattr: u8 = 99,
        /// Namespace Globally Unique Identifier.
        pub nguid: [u8; 16] = 104,
        /// IEEE Extended Unique Identifier.
        pub eui64: [u8; 8] = 120,
        /// The LBA formats.
        pub lbaf: [LbaFormat; 64] = 128,
    }
}
