//! A completion queue, the controller's side.

use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError, copy};
use sidecore_spec_nvme::command::COMPLETION_BYTES;

use super::DoorbellError;
use super::place::Place;
use crate::cell::Words;

/// A completion queue's entry (NVMe base 2.0, 3.3.3.2.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// Dword 0: specific to the command.
    pub result: u32,
    /// Dword 1: reserved, or specific to the command.
    pub reserved_or_result_high: u32,
    /// SQHD: the next entry that the controller takes from the submission queue.
    pub sq_head: u16,
    /// SQID: the submission queue that the command came from.
    pub sq_id: u16,
    /// CID: the command, by the host's number.
    pub command_id: u16,
    /// The upper half of dword 3: the status field in bits 15:1. Bit 0, the phase tag, is the
    /// queue's own: it is ignored in what is posted, and zero in what is taken.
    pub status: u16,
}

impl Completion {
    /// Dwords 0 and 1.
    #[inline(always)]
    pub(crate) const fn first_word(&self) -> u64 {
        self.result as u64 | (self.reserved_or_result_high as u64) << 32
    }

    /// Dwords 2 and 3 with the phase tag.
    #[inline(always)]
    pub(crate) const fn last_word(&self, phase: bool) -> u64 {
        let status = self.status & !1 | phase as u16;
        self.sq_head as u64
            | (self.sq_id as u64) << 16
            | (self.command_id as u64) << 32
            | (status as u64) << 48
    }

    /// The phase tag of an entry whose dwords 2 and 3 are `word`.
    #[inline(always)]
    pub(crate) const fn phase(word: u64) -> bool {
        word >> 48 & 1 != 0
    }

    /// The entry of these words.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // taking the fields apart
    pub(crate) const fn from_words(first: u64, last: u64) -> Self {
        Self {
            result: first as u32,
            reserved_or_result_high: (first >> 32) as u32,
            sq_head: last as u16,
            sq_id: (last >> 16) as u16,
            command_id: (last >> 32) as u16,
            status: (last >> 48) as u16 & !1,
        }
    }
}

/// Where a completion queue is: what another process needs to know to go on with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionPosition {
    /// Up to where the host has taken entries.
    pub head: u32,
    /// The next entry to write.
    pub tail: u32,
    /// The phase tag of this round's entries.
    pub phase: bool,
}

impl Default for CompletionPosition {
    /// A new queue's: its first round has the phase tag set, because the host has zeroed the queue
    /// (3.3.3.2.1).
    fn default() -> Self {
        Self { head: 0, tail: 0, phase: true }
    }
}

/// Completions for the host. One thread owns it.
#[derive(Debug)]
pub struct CompletionQueue {
    place: Place,
    /// `None` while the queue is not in the guest's memory.
    words: Option<Words<AtomicU64>>,
    /// Up to where the host has taken entries.
    head: u32,
    /// The next entry to write.
    tail: u32,
    /// The phase tag of this round's entries.
    phase: bool,
}

impl CompletionQueue {
    /// The queue of `entries` entries, 2 to 65536, at `address`, a page's, all in one region;
    /// empty, in its first round.
    ///
    /// # Errors
    /// It is not there, not on a page, or not of such a size.
    pub fn new(
        memory: &GuestMemory,
        address: GuestAddress,
        entries: u32,
    ) -> Result<Self, MemoryError> {
        let place = Place::new(address, entries, COMPLETION_BYTES);
        let words = Some(place.find(memory)?);
        let CompletionPosition { head, tail, phase } = CompletionPosition::default();
        Ok(Self { place, words, head, tail, phase })
    }

    /// The same, of a queue that has come to that position. If it is not there it is unbound.
    ///
    /// # Errors
    /// There can be no such queue, or no such position in it.
    pub fn resume(
        memory: &GuestMemory,
        address: GuestAddress,
        entries: u32,
        position: CompletionPosition,
    ) -> Result<Self, MemoryError> {
        let place = Place::new(address, entries, COMPLETION_BYTES);
        let CompletionPosition { head, tail, phase } = position;
        place.check_positions([head, tail])?;
        Ok(Self { place, words: place.find(memory).ok(), head, tail, phase })
    }

    /// Where it is in the guest's memory.
    #[must_use]
    pub fn address(&self) -> GuestAddress {
        self.place.address()
    }

    /// Where it has come to.
    #[must_use]
    pub fn position(&self) -> CompletionPosition {
        CompletionPosition { head: self.head, tail: self.tail, phase: self.phase }
    }

    /// The head doorbell's value: the entries before it may be written again.
    ///
    /// # Errors
    /// There is no such entry, or it is past what was posted. The queue is as before.
    #[inline]
    pub fn set_head(&mut self, head: u32) -> Result<(), DoorbellError> {
        if head == self.head {
            return Ok(());
        }
        let entries = self.place.entries;
        if head >= entries {
            return Err(DoorbellError::OutOfRange { value: head, entries });
        }
        let (moved, room) = (self.place.distance(self.head, head), self.unconsumed());
        if moved > room {
            return Err(DoorbellError::Overrun { value: head, moved, room });
        }
        self.head = head;
        Ok(())
    }

    /// How many entries can be posted; none while the queue is unbound.
    #[must_use]
    #[inline]
    pub fn room(&self) -> u32 {
        if self.words.is_some() { self.place.capacity().wrapping_sub(self.unconsumed()) } else { 0 }
    }

    /// How many entries were posted that the host has not given back.
    #[must_use]
    #[inline]
    pub fn unconsumed(&self) -> u32 {
        self.place.distance(self.head, self.tail)
    }

    /// Posts an entry, with the phase tag that it has to have: once the host sees it, it sees all
    /// of it, and all that was written before. Returns false, and nothing is posted, if there is no
    /// [`room`](Self::room).
    #[inline]
    pub fn push(&mut self, entry: Completion) -> bool {
        if self.unconsumed() >= self.place.capacity() {
            return false;
        }
        let at = self.place.word(self.tail);
        let Some(words) = &self.words else { return false };
        let (Some(first), Some(last)) = (words.get(at), words.get(at.wrapping_add(1))) else {
            return false;
        };
        first.store(entry.first_word().to_le(), Ordering::Relaxed);
        // One store for the rest, phase tag included; release, so that the command's data and the
        // first word come before.
        last.store(entry.last_word(self.phase).to_le(), Ordering::Release);
        self.tail = self.place.after(self.tail);
        if self.tail == 0 {
            self.phase = !self.phase;
        }
        true
    }

    /// Prefetches the entry that is written next, for writing: for a caller that is about to
    /// complete a command. A hint.
    #[inline]
    pub fn prefetch(&self) {
        if let Some(words) = &self.words {
            copy::prefetch_for_write(words.address_of(self.place.word(self.tail)));
        }
    }

    /// The same queue, at the same position and in the same round, in another table.
    ///
    /// # Errors
    /// It is not there. The queue is unbound then.
    pub fn rebind(&mut self, memory: &GuestMemory) -> Result<(), MemoryError> {
        self.words = None;
        self.words = Some(self.place.find(memory)?);
        Ok(())
    }
}
