//! The 64 bytes of a command (NVMe base 2.0, 3.3.3.1).

use sidecore_spec_nvme::command::{
    COMMAND_BYTES, DATA_POINTER_OFFSET, FUSE_FIRST, FUSE_SECOND, FUSE_SHIFT, PRP_BYTES, PSDT_SGL,
    PSDT_SHIFT, sgl,
};

/// Dword 0 of the first of two fused commands.
pub(crate) const FUSED_FIRST: u32 = FUSE_FIRST << FUSE_SHIFT;
/// Dword 0 of the second of two fused commands.
pub(crate) const FUSED_SECOND: u32 = FUSE_SECOND << FUSE_SHIFT;
/// Dword 0: the data pointer is an SGL descriptor.
const SGL: u32 = PSDT_SGL << PSDT_SHIFT;

/// The dword at which the data pointer begins.
const DATA_POINTER: usize = DATA_POINTER_OFFSET / 4;

/// The last dword of an SGL descriptor of this type.
const fn sgl_type(kind: u8) -> u32 {
    (kind as u32) << 28
}

/// A command, as sixteen dwords. Any is possible: for tests, those that make no sense too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeCommand(pub [u32; 16]);

impl NvmeCommand {
    /// A command for namespace `nsid` with nothing else in it.
    #[must_use]
    #[inline]
    pub const fn new(opcode: u8, nsid: u32) -> Self {
        let mut dwords = [0; 16];
        dwords[0] = opcode as u32;
        dwords[1] = nsid;
        Self(dwords)
    }

    /// With dword `index` (0 to 15) as it is given.
    #[must_use]
    #[inline]
    pub const fn dword(mut self, index: usize, value: u32) -> Self {
        self.0[index & 15] = value;
        self
    }

    /// With these bits of dword 0 set as well.
    #[must_use]
    #[inline]
    pub const fn flags(mut self, bits: u32) -> Self {
        self.0[0] |= bits;
        self
    }

    /// With two PRP entries as its data pointer.
    #[must_use]
    #[inline]
    pub const fn prp(self, first: u64, second: u64) -> Self {
        self.qword(DATA_POINTER, first).qword(DATA_POINTER + PRP_BYTES / 4, second)
    }

    /// With an SGL data block descriptor as its data pointer.
    #[must_use]
    #[inline]
    pub const fn sgl_data(self, address: u64, len_bytes: u32) -> Self {
        self.flags(SGL)
            .qword(DATA_POINTER, address)
            .dword(DATA_POINTER + 2, len_bytes)
            .dword(DATA_POINTER + 3, sgl_type(sgl::DATA_BLOCK))
    }

    /// With an SGL last segment descriptor as its data pointer: `len_bytes` of descriptors at
    /// `address`.
    #[must_use]
    #[inline]
    pub const fn sgl_segment(self, address: u64, len_bytes: u32) -> Self {
        self.flags(SGL)
            .qword(DATA_POINTER, address)
            .dword(DATA_POINTER + 2, len_bytes)
            .dword(DATA_POINTER + 3, sgl_type(sgl::LAST_SEGMENT))
    }

    /// With a range of logical blocks: `blocks` from `lba` on. The field counts from 0 and has 16
    /// bits.
    #[must_use]
    #[inline]
    pub const fn blocks(self, lba: u64, blocks: u32) -> Self {
        let count = blocks.wrapping_sub(1) & 0xffff;
        self.qword(10, lba).dword(12, count)
    }

    /// With `id` as its identifier (CID).
    #[must_use]
    #[inline]
    pub const fn id(mut self, id: u16) -> Self {
        self.0[0] = self.0[0] & 0xffff | (id as u32) << 16;
        self
    }

    const fn qword(mut self, index: usize, value: u64) -> Self {
        self.0[index] = value as u32;
        self.0[index + 1] = (value >> 32) as u32;
        self
    }

    /// The entry, as it lies in memory.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> [u8; COMMAND_BYTES] {
        let mut bytes = [0; COMMAND_BYTES];
        let (chunks, _) = bytes.as_chunks_mut::<4>();
        for (chunk, dword) in chunks.iter_mut().zip(self.0) {
            *chunk = dword.to_le_bytes();
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use sidecore_spec_nvme::opcode::nvm as io_opcode;

    use super::*;

    #[test]
    fn fields_are_where_the_standard_has_them() {
        let command = NvmeCommand::new(io_opcode::READ, 0x0403_0201)
            .prp(0x1817_1615_1413_1211, 0x2827_2625_2423_2221)
            .blocks(0x3837_3635_3433_3231, 8)
            .id(0xaabb);
        let bytes = command.bytes();
        assert_eq!(bytes[0..8], [2, 0, 0xbb, 0xaa, 1, 2, 3, 4]);
        assert_eq!(
            bytes[24..40],
            std::array::from_fn::<u8, 16, _>(|at| if at < 8 {
                0x11 + at as u8
            } else {
                0x19 + at as u8
            })
        );
        assert_eq!(bytes[40..50], [0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38, 7, 0]);
        let bytes = NvmeCommand::new(1, 1).sgl_data(0x1000, 512).bytes();
        assert_eq!((bytes[1], bytes[25], bytes[33], bytes[39]), (0x40, 0x10, 2, 0));
        assert_eq!(NvmeCommand::new(1, 1).sgl_segment(0x1000, 32).bytes()[39], 0x30);
    }
}
