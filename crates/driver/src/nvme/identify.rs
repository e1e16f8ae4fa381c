//! Identify data of the controller and of its namespaces (NVMe base 2.0, 5.17; NVM command set 1.0,
//! 4.1.5).

use sidecore_spec_nvme::identify::{self, BYTES as IDENTIFY_BYTES};

/// Identify Controller (CNS 01h).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeControllerInfo {
    /// PCI vendor (VID).
    pub vendor: u16,
    /// Serial number (SN), without trailing spaces.
    pub serial: String,
    /// Model number (MN).
    pub model: String,
    /// Firmware revision (FR).
    pub firmware: String,
    /// The most that a command moves (MDTS), in bytes; 0 for no limit.
    pub max_transfer_bytes: u64,
    /// The controller's number (CNTLID).
    pub id: u16,
    /// The version that it keeps to (VER).
    pub version: u32,
    /// Optional admin commands (OACS).
    pub optional_admin_commands: u16,
    /// The highest namespace number (NN).
    pub namespaces: u32,
    /// Optional commands (ONCS).
    pub optional_commands: u16,
    /// Fused operations (FUSES).
    pub fused_operations: u16,
    /// Volatile write cache (VWC).
    pub volatile_write_cache: u8,
    /// Atomic compare and write unit (ACWU), in blocks, counting from 0.
    pub atomic_compare_and_write: u16,
    /// SGL support (SGLS).
    pub sgl_support: u32,
    /// The subsystem's name (SUBNQN).
    pub subsystem: String,
}

impl NvmeControllerInfo {
    pub(crate) fn parse(raw: &[u8; IDENTIFY_BYTES], min_page_bytes: u64) -> Self {
        let raw = identify::Controller::decode(raw);
        let max_transfer_bytes = match raw.mdts {
            0 => 0,
            log2 => min_page_bytes.checked_shl(log2.into()).unwrap_or(0),
        };
        Self {
            vendor: raw.vid,
            serial: text(&raw.sn),
            model: text(&raw.mn),
            firmware: text(&raw.fr),
            max_transfer_bytes,
            id: raw.cntlid,
            version: raw.ver,
            optional_admin_commands: raw.oacs,
            namespaces: raw.nn,
            optional_commands: raw.oncs,
            fused_operations: raw.fuses,
            volatile_write_cache: raw.vwc,
            atomic_compare_and_write: raw.acwu,
            sgl_support: raw.sgls,
            subsystem: text(&raw.subnqn),
        }
    }
}

/// Identify Namespace (CNS 00h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeNamespaceInfo {
    /// Its number (NSID).
    pub id: u32,
    /// Its size in logical blocks (NSZE).
    pub blocks: u64,
    /// How many of them can be allocated at once (NCAP).
    pub capacity_blocks: u64,
    /// How many are allocated (NUSE).
    pub used_blocks: u64,
    /// The size of a logical block in bytes.
    pub block_bytes: u32,
    /// Bytes of metadata with each block; this driver moves none.
    pub metadata_bytes: u16,
    /// NGUID.
    pub nguid: [u8; 16],
    /// EUI64.
    pub eui64: [u8; 8],
}

impl NvmeNamespaceInfo {
    /// Before the first Identify: NSID 0 is no namespace.
    pub(crate) const NONE: Self = Self {
        id: 0,
        blocks: 0,
        capacity_blocks: 0,
        used_blocks: 0,
        block_bytes: 512,
        metadata_bytes: 0,
        nguid: [0; 16],
        eui64: [0; 8],
    };

    /// `None` if its format makes no sense.
    pub(crate) fn parse(id: u32, raw: &[u8; IDENTIFY_BYTES]) -> Option<Self> {
        let raw = identify::Namespace::decode(raw);
        // FLBAS: bits 3:0, and above 16 formats 6:5 in front of them.
        let index = usize::from(raw.flbas & 0xf) | usize::from(raw.flbas >> 5 & 3) << 4;
        let format = raw.lbaf[index];
        if !(9..=16).contains(&format.lbads) {
            return None;
        }
        Some(Self {
            id,
            blocks: raw.nsze,
            capacity_blocks: raw.ncap,
            used_blocks: raw.nuse,
            block_bytes: 1 << format.lbads,
            metadata_bytes: format.ms,
            nguid: raw.nguid,
            eui64: raw.eui64,
        })
    }

    /// Its size in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes.into())
    }
}

fn text(raw: &[u8]) -> String {
    String::from_utf8_lossy(raw).trim_end_matches([' ', '\0']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_taken_from_its_own_bytes() {
        let mut raw = [0; IDENTIFY_BYTES];
        raw[0..2].copy_from_slice(&0x1234_u16.to_le_bytes());
        raw[4..24].copy_from_slice(b"serial              ");
        raw[24..64].copy_from_slice(b"model                                   ");
        raw[77] = 8;
        raw[516] = 3;
        raw[257] = 1;
        raw[768..775].copy_from_slice(b"nqn.x.y");
        let info = NvmeControllerInfo::parse(&raw, 4096);
        assert_eq!((info.vendor, &info.serial[..], &info.model[..]), (0x1234, "serial", "model"));
        assert_eq!(
            (info.max_transfer_bytes, info.namespaces, &info.subsystem[..]),
            (1 << 20, 3, "nqn.x.y")
        );
        assert_ne!(info.optional_admin_commands & identify::oacs::DOORBELL_BUFFER_CONFIG, 0);
    }

    #[test]
    fn a_namespaces_format_says_how_large_its_blocks_are() {
        let mut raw = [0; IDENTIFY_BYTES];
        raw[0] = 8;
        raw[26] = 1;
        raw[128 + 2] = 9;
        raw[132 + 2] = 12;
        let info = NvmeNamespaceInfo::parse(7, &raw).unwrap();
        assert_eq!((info.id, info.blocks, info.block_bytes, info.len_bytes()), (7, 8, 4096, 32768));
        for nonsense in [0, 8, 17, 255] {
            raw[132 + 2] = nonsense;
            assert!(NvmeNamespaceInfo::parse(7, &raw).is_none());
        }
    }
}
