//! A submission queue, the controller's side.

use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError, copy};
use sidecore_spec_nvme::command::COMMAND_BYTES;

use super::DoorbellError;
use super::place::{Place, WORD_BYTES};
use crate::cell::Words;

/// Words of a command.
const WORDS: usize = COMMAND_BYTES / WORD_BYTES;

/// How many commands ahead of the one being taken are fetched: each is a cache line that another
/// core has written.
const PREFETCH_DISTANCE: u32 = 4;

/// Commands from the host. One thread owns it.
#[derive(Debug)]
pub struct SubmissionQueue {
    place: Place,
    /// `None` while the queue is not in the guest's memory.
    words: Option<Words<AtomicU64>>,
    /// The next entry to take.
    head: u32,
    /// Up to where entries were announced.
    tail: u32,
}

impl SubmissionQueue {
    /// The queue of `entries` entries, 2 to 65536, at `address`, a page's, all in one region;
    /// empty, at position `head`.
    ///
    /// # Errors
    /// It is not there, not on a page, or not of such a size.
    pub fn new(
        memory: &GuestMemory,
        address: GuestAddress,
        entries: u32,
        head: u16,
    ) -> Result<Self, MemoryError> {
        let place = Place::new(address, entries, COMMAND_BYTES);
        let words = place.find(memory)?;
        let head = u32::from(head);
        place.check_positions([head])?;
        Ok(Self { place, words: Some(words), head, tail: head })
    }

    /// The same, of a queue that has come to that position. If it is not there it is unbound.
    ///
    /// # Errors
    /// There can be no such queue, or no such position in it.
    pub fn resume(
        memory: &GuestMemory,
        address: GuestAddress,
        entries: u32,
        head: u16,
    ) -> Result<Self, MemoryError> {
        let place = Place::new(address, entries, COMMAND_BYTES);
        let head = u32::from(head);
        place.check_positions([head])?;
        Ok(Self { place, words: place.find(memory).ok(), head, tail: head })
    }

    /// Where it is in the guest's memory.
    #[must_use]
    pub fn address(&self) -> GuestAddress {
        self.place.address()
    }

    /// The tail doorbell's value: the entries before it may be taken. It was read with acquire
    /// ordering, as [`Doorbells`](super::Doorbells) and [`ShadowDoorbells`](super::ShadowDoorbells)
    /// do, or came in a message.
    ///
    /// # Errors
    /// There is no such entry, or so many commands do not fit. The queue is as before.
    #[inline]
    pub fn set_tail(&mut self, tail: u32) -> Result<(), DoorbellError> {
        if tail == self.tail {
            return Ok(());
        }
        let entries = self.place.entries;
        if tail >= entries {
            return Err(DoorbellError::OutOfRange { value: tail, entries });
        }
        let moved = self.place.distance(self.tail, tail);
        let room = self.place.capacity().wrapping_sub(self.announced());
        if moved > room {
            return Err(DoorbellError::Overrun { value: tail, moved, room });
        }
        self.tail = tail;
        for ahead in 0..PREFETCH_DISTANCE.min(self.announced()) {
            self.prefetch_ahead(ahead);
        }
        Ok(())
    }

    /// Takes the next command, having read it once. `None` if there is none, or while the queue is
    /// unbound.
    #[inline]
    pub fn pop(&mut self) -> Option<[u8; COMMAND_BYTES]> {
        if self.head == self.tail {
            return None;
        }
        let first = self.place.word(self.head);
        let from = self.words.as_ref()?.words().get(first..first.wrapping_add(WORDS))?;
        let mut command = [0; COMMAND_BYTES];
        let (to, _) = command.as_chunks_mut::<WORD_BYTES>();
        for (to, from) in to.iter_mut().zip(from) {
            // Relaxed: the doorbell that announced it was read with acquire. Bytes are in memory's
            // order.
            *to = from.load(Ordering::Relaxed).to_ne_bytes();
        }
        if self.announced() > PREFETCH_DISTANCE {
            self.prefetch_ahead(PREFETCH_DISTANCE);
        }
        self.head = self.place.after(self.head);
        Some(command)
    }

    /// The next entry to be taken: what completions report as SQHD.
    #[must_use]
    #[inline]
    pub fn head(&self) -> u16 {
        // Below 65536, by `Place::after`.
        u16::try_from(self.head).unwrap_or(0)
    }

    /// Up to where commands are announced, as far as the queue was told.
    #[must_use]
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// How many commands are there to be taken; none while the queue is unbound.
    #[must_use]
    #[inline]
    pub fn pending(&self) -> u32 {
        if self.words.is_some() { self.announced() } else { 0 }
    }

    /// Fetches the entry that comes next, announced or not: for a poll that looks at the doorbell
    /// and wants both lines on their way at once. A hint.
    #[inline]
    pub fn prefetch(&self) {
        self.prefetch_ahead(0);
    }

    /// The same queue, at the same position, in another table.
    ///
    /// # Errors
    /// It is not there. The queue is unbound then.
    pub fn rebind(&mut self, memory: &GuestMemory) -> Result<(), MemoryError> {
        self.words = None;
        self.words = Some(self.place.find(memory)?);
        Ok(())
    }

    #[inline(always)]
    fn announced(&self) -> u32 {
        self.place.distance(self.head, self.tail)
    }

    /// Fetches the entry `ahead` places from the head, `ahead` less than there are entries.
    #[inline(always)]
    fn prefetch_ahead(&self, ahead: u32) {
        if let Some(words) = &self.words {
            let index = self.head.wrapping_add(ahead);
            let index = if index < self.place.entries {
                index
            } else {
                index.wrapping_sub(self.place.entries)
            };
            copy::prefetch_for_read(words.address_of(self.place.word(index)));
        }
    }
}
