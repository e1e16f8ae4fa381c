//! The base address registers: which access is for what.

use sidecore_ring::nvme::DoorbellStride;
use sidecore_spec_nvme::register::DOORBELLS;

/// BAR0: the controller's properties and doorbells.
pub(crate) const REGISTERS_BAR: u8 = 0;
pub(crate) const REGISTERS_BAR_BYTES: u64 = 1 << 20;

/// BAR4: the MSI-X table, and the pending bits on a page of their own.
pub(crate) const MSIX_BAR: u8 = 4;
pub(crate) const MSIX_BAR_BYTES: u64 = 8192;
pub(crate) const TABLE_OFFSET: u64 = 0;
pub(crate) const PENDING_OFFSET: u64 = 4096;

/// Most I/O queue pairs.
pub const MAX_QUEUE_PAIRS: u16 = 64;

/// CAP.DSTRD of doorbells that are not mapped: side by side. Shadow doorbells are laid out like
/// doorbells, and those of all queues have to fit a page (NVMe base 2.0, 5.8).
pub(crate) const TRAPPED_STRIDE: u8 = 0;

/// The target of an access to BAR0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bar {
    /// A property, at this offset.
    Register(u64),
    /// The tail doorbell of a submission queue.
    Tail(u16),
    /// The head doorbell of a completion queue.
    Head(u16),
    /// Nothing.
    Hole,
}

impl Bar {
    /// Behind the last doorbell there can be: those that an earlier version has handed over are 2
    /// KiB apart.
    pub(super) const END_BYTES: u64 =
        DOORBELLS + (MAX_QUEUE_PAIRS as u64 + 1) * (8 << DoorbellStride::HalfPage.dstrd());

    /// The register or doorbell at `offset`, with doorbells 4 << `stride` bytes apart (NVMe over
    /// PCIe transport 1.0, 3.1.2).
    pub(crate) fn at(offset: u64, stride: u8) -> Self {
        let Some(behind) = offset.checked_sub(DOORBELLS) else { return Self::Register(offset) };
        let stride_bytes = 4_u64.checked_shl(stride.into()).unwrap_or(4);
        let Some(index) = behind.checked_div(stride_bytes) else { return Self::Hole };
        let queue = match u16::try_from(index / 2) {
            Ok(queue) if queue <= MAX_QUEUE_PAIRS && behind.is_multiple_of(stride_bytes) => queue,
            _ => return Self::Hole,
        };
        if index.is_multiple_of(2) { Self::Tail(queue) } else { Self::Head(queue) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_doorbells_have_a_line_each() {
        let at = |offset| Bar::at(offset, DoorbellStride::Line.dstrd());
        assert_eq!(at(0x14), Bar::Register(0x14));
        assert_eq!((at(0x1000), at(0x1040)), (Bar::Tail(0), Bar::Head(0)));
        assert_eq!((at(0x1080), at(0x10C0)), (Bar::Tail(1), Bar::Head(1)));
        assert_eq!((at(0x1F80), at(0x1FC0)), (Bar::Tail(31), Bar::Head(31)));
        assert_eq!((at(0x3000), at(0x3040)), (Bar::Tail(64), Bar::Head(64)));
        assert_eq!((at(0x3080), at(0x1084), at(0xF_FFFC)), (Bar::Hole, Bar::Hole, Bar::Hole));
    }

    #[test]
    fn doorbells_of_an_earlier_version_have_a_page_for_each_pair() {
        let at = |offset| Bar::at(offset, DoorbellStride::HalfPage.dstrd());
        assert_eq!((at(0x1000), at(0x1800)), (Bar::Tail(0), Bar::Head(0)));
        assert_eq!((at(0x41000), at(0x41800)), (Bar::Tail(64), Bar::Head(64)));
        assert_eq!((at(0x42000), at(0x2004)), (Bar::Hole, Bar::Hole));
    }

    #[test]
    fn trapped_doorbells_are_side_by_side() {
        let at = |offset| Bar::at(offset, TRAPPED_STRIDE);
        assert_eq!(
            (at(0x1000), at(0x1004), at(0x1008)),
            (Bar::Tail(0), Bar::Head(0), Bar::Tail(1))
        );
        assert_eq!((at(0x1204), at(0x1208)), (Bar::Head(64), Bar::Hole));
    }
}
