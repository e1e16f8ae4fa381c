//! The requests that a channel gives to the store: each with pages for a part's ciphertext.

use std::io;

use sidecore_block::{BlockRequest, BounceParts, Place, Tag};
use sidecore_memory::GuestMemory;

/// The most bytes of a part with data.
pub(crate) const PART_BYTES: u64 = 64 << 10;

/// A request for the store.
struct Part {
    /// `None` while the store has it.
    request: Option<Box<BlockRequest>>,
    /// The request of which it is a part.
    of: Place,
    /// Its start in that request.
    skip_bytes: u64,
}

/// See the module.
pub(crate) struct Parts(BounceParts<Part>);

impl Parts {
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let blank = || Part { request: Some(BlockRequest::blank(1)), of: 0, skip_bytes: 0 };
        Ok(Self(BounceParts::new("sidecore-encrypt", count, PART_BYTES, blank)?))
    }

    /// The pages of all parts.
    pub(crate) fn memory(&self) -> &GuestMemory {
        self.0.memory()
    }

    pub(crate) fn has_free(&self) -> bool {
        self.0.has_free()
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
        let number = self.0.take()?;
        let part = self.0.get_mut(number)?;
        let mut request = part.request.take()?;
        (part.of, part.skip_bytes) = (of, skip_bytes);
        self.0.bind(&mut request, (number, 0), len_bytes);
        request.tag = Some(Tag::from_bits(number as u64));
        Some(request)
    }

    /// The request of which this is a part, and the part's start in it. Call
    /// [`give_back`](Self::give_back) next.
    #[inline]
    pub(crate) fn origin(&self, request: &BlockRequest) -> Option<(Place, u64)> {
        let bits = request.tag.as_ref()?.bits();
        let part = self.0.get(usize::try_from(bits).ok()?)?;
        Some((part.of, part.skip_bytes))
    }

    /// Takes a request back from the store.
    #[inline]
    pub(crate) fn give_back(&mut self, mut request: Box<BlockRequest>) {
        let Some(number) = request.tag.take().map(Tag::into_bits) else { return };
        let Ok(number) = usize::try_from(number) else { return };
        if let Some(part) = self.0.get_mut(number) {
            part.request = Some(request);
            self.0.give_back(number);
        }
    }
}
