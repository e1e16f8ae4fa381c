//! A contiguous piece of guest memory at a fixed address: the place of a ring.

use std::ptr::NonNull;

use crate::table::{GuestAddress, GuestMemory};

/// `len_bytes` of guest memory at a fixed host address, mapped as long as the window lives.
///
/// The ring crate builds its typed accessors on a window; the pointer is valid for reads and writes
/// of the whole length, but the peer writes there too, so all accesses must be atomic or volatile.
#[derive(Clone, Debug)]
pub struct Window {
    memory: GuestMemory,
    host: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the window points into the memory that it keeps alive, which is Send and Sync.
unsafe impl Send for Window {}
// SAFETY: as above; a shared window only gives its pointer away.
unsafe impl Sync for Window {}

impl Window {
    pub(crate) fn new(memory: GuestMemory, host: NonNull<u8>, len_bytes: usize) -> Self {
        Self { memory, host, len_bytes }
    }

    /// The first byte.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    /// Size in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The guest's address of the first byte.
    #[must_use]
    pub fn guest_address(&self) -> Option<GuestAddress> {
        self.memory.guest_address_of(self.host)
    }

    /// The memory that contains the window.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }
}
