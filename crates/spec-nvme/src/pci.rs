//! The configuration space of a PCI function (PCI Express base 5.0, 7.5).

/// Size of the configuration space.
pub const CONFIG_BYTES: usize = 4096;
/// Bytes from one base address register to the next.
pub const BAR_BYTES: usize = 4;

/// Offsets in the configuration space (7.5.1).
pub mod offset {
    /// Vendor ID and Device ID.
    pub const ID: usize = 0x00;
    /// Command, and Status in the upper half.
    pub const COMMAND: usize = 0x04;
    /// Revision ID, and Class Code behind it.
    pub const REVISION: usize = 0x08;
    /// Class Code, the programming interface first.
    pub const CLASS: usize = 0x09;
    /// Cache Line Size.
    pub const CACHE_LINE_SIZE: usize = 0x0C;
    /// The first base address register.
    pub const BAR0: usize = 0x10;
    /// Subsystem Vendor ID and Subsystem ID.
    pub const SUBSYSTEM: usize = 0x2C;
    /// Capabilities Pointer.
    pub const CAPABILITIES: usize = 0x34;
    /// Interrupt Line, and Interrupt Pin behind it.
    pub const INTERRUPT_LINE: usize = 0x3C;
}

/// Bits of the Command register (7.5.1.1.3).
pub mod command {
    /// The function answers accesses to its memory.
    pub const MEMORY: u16 = 1 << 1;
    /// The function may access memory.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// Parity Error Response.
    pub const PARITY_ERROR: u16 = 1 << 6;
    /// SERR# Enable.
    pub const SERR: u16 = 1 << 8;
    /// Interrupt Disable.
    pub const INTERRUPT_DISABLE: u16 = 1 << 10;
}

/// Status register, bit 4: there is a list of capabilities (7.5.1.1.4).
pub const STATUS_CAPABILITIES: u16 = 1 << 4;

/// A 64-bit base address register for memory (7.5.1.2.1).
pub const BAR_MEMORY_64: u32 = 0b100;

/// Class Code of an NVM Express I/O controller, as it lies in the configuration space: programming
/// interface, sub-class, base class (PCI Code and ID Assignment 1.11, 1.9).
pub const CLASS_NVME: [u8; 3] = [0x02, 0x08, 0x01];

/// Capability identifiers.
pub mod capability {
    /// Power Management.
    pub const POWER_MANAGEMENT: u8 = 0x01;
    /// MSI.
    pub const MSI: u8 = 0x05;
    /// PCI Express.
    pub const EXPRESS: u8 = 0x10;
    /// MSI-X.
    pub const MSIX: u8 = 0x11;
}
