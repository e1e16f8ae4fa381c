//! A contiguous piece of mapped memory for the moment of a copy.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::copy;
use crate::segments::Segments;

/// A contiguous piece of mapped memory, borrowed from its table: copies to and from it need neither
/// a list nor another look at the table.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    host: NonNull<u8>,
    len_bytes: usize,
    memory: PhantomData<&'a ()>,
}

impl Span<'_> {
    /// # Safety
    /// `len_bytes` at `host` are mapped for the life of the borrow.
    pub(crate) const unsafe fn new(host: NonNull<u8>, len_bytes: usize) -> Self {
        Self { host, len_bytes, memory: PhantomData }
    }

    /// Size in bytes.
    #[must_use]
    #[inline]
    pub const fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The first byte, and the number of bytes, of at most `len_bytes` from byte `skip_bytes` on.
    #[inline]
    fn part(&self, skip_bytes: usize, len_bytes: usize) -> (*mut u8, usize) {
        let skip = skip_bytes.min(self.len_bytes);
        let rest = self.len_bytes.wrapping_sub(skip);
        // SAFETY: `skip` is at most the size.
        (unsafe { self.host.as_ptr().add(skip) }, len_bytes.min(rest))
    }

    /// Asks the CPU to fetch the lines of the first `len_bytes` for reading. A hint.
    #[inline]
    pub fn prefetch_for_read(&self, len_bytes: usize) {
        self.each_line(len_bytes, copy::prefetch_for_read);
    }

    /// Asks the CPU to fetch the lines of the first `len_bytes` for writing. A hint.
    #[inline]
    pub fn prefetch_for_write(&self, len_bytes: usize) {
        self.each_line(len_bytes, copy::prefetch_for_write);
    }

    #[inline]
    fn each_line(&self, len_bytes: usize, visit: impl Fn(*const u8)) {
        let start = self.host.as_ptr().cast_const();
        let (_, len_bytes) = self.part(0, len_bytes);
        let lead = start.addr() % copy::CACHE_LINE_BYTES;
        let mut line = start.wrapping_sub(lead);
        let end = start.wrapping_add(len_bytes);
        while line < end && len_bytes > 0 {
            visit(line);
            line = line.wrapping_add(copy::CACHE_LINE_BYTES);
        }
    }

    /// Reads from byte `skip_bytes` on. Returns the number of bytes, fewer than asked for if the
    /// span ends before.
    #[inline]
    pub fn read(&self, skip_bytes: usize, to: &mut [u8]) -> usize {
        let (host, count) = self.part(skip_bytes, to.len());
        // SAFETY: `host` is valid for `count` bytes, and `to` is a distinct buffer of at least as
        // many.
        unsafe { copy::copy(to.as_mut_ptr(), host, count) };
        count
    }

    /// Writes to byte `skip_bytes` and after. Returns the number of bytes, fewer than given if the
    /// span ends before.
    #[inline]
    pub fn write(&self, skip_bytes: usize, from: &[u8]) -> usize {
        let (host, count) = self.part(skip_bytes, from.len());
        // SAFETY: as in `read`.
        unsafe { copy::copy(host, from.as_ptr(), count) };
        count
    }

    /// Copies up to `len_bytes` from byte `skip_bytes` on to byte `to_bytes` of a request. Returns
    /// the number of bytes.
    #[inline]
    pub fn copy_to(
        &self,
        (skip_bytes, len_bytes): (usize, usize),
        to: &Segments,
        to_bytes: u64,
    ) -> usize {
        let (from, most) = self.part(skip_bytes, len_bytes);
        let mut done = 0_usize;
        to.for_each_run(to_bytes, most, |host, count| {
            // SAFETY: the runs have `most` bytes at most in all, and `from` is valid for those;
            // `host` is valid for `count` bytes. A peer that maps the same page into both gets any
            // bytes in it, and no more.
            unsafe { copy::copy(host, from.add(done), count) };
            done = done.wrapping_add(count);
        });
        done
    }

    /// Copies up to `len_bytes` from byte `from_bytes` of a request on to byte `skip_bytes` and
    /// after. Returns the number of bytes.
    #[inline]
    pub fn copy_from(
        &self,
        (skip_bytes, len_bytes): (usize, usize),
        from: &Segments,
        from_bytes: u64,
    ) -> usize {
        let (to, most) = self.part(skip_bytes, len_bytes);
        let mut done = 0_usize;
        from.for_each_run(from_bytes, most, |host, count| {
            // SAFETY: as in `copy_to`.
            unsafe { copy::copy(to.add(done), host, count) };
            done = done.wrapping_add(count);
        });
        done
    }
}

#[cfg(test)]
mod tests {
    use crate::{GuestAddress, RegionHint, Segments, SharedPages};

    #[test]
    fn copies_end_with_the_span_and_with_the_request() {
        let (frames, data) =
            (SharedPages::new("a", 4096).unwrap(), SharedPages::new("b", 4096).unwrap());
        let hint = &mut RegionHint::default();
        let span = frames.memory().span(GuestAddress(100), 50, hint).unwrap();
        let bytes: Vec<u8> = (1..=60).collect();
        assert_eq!((span.len_bytes(), span.write(0, &bytes), span.write(50, &bytes)), (50, 50, 0));
        let mut read = [0; 60];
        assert_eq!((span.read(45, &mut read), span.read(usize::MAX, &mut [0; 9])), (5, 0));
        assert_eq!(read[..6], [46, 47, 48, 49, 50, 0]);

        let mut request = Segments::with_capacity(2);
        request.bind(data.memory());
        request.push(GuestAddress(0), 10, &mut RegionHint::default()).unwrap();
        request.push(GuestAddress(2000), 20, &mut RegionHint::default()).unwrap();
        assert_eq!(span.copy_to((40, 100), &request, 4), 10, "the span ends");
        let mut stored = [0; 30];
        request.copy_to_slice(0, &mut stored);
        assert_eq!(stored[..15], [0, 0, 0, 0, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 0]);
        assert_eq!(span.copy_to((0, 100), &request, 25), 5, "the request ends");
        assert_eq!(span.copy_from((20, 12), &request, 3), 12);
        assert_eq!(span.copy_from((48, 12), &request, 0), 2);
        assert_eq!(span.copy_from((0, 12), &request, 30), 0);
        let mut read = [0; 15];
        span.read(19, &mut read);
        assert_eq!(read, [20, 0, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 0, 33, 34]);
    }

    #[test]
    fn the_lines_of_a_span_are_visited_once() {
        let pages = SharedPages::new("pages", 4096).unwrap();
        let hint = &mut RegionHint::default();
        let span = pages.memory().span(GuestAddress(4014 - 1024), 1024, hint).unwrap();
        let start = span.host.as_ptr().addr();
        let lines = |len| {
            let lines = std::cell::RefCell::new(Vec::new());
            span.each_line(len, |line| lines.borrow_mut().push(line.addr()));
            lines.into_inner()
        };
        // It begins 18 bytes before the end of a line.
        assert_eq!(start % 64, 46);
        assert_eq!(lines(18), [start - 46]);
        assert_eq!(lines(19), [start - 46, start + 18]);
        assert_eq!((lines(0).len(), lines(usize::MAX).len()), (0, 17));
        span.prefetch_for_read(1024);
        span.prefetch_for_write(1024);
    }

    #[test]
    fn a_span_is_inside_one_region() {
        let pages = SharedPages::new("pages", 4096).unwrap();
        let memory = pages.memory().with_memory(4096, pages.memory()).unwrap();
        let span = |start, len| {
            let span = memory.span(GuestAddress(start), len, &mut RegionHint::default());
            span.map(|span| span.len_bytes())
        };
        assert_eq!((span(4000, 96), span(4096, 4096)), (Some(96), Some(4096)));
        assert_eq!((span(4000, 97), span(8192, 1), span(8000, 193)), (None, None, None));
    }
}
