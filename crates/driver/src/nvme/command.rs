//! The 64 bytes of a command (NVMe base 2.0, 3.3.3.1).

/// Opcodes of admin commands.
pub mod admin_opcode {
    /// Delete I/O Submission Queue.
    pub const DELETE_SUBMISSION_QUEUE: u8 = 0x00;
    /// Create I/O Submission Queue.
    pub const CREATE_SUBMISSION_QUEUE: u8 = 0x01;
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O Completion Queue.
    pub const DELETE_COMPLETION_QUEUE: u8 = 0x04;
    /// Create I/O Completion Queue.
    pub const CREATE_COMPLETION_QUEUE: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0A;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
    /// Namespace Management.
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0D;
    /// Namespace Attachment.
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    /// Virtualization Management.
    pub const VIRTUALIZATION_MANAGEMENT: u8 = 0x1C;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER_CONFIG: u8 = 0x7C;
}

/// Opcodes of the NVM command set's commands.
pub mod io_opcode {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0C;
}

/// The first of two fused commands.
pub(crate) const FUSE_FIRST: u32 = 1 << 8;
/// The second of two fused commands.
pub(crate) const FUSE_SECOND: u32 = 2 << 8;
/// PSDT: the data pointer is an SGL descriptor.
const SGL: u32 = 1 << 14;
/// An SGL data block descriptor's type, in its last byte.
const DATA_BLOCK: u32 = 0x00 << 28;
/// An SGL last segment descriptor's.
const LAST_SEGMENT: u32 = 0x03 << 28;

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
        self.qword(6, first).qword(8, second)
    }

    /// With an SGL data block descriptor as its data pointer.
    #[must_use]
    #[inline]
    pub const fn sgl_data(self, address: u64, len_bytes: u32) -> Self {
        self.flags(SGL).qword(6, address).dword(8, len_bytes).dword(9, DATA_BLOCK)
    }

    /// With an SGL last segment descriptor as its data pointer: `len_bytes` of descriptors at `address`.
    #[must_use]
    #[inline]
    pub const fn sgl_segment(self, address: u64, len_bytes: u32) -> Self {
        self.flags(SGL).qword(6, address).dword(8, len_bytes).dword(9, LAST_SEGMENT)
    }

    /// With a range of logical blocks: `blocks` from `lba` on. The field counts from 0 and has 16 bits.
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
    pub fn bytes(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        let (chunks, _) = bytes.as_chunks_mut::<4>();
        for (chunk, dword) in chunks.iter_mut().zip(self.0) {
            *chunk = dword.to_le_bytes();
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
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
            std::array::from_fn::<u8, 16, _>(|at| if at < 8 { 0x11 + at as u8 } else { 0x19 + at as u8 })
        );
        assert_eq!(bytes[40..50], [0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38, 7, 0]);
        let bytes = NvmeCommand::new(1, 1).sgl_data(0x1000, 512).bytes();
        assert_eq!((bytes[1], bytes[25], bytes[33], bytes[39]), (0x40, 0x10, 2, 0));
        assert_eq!(NvmeCommand::new(1, 1).sgl_segment(0x1000, 32).bytes()[39], 0x30);
    }
}
