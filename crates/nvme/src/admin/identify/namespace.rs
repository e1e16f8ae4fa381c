//! A namespace's data structures (NVM command set 1.0, 4.1.5; NVMe base 2.0, 5.17.2).

use sidecore_spec_nvme::identify;

use crate::Namespace;
use crate::admin::data::STRUCTURE_BYTES;
use crate::bytes::Bytes;
use crate::io::COMPARE_AND_WRITE_BYTES;
use crate::manager::AllocatedNamespace;

/// The sizes of logical blocks that there are, as powers of two: LBA formats 0 and 1.
const LBA_FORMATS: [u8; 2] = [9, 12];

/// A namespace as Identify shows it.
pub(super) struct NamespaceView {
    capacity_bytes: u64,
    block_bytes: u32,
    /// The size of a write that needs no read-modify-write.
    physical_block_bytes: u32,
    nguid: [u8; 16],
    uuid: [u8; 16],
    read_only: bool,
    has_volatile_cache: bool,
    /// Deallocated blocks read as zeros.
    deallocates_to_zeroes: bool,
    write_zeroes: bool,
}

impl From<&Namespace> for NamespaceView {
    fn from(namespace: &Namespace) -> Self {
        let geometry = namespace.store.geometry();
        Self {
            capacity_bytes: geometry.capacity_bytes,
            block_bytes: namespace.block_bytes,
            physical_block_bytes: geometry.physical_block_bytes,
            nguid: namespace.nguid,
            uuid: namespace.uuid,
            read_only: geometry.read_only,
            has_volatile_cache: geometry.volatile_cache,
            deallocates_to_zeroes: geometry.discard && geometry.discard_zeroes,
            write_zeroes: geometry.write_zeroes,
        }
    }
}

impl From<&AllocatedNamespace> for NamespaceView {
    fn from(namespace: &AllocatedNamespace) -> Self {
        Self {
            capacity_bytes: namespace.capacity_bytes,
            block_bytes: namespace.block_bytes,
            physical_block_bytes: namespace.block_bytes,
            nguid: namespace.nguid,
            // Only a namespace that is attached has its descriptors read.
            uuid: [0; 16],
            read_only: namespace.read_only,
            has_volatile_cache: true,
            // Volumes all do.
            deallocates_to_zeroes: !namespace.read_only,
            write_zeroes: !namespace.read_only,
        }
    }
}

/// The LBA format of blocks of this size.
pub(crate) fn format_of(block_bytes: u32) -> u8 {
    if block_bytes >= 4096 { 1 } else { 0 }
}

/// The size of blocks in an LBA format, if there is such a format.
pub(crate) fn block_bytes_of(format: u8) -> Option<u32> {
    LBA_FORMATS.get(usize::from(format)).and_then(|shift| 1_u32.checked_shl((*shift).into()))
}

/// How much Compare and Write do as one (ACWU, NACWU), a 0's based number of blocks of this size.
pub(super) fn compare_and_write_blocks(block_bytes: u32) -> u16 {
    zero_based(COMPARE_AND_WRITE_BYTES.checked_div(block_bytes.into()).unwrap_or(1))
}

/// A 0's based value, as large as it can be.
fn zero_based(count: u64) -> u16 {
    u16::try_from(count.saturating_sub(1)).unwrap_or(u16::MAX)
}

/// The fields that all namespaces have in common: the formats, without metadata.
fn common_fields() -> identify::Namespace {
    let nlbaf = LBA_FORMATS.len().saturating_sub(1) as u8;
    let mut structure = identify::Namespace { nlbaf, ..identify::Namespace::default() };
    for (format, shift) in structure.lbaf.iter_mut().zip(LBA_FORMATS) {
        format.lbads = shift;
    }
    structure
}

/// The fields that namespaces to be created have in common.
pub(super) fn common() -> Vec<u8> {
    common_fields().encode().to_vec()
}

impl NamespaceView {
    /// Identify Namespace.
    pub(super) fn identify(&self) -> Vec<u8> {
        let blocks = self.capacity_bytes.checked_div(self.block_bytes.into()).unwrap_or(0);
        let granularity = self.physical_block_bytes.checked_div(self.block_bytes).unwrap_or(1);
        let granularity = zero_based(granularity.into());
        let structure = identify::Namespace {
            // Not thin, as far as the host is concerned.
            nsze: blocks,
            ncap: blocks,
            nuse: blocks,
            // NACWU and the like are meant (bit 1), NGUIDs are never reused (bit 3), and NPWG and
            // the like say how to write best (bit 4).
            nsfeat: 1 << 1 | 1 << 3 | 1 << 4,
            flbas: format_of(self.block_bytes),
            dlfeat: self.deallocation(),
            // NAWUN and NAWUPF are one block.
            nacwu: compare_and_write_blocks(self.block_bytes),
            nvmcap: self.capacity_bytes.into(),
            npwg: granularity,
            npwa: granularity,
            npdg: granularity,
            npda: granularity,
            nows: granularity,
            nsattr: self.attributes(),
            nguid: self.nguid,
            ..common_fields()
        };
        structure.encode().to_vec()
    }

    /// DLFEAT: deallocated blocks read as zeros (bits 2:0), and Write Zeroes deallocates if it may
    /// (bit 3); or nothing is said.
    fn deallocation(&self) -> u8 {
        if self.deallocates_to_zeroes { 1 | u8::from(self.write_zeroes) << 3 } else { 0 }
    }

    /// NSATTR: whether it is write protected.
    fn attributes(&self) -> u8 {
        self.read_only.into()
    }

    /// Namespace Identification Descriptor list (figure 277): the NGUID, the UUID, and that it is
    /// of the NVM command set.
    pub(super) fn descriptors(&self) -> Vec<u8> {
        const NGUID: u8 = 2;
        const UUID: u8 = 3;
        const COMMAND_SET: u8 = 4;
        let mut list = Vec::new();
        for (kind, identifier) in [(NGUID, self.nguid), (UUID, self.uuid)] {
            if identifier != [0; 16] {
                list.extend([kind, 16, 0, 0]);
                list.extend(identifier);
            }
        }
        list.extend([COMMAND_SET, 1, 0, 0, 0]);
        list
    }

    /// I/O Command Set Independent Identify Namespace (figure 280): it is ready (NSTAT), and has a
    /// write cache or not (NSFEAT, bit 5).
    pub(super) fn independent(&self) -> Vec<u8> {
        let mut structure = Bytes::new(STRUCTURE_BYTES);
        let no_cache = if self.has_volatile_cache { 0 } else { 1 << 5 };
        structure.put(0, &[1 << 3 | no_cache]);
        structure.put(8, &[self.attributes()]);
        structure.put(14, &[1]);
        structure.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(block_bytes: u32) -> NamespaceView {
        NamespaceView {
            capacity_bytes: 1 << 30,
            block_bytes,
            physical_block_bytes: 4096,
            nguid: [7; 16],
            uuid: [8; 16],
            read_only: block_bytes == 4096,
            has_volatile_cache: false,
            deallocates_to_zeroes: false,
            write_zeroes: true,
        }
    }

    #[test]
    fn sizes_are_in_blocks_of_the_format() {
        for (block_bytes, format, write_granularity) in [(512, 0, 7), (4096, 1, 0)] {
            let structure = view(block_bytes).identify();
            assert_eq!(&structure[..8], &((1_u64 << 30) / u64::from(block_bytes)).to_le_bytes());
            assert_eq!((structure[25], structure[26]), (1, format));
            assert_eq!(
                structure[usize::from(format) * 4 + 128 + 2],
                block_bytes.trailing_zeros() as u8
            );
            assert_eq!(structure[64], write_granularity);
            assert_eq!(u16::from(structure[38]) + 1, (65536 / block_bytes) as u16);
            assert_eq!(structure[99], u8::from(block_bytes == 4096));
            assert_eq!(&structure[104..120], &[7; 16]);
            assert_eq!(block_bytes_of(format_of(block_bytes)), Some(block_bytes));
        }
        assert_eq!(block_bytes_of(2), None);
    }

    #[test]
    fn descriptors_name_it_and_its_command_set() {
        let list = view(512).descriptors();
        assert_eq!((&list[..4], &list[20..24]), (&[2, 16, 0, 0][..], &[3, 16, 0, 0][..]));
        assert_eq!(
            (&list[4..20], &list[24..40], &list[40..]),
            (&[7; 16][..], &[8; 16][..], &[4, 1, 0, 0, 0][..])
        );
        let nameless = NamespaceView { nguid: [0; 16], uuid: [0; 16], ..view(512) };
        assert_eq!(nameless.descriptors(), [4, 1, 0, 0, 0]);
    }

    #[test]
    fn it_says_what_deallocated_blocks_read_as() {
        for (deallocates_to_zeroes, write_zeroes, expected) in
            [(false, true, 0), (true, false, 1), (true, true, 0b1001)]
        {
            let view = NamespaceView { deallocates_to_zeroes, write_zeroes, ..view(512) };
            assert_eq!(view.identify()[33], expected);
        }
    }

    #[test]
    fn it_is_ready() {
        let structure = view(512).independent();
        assert_eq!((structure[0], structure[14]), (0b10_1000, 1));
    }
}
