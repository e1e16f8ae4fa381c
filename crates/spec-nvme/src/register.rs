//! The controller's properties (3.1.3, figure 35) and their fields.

/// Controller Capabilities, 64 bits.
pub const CAP: u64 = 0x00;
/// Version.
pub const VS: u64 = 0x08;
/// Interrupt Mask Set.
pub const INTMS: u64 = 0x0C;
/// Interrupt Mask Clear.
pub const INTMC: u64 = 0x10;
/// Controller Configuration.
pub const CC: u64 = 0x14;
/// Controller Status.
pub const CSTS: u64 = 0x1C;
/// Admin Queue Attributes.
pub const AQA: u64 = 0x24;
/// Admin Submission Queue Base Address, 64 bits.
pub const ASQ: u64 = 0x28;
/// Admin Completion Queue Base Address, 64 bits.
pub const ACQ: u64 = 0x30;
/// Controller Ready Timeouts.
pub const CRTO: u64 = 0x68;
/// The first doorbell (NVMe over PCIe transport 1.0, 3.1.2).
pub const DOORBELLS: u64 = 0x1000;

/// Size of a doorbell, and the least distance between two.
pub const DOORBELL_BYTES: usize = 4;

/// VS of a controller of version 2.0 (3.1.3.2).
pub const VERSION_2_0: u32 = 0x0002_0000;

/// Fields of [`CAP`] (3.1.3.1).
pub mod cap {
    /// Maximum Queue Entries Supported, counted from 0.
    pub const MQES_MASK: u64 = 0xFFFF;
    /// Contiguous Queues Required.
    pub const CQR: u64 = 1 << 16;
    /// Timeout, eight bits, in units of [`TO_MILLIS`].
    pub const TO_SHIFT: u32 = 24;
    /// The unit of the timeout.
    pub const TO_MILLIS: u64 = 500;
    /// Doorbell Stride, four bits: doorbells are 4 << DSTRD bytes apart.
    pub const DSTRD_SHIFT: u32 = 32;
    /// Command Sets Supported: the NVM command set.
    pub const CSS_NVM: u64 = 1 << 37;
    /// Memory Page Size Minimum, four bits: 4 KiB << MPSMIN.
    pub const MPSMIN_SHIFT: u32 = 48;
    /// Controller Ready Modes Supported: Controller Ready With Media.
    pub const CRMS_CRWMS: u64 = 1 << 59;
}

/// Fields of [`CC`] (3.1.3.5).
pub mod cc {
    /// Enable.
    pub const EN: u32 = 1;
    /// I/O Command Set Selected, three bits.
    pub const CSS_SHIFT: u32 = 4;
    /// Memory Page Size, four bits: 4 KiB << MPS.
    pub const MPS_SHIFT: u32 = 7;
    /// Arbitration Mechanism Selected, three bits.
    pub const AMS_SHIFT: u32 = 11;
    /// Shutdown Notification, two bits.
    pub const SHN_SHIFT: u32 = 14;
    /// Shutdown Notification: a normal shutdown.
    pub const SHN_NORMAL: u32 = 0b01;
    /// Shutdown Notification: an abrupt shutdown.
    pub const SHN_ABRUPT: u32 = 0b10;
    /// I/O Submission Queue Entry Size, four bits, log2.
    pub const IOSQES_SHIFT: u32 = 16;
    /// I/O Completion Queue Entry Size, four bits, log2.
    pub const IOCQES_SHIFT: u32 = 20;
}

/// Fields of [`CSTS`] (3.1.3.6).
pub mod csts {
    /// Ready.
    pub const RDY: u32 = 1;
    /// Controller Fatal Status.
    pub const CFS: u32 = 1 << 1;
    /// Shutdown Status, two bits.
    pub const SHST_SHIFT: u32 = 2;
    /// Shutdown Status: processing.
    pub const SHST_OCCURRING: u32 = 0b01;
    /// Shutdown Status: complete.
    pub const SHST_COMPLETE: u32 = 0b10;
}
