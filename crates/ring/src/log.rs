//! The log of writes to an area of a ring, while the guest migrates.

use sidecore_memory::{DirtyLog, GuestAddress, Word, Words};

/// The area's part in the log of written pages.
///
/// The address is that of the memory table, which also names the area. So the address of
/// VHOST_USER_SET_VRING_ADDR is not needed, which some front ends leave zero.
#[derive(Debug)]
pub(crate) struct AreaLog {
    log: DirtyLog,
    start: GuestAddress,
}

impl AreaLog {
    pub(crate) fn of<T: Word>(log: &DirtyLog, area: &Words<T>) -> Option<Self> {
        Some(Self { log: log.clone(), start: area.guest_address()? })
    }

    /// Marks the pages of a part of the area, which was written.
    pub(crate) fn mark(&self, offset_bytes: usize, len_bytes: usize) {
        let start = self.start.0.saturating_add(offset_bytes as u64);
        self.log.mark(GuestAddress(start), len_bytes as u64);
    }
}
