//! The requests that a channel gives to the store: each with pages for a part's ciphertext.

use std::io;

use sidecore_block::{BlockRequest, Tag};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, SharedPages};

use crate::table::{PART_BYTES, Place};

/// A request for the store.
struct Part {
    /// `None` while the store has it.
    request: Option<Box<BlockRequest>>,
    /// The request of which it is a part.
    of: Place,
    /// Its start in that request.
    skip_bytes: u64,
}

/// See the module. The pages are touched when a part first uses them, and a part that was used last
/// is used next, so that a queue with few requests in flight uses few of them.
pub(crate) struct Parts {
    parts: Vec<Part>,
    free: Vec<usize>,
    pages: SharedPages,
}

impl Parts {
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let too_many = || io::Error::from(io::ErrorKind::OutOfMemory);
        let part_bytes = usize::try_from(PART_BYTES).map_err(|_| too_many())?;
        let len_bytes = count.checked_mul(part_bytes).ok_or_else(too_many)?;
        let blank = || Part { request: Some(BlockRequest::blank(1)), of: 0, skip_bytes: 0 };
        Ok(Self {
            parts: (0..count).map(|_| blank()).collect(),
            free: (0..count).rev().collect(),
            pages: SharedPages::new("sidecore-encrypt", len_bytes)?,
        })
    }

    /// The pages of all parts.
    pub(crate) fn memory(&self) -> &GuestMemory {
        self.pages.memory()
    }

    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// A request for the store with `len_bytes` of pages, for the part of a request. `None` if all
    /// are in use.
    #[inline]
    pub(crate) fn take(
        &mut self,
        of: Place,
        skip_bytes: u64,
        len_bytes: u64,
    ) -> Option<Box<BlockRequest>> {
        let number = self.free.pop()?;
        let part = self.parts.get_mut(number)?;
        let mut request = part.request.take()?;
        (part.of, part.skip_bytes) = (of, skip_bytes);
        request.segments.bind(self.pages.memory());
        if len_bytes > 0 {
            let start = GuestAddress((number as u64).saturating_mul(PART_BYTES));
            // The pages are one region, of which this is a part.
            let pushed = request.segments.push(start, len_bytes, &mut RegionHint::default());
            debug_assert!(pushed.is_ok(), "{pushed:?}");
        }
        request.tag = Some(Tag::from_bits(number as u64));
        request.result = Ok(());
        Some(request)
    }

    /// The request of which this is a part, and the part's start in it. Call
    /// [`give_back`](Self::give_back) next.
    #[inline]
    pub(crate) fn origin(&self, request: &BlockRequest) -> Option<(Place, u64)> {
        let bits = request.tag.as_ref()?.bits();
        let part = self.parts.get(usize::try_from(bits).ok()?)?;
        Some((part.of, part.skip_bytes))
    }

    /// Takes a request back from the store.
    #[inline]
    pub(crate) fn give_back(&mut self, mut request: Box<BlockRequest>) {
        let Some(number) = request.tag.take().map(Tag::into_bits) else { return };
        let Ok(number) = usize::try_from(number) else { return };
        if let Some(part) = self.parts.get_mut(number) {
            part.request = Some(request);
            self.free.push(number);
        }
    }
}
