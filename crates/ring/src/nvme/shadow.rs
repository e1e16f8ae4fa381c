//! Shadow doorbells in the guest's memory (NVMe base 2.0, 5.8 and annex B.5).

use std::sync::atomic::{AtomicU32, Ordering, fence};

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError};
use sidecore_units::PAGE_BYTES;

use crate::cell::Words;

/// Bytes of a doorbell.
const DOORBELL_BYTES: usize = 4;

/// The two buffers of a Doorbell Buffer Config command: the host writes its doorbells to the one,
/// and to the controller itself only when that passes the value in the other, EventIdx.
///
/// Both are laid out like the doorbell registers: of queue q, the submission queue's word is number
/// 2q, the completion queue's 2q + 1, each `stride_bytes` from the next; those of queue 0 are not
/// used.
///
/// EventIdx works like virtio's, in 16 bits and on positions: a host that moves a doorbell from
/// `old` to `new` rings if `new - event - 1 < new - old`. The position that the queue is at makes
/// the next move ring; the one just behind it stays silent until the host has gone round the queue,
/// so it has to be moved up before that.
#[derive(Debug)]
pub struct ShadowDoorbells {
    shadow: Words<AtomicU32>,
    events: Words<AtomicU32>,
    /// Words from one doorbell to the next.
    stride: usize,
}

impl ShadowDoorbells {
    /// The buffers at `shadow` and `event_index`, each on a page and in one region, for queues up
    /// to `queue_pairs`; `stride_bytes` is 4 << CAP.DSTRD. With DSTRD = 0 that is less than a page
    /// each, which is all that the host has to have there.
    ///
    /// # Errors
    /// They are not there, or not on a page.
    pub fn new(
        memory: &GuestMemory,
        shadow: GuestAddress,
        event_index: GuestAddress,
        queue_pairs: u16,
        stride_bytes: u32,
    ) -> Result<Self, MemoryError> {
        let stride = (stride_bytes as usize / DOORBELL_BYTES).max(1);
        let doorbells = usize::from(queue_pairs).saturating_add(1).saturating_mul(2);
        let len_bytes = doorbells.saturating_mul(stride).saturating_mul(DOORBELL_BYTES);
        let find = |address: GuestAddress| {
            if !address.0.is_multiple_of(PAGE_BYTES) {
                let align_bytes = usize::try_from(PAGE_BYTES).unwrap_or(0);
                return Err(MemoryError::Misaligned { start: address.0, align_bytes });
            }
            Words::of(memory.guest_window(address, len_bytes, DOORBELL_BYTES)?)
        };
        Ok(Self { shadow: find(shadow)?, events: find(event_index)?, stride })
    }

    /// The tail that the host has announced for submission queue `queue`; what it wrote before is
    /// visible. Zero if there is no such doorbell.
    #[must_use]
    #[inline]
    pub fn submission_tail(&self, queue: u16) -> u32 {
        load(&self.shadow, self.tail_word(queue))
    }

    /// The head that the host has announced for completion queue `queue`.
    #[must_use]
    #[inline]
    pub fn completion_head(&self, queue: u16) -> u32 {
        load(&self.shadow, self.head_word(queue))
    }

    /// Where the host is to write a submission queue's doorbell to the controller.
    #[inline]
    pub fn set_submission_event(&self, queue: u16, event: u32) {
        store(&self.events, self.tail_word(queue), event);
    }

    /// Where the host is to write a completion queue's doorbell to the controller.
    #[inline]
    pub fn set_completion_event(&self, queue: u16, event: u32) {
        store(&self.events, self.head_word(queue), event);
    }

    /// Asks for a doorbell write when the tail of `queue` moves on from `tail`, and looks again:
    /// returns where it is now. If that is not `tail`, the host may not have seen the wish, and no
    /// write may come.
    #[must_use]
    pub fn arm_submission(&self, queue: u16, tail: u32) -> u32 {
        self.set_submission_event(queue, tail);
        // The wish is visible before the doorbell is read; the host has the same fence between its
        // store and its load.
        fence(Ordering::SeqCst);
        self.submission_tail(queue)
    }

    /// The same for the head of a completion queue.
    #[must_use]
    pub fn arm_completion(&self, queue: u16, head: u32) -> u32 {
        self.set_completion_event(queue, head);
        fence(Ordering::SeqCst);
        self.completion_head(queue)
    }

    #[inline(always)]
    fn tail_word(&self, queue: u16) -> usize {
        usize::from(queue).wrapping_mul(2).wrapping_mul(self.stride)
    }

    #[inline(always)]
    fn head_word(&self, queue: u16) -> usize {
        self.tail_word(queue).wrapping_add(self.stride)
    }
}

#[inline(always)]
fn load(words: &Words<AtomicU32>, index: usize) -> u32 {
    // Acquire: what the host wrote before its doorbell is read after it.
    words.get(index).map_or(0, |word| u32::from_le(word.load(Ordering::Acquire)))
}

#[inline(always)]
fn store(words: &Words<AtomicU32>, index: usize, value: u32) {
    if let Some(word) = words.get(index) {
        word.store(value.to_le(), Ordering::Release);
    }
}
