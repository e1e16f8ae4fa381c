//! Doorbells in memory of ours, which clients map.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use sidecore_memory::{SharedPages, UserAddress};

use crate::cell::Words;

const PAGE_BYTES: usize = 4096;

/// The file's first page stands for the registers, which are not in it: an area is mapped from the
/// file at the same offset as it has in its base address register.
const AREA_OFFSET_BYTES: usize = PAGE_BYTES;

/// How far doorbells are apart, in shared memory: 4 << CAP.DSTRD (NVMe over PCIe transport 1.0,
/// 3.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellStride {
    /// 64 bytes (DSTRD = 4): a cache line each. The admin queue and 31 I/O queue pairs are on the
    /// first page, which is the only one that some drivers map.
    Line,
    /// 2 KiB (DSTRD = 9): a page for each queue pair. Only in memory that a process of an earlier
    /// version has made and handed over.
    HalfPage,
}

impl DoorbellStride {
    /// CAP.DSTRD.
    #[must_use]
    pub const fn dstrd(self) -> u8 {
        match self {
            Self::Line => 4,
            Self::HalfPage => 9,
        }
    }

    /// The stride that this CAP.DSTRD stands for, if it is one of these.
    #[must_use]
    pub const fn from_dstrd(dstrd: u8) -> Option<Self> {
        match dstrd {
            4 => Some(Self::Line),
            9 => Some(Self::HalfPage),
            _ => None,
        }
    }

    const fn bytes(self) -> usize {
        match self {
            Self::Line => 64,
            Self::HalfPage => 2048,
        }
    }

    /// log2 of the words from one doorbell to the next.
    const fn shift(self) -> u32 {
        match self {
            Self::Line => 4,
            Self::HalfPage => 9,
        }
    }
}

/// The doorbells of a controller's queue pairs, from the admin queue's (number 0) on: the
/// submission queue's tail, and a stride behind it the completion queue's head.
///
/// A client that has them mapped stores there; for one that has not, the thread that gets its
/// message does. Values are checked where a queue takes them.
#[derive(Debug)]
pub struct Doorbells {
    pages: SharedPages,
    words: Words<AtomicU32>,
    queue_pairs: u16,
    stride: DoorbellStride,
    /// Of the stride, so that a look takes no branch.
    shift: u32,
}

// SAFETY: `words` is reached through atomics only, and lives as long as its window, which is Send;
// `pages` is Sync.
unsafe impl Sync for Doorbells {}

impl Doorbells {
    /// Doorbells for the admin queue and `queue_pairs` I/O queue pairs, all zero, a line each.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor left, or `queue_pairs` is zero.
    pub fn new(queue_pairs: u16) -> io::Result<Self> {
        let stride = DoorbellStride::Line;
        let file_bytes = file_bytes(queue_pairs, stride)?;
        let doorbells =
            Self::of(SharedPages::new("sidecore-doorbells", file_bytes)?, queue_pairs, stride)?;
        for queue in 0..=queue_pairs {
            // Touch each page now: a sidecore's first look is no page fault.
            doorbells.set_submission_tail(queue, 0);
        }
        Ok(doorbells)
    }

    /// Doorbells that a client has mapped from another process, with the values stored in them.
    ///
    /// # Errors
    /// It is no such file, or of another number of queue pairs.
    pub fn from_file(file: OwnedFd, queue_pairs: u16, stride: DoorbellStride) -> io::Result<Self> {
        Self::of(
            SharedPages::from_file(file, file_bytes(queue_pairs, stride)?)?,
            queue_pairs,
            stride,
        )
    }

    fn of(pages: SharedPages, queue_pairs: u16, stride: DoorbellStride) -> io::Result<Self> {
        let count = doorbell_count(queue_pairs).wrapping_shl(stride.shift());
        let at = UserAddress(AREA_OFFSET_BYTES as u64);
        let words = Words::new(pages.memory(), at, count, PAGE_BYTES).map_err(io::Error::other)?;
        Ok(Self { pages, words, queue_pairs, stride, shift: stride.shift() })
    }

    /// The file for the client to map.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.pages.file()
    }

    /// Where the doorbells begin, in the file as in the base address register.
    #[must_use]
    pub fn area_offset_bytes(&self) -> u64 {
        AREA_OFFSET_BYTES as u64
    }

    /// How much of the file they take: whole pages.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.pages.len_bytes().saturating_sub(AREA_OFFSET_BYTES)
    }

    /// How many I/O queue pairs there are doorbells for.
    #[must_use]
    pub fn queue_pairs(&self) -> u16 {
        self.queue_pairs
    }

    /// How far they are apart.
    #[must_use]
    pub fn stride(&self) -> DoorbellStride {
        self.stride
    }

    /// The tail that the host has announced for submission queue `queue`; the entries before it are
    /// visible. Zero if there is no such doorbell.
    #[must_use]
    #[inline]
    pub fn submission_tail(&self, queue: u16) -> u32 {
        self.load(usize::from(queue).wrapping_mul(2))
    }

    /// The head that the host has announced for completion queue `queue`.
    #[must_use]
    #[inline]
    pub fn completion_head(&self, queue: u16) -> u32 {
        self.load(usize::from(queue).wrapping_mul(2).wrapping_add(1))
    }

    /// Stores the value of a message, or zero for a new queue.
    #[inline]
    pub fn set_submission_tail(&self, queue: u16, tail: u32) {
        self.store(usize::from(queue).wrapping_mul(2), tail);
    }

    /// The same for a completion queue.
    #[inline]
    pub fn set_completion_head(&self, queue: u16, head: u32) {
        self.store(usize::from(queue).wrapping_mul(2).wrapping_add(1), head);
    }

    #[inline(always)]
    fn load(&self, doorbell: usize) -> u32 {
        let word = self.words.get(doorbell.wrapping_shl(self.shift));
        word.map_or(0, |word| u32::from_le(word.load(Ordering::Acquire)))
    }

    #[inline(always)]
    fn store(&self, doorbell: usize, value: u32) {
        if let Some(word) = self.words.get(doorbell.wrapping_shl(self.shift)) {
            word.store(value.to_le(), Ordering::Release);
        }
    }
}

/// A submission and a completion queue's for each pair, the admin queue's among them.
fn doorbell_count(queue_pairs: u16) -> usize {
    usize::from(queue_pairs).saturating_add(1).saturating_mul(2)
}

/// Bytes of the area, in whole pages.
fn area_bytes(queue_pairs: u16, stride: DoorbellStride) -> usize {
    doorbell_count(queue_pairs).saturating_mul(stride.bytes()).next_multiple_of(PAGE_BYTES)
}

fn file_bytes(queue_pairs: u16, stride: DoorbellStride) -> io::Result<usize> {
    if queue_pairs == 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(area_bytes(queue_pairs, stride).saturating_add(AREA_OFFSET_BYTES))
}
