//! Bounce buffers: pages of a channel's own, to which parts of requests are copied.
//!
//! A guest can read and change its memory at any time. A stage that must not show it an unfinished
//! state, or looks at a byte twice, has the store use such pages.

use std::io;

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, SharedPages};

use crate::BlockRequest;

/// The number of a part.
pub type PartNumber = usize;

/// The parts of a channel, each with a bounce buffer.
///
/// A buffer is touched when a part first uses it, and the part that was used last is used next, so
/// that a queue with few requests in flight uses few of them.
pub struct BounceParts<T> {
    parts: Vec<T>,
    free: Vec<PartNumber>,
    pages: SharedPages,
    bytes_each: u64,
}

impl<T> BounceParts<T> {
    /// So many free parts, with `bytes_each` bytes of pages. `name` is that of the pages in
    /// `/proc`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(
        name: &str,
        count: usize,
        bytes_each: u64,
        blank: impl FnMut() -> T,
    ) -> io::Result<Self> {
        let len_bytes = (count as u64).checked_mul(bytes_each);
        let len_bytes = len_bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let len_bytes = len_bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            parts: std::iter::repeat_with(blank).take(count).collect(),
            free: (0..count).rev().collect(),
            pages: SharedPages::new(name, len_bytes)?,
            bytes_each,
        })
    }

    /// The pages of all parts.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        self.pages.memory()
    }

    /// Whether a part is free.
    #[must_use]
    #[inline]
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether a part is in use.
    #[must_use]
    #[inline]
    pub fn has_used(&self) -> bool {
        self.free.len() < self.parts.len()
    }

    /// Takes a free part.
    #[must_use]
    #[inline]
    pub fn take(&mut self) -> Option<PartNumber> {
        self.free.pop()
    }

    /// Gives a part back that the store does not have.
    #[inline]
    pub fn give_back(&mut self, number: PartNumber) {
        self.free.push(number);
    }

    /// A part.
    #[must_use]
    #[inline]
    pub fn get(&self, number: PartNumber) -> Option<&T> {
        self.parts.get(number)
    }

    /// A part.
    #[must_use]
    #[inline]
    pub fn get_mut(&mut self, number: PartNumber) -> Option<&mut T> {
        self.parts.get_mut(number)
    }

    /// Has a request refer to the pages of a part, from `skip_bytes` on.
    #[inline]
    pub fn bind(
        &self,
        request: &mut BlockRequest,
        (number, skip_bytes): (PartNumber, u64),
        len_bytes: u64,
    ) {
        request.result = Ok(());
        request.segments.bind(self.pages.memory());
        if len_bytes > 0 {
            let start = (number as u64).saturating_mul(self.bytes_each).saturating_add(skip_bytes);
            // The pages are one region, of which this is a part.
            let hint = &mut RegionHint::default();
            let pushed = request.segments.push(GuestAddress(start), len_bytes, hint);
            debug_assert!(pushed.is_ok(), "{pushed:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_pages_of_its_own() {
        let mut parts = BounceParts::new("parts", 2, 8192, || 0_u8).unwrap();
        assert!(parts.has_free() && !parts.has_used());
        let (one, two) = (parts.take().unwrap(), parts.take().unwrap());
        assert!(!parts.has_free() && parts.take().is_none());
        *parts.get_mut(two).unwrap() = 7;
        assert_eq!((parts.get(one), parts.get(two), parts.get(2)), (Some(&0), Some(&7), None));
        let mut request = BlockRequest::blank(1);
        parts.bind(&mut request, (one, 0), 8192);
        assert_eq!(request.segments.copy_from_slice(0, &[1; 8192]), 8192);
        parts.bind(&mut request, (two, 4096), 512);
        assert_eq!(request.segments.copy_from_slice(0, &[2; 512]), 512);
        let mut seen = [0; 512];
        for (address, expected) in [(0, 1), (7680, 1), (8192, 0), (12288, 2), (12800, 0)] {
            let hint = &mut RegionHint::default();
            parts.memory().read_slice(GuestAddress(address), &mut seen, hint).unwrap();
            assert_eq!(seen, [expected; 512], "{address}");
        }
        parts.bind(&mut request, (one, 0), 0);
        assert_eq!(request.segments.len_bytes(), 0);
        parts.give_back(two);
        assert_eq!(parts.take(), Some(two), "the last one is used next");
    }
}
