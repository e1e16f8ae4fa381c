//! Numbers and layouts of NVMe, of PCI and of vfio-user, shared by controllers, drivers and tests.
//!
//! Nothing here acts: constants, and the encoding of structures with fixed fields. Clauses and
//! figures in the documentation are those of the NVM Express base specification 2.0, except where
//! another is named. A wrong number here is wrong on both sides of a connection and thus not found
//! by running them against each other, so the tests compare each with the kernel's headers, or with
//! the specification's tables.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

pub mod command;
pub mod identify;
pub mod opcode;
pub mod pci;
pub mod register;
pub mod status;
pub mod vfio;
pub mod vfio_user;

/// Identifiers of log pages (figure 201).
pub mod log_page {
    /// Supported Log Pages.
    pub const SUPPORTED_LOG_PAGES: u8 = 0x00;
    /// Error Information.
    pub const ERROR_INFORMATION: u8 = 0x01;
    /// SMART / Health Information.
    pub const HEALTH: u8 = 0x02;
    /// Firmware Slot Information.
    pub const FIRMWARE_SLOT: u8 = 0x03;
    /// Changed Namespace List.
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    /// Commands Supported and Effects.
    pub const COMMANDS_SUPPORTED: u8 = 0x05;
    /// Feature Identifiers Supported and Effects.
    pub const FEATURES_SUPPORTED: u8 = 0x12;
    /// NVMe-MI Commands Supported and Effects.
    pub const MANAGEMENT_SUPPORTED: u8 = 0x13;
}

/// Feature identifiers (figure 316).
pub mod feature {
    /// Arbitration.
    pub const ARBITRATION: u8 = 0x01;
    /// Power Management.
    pub const POWER_MANAGEMENT: u8 = 0x02;
    /// Temperature Threshold.
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    /// Error Recovery (NVM command set 1.0, 4.1.3.2).
    pub const ERROR_RECOVERY: u8 = 0x05;
    /// Volatile Write Cache.
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    /// Number of Queues.
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    /// Interrupt Coalescing.
    pub const INTERRUPT_COALESCING: u8 = 0x08;
    /// Interrupt Vector Configuration.
    pub const INTERRUPT_VECTOR: u8 = 0x09;
    /// Write Atomicity Normal (NVM command set 1.0, 4.1.3.3).
    pub const WRITE_ATOMICITY: u8 = 0x0A;
    /// Asynchronous Event Configuration.
    pub const ASYNCHRONOUS_EVENTS: u8 = 0x0B;
    /// Keep Alive Timer.
    pub const KEEP_ALIVE_TIMER: u8 = 0x0F;
}
