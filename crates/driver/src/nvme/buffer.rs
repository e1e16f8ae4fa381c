//! Memory of an application's that the controller reads and writes directly.

use sidecore_ring::driver::SharedMemory;

use crate::arena::Arena;
use crate::error::ClientError;

/// A buffer of the application's own: requests move its bytes with no copy in between
/// ([`NvmeQueue::submit_read_at`](super::NvmeQueue::submit_read_at)). It is mapped for the
/// controller until the client takes it back or hangs up.
#[derive(Debug)]
pub struct DmaBuffer {
    memory: SharedMemory,
    address: u64,
}

impl DmaBuffer {
    pub(crate) fn new(arena: &mut Arena, len_bytes: usize) -> Result<Self, ClientError> {
        let part = arena.give(len_bytes)?;
        Ok(Self { memory: SharedMemory::new(part.window), address: part.guest_address })
    }

    /// Where the controller finds its first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    /// Copies out of it; returns how many bytes there were.
    pub fn read(&self, offset_bytes: usize, to: &mut [u8]) -> usize {
        self.memory.read_bytes(offset_bytes, to)
    }

    /// Copies into it; returns how many bytes fitted.
    pub fn write(&self, offset_bytes: usize, from: &[u8]) -> usize {
        self.memory.write_bytes(offset_bytes, from)
    }

    /// Its words, for looking at data where it lies.
    #[must_use]
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }
}
