//! The scatter-gather list of one request.

use std::ptr::NonNull;

use crate::arena::Part;
use crate::copy;
use crate::dirty_log::DirtyLog;
use crate::table::{GuestAddress, GuestMemory, MemoryError, RegionHint};

/// A contiguous piece of mapped guest memory, owned by a [`Segments`].
///
/// The type is neither `Copy` nor `Clone`, so that a piece cannot outlive the list that keeps its
/// memory mapped.
#[derive(Debug)]
pub struct Segment {
    host: NonNull<u8>,
    len_bytes: usize,
}

impl Segment {
    /// The first byte, for the kernel or a copy routine.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    /// Size in bytes; never zero.
    #[must_use]
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// The data of one request: pieces of guest memory, in order, and a reference that keeps the memory
/// mapped.
///
/// A list has a fixed capacity and never allocates after its construction.
#[derive(Debug)]
pub struct Segments {
    memory: Option<GuestMemory>,
    pieces: Vec<Segment>,
    max_segments: usize,
    len_bytes: u64,
}

// SAFETY: the pieces point into `memory`, which is Send and Sync.
unsafe impl Send for Segments {}

impl Segments {
    /// A list that can hold `max_segments` pieces.
    #[must_use]
    pub fn with_capacity(max_segments: usize) -> Self {
        Self { memory: None, pieces: Vec::with_capacity(max_segments), max_segments, len_bytes: 0 }
    }

    /// The number of pieces that the list can hold.
    #[must_use]
    #[inline]
    pub const fn max_segments(&self) -> usize {
        self.max_segments
    }

    /// Empties the list and makes it refer to `memory`.
    #[inline]
    pub fn bind(&mut self, memory: &GuestMemory) {
        self.clear();
        if !self.memory.as_ref().is_some_and(|old| old.is_same(memory)) {
            self.memory = Some(memory.clone());
        }
    }

    /// Empties the list, which keeps its reference to the memory for the next request.
    #[inline]
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.len_bytes = 0;
    }

    /// Appends `len_bytes` at guest `address`, split where regions meet.
    ///
    /// # Errors
    /// The range is outside of guest memory, or has more pieces than the capacity.
    #[inline]
    pub fn push(
        &mut self,
        address: GuestAddress,
        len_bytes: u64,
        hint: &mut RegionHint,
    ) -> Result<(), MemoryError> {
        // The rule: the range lies in one region.
        if let Ok(len_bytes) = usize::try_from(len_bytes)
            && self.push_piece(address, len_bytes, hint)
        {
            return Ok(());
        }
        self.push_pieces(address, len_bytes, hint)
    }

    /// Appends the `len_bytes` at guest `address` as one piece. False, and nothing appended, if
    /// they are none, or not in one region, or if the list has no room.
    #[inline]
    #[must_use]
    pub fn push_piece(
        &mut self,
        address: GuestAddress,
        len_bytes: usize,
        hint: &mut RegionHint,
    ) -> bool {
        let Some(memory) = &self.memory else { return false };
        let Some((host, count)) = memory.locate(address, len_bytes as u64, hint) else {
            return false;
        };
        if count != len_bytes as u64 || count == 0 || self.pieces.len() >= self.max_segments {
            return false;
        }
        self.pieces.push(Segment { host, len_bytes });
        self.len_bytes = self.len_bytes.wrapping_add(count);
        true
    }

    /// Appends a range that may have several pieces, or none.
    #[cold]
    fn push_pieces(
        &mut self,
        address: GuestAddress,
        len_bytes: u64,
        hint: &mut RegionHint,
    ) -> Result<(), MemoryError> {
        let out_of_range = || MemoryError::OutOfRange { start: address.0, len_bytes };
        let memory = self.memory.as_ref().ok_or_else(out_of_range)?;
        let mut done = 0_u64;
        while done < len_bytes {
            let at = address.0.checked_add(done).ok_or_else(out_of_range)?;
            let (host, count) = memory
                .locate(GuestAddress(at), len_bytes.saturating_sub(done), hint)
                .ok_or_else(out_of_range)?;
            if self.pieces.len() >= self.max_segments {
                return Err(MemoryError::TooManySegments { max_segments: self.max_segments });
            }
            self.pieces.push(Segment {
                host,
                len_bytes: usize::try_from(count).map_err(|_| out_of_range())?,
            });
            done = done.saturating_add(count);
        }
        self.len_bytes = self.len_bytes.saturating_add(len_bytes);
        Ok(())
    }

    /// Makes the list a part of `whole`: `len_bytes` from byte `skip_bytes` on, or as much of that
    /// as `whole` has and this list has room for. Returns the number of bytes.
    #[inline]
    pub fn bind_part(&mut self, whole: &Self, skip_bytes: u64, len_bytes: u64) -> u64 {
        match &whole.memory {
            Some(memory) => self.bind(memory),
            None => self.release(),
        }
        let (pieces, max_segments) = (&mut self.pieces, self.max_segments);
        let mut bound = 0_u64;
        whole.for_each_run(
            skip_bytes,
            usize::try_from(len_bytes).unwrap_or(usize::MAX),
            |host, count| {
                if pieces.len() < max_segments
                    && let Some(host) = NonNull::new(host)
                {
                    pieces.push(Segment { host, len_bytes: count });
                    bound = bound.saturating_add(count as u64);
                }
            },
        );
        self.len_bytes = bound;
        bound
    }

    /// Fetches the first line of the last piece for reading.
    #[inline]
    pub fn prefetch_last_for_read(&self) {
        if let Some(piece) = self.pieces.last() {
            copy::prefetch_for_read(piece.as_ptr());
        }
    }

    /// Fetches the first line of the last piece for writing.
    #[inline]
    pub fn prefetch_last_for_write(&self) {
        if let Some(piece) = self.pieces.last() {
            copy::prefetch_for_write(piece.as_ptr());
        }
    }

    /// Empties the list and drops its reference to the memory.
    #[inline]
    pub fn release(&mut self) {
        self.clear();
        self.memory = None;
    }

    /// Zeroes `len_bytes` of guest memory from byte `offset_bytes` of the request on, or fewer if
    /// the request ends before.
    pub fn zero(&self, offset_bytes: u64, len_bytes: u64) {
        self.for_each_run(
            offset_bytes,
            usize::try_from(len_bytes).unwrap_or(usize::MAX),
            |host, count| {
                // SAFETY: `host` is valid for `count` bytes while `self` holds its memory.
                unsafe { copy::zero(host, count) };
            },
        );
    }

    /// Marks all pages of the list in `log`.
    ///
    /// Translates each piece back to the guest's addresses, so that a list carries none while no
    /// log is in use.
    pub fn mark(&self, log: &DirtyLog) {
        let Some(memory) = &self.memory else { return };
        for piece in &self.pieces {
            if let Some(address) = memory.guest_address_of(piece.host) {
                log.mark(address, piece.len_bytes as u64);
            }
        }
    }

    /// The pieces, in the order of the request's bytes.
    #[must_use]
    #[inline]
    pub fn pieces(&self) -> &[Segment] {
        &self.pieces
    }

    /// Bytes in all pieces.
    #[must_use]
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Copies guest memory from byte `offset_bytes` of the request into `to`; returns the number of
    /// bytes copied.
    #[inline]
    pub fn copy_to_slice(&self, offset_bytes: u64, to: &mut [u8]) -> usize {
        // The rule for short copies: they start in the first piece, and end there.
        if offset_bytes == 0
            && let [piece, others @ ..] = self.pieces.as_slice()
            && (others.is_empty() || to.len() <= piece.len_bytes)
        {
            let count = to.len().min(piece.len_bytes);
            // SAFETY: the piece is valid for `count` bytes while `self` holds its memory; `to` is a
            // distinct local buffer.
            unsafe { copy::copy(to.as_mut_ptr(), piece.as_ptr(), count) };
            return count;
        }
        self.copy_to_slice_by_runs(offset_bytes, to)
    }

    fn copy_to_slice_by_runs(&self, offset_bytes: u64, to: &mut [u8]) -> usize {
        let mut copied = 0_usize;
        self.for_each_run(offset_bytes, to.len(), |host, count| {
            if let Some(rest) = to.get_mut(copied..) {
                let count = count.min(rest.len());
                // SAFETY: `host` is valid for `count` bytes while `self` holds its memory; `rest`
                // is a distinct local buffer.
                unsafe { copy::copy(rest.as_mut_ptr(), host, count) };
                copied = copied.saturating_add(count);
            }
        });
        copied
    }

    /// Copies `from` into guest memory at byte `offset_bytes` of the request; returns the number of
    /// bytes copied.
    #[inline]
    pub fn copy_from_slice(&self, offset_bytes: u64, from: &[u8]) -> usize {
        // As above.
        if offset_bytes == 0
            && let [piece, others @ ..] = self.pieces.as_slice()
            && (others.is_empty() || from.len() <= piece.len_bytes)
        {
            let count = from.len().min(piece.len_bytes);
            // SAFETY: as above.
            unsafe { copy::copy(piece.as_ptr(), from.as_ptr(), count) };
            return count;
        }
        self.copy_from_slice_by_runs(offset_bytes, from)
    }

    fn copy_from_slice_by_runs(&self, offset_bytes: u64, from: &[u8]) -> usize {
        let mut copied = 0_usize;
        self.for_each_run(offset_bytes, from.len(), |host, count| {
            if let Some(rest) = from.get(copied..) {
                let count = count.min(rest.len());
                // SAFETY: as above.
                unsafe { copy::copy(host, rest.as_ptr(), count) };
                copied = copied.saturating_add(count);
            }
        });
        copied
    }

    /// Copies a frame or block whose first bytes are `head`, and whose others are the bytes of
    /// this list from byte `skip_bytes` on, to piece number `piece` of `to`, as far as it has room.
    #[inline]
    pub fn copy_to_piece(&self, head: &[u8], skip_bytes: usize, to: &Self, piece: usize) {
        let Some(piece) = to.pieces.get(piece) else { return };
        let count = head.len().min(piece.len_bytes);
        let mut rest = piece.len_bytes.wrapping_sub(count);
        // SAFETY: the piece is valid for `count` bytes while `to` holds its memory, and `head` is
        // private memory of at least so many.
        unsafe { copy::copy(piece.as_ptr(), head.as_ptr(), count) };
        if rest == 0 {
            return;
        }
        self.for_each_run(skip_bytes as u64, rest, |from, count| {
            let count = count.min(rest);
            // SAFETY: `from` is valid for `count` bytes while `self` holds its memory, and so are
            // the last `rest` bytes of the piece. As in `copy_to`, the same page may be in both.
            unsafe {
                let to = piece.as_ptr().add(piece.len_bytes.wrapping_sub(rest));
                copy::copy(to, from, count);
            }
            rest = rest.wrapping_sub(count);
        });
    }

    /// Copies `part` of this list to `to`, from byte `to_bytes` of that on. Returns the number of
    /// bytes copied, which is less than asked for if either list ends before.
    ///
    /// The lists may be of different memory, and both may change meanwhile.
    #[inline]
    pub fn copy_to(&self, part: Part, to: &Self, to_bytes: u64) -> usize {
        let mut copied = 0_usize;
        self.for_each_run(part.skip_bytes, part.len_bytes, |from, from_bytes| {
            let mut from = from;
            to.for_each_run(to_bytes.saturating_add(copied as u64), from_bytes, |host, count| {
                // SAFETY: `from` is valid for the rest of its run, of which `count` is a part, and
                // `host` for `count` bytes, while the two lists hold their memory. A peer that maps
                // the same page into both gets any bytes in it, and no more.
                unsafe {
                    copy::copy(host, from, count);
                    from = from.add(count);
                }
                copied = copied.saturating_add(count);
            });
        });
        copied
    }

    /// Calls `visit` for each contiguous piece of the `len_bytes` from byte `offset_bytes` on, or
    /// of fewer if the request ends before.
    #[inline]
    pub(crate) fn for_each_run(
        &self,
        offset_bytes: u64,
        len_bytes: usize,
        mut visit: impl FnMut(*mut u8, usize),
    ) {
        let Ok(mut skip) = usize::try_from(offset_bytes) else {
            return;
        };
        let mut rest = len_bytes;
        for piece in &self.pieces {
            let Some(usable) = piece.len_bytes.checked_sub(skip).filter(|left| *left > 0) else {
                skip = skip.saturating_sub(piece.len_bytes);
                continue;
            };
            let count = usable.min(rest);
            if count == 0 {
                return;
            }
            // SAFETY: `skip` is less than the piece's length.
            visit(unsafe { piece.as_ptr().add(skip) }, count);
            rest = rest.saturating_sub(count);
            skip = 0;
        }
    }
}
