//! The controller's properties (NVMe base 2.0, 3.1.3).

use std::time::Duration;

/// Where the properties are in BAR0.
pub mod register {
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
    /// The first doorbell.
    pub const DOORBELLS: u64 = 0x1000;
}

/// CC.EN.
pub(crate) const CC_ENABLE: u32 = 1;
/// CC.IOSQES = 6 and CC.IOCQES = 4: commands of 64 bytes, completions of 16.
pub(crate) const CC_ENTRY_SIZES: u32 = 6 << 16 | 4 << 20;
/// CC.SHN: a normal shutdown.
pub(crate) const CC_SHUTDOWN: u32 = 1 << 14;
/// CC.SHN's bits.
pub(crate) const CC_SHUTDOWN_MASK: u32 = 3 << 14;

/// CSTS.RDY.
pub(crate) const CSTS_READY: u32 = 1;
/// CSTS.CFS.
pub(crate) const CSTS_FATAL: u32 = 1 << 1;
/// CSTS.SHST.
pub(crate) const CSTS_SHUTDOWN_MASK: u32 = 3 << 2;
/// CSTS.SHST: shutdown processing is complete.
pub(crate) const CSTS_SHUTDOWN_COMPLETE: u32 = 2 << 2;

/// Controller Capabilities (CAP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeCapabilities(pub u64);

impl NvmeCapabilities {
    /// Most entries of an I/O queue (CAP.MQES, which counts from 0).
    #[must_use]
    pub fn max_entries(self) -> u32 {
        (self.0 & 0xffff) as u32 + 1
    }

    /// How long enabling and disabling may take (CAP.TO).
    #[must_use]
    pub fn timeout(self) -> Duration {
        Duration::from_millis((self.0 >> 24 & 0xff) * 500)
    }

    /// Bytes from one doorbell to the next (CAP.DSTRD).
    #[must_use]
    pub fn doorbell_stride_bytes(self) -> u32 {
        4 << (self.0 >> 32 & 0xf)
    }

    /// The smallest memory page that it can be told to use (CAP.MPSMIN).
    #[must_use]
    pub fn min_page_bytes(self) -> u64 {
        4096 << (self.0 >> 48 & 0xf)
    }

    /// Where in BAR0 the tail doorbell of submission queue `queue` is.
    #[must_use]
    pub fn tail_offset(self, queue: u16) -> u64 {
        register::DOORBELLS + 2 * u64::from(queue) * u64::from(self.doorbell_stride_bytes())
    }

    /// Where in BAR0 the head doorbell of completion queue `queue` is.
    #[must_use]
    pub fn head_offset(self, queue: u16) -> u64 {
        self.tail_offset(queue) + u64::from(self.doorbell_stride_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_standard_has_them() {
        let capabilities = NvmeCapabilities(0x0001_0029_1401_03ff);
        assert_eq!((capabilities.max_entries(), capabilities.timeout()), (1024, Duration::from_secs(10)));
        assert_eq!((capabilities.doorbell_stride_bytes(), capabilities.min_page_bytes()), (2048, 8192));
        assert_eq!((capabilities.tail_offset(0), capabilities.head_offset(0)), (0x1000, 0x1800));
        assert_eq!((capabilities.tail_offset(3), capabilities.head_offset(3)), (0x4000, 0x4800));
        assert_eq!((NvmeCapabilities(0).tail_offset(3), NvmeCapabilities(0).head_offset(3)), (0x1018, 0x101c));
    }
}
