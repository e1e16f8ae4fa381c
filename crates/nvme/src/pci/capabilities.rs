//! The capabilities in the configuration space (NVMe over PCIe transport 1.0, 3.8; PCI Express base
//! 5.0, 7.5 and 7.7).

use sidecore_spec_nvme::pci::capability;

use crate::pci::Interrupts;
use crate::pci::bar::{MSIX_BAR, PENDING_OFFSET, TABLE_OFFSET};

/// Where the list of capabilities begins.
pub(super) const FIRST: u8 = POWER;
/// PCI Power Management.
const POWER: u8 = 0x40;
/// MSI-X, or MSI.
const MESSAGES: u8 = 0x50;
/// PCI Express.
const EXPRESS: u8 = 0x60;

/// Where the Device Control register is, whose bit 15 resets the function.
pub(super) const DEVICE_CONTROL: usize = EXPRESS as usize + 8;

/// A register of a capability: its offset, its value after a reset, and which of its bits can be
/// written.
pub(super) struct Field {
    pub offset: usize,
    pub value: u32,
    pub writable: u32,
}

const fn field(offset: u8, value: u32, writable: u32) -> Field {
    Field { offset: offset as usize, value, writable }
}

/// All of them, in dwords.
pub(super) fn fields(interrupts: Interrupts) -> Vec<Field> {
    let mut fields = vec![
        // Version 3, and no power management events. In PMCSR the power state can be written (D0
        // and D3hot are all there are), and going back to D0 resets nothing.
        field(POWER, 0x0003_0000 | (MESSAGES as u32) << 8 | capability::POWER_MANAGEMENT as u32, 0),
        field(POWER + 4, 1 << 3, 0b11),
        // The last capability; version 2, an endpoint.
        field(EXPRESS, 0x0002_0000 | capability::EXPRESS as u32, 0),
        // Device Capabilities: role-based error reporting, function level reset.
        field(EXPRESS + 0x04, 1 << 15 | 1 << 28, 0),
        // Device Control: error reporting, relaxed ordering, sizes, no snoop. Bit 15 reads as zero.
        field(EXPRESS + 0x08, 0x2810, 0x78FF),
        // Link Capabilities, Link Control and Status: 2.5 GT/s, one lane.
        field(EXPRESS + 0x0C, 0x11, 0),
        field(EXPRESS + 0x10, 0x11 << 16, 0x0FFB),
        field(EXPRESS + 0x24, 0, 0),
        field(EXPRESS + 0x28, 0, 0x041F),
        // Link Capabilities 2: 2.5 GT/s; Link Control 2 has it as the target.
        field(EXPRESS + 0x2C, 1 << 1, 0),
        field(EXPRESS + 0x30, 1, 0),
        field(EXPRESS + 0x34, 0, 0),
    ];
    fields.extend(messages(interrupts));
    fields
}

/// The capability that interrupts come from.
fn messages(interrupts: Interrupts) -> Vec<Field> {
    let vectors = u32::from(interrupts.vectors());
    let next = (EXPRESS as u32) << 8;
    match interrupts {
        Interrupts::MsiX => vec![
            // MSI-X Enable and Function Mask can be written.
            field(
                MESSAGES,
                u32::from(capability::MSIX) | next | (vectors.saturating_sub(1) & 0x7FF) << 16,
                0xC000_0000,
            ),
            field(MESSAGES + 4, TABLE_OFFSET as u32 | MSIX_BAR as u32, 0),
            field(MESSAGES + 8, PENDING_OFFSET as u32 | MSIX_BAR as u32, 0),
        ],
        Interrupts::Msi => vec![
            // 64-bit addresses, no mask of each vector. MSI Enable can be written, and how many
            // vectors (a power of two) are enabled.
            field(
                MESSAGES,
                u32::from(capability::MSI) | next | vectors.trailing_zeros() << 17 | 1 << 23,
                0x0071_0000,
            ),
            // The message's address and its data.
            field(MESSAGES + 4, 0, !0b11),
            field(MESSAGES + 8, 0, u32::MAX),
            field(MESSAGES + 12, 0, 0xFFFF),
        ],
    }
}
