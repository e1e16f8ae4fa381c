//! Memory between the guest's and the file, for requests whose layout in guest memory direct I/O
//! cannot take.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};
use sidecore_block::{BlockRequest, Operation};

/// The bytes of one request's buffer; a larger request takes more rounds.
const SLOT_BYTES: usize = 64 << 10;

/// A bounce buffer for each slot of a channel, in one mapping. Pages that are never used are never
/// allocated, so that the common case, a guest which aligns its buffers, costs address space only.
#[derive(Debug)]
pub(super) struct Bounce {
    base: NonNull<u8>,
    len_bytes: usize,
}

impl Bounce {
    pub fn new(slots: usize) -> io::Result<Self> {
        let len_bytes = slots * SLOT_BYTES;
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let base = NonNull::new(base.cast())
            .ok_or_else(|| io::Error::other("mmap returned the null page"))?;
        Ok(Self { base, len_bytes })
    }

    /// Prepares a round of the request from byte `done_bytes` on, up to `end_bytes` at most.
    /// Returns the memory for the round.
    pub fn begin(
        &self,
        slot: u32,
        request: &BlockRequest,
        done_bytes: u64,
        end_bytes: u64,
    ) -> libc::iovec {
        let at = self.at(slot);
        let len = end_bytes.saturating_sub(done_bytes).min(SLOT_BYTES as u64) as usize;
        if request.operation == Operation::Write {
            // SAFETY: the slot's buffer has SLOT_BYTES bytes, and the kernel does not use it
            // between rounds; mapped memory is always initialized. No other reference to it exists.
            let buffer = unsafe { std::slice::from_raw_parts_mut(at, len) };
            request.segments.copy_to_slice(done_bytes, buffer);
        }
        libc::iovec { iov_base: at.cast(), iov_len: len }
    }

    /// Ends a round with the kernel's result, and copies bytes that were read to the guest.
    pub fn end(&self, slot: u32, request: &BlockRequest, done_bytes: u64, result: i32) {
        let moved = usize::try_from(result).unwrap_or(0).min(SLOT_BYTES);
        if request.operation == Operation::Read && moved > 0 {
            // SAFETY: as in `begin`.
            let buffer = unsafe { std::slice::from_raw_parts(self.at(slot), moved) };
            request.segments.copy_from_slice(done_bytes, buffer);
        }
    }

    fn at(&self, slot: u32) -> *mut u8 {
        let offset = slot as usize * SLOT_BYTES;
        assert!(offset < self.len_bytes, "one buffer per slot");
        // SAFETY: the offset is inside the mapping, as was just checked.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and its channel has waited for the kernel.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}
