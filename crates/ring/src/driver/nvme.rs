//! The host's side of NVMe queues (NVMe base 2.0, 3.3), in user space; the controller's is
//! [`crate::nvme`].
//!
//! [`SubmissionRing`] and [`CompletionRing`] are a queue pair, [`DoorbellWords`] are its doorbells,
//! wherever they lie. Nothing here allocates.
//!
//! ```
//! use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};
//! use sidecore_ring::driver::nvme::{CompletionRing, SubmissionRing};
//! use sidecore_ring::nvme::{Completion, CompletionQueue, SubmissionQueue};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?;
//! # let file = std::fs::File::from(file);
//! # file.set_len(1 << 20)?;
//! let memory = GuestMemory::map(vec![RegionSpec {
//!     guest_address: GuestAddress(0x10_0000),
//!     user_address: UserAddress(0x10_0000),
//!     len_bytes: 1 << 20,
//!     file: file.into(),
//!     file_offset_bytes: 0,
//! }])?;
//! let window = memory.guest_window(GuestAddress(0x10_0000), 32 * 64, 64)?;
//! let mut commands = SubmissionRing::new(window, 32)?;
//! let window = memory.guest_window(GuestAddress(0x11_0000), 32 * 16, 64)?;
//! let mut completions = CompletionRing::new(window, 32)?;
//! assert!(commands.push(&[7; 64]));
//!
//! let mut controller = SubmissionQueue::new(&memory, GuestAddress(0x10_0000), 32, 0)?;
//! controller.set_tail(commands.tail())?;
//! assert_eq!(controller.pop(), Some([7; 64]));
//! let sq_head = controller.head();
//! let mut completion_queue = CompletionQueue::new(&memory, GuestAddress(0x11_0000), 32)?;
//! completion_queue.push(Completion { sq_head, ..Completion::default() });
//!
//! let completion = completions.pop().ok_or("nothing was completed")?;
//! commands.set_head(completion.sq_head)?;
//! assert_eq!((commands.room(), completions.head()), (31, 1));
//! # Ok(())
//! # }
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use sidecore_memory::{MemoryError, Window, copy};
use sidecore_spec_nvme::command::{COMMAND_BYTES, COMPLETION_BYTES, MAX_ENTRIES};
use sidecore_spec_nvme::register::DOORBELL_BYTES;

use crate::cell::Words;
use crate::nvme::Completion;
use crate::split::need_event;

/// Bytes of a word that entries are made of.
const WORD_BYTES: usize = 8;
const COMMAND_WORDS: usize = COMMAND_BYTES / WORD_BYTES;
const COMPLETION_WORDS: usize = COMPLETION_BYTES / WORD_BYTES;

/// An error of a queue pair, its user or its controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// A queue has 2 to 65536 entries, all of them in its window.
    #[error(
        "a queue of {entries} entries in {len_bytes} bytes: 2 to 65536 are possible, and all have \
         to fit"
    )]
    Size {
        /// Entries asked for.
        entries: u32,
        /// Size of the window.
        len_bytes: usize,
    },
    /// The memory is not aligned.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The controller says that it took what it was not given.
    #[error("the controller's head {head} is outside of what it was given")]
    Head {
        /// The head that the completion reports (SQHD).
        head: u16,
    },
}

/// A ring's position arithmetic.
#[derive(Clone, Copy, Debug)]
struct Round {
    entries: u32,
}

impl Round {
    fn new(entries: u32, window: &Window, entry_bytes: usize) -> Result<Self, QueueError> {
        let needed = (entries as usize).saturating_mul(entry_bytes);
        if !(2..=MAX_ENTRIES).contains(&entries) || window.len_bytes() < needed {
            return Err(QueueError::Size { entries, len_bytes: window.len_bytes() });
        }
        Ok(Self { entries })
    }

    #[inline(always)]
    const fn after(self, index: u32) -> u32 {
        let next = index.wrapping_add(1);
        if next < self.entries { next } else { 0 }
    }

    #[inline(always)]
    const fn distance(self, from: u32, to: u32) -> u32 {
        match to.checked_sub(from) {
            Some(distance) => distance,
            None => to.wrapping_add(self.entries).wrapping_sub(from),
        }
    }
}

/// A submission queue, the host's side.
#[derive(Debug)]
pub struct SubmissionRing {
    words: Words<AtomicU64>,
    round: Round,
    /// Up to where the controller has taken commands, as it said last.
    head: u32,
    tail: u32,
}

impl SubmissionRing {
    /// An empty queue of `entries` entries in `window`, which stays as it is.
    ///
    /// # Errors
    /// The size is impossible, or the window is too small or not aligned to 8 bytes.
    pub fn new(window: Window, entries: u32) -> Result<Self, QueueError> {
        let round = Round::new(entries, &window, COMMAND_BYTES)?;
        Ok(Self { words: Words::of(window)?, round, head: 0, tail: 0 })
    }

    /// Queues a command. The controller sees it when the doorbell is at [`SubmissionRing::tail`].
    /// False, and nothing was done, if the queue is full.
    #[inline]
    pub fn push(&mut self, command: &[u8; COMMAND_BYTES]) -> bool {
        let next = self.round.after(self.tail);
        if next == self.head {
            return false;
        }
        self.write(self.tail, command);
        self.tail = next;
        true
    }

    /// Writes any entry, also one that the controller owns: for tests that play a hostile host.
    /// Outside of the queue it writes nothing.
    #[inline]
    pub fn write(&self, index: u32, command: &[u8; COMMAND_BYTES]) {
        let first = (index as usize).saturating_mul(COMMAND_WORDS);
        let (from, _) = command.as_chunks::<WORD_BYTES>();
        if let Some(to) = self.words.words().get(first..first.saturating_add(COMMAND_WORDS)) {
            for (to, from) in to.iter().zip(from) {
                // Relaxed: the doorbell's store, or the message, comes after it. Bytes are in
                // memory's order.
                to.store(u64::from_ne_bytes(*from), Ordering::Relaxed);
            }
        }
    }

    /// The tail doorbell's value.
    #[must_use]
    #[inline]
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// Takes note of how far the controller is, from a completion's SQHD.
    ///
    /// # Errors
    /// It cannot be there. Nothing has changed.
    #[inline]
    pub fn set_head(&mut self, head: u16) -> Result<(), QueueError> {
        let to = u32::from(head);
        if to >= self.round.entries
            || self.round.distance(self.head, to) > self.round.distance(self.head, self.tail)
        {
            return Err(QueueError::Head { head });
        }
        self.head = to;
        Ok(())
    }

    /// How many commands can be queued.
    #[must_use]
    #[inline]
    pub fn room(&self) -> u32 {
        self.entries().wrapping_sub(1).wrapping_sub(self.round.distance(self.head, self.tail))
    }

    /// Entries of the queue.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.round.entries
    }

    /// Empties it, for a queue that the controller has forgotten.
    pub fn reset(&mut self) {
        (self.head, self.tail) = (0, 0);
    }
}

/// A completion queue, the host's side.
#[derive(Debug)]
pub struct CompletionRing {
    words: Words<AtomicU64>,
    round: Round,
    head: u32,
    /// The phase tag of entries that are new in this round.
    phase: bool,
}

impl CompletionRing {
    /// An empty queue of `entries` entries in `window`, which is zeroed.
    ///
    /// # Errors
    /// The size is impossible, or the window is too small or not aligned to 8 bytes.
    pub fn new(window: Window, entries: u32) -> Result<Self, QueueError> {
        let round = Round::new(entries, &window, COMPLETION_BYTES)?;
        let mut ring = Self { words: Words::of(window)?, round, head: 0, phase: true };
        ring.reset();
        Ok(ring)
    }

    /// Takes the next completion, if there is one. The controller may write the entry again once
    /// the doorbell is at [`CompletionRing::head`].
    #[inline]
    pub fn pop(&mut self) -> Option<Completion> {
        let at = self.word();
        let last = u64::from_le(self.words.get(at.wrapping_add(1))?.load(Ordering::Acquire));
        if Completion::phase(last) != self.phase {
            return None;
        }
        // After the phase tag, which comes last.
        let first = u64::from_le(self.words.get(at)?.load(Ordering::Relaxed));
        self.head = self.round.after(self.head);
        if self.head == 0 {
            self.phase = !self.phase;
        }
        Some(Completion::from_words(first, last))
    }

    /// Whether there is a completion to be taken.
    #[must_use]
    #[inline]
    pub fn has_next(&self) -> bool {
        let last = self.words.get(self.word().wrapping_add(1));
        last.is_some_and(|word| {
            Completion::phase(u64::from_le(word.load(Ordering::Acquire))) == self.phase
        })
    }

    /// The head doorbell's value.
    #[must_use]
    #[inline]
    pub fn head(&self) -> u32 {
        self.head
    }

    /// Entries of the queue.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.round.entries
    }

    /// Empties it, for a queue that the controller has forgotten.
    pub fn reset(&mut self) {
        self.words.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        (self.head, self.phase) = (0, true);
    }

    #[inline(always)]
    fn word(&self) -> usize {
        (self.head as usize).wrapping_mul(COMPLETION_WORDS)
    }
}

/// Doorbells that lie in memory: a controller's, mapped, or shadow doorbells and their EventIdx.
///
/// An offset outside of it, or not a multiple of four, reads as zero and writes nothing.
#[derive(Debug)]
pub struct DoorbellWords(Words<AtomicU32>);

impl DoorbellWords {
    /// The doorbells in `window`.
    ///
    /// # Errors
    /// It is not aligned to 4 bytes.
    pub fn new(window: Window) -> Result<Self, QueueError> {
        Ok(Self(Words::of(window)?))
    }

    /// Stores a doorbell's value, after everything written before.
    #[inline(always)]
    pub fn store(&self, offset_bytes: usize, value: u32) {
        if let Some(word) = self.word(offset_bytes) {
            word.store(value.to_le(), Ordering::Release);
        }
    }

    /// Loads what is there.
    #[must_use]
    #[inline(always)]
    pub fn load(&self, offset_bytes: usize) -> u32 {
        self.word(offset_bytes).map_or(0, |word| u32::from_le(word.load(Ordering::Acquire)))
    }

    /// Fetches the line of a doorbell for writing. A hint.
    #[inline(always)]
    pub fn prefetch_for_write(&self, offset_bytes: usize) {
        copy::prefetch_for_write(self.0.address_of(offset_bytes / DOORBELL_BYTES));
    }

    #[inline(always)]
    fn word(&self, offset_bytes: usize) -> Option<&AtomicU32> {
        if !offset_bytes.is_multiple_of(DOORBELL_BYTES) {
            return None;
        }
        self.0.get(offset_bytes / DOORBELL_BYTES)
    }
}

/// Shadow doorbells, the host's side (NVMe base 2.0, 5.8 and annex B.5): two buffers laid out like
/// the doorbells.
#[derive(Debug)]
pub struct HostShadow {
    shadow: DoorbellWords,
    events: DoorbellWords,
}

impl HostShadow {
    /// The two buffers of a Doorbell Buffer Config command.
    #[must_use]
    pub fn new(shadow: DoorbellWords, events: DoorbellWords) -> Self {
        Self { shadow, events }
    }

    /// Moves the doorbell at `offset_bytes` to `value`. True if the controller wants to be told as
    /// well.
    #[must_use]
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // positions have 16 bits
    pub fn announce(&self, offset_bytes: usize, value: u32) -> bool {
        let old = self.shadow.load(offset_bytes);
        self.shadow.store(offset_bytes, value);
        // The doorbell is visible before the wish is read, or a controller that falls asleep just
        // now and this host miss each other.
        fence(Ordering::SeqCst);
        need_event(self.events.load(offset_bytes) as u16, value as u16, old as u16)
    }

    /// Puts a doorbell at zero, for a new queue.
    pub fn reset(&self, offset_bytes: usize) {
        self.shadow.store(offset_bytes, 0);
        self.events.store(offset_bytes, 0);
    }

    /// Any word of the two buffers, for tests.
    #[must_use]
    pub fn words(&self) -> [&DoorbellWords; 2] {
        [&self.shadow, &self.events]
    }
}
