//! The log pages that say what is supported: log pages, commands with their effects, features.

use sidecore_spec_nvme::opcode::{admin as opcode, nvm};

use crate::admin::MANDATORY;
use crate::admin::features::FEATURES;
use crate::admin::log::LOG_PAGES;
use crate::bytes::Bytes;

/// Bits of a command's entry (figure 211).
mod effect {
    /// CSUPP.
    pub const SUPPORTED: u32 = 1;
    /// LBCC: it may change what is in a namespace.
    pub const CONTENT: u32 = 1 << 1;
    /// NCC: it may change what a namespace can do.
    pub const CAPABILITIES: u32 = 1 << 2;
    /// NIC: it may change how many namespaces there are, or where they are attached.
    pub const INVENTORY: u32 = 1 << 3;
}

/// I/O commands of the NVM command set that are served, and their effects (NVM command set 1.0, 3.2
/// and 3.3).
const IO_COMMANDS: [(u8, u32); 7] = [
    (nvm::FLUSH, effect::SUPPORTED),
    (nvm::WRITE, effect::SUPPORTED | effect::CONTENT),
    (nvm::READ, effect::SUPPORTED),
    (nvm::COMPARE, effect::SUPPORTED),
    (nvm::WRITE_ZEROES, effect::SUPPORTED | effect::CONTENT),
    (nvm::DATASET_MANAGEMENT, effect::SUPPORTED | effect::CONTENT),
    (nvm::VERIFY, effect::SUPPORTED),
];

/// Supported Log Pages (figure 203): LSUPP in bit 0 of a dword for each.
pub(crate) fn log_pages_supported() -> Vec<u8> {
    let mut page = Bytes::new(1024);
    for log_page in LOG_PAGES {
        page.put(usize::from(log_page).saturating_mul(4), &[1]);
    }
    page.into()
}

/// Commands Supported and Effects (figure 210): a dword for each admin command, and then for each
/// I/O command.
pub(crate) fn commands_supported(is_managed: bool, has_doorbell_buffer: bool) -> Vec<u8> {
    let mut page = Bytes::new(4096);
    let mut admin = |opcode: u8, effects: u32| {
        page.put(usize::from(opcode).saturating_mul(4), &effects.to_le_bytes())
    };
    for opcode in MANDATORY {
        admin(opcode, effect::SUPPORTED);
    }
    if has_doorbell_buffer {
        admin(opcode::DOORBELL_BUFFER_CONFIG, effect::SUPPORTED);
    }
    if is_managed {
        admin(opcode::NAMESPACE_MANAGEMENT, effect::SUPPORTED | effect::INVENTORY);
        admin(
            opcode::NAMESPACE_ATTACHMENT,
            effect::SUPPORTED | effect::INVENTORY | effect::CAPABILITIES,
        );
        admin(opcode::VIRTUALIZATION_MANAGEMENT, effect::SUPPORTED);
    }
    for (opcode, effects) in IO_COMMANDS {
        page.put(
            usize::from(opcode).saturating_mul(4).saturating_add(1024),
            &effects.to_le_bytes(),
        );
    }
    page.into()
}

/// Feature Identifiers Supported and Effects (figure 256): FSUPP in bit 0, the scope in bits 31:20
/// (controller or namespace).
pub(crate) fn features_supported() -> Vec<u8> {
    const NAMESPACE_SCOPE: u32 = 1 << 20;
    const CONTROLLER_SCOPE: u32 = 1 << 21;
    let mut page = Bytes::new(1024);
    for (feature, capabilities) in FEATURES {
        let scope = if capabilities & 0b10 != 0 { NAMESPACE_SCOPE } else { CONTROLLER_SCOPE };
        page.put(usize::from(*feature).saturating_mul(4), &(1 | scope).to_le_bytes());
    }
    page.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dword(page: &[u8], index: usize) -> u32 {
        u32::from_le_bytes(page[index * 4..][..4].try_into().unwrap())
    }

    #[test]
    fn a_virtual_function_manages_nothing() {
        let managed = commands_supported(true, false);
        let plain = commands_supported(false, true);
        for opcode in [0x0D, 0x15, 0x1C] {
            assert_eq!((dword(&managed, opcode) & 1, dword(&plain, opcode)), (1, 0), "{opcode:#x}");
        }
        assert_eq!((dword(&managed, 0x7C), dword(&plain, 0x7C)), (0, 1));
        for refused in [0x10, 0x11, 0x14, 0x80, 0x84] {
            assert_eq!(dword(&managed, refused), 0, "{refused:#x}");
        }
        assert_eq!(dword(&plain, 256 + 1), 0b11, "Write changes contents");
    }

    #[test]
    fn pages_and_features_are_listed() {
        let pages = log_pages_supported();
        assert_eq!((dword(&pages, 2), dword(&pages, 6)), (1, 0));
        let features = features_supported();
        assert_eq!(dword(&features, 5), 1 | 1 << 20);
        assert_eq!(dword(&features, 7), 1 | 1 << 21);
        assert_eq!(dword(&features, 0x10), 0);
    }
}
