//! The log of the pages that a device has written, while a guest migrates.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::table::{GuestAddress, GuestMemory, MemoryError, RegionSpec, UserAddress};
use crate::words::Words;

/// Bytes of guest memory for each bit of a log (QEMU's docs/interop/vhost-user.rst, "Migration").
pub const LOG_PAGE_BYTES: u64 = 4096;

/// The pages of a log's byte.
const PAGES_PER_BYTE: u64 = u8::BITS as u64;

/// A bitmap in memory of the VMM: bit *n* % 8 of byte *n* / 8 says that page *n* of the guest's
/// physical address space was written. The VMM clears bits and copies those pages to the
/// destination, so a page is marked after it was written.
///
/// The VMM may truncate the file behind the log, as that behind guest memory: see
/// [`is_lost`](Self::is_lost).
#[derive(Clone, Debug)]
pub struct DirtyLog(Arc<Words<AtomicU8>>);

impl DirtyLog {
    /// Maps the `len_bytes` of a log that begin at `offset_bytes` of `file`.
    ///
    /// # Errors
    /// The file is not in memory, or does not have these bytes; `len_bytes` is zero.
    pub fn map(file: OwnedFd, offset_bytes: u64, len_bytes: u64) -> Result<Self, MemoryError> {
        let memory = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(0),
            user_address: UserAddress(0),
            len_bytes,
            file,
            file_offset_bytes: offset_bytes,
        }])?;
        let overflow = |_| MemoryError::RegionOverflow { start: offset_bytes, len_bytes };
        let count = usize::try_from(len_bytes).map_err(overflow)?;
        Ok(Self(Arc::new(Words::new(&memory, UserAddress(0), count, 1)?)))
    }

    /// The number of pages that have a bit in the log.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        (self.0.words().len() as u64).saturating_mul(PAGES_PER_BYTE)
    }

    /// Whether each page of `memory` has a bit in the log.
    #[must_use]
    pub fn covers(&self, memory: &GuestMemory) -> bool {
        memory.end_address().0.div_ceil(LOG_PAGE_BYTES) <= self.page_count()
    }

    /// Marks the pages of the `len_bytes` at `address`, which this process or the kernel has
    /// written. Pages without a bit in the log are not marked: see [`covers`](Self::covers).
    #[cold]
    pub fn mark(&self, address: GuestAddress, len_bytes: u64) {
        let Some(last) = len_bytes.checked_sub(1) else { return };
        let last_page = address.0.saturating_add(last) / LOG_PAGE_BYTES;
        let mut page = address.0 / LOG_PAGE_BYTES;
        while page <= last_page {
            let (byte, bit) = (page / PAGES_PER_BYTE, page % PAGES_PER_BYTE);
            let rest = last_page.saturating_sub(page);
            let count = PAGES_PER_BYTE.saturating_sub(bit).min(rest.saturating_add(1));
            let bits = u8::MAX >> PAGES_PER_BYTE.saturating_sub(count) << bit;
            let Some(marks) = usize::try_from(byte).ok().and_then(|byte| self.0.get(byte)) else {
                return;
            };
            // Release: a VMM that sees the mark sees the page's new contents. The mark is made even
            // if the bit is set already, because the VMM may be about to clear the bit.
            marks.fetch_or(bits, Ordering::Release);
            page = page.saturating_add(count);
        }
    }

    /// Whether the VMM has truncated the file behind the log. Marks are lost then.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.0.memory().is_lost()
    }
}

#[cfg(test)]
mod tests;
