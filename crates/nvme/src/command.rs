//! A submission queue entry (NVMe base 2.0, 3.3.3.1), typed.

use sidecore_spec_nvme::command::{
    COMMAND_BYTES, DATA_POINTER_OFFSET, FUSE_FIRST, FUSE_SECOND, FUSE_SHIFT,
    METADATA_POINTER_OFFSET, PRP_BYTES, PSDT_SGL, PSDT_SGL_WITH_METADATA_SEGMENT, PSDT_SHIFT,
};

/// The 64 bytes of a command: copied from guest memory once, and never read there again.
#[derive(Clone, Copy, Debug)]
pub struct Command([u8; COMMAND_BYTES]);

/// Whether a command is one of two that are executed as one (figure 91, FUSE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fuse {
    /// It stands alone.
    Normal,
    /// The first of two.
    First,
    /// The second of two.
    Second,
    /// The value that is reserved.
    Reserved,
}

/// The type of the data pointer (figure 91, PSDT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointerKind {
    /// Two PRP entries.
    Prp,
    /// An SGL descriptor; the metadata pointer is the address of a buffer.
    Sgl,
    /// An SGL descriptor; the metadata pointer is the address of an SGL segment with one
    /// descriptor.
    SglWithMetadataSegment,
    /// The value that is reserved.
    Reserved,
}

impl Command {
    /// Wraps the bytes of a submission queue entry.
    #[must_use]
    #[inline]
    pub const fn new(bytes: [u8; COMMAND_BYTES]) -> Self {
        Self(bytes)
    }

    /// The submission queue entry.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; COMMAND_BYTES] {
        &self.0
    }

    /// A little-endian field; zero past the end.
    #[inline]
    fn field<const N: usize>(&self, offset: usize) -> [u8; N] {
        self.0.get(offset..).and_then(|rest| rest.first_chunk::<N>()).copied().unwrap_or([0; N])
    }

    /// Dword `index`, 0 to 15.
    #[must_use]
    #[inline]
    pub fn dword(&self, index: usize) -> u32 {
        u32::from_le_bytes(self.field(index.saturating_mul(4)))
    }

    /// OPC.
    #[must_use]
    #[inline]
    pub fn opcode(&self) -> u8 {
        let [opcode] = self.field(0);
        opcode
    }

    /// FUSE.
    #[must_use]
    #[inline]
    pub fn fuse(&self) -> Fuse {
        match self.dword(0) >> FUSE_SHIFT & 0b11 {
            0 => Fuse::Normal,
            FUSE_FIRST => Fuse::First,
            FUSE_SECOND => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// PSDT.
    #[must_use]
    #[inline]
    pub fn pointer_kind(&self) -> PointerKind {
        match self.dword(0) >> PSDT_SHIFT & 0b11 {
            0 => PointerKind::Prp,
            PSDT_SGL => PointerKind::Sgl,
            PSDT_SGL_WITH_METADATA_SEGMENT => PointerKind::SglWithMetadataSegment,
            _ => PointerKind::Reserved,
        }
    }

    /// CID.
    #[must_use]
    #[inline]
    pub fn id(&self) -> u16 {
        u16::from_le_bytes(self.field(2))
    }

    /// NSID.
    #[must_use]
    #[inline]
    pub fn nsid(&self) -> u32 {
        self.dword(1)
    }

    /// MPTR.
    #[must_use]
    pub fn metadata_pointer(&self) -> u64 {
        u64::from_le_bytes(self.field(METADATA_POINTER_OFFSET))
    }

    /// DPTR as PRP entry 1.
    #[must_use]
    #[inline]
    pub fn prp1(&self) -> u64 {
        u64::from_le_bytes(self.field(DATA_POINTER_OFFSET))
    }

    /// DPTR as PRP entry 2.
    #[must_use]
    #[inline]
    pub fn prp2(&self) -> u64 {
        u64::from_le_bytes(self.field(DATA_POINTER_OFFSET + PRP_BYTES))
    }

    /// DPTR as an SGL descriptor.
    #[must_use]
    #[inline]
    pub fn sgl(&self) -> [u8; 16] {
        self.field(24)
    }

    /// Command dword 10.
    #[must_use]
    #[inline]
    pub fn dword10(&self) -> u32 {
        self.dword(10)
    }

    /// Command dword 11.
    #[must_use]
    #[inline]
    pub fn dword11(&self) -> u32 {
        self.dword(11)
    }

    /// Command dword 12.
    #[must_use]
    #[inline]
    pub fn dword12(&self) -> u32 {
        self.dword(12)
    }

    /// Command dword 13.
    #[must_use]
    pub fn dword13(&self) -> u32 {
        self.dword(13)
    }

    /// Command dword 14.
    #[must_use]
    pub fn dword14(&self) -> u32 {
        self.dword(14)
    }

    /// Command dword 15.
    #[must_use]
    pub fn dword15(&self) -> u32 {
        self.dword(15)
    }

    /// Command dwords 10 and 11 as one number: SLBA of commands that read and write.
    #[must_use]
    #[inline]
    pub fn qword10(&self) -> u64 {
        u64::from_le_bytes(self.field(40))
    }

    /// A command of zeros but for its opcode, identifier and namespace, to be filled in.
    #[must_use]
    pub fn build(opcode: u8, id: u16, nsid: u32) -> Self {
        Self([0; COMMAND_BYTES])
            .with(0, &[opcode])
            .with(2, &id.to_le_bytes())
            .with(4, &nsid.to_le_bytes())
    }

    /// The same with PRP entries 1 and 2.
    #[must_use]
    pub fn with_prps(self, prp1: u64, prp2: u64) -> Self {
        self.with(24, &prp1.to_le_bytes()).with(32, &prp2.to_le_bytes())
    }

    /// The same with another dword `index`, 0 to 15.
    #[must_use]
    pub fn with_dword(self, index: usize, value: u32) -> Self {
        self.with(index.saturating_mul(4), &value.to_le_bytes())
    }

    fn with(mut self, offset: usize, bytes: &[u8]) -> Self {
        if let Some(field) = self.0.get_mut(offset..offset.saturating_add(bytes.len())) {
            field.copy_from_slice(bytes);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_figure_91_has_them() {
        let mut bytes = [0_u8; COMMAND_BYTES];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = index as u8;
        }
        let command = Command::new(bytes);
        assert_eq!(command.opcode(), 0);
        assert_eq!(command.id(), 0x0302);
        assert_eq!(command.nsid(), 0x0706_0504);
        assert_eq!(command.metadata_pointer(), 0x1716_1514_1312_1110);
        assert_eq!(command.prp1(), 0x1F1E_1D1C_1B1A_1918);
        assert_eq!(command.prp2(), 0x2726_2524_2322_2120);
        assert_eq!(command.sgl()[0], 0x18);
        assert_eq!(command.dword10(), 0x2B2A_2928);
        assert_eq!(command.dword15(), 0x3F3E_3D3C);
        assert_eq!(command.qword10(), 0x2F2E_2D2C_2B2A_2928);
        assert_eq!(command.dword(16), 0, "there is none");
    }

    #[test]
    fn flags_are_read_out_of_dword_0() {
        let with_flags =
            |flags: u32| Command::build(2, 7, 1).with_dword(0, 2 | flags << 8 | 7 << 16);
        assert_eq!(with_flags(0).fuse(), Fuse::Normal);
        assert_eq!(with_flags(1).fuse(), Fuse::First);
        assert_eq!(with_flags(2).fuse(), Fuse::Second);
        assert_eq!(with_flags(3).fuse(), Fuse::Reserved);
        assert_eq!(with_flags(0).pointer_kind(), PointerKind::Prp);
        assert_eq!(with_flags(1 << 6).pointer_kind(), PointerKind::Sgl);
        assert_eq!(with_flags(2 << 6).pointer_kind(), PointerKind::SglWithMetadataSegment);
        assert_eq!(with_flags(3 << 6).pointer_kind(), PointerKind::Reserved);
        assert_eq!(with_flags(3).id(), 7);
    }
}
