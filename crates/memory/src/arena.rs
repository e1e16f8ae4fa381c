//! A contiguous piece of this process's own memory: the store of a RAM disk's blocks.

use std::io;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags};

use crate::copy;
use crate::mapping::Mapping;
use crate::segments::Segments;

/// The pages under an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Reserved 2 MiB pages (`vm.nr_hugepages`).
    Huge,
    /// Plain pages, which the kernel was asked to merge into huge ones.
    Plain,
}

/// A part of a request's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The part's start in the request, in bytes.
    pub skip_bytes: u64,
    /// The part's size in bytes.
    pub len_bytes: usize,
}

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A zeroed piece of private memory, faulted in when it is made, so that no request ever waits for
/// a page fault (FAST'12, section 6: static memory on huge pages).
///
/// Sidecores may share an arena: accesses are opaque to the compiler, and two guests' requests that
/// overlap race as on any disk.
#[derive(Debug)]
pub struct Arena {
    mapping: Arc<Mapping>,
    len_bytes: usize,
    pages: PageKind,
}

impl Arena {
    /// Makes an arena on huge pages if enough are free, else on plain memory.
    ///
    /// # Errors
    /// The system is short of memory, or `len_bytes` is zero.
    pub fn new(len_bytes: usize) -> io::Result<Self> {
        let round_up = |page: usize| {
            len_bytes
                .checked_next_multiple_of(page)
                .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
        };
        let huge = Mapping::anonymous(
            round_up(HUGE_PAGE_BYTES)?,
            MapFlags::HUGETLB | MapFlags::HUGE_2MB | MapFlags::POPULATE,
        );
        let (mapping, pages) = match huge {
            Ok(mapping) => (mapping, PageKind::Huge),
            Err(_) => {
                let mapping = Mapping::anonymous(round_up(HUGE_PAGE_BYTES)?, MapFlags::empty())?;
                // EINVAL on a kernel without transparent huge pages, which is no error.
                let _ = mapping.advise(Advice::LinuxHugepage);
                mapping.advise(Advice::LinuxPopulateWrite)?;
                (mapping, PageKind::Plain)
            }
        };
        Ok(Self { mapping, len_bytes, pages })
    }

    /// Size in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The kind of pages under the arena.
    #[must_use]
    pub fn pages(&self) -> PageKind {
        self.pages
    }

    /// The address of byte `offset_bytes`, for a prefetch; null outside of the arena.
    #[must_use]
    #[inline]
    pub fn address_of(&self, offset_bytes: u64) -> *const u8 {
        self.at(offset_bytes, 0).map_or(std::ptr::null(), <*mut u8>::cast_const)
    }

    /// Copies the arena's bytes at `offset_bytes` to `part` of `segments`, and meanwhile prefetches
    /// `next`, the source of the next copy. False, and nothing copied, if the range is not inside
    /// the arena.
    #[must_use]
    #[inline]
    pub fn read(
        &self,
        offset_bytes: u64,
        segments: &Segments,
        part: Part,
        next: *const u8,
    ) -> bool {
        let Some(mut from) = self.at(offset_bytes, part.len_bytes as u64) else {
            return false;
        };
        let mut next = next;
        segments.for_each_run(part.skip_bytes, part.len_bytes, |to, len| {
            // SAFETY: `at` checked that the arena holds the whole part; a piece is valid while its
            // list is borrowed; guest memory and the arena are distinct mappings.
            unsafe {
                copy::copy_out(to, from, len, next);
                from = from.add(len);
            }
            next = next.wrapping_add(len);
        });
        true
    }

    /// Copies `part` of `segments` to `offset_bytes`, and meanwhile prefetches `next`, the source
    /// of the next copy. False, and nothing copied, if the range is not inside the arena.
    ///
    /// Other cores see the data after [`settle`](Self::settle).
    #[must_use]
    #[inline]
    pub fn write(
        &self,
        offset_bytes: u64,
        segments: &Segments,
        part: Part,
        next: *const u8,
    ) -> bool {
        let Some(mut to) = self.at(offset_bytes, part.len_bytes as u64) else {
            return false;
        };
        let mut next = next;
        segments.for_each_run(part.skip_bytes, part.len_bytes, |from, len| {
            // SAFETY: as in `read`.
            unsafe {
                copy::copy_in(to, from, len, next);
                to = to.add(len);
            }
            next = next.wrapping_add(len);
        });
        true
    }

    /// Orders all writes so far before the store that publishes their completion. Call once a
    /// batch, on the thread that wrote.
    #[inline]
    pub fn settle(&self) {
        copy::settle();
    }

    /// Writes zeros. False, and nothing written, if the range is not inside the arena.
    #[must_use]
    pub fn zero(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let (Some(at), Ok(len)) = (self.at(offset_bytes, len_bytes), usize::try_from(len_bytes))
        else {
            return false;
        };
        // SAFETY: `at` checked the range.
        unsafe { copy::zero(at, len) };
        true
    }

    #[inline]
    fn at(&self, offset_bytes: u64, len_bytes: u64) -> Option<*mut u8> {
        let end = offset_bytes.checked_add(len_bytes)?;
        if end > self.len_bytes as u64 {
            return None;
        }
        let offset = usize::try_from(offset_bytes).ok()?;
        // SAFETY: inside the mapping, which is at least `len_bytes` long.
        Some(unsafe { self.mapping.base().as_ptr().add(offset) })
    }
}
