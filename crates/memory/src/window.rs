//! A stretch of guest memory that stays put: where a ring lives.

use std::ptr::NonNull;

use crate::table::GuestMemory;

/// `len_bytes` of guest memory at a fixed host address, alive and mapped as long as the window is.
///
/// The ring crate builds its typed accessors on it; the pointer is valid for reads and writes of
/// the whole length, but the peer writes there too, so it must only be used with atomic or volatile
/// accesses.
#[derive(Clone, Debug)]
pub struct Window {
    memory: GuestMemory,
    host: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the window points into the memory it keeps alive, which is Send and Sync.
unsafe impl Send for Window {}

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

    /// The memory it is a part of.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }
}
