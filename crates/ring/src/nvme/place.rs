//! Where a queue lies, and positions in it.

use std::sync::atomic::AtomicU64;

use sidecore_memory::copy::CACHE_LINE_BYTES;
use sidecore_memory::{GuestAddress, GuestMemory, MemoryError};
use sidecore_spec_nvme::command::MAX_ENTRIES;
use sidecore_units::PAGE_BYTES;

use crate::cell::Words;

/// Bytes of a word that entries are made of.
pub(super) const WORD_BYTES: usize = 8;

/// The data that finds a queue, now and in another table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    address: GuestAddress,
    pub(super) entries: u32,
    entry_bytes: usize,
}

impl Place {
    pub(super) const fn new(address: GuestAddress, entries: u32, entry_bytes: usize) -> Self {
        Self { address, entries, entry_bytes }
    }

    pub(super) const fn address(&self) -> GuestAddress {
        self.address
    }

    /// The queue's memory.
    pub(super) fn find(&self, memory: &GuestMemory) -> Result<Words<AtomicU64>, MemoryError> {
        self.check()?;
        Words::of(memory.guest_window(self.address, self.len_bytes(), CACHE_LINE_BYTES)?)
    }

    fn len_bytes(&self) -> usize {
        usize::try_from(self.entries).unwrap_or(usize::MAX).saturating_mul(self.entry_bytes)
    }

    /// Whether there can be such a queue, wherever memory is.
    fn check(&self) -> Result<(), MemoryError> {
        let (start, len_bytes) = (self.address.0, self.len_bytes());
        if !(2..=MAX_ENTRIES).contains(&self.entries) {
            return Err(MemoryError::OutOfRange { start, len_bytes: len_bytes as u64 });
        }
        // Queues are contiguous and begin on a page (NVMe base 2.0, 5.4 and 5.5); the host's
        // mapping of it need only keep an entry on one line.
        if !start.is_multiple_of(PAGE_BYTES) {
            return Err(MemoryError::Misaligned {
                start,
                align_bytes: usize::try_from(PAGE_BYTES).unwrap_or(0),
            });
        }
        Ok(())
    }

    /// Whether there can be such a queue, and these are positions in it.
    pub(super) fn check_positions<const N: usize>(
        &self,
        positions: [u32; N],
    ) -> Result<(), MemoryError> {
        self.check()?;
        match positions.into_iter().find(|position| *position >= self.entries) {
            Some(position) => Err(MemoryError::OutOfRange {
                start: self.address.0,
                len_bytes: u64::from(position),
            }),
            None => Ok(()),
        }
    }

    /// The word that entry `index` begins with.
    #[inline(always)]
    pub(super) fn word(&self, index: u32) -> usize {
        (index as usize).wrapping_mul(self.entry_bytes / WORD_BYTES)
    }

    /// How far it is from one position to another, going up; both are below `entries`.
    #[inline(always)]
    pub(super) const fn distance(&self, from: u32, to: u32) -> u32 {
        match to.checked_sub(from) {
            Some(distance) => distance,
            None => to.wrapping_add(self.entries).wrapping_sub(from),
        }
    }

    /// The position after `index`.
    #[inline(always)]
    pub(super) const fn after(&self, index: u32) -> u32 {
        let next = index.wrapping_add(1);
        if next < self.entries { next } else { 0 }
    }

    /// Entries that a queue holds: one stays free, or a full queue would look empty (NVMe base 2.0,
    /// 3.3.1.5).
    #[inline(always)]
    pub(super) const fn capacity(&self) -> u32 {
        self.entries.wrapping_sub(1)
    }
}
