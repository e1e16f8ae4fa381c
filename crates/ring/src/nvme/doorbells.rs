//! Doorbells in memory of ours, which hosts map.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use sidecore_memory::{SharedPages, UserAddress};

use crate::cell::Words;

/// Bytes for the doorbells of a queue pair: a page, so that no two queues' doorbells share a line, and a page table can
/// give one without the others.
const PAIR_BYTES: usize = 4096;
/// Where in it the completion queue's doorbell is: CAP.DSTRD = 9 puts doorbells 2 KiB apart.
const HEAD_OFFSET_BYTES: usize = PAIR_BYTES / 2;

/// Where in the file they begin, as in the registers: pages 0 and 1 are the properties and the admin queue's doorbells,
/// which are elsewhere. A client maps part of a base address register at the same offset of its file, plus one for the
/// whole, which cannot be negative.
const FILE_OFFSET_BYTES: usize = 2 * PAIR_BYTES;

const PAIR_WORDS: usize = PAIR_BYTES / size_of::<u32>();
const HEAD_OFFSET_WORDS: usize = HEAD_OFFSET_BYTES / size_of::<u32>();

/// The doorbells of a controller's I/O queue pairs 1, 2, and so on, a page each: the submission queue's tail at +0, the
/// completion queue's head at +0x800 (NVMe over PCIe transport 1.0, 3.1.2, with CAP.DSTRD = 9).
///
/// A host that has the pages mapped stores there; for one that has not, whoever gets its message does. What else it may
/// store there is nobody's concern: values are checked where a queue takes them.
#[derive(Debug)]
pub struct Doorbells {
    pages: SharedPages,
    words: Words<AtomicU32>,
    queue_pairs: u16,
}

// SAFETY: `words` is reached through atomics only, and lives as long as its window, which is Send; `pages` is Sync.
unsafe impl Sync for Doorbells {}

impl Doorbells {
    /// Doorbells for `queue_pairs` pairs, all zero.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor left, or `queue_pairs` is zero.
    pub fn new(queue_pairs: u16) -> io::Result<Self> {
        let doorbells = Self::of(SharedPages::new("sidecore-doorbells", file_bytes(queue_pairs)?)?, queue_pairs)?;
        for queue in 1..=queue_pairs {
            // Touched here and now: a sidecore's first look is no page fault.
            doorbells.set_submission_tail(queue, 0);
        }
        Ok(doorbells)
    }

    /// Those that a host has mapped from another process, with what it has stored in them.
    ///
    /// # Errors
    /// It is no such file, or of another number of queue pairs.
    pub fn from_file(file: OwnedFd, queue_pairs: u16) -> io::Result<Self> {
        Self::of(SharedPages::from_file(file, file_bytes(queue_pairs)?)?, queue_pairs)
    }

    fn of(pages: SharedPages, queue_pairs: u16) -> io::Result<Self> {
        let count = usize::from(queue_pairs).saturating_mul(PAIR_WORDS);
        let at = UserAddress(FILE_OFFSET_BYTES as u64);
        let words = Words::new(pages.memory(), at, count, PAIR_BYTES).map_err(io::Error::other)?;
        Ok(Self { pages, words, queue_pairs })
    }

    /// The file that they are in, for the host to map.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.pages.file()
    }

    /// Where in the file they begin.
    #[must_use]
    pub fn file_offset_bytes(&self) -> u64 {
        FILE_OFFSET_BYTES as u64
    }

    /// How much of the file they are: 4 KiB for each queue pair.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.pages.len_bytes().saturating_sub(FILE_OFFSET_BYTES)
    }

    /// How many queue pairs there are doorbells for.
    #[must_use]
    pub fn queue_pairs(&self) -> u16 {
        self.queue_pairs
    }

    /// The tail that the host has announced for submission queue `queue`, from 1 on; what it wrote before is visible. Zero
    /// if there is no such doorbell.
    #[must_use]
    #[inline]
    pub fn submission_tail(&self, queue: u16) -> u32 {
        self.load(queue, 0)
    }

    /// The head that the host has announced for completion queue `queue`.
    #[must_use]
    #[inline]
    pub fn completion_head(&self, queue: u16) -> u32 {
        self.load(queue, HEAD_OFFSET_WORDS)
    }

    /// Stores what the host said in a message, or zero for a new queue.
    #[inline]
    pub fn set_submission_tail(&self, queue: u16, tail: u32) {
        self.store(queue, 0, tail);
    }

    /// The same for a completion queue.
    #[inline]
    pub fn set_completion_head(&self, queue: u16, head: u32) {
        self.store(queue, HEAD_OFFSET_WORDS, head);
    }

    #[inline(always)]
    fn load(&self, queue: u16, offset: usize) -> u32 {
        self.word(queue, offset).map_or(0, |word| u32::from_le(word.load(Ordering::Acquire)))
    }

    #[inline(always)]
    fn store(&self, queue: u16, offset: usize, value: u32) {
        if let Some(word) = self.word(queue, offset) {
            word.store(value.to_le(), Ordering::Release);
        }
    }

    #[inline(always)]
    fn word(&self, queue: u16, offset: usize) -> Option<&AtomicU32> {
        let page = usize::from(queue).checked_sub(1)?;
        self.words.get(page.wrapping_mul(PAIR_WORDS).wrapping_add(offset))
    }
}

/// How large the file is.
fn file_bytes(queue_pairs: u16) -> io::Result<usize> {
    match usize::from(queue_pairs) {
        0 => Err(io::ErrorKind::InvalidInput.into()),
        pairs => Ok(pairs.saturating_mul(PAIR_BYTES).saturating_add(FILE_OFFSET_BYTES)),
    }
}
