//! The controller's properties (NVMe base 2.0, 3.1.3).

use std::time::Duration;

use sidecore_spec_nvme::command::{COMMAND_BYTES_LOG2, COMPLETION_BYTES_LOG2};
use sidecore_spec_nvme::register::{self, cap, cc, csts};

/// CC.IOSQES and CC.IOCQES: commands of 64 bytes, completions of 16.
pub(crate) const CC_ENTRY_SIZES: u32 =
    COMMAND_BYTES_LOG2 << cc::IOSQES_SHIFT | COMPLETION_BYTES_LOG2 << cc::IOCQES_SHIFT;
/// CC.SHN: a normal shutdown.
pub(crate) const CC_SHUTDOWN: u32 = cc::SHN_NORMAL << cc::SHN_SHIFT;
/// CC.SHN's bits.
pub(crate) const CC_SHUTDOWN_MASK: u32 = 0b11 << cc::SHN_SHIFT;

/// CSTS.SHST's bits.
pub(crate) const CSTS_SHUTDOWN_MASK: u32 = 0b11 << csts::SHST_SHIFT;
/// CSTS.SHST: shutdown processing is complete.
pub(crate) const CSTS_SHUTDOWN_COMPLETE: u32 = csts::SHST_COMPLETE << csts::SHST_SHIFT;

/// Controller Capabilities (CAP).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeCapabilities(pub u64);

impl NvmeCapabilities {
    /// Most entries of an I/O queue (CAP.MQES, which counts from 0).
    #[must_use]
    pub fn max_entries(self) -> u32 {
        (self.0 & cap::MQES_MASK) as u32 + 1
    }

    /// How long enabling and disabling may take (CAP.TO).
    #[must_use]
    pub fn timeout(self) -> Duration {
        Duration::from_millis((self.0 >> cap::TO_SHIFT & 0xff) * cap::TO_MILLIS)
    }

    /// Bytes from one doorbell to the next (CAP.DSTRD).
    #[must_use]
    pub fn doorbell_stride_bytes(self) -> u32 {
        (register::DOORBELL_BYTES as u32) << (self.0 >> cap::DSTRD_SHIFT & 0xf)
    }

    /// The smallest memory page that it can be told to use (CAP.MPSMIN).
    #[must_use]
    pub fn min_page_bytes(self) -> u64 {
        4096 << (self.0 >> cap::MPSMIN_SHIFT & 0xf)
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
        assert_eq!(
            (capabilities.max_entries(), capabilities.timeout()),
            (1024, Duration::from_secs(10))
        );
        assert_eq!(
            (capabilities.doorbell_stride_bytes(), capabilities.min_page_bytes()),
            (2048, 8192)
        );
        assert_eq!((capabilities.tail_offset(0), capabilities.head_offset(0)), (0x1000, 0x1800));
        assert_eq!((capabilities.tail_offset(3), capabilities.head_offset(3)), (0x4000, 0x4800));
        assert_eq!(
            (NvmeCapabilities(0).tail_offset(3), NvmeCapabilities(0).head_offset(3)),
            (0x1018, 0x101c)
        );
    }
}
