//! Frames that are written and read where they lie in shared memory, without a copy: for clients
//! whose own time must be short beside the device's.

use sidecore_ring::driver::{Buffer, SharedMemory};

use super::{NetQueues, wrong};
use crate::error::ClientError;
use crate::request::Slot;

/// The memory of one buffer, which begins with the virtio header of its frame, or goes on with the
/// frame where the buffer before it ends.
#[derive(Clone, Copy, Debug)]
pub struct FrameBuffer<'a> {
    memory: &'a SharedMemory,
    at: usize,
}

impl FrameBuffer<'_> {
    /// Reads the little-endian 64-bit word at an offset that is a multiple of 8.
    #[must_use]
    #[inline(always)]
    pub fn word(&self, offset_bytes: usize) -> u64 {
        self.memory.load_u64(self.at + offset_bytes)
    }

    /// Writes the little-endian 64-bit word at an offset that is a multiple of 8.
    #[inline(always)]
    pub fn set_word(&self, offset_bytes: usize, word: u64) {
        self.memory.store_u64(self.at + offset_bytes, word);
    }
}

impl NetQueues {
    /// Queues a frame of `len_bytes` with its virtio header, in one buffer that `write` fills: that
    /// of the slot that has been free for longest, so that all buffers take turns.
    /// False, without a call, if all slots are with the device: [`NetQueues::reclaim`] takes them
    /// back.
    ///
    /// # Errors
    /// The frame is larger than a buffer.
    #[inline]
    pub fn send_in_place(
        &mut self,
        len_bytes: u32,
        write: impl FnOnce(FrameBuffer<'_>),
    ) -> Result<bool, ClientError> {
        let sending = &mut self.sending;
        sending.data.check_len(len_bytes)?;
        let Some(slot) = sending.free.pop_front() else { return Ok(false) };
        let (memory, at) = sending.data.place(Slot(slot));
        write(FrameBuffer { memory, at });
        let described = &mut sending.described[usize::from(slot)];
        if *described != len_bytes {
            let buffer = Buffer::to_device(sending.data.address(Slot(slot)), len_bytes);
            sending.ring.describe(slot, &[buffer])?;
            *described = len_bytes;
        }
        sending.push(slot)?;
        Ok(true)
    }

    /// Takes the next frame: calls `read` with each of its buffers, the offset of that buffer in
    /// the virtio header and frame, and its length. The buffers are offered again at the next
    /// [`NetQueues::publish`]. Returns the bytes of the frame with its virtio header.
    ///
    /// # Errors
    /// The device completed what it was not given, or a frame whose parts are missing.
    #[inline]
    pub fn receive_in_place(
        &mut self,
        mut read: impl FnMut(FrameBuffer<'_>, usize, usize),
    ) -> Result<Option<usize>, ClientError> {
        let receiving = &mut self.receiving;
        let Some(mut used) = receiving.ring.pop()? else { return Ok(None) };
        let (mut total, mut left) = (0, None);
        loop {
            let (memory, at) = receiving.data.place(Slot(used.slot));
            let buffer = FrameBuffer { memory, at };
            let len_bytes = used.written_bytes.min(receiving.data.slot_bytes()) as usize;
            read(buffer, total, len_bytes);
            total += len_bytes;
            // `num_buffers` is at byte 10 of the first buffer (virtio 1.2, 5.1.6).
            let of_frame = if self.is_merged { (buffer.word(8) >> 16) as u16 } else { 1 };
            let after = left.unwrap_or(of_frame).checked_sub(1);
            let after = after.ok_or_else(|| wrong("a frame in no buffers"))?;
            receiving.push(used.slot)?;
            if after == 0 {
                return Ok(Some(total));
            }
            left = Some(after);
            let next = receiving.ring.pop()?;
            used = next.ok_or_else(|| wrong("a frame that lacks a buffer"))?;
        }
    }
}
