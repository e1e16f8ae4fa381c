//! Ranges of a socket's memory, as the kernel takes them.

use std::fmt;
use std::io;

use sidecore_memory::GuestMemory;

/// A range of the socket's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// First byte.
    pub start: u32,
    /// Size in bytes.
    pub len_bytes: u32,
}

/// Memory of one region, and where this process has it.
pub(crate) struct Gather {
    /// Keeps the range at `base` mapped.
    memory: GuestMemory,
    base: *mut u8,
    len_bytes: u64,
}

// SAFETY: `base` points into `memory`, which belongs to no thread.
unsafe impl Send for Gather {}

impl fmt::Debug for Gather {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Gather").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

impl Gather {
    /// # Errors
    /// The memory is empty.
    pub(crate) fn new(memory: GuestMemory) -> io::Result<Self> {
        let (base, len_bytes) = memory.host_ranges().next().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { memory, base, len_bytes })
    }

    pub(crate) fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// A range, which is mapped as long as this value lives.
    ///
    /// # Errors
    /// The range is outside of the memory.
    pub(crate) fn vector(&self, place: Place) -> io::Result<libc::iovec> {
        let (start, len) = (u64::from(place.start), u64::from(place.len_bytes));
        if start + len > self.len_bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a place outside of the socket's memory",
            ));
        }
        // SAFETY: the range is inside of the mapping.
        let base = unsafe { self.base.add(place.start as usize) };
        Ok(libc::iovec { iov_base: base.cast(), iov_len: place.len_bytes as usize })
    }
}
