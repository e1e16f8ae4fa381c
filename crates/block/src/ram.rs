//! A disk in memory: one copy per request, between the guest and the arena.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_memory::{Arena, PageKind, Part};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::request::move_front;
use crate::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Mapped, Operation,
    Readiness,
};

/// How much of one request is done in one go: some tens of microseconds. A larger one is continued
/// from poll to poll, and neighbours are served in between.
const SLICE_BYTES: usize = 256 << 10;

/// A store in huge pages if there are any, else in plain memory.
#[derive(Debug)]
pub struct RamStore {
    geometry: Geometry,
    arena: Arc<Arena>,
}

impl RamStore {
    /// Allocates and faults in `geometry.capacity_bytes`, zeroed.
    ///
    /// # Errors
    /// There is not that much memory.
    pub fn new(geometry: Geometry) -> io::Result<Self> {
        let len_bytes = usize::try_from(geometry.capacity_bytes)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { geometry, arena: Arc::new(Arena::new(len_bytes)?) })
    }

    /// The kind of pages that back the disk.
    #[must_use]
    pub fn pages(&self) -> PageKind {
        self.arena.pages()
    }
}

impl BlockDevice for RamStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_channel(&self, _core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(RamChannel {
            arena: Arc::clone(&self.arena),
            read_only: self.geometry.read_only,
            depth,
            large: VecDeque::with_capacity(depth),
            done: Batch::with_capacity(depth),
        }))
    }
}

struct RamChannel {
    arena: Arc<Arena>,
    read_only: bool,
    depth: usize,
    /// Requests of more than a slice, and how many bytes of each are done.
    large: VecDeque<(Box<BlockRequest>, u64)>,
    done: Batch,
}

impl RamChannel {
    /// Where the request will read from, for fetching it ahead, if its place is `offset_bytes`.
    #[inline]
    fn source(&self, request: &BlockRequest, offset_bytes: u64) -> *const u8 {
        match (request.operation, request.segments.pieces().first()) {
            (Operation::Read, _) => self.arena.address_of(offset_bytes),
            (Operation::Write, Some(piece)) => piece.as_ptr().cast_const(),
            _ => std::ptr::null(),
        }
    }

    /// Does `part` of the request, whose place is `offset_bytes`, and sets its result.
    #[inline]
    fn carry_out(
        &self,
        request: &mut BlockRequest,
        offset_bytes: u64,
        part: Part,
        next: *const u8,
    ) {
        if self.read_only && request.operation.is_write() {
            request.result = Err(BlockError::ReadOnly);
            return;
        }
        let arena = &self.arena;
        // A sum that overflows is outside of the arena as well.
        let offset_bytes = offset_bytes.saturating_add(part.skip_bytes);
        let in_bounds = match request.operation {
            Operation::Read => arena.read(offset_bytes, &request.segments, part, next),
            Operation::Write => arena.write(offset_bytes, &request.segments, part, next),
            Operation::Flush => true,
            Operation::Discard | Operation::WriteZeroes { .. } => {
                arena.zero(offset_bytes, part.len_bytes as u64)
            }
        };
        // In place: the result of a function would be stored in two words and loaded in one, which
        // a processor cannot forward.
        if in_bounds {
            request.result = Ok(());
        } else {
            request.result = Err(BlockError::OutOfBounds);
        }
    }

    /// Carries out requests of a slice at most from the front of `batch` on, `limit` at most, each
    /// at its `place`; ends at the first that has none. Returns their number.
    #[inline]
    fn carry_out_front(
        &self,
        (batch, limit): (&mut Batch, usize),
        completed: &mut Batch,
        place: impl Fn(&BlockRequest) -> Option<u64>,
    ) -> usize {
        let limit = limit.min(batch.len());
        let mut rest = batch.get_mut(..limit).unwrap_or_default().iter_mut();
        let mut placed = || {
            let request = rest.next().filter(|request| request.len_bytes <= SLICE_BYTES as u64)?;
            place(request).map(|offset_bytes| (request, offset_bytes))
        };
        let (mut count, mut wrote) = (0_usize, false);
        let mut current = placed();
        while let Some((request, offset_bytes)) = current {
            let following = placed();
            let next =
                following.as_ref().map_or(std::ptr::null(), |(next, at)| self.source(next, *at));
            let len_bytes = usize::try_from(request.len_bytes).unwrap_or(SLICE_BYTES);
            let part = Part { skip_bytes: 0, len_bytes };
            self.carry_out(request, offset_bytes, part, next);
            wrote |= request.operation.is_write();
            count = count.wrapping_add(1);
            current = following;
        }
        if wrote {
            self.arena.settle();
        }
        move_front(batch, count, completed);
        count
    }

    /// Carries requests out, as many as there is room for beside those `waiting` to be handed back;
    /// `done` gets all but the large ones.
    #[inline]
    fn carry_out_all(&mut self, batch: &mut Batch, waiting: usize, done: &mut Batch) {
        let mut room =
            self.depth.saturating_sub(self.large.len()).saturating_sub(waiting).min(batch.len());
        loop {
            let in_place = |request: &BlockRequest| Some(request.offset_bytes);
            room = room.saturating_sub(self.carry_out_front((batch, room), done, in_place));
            if room == 0 {
                break;
            }
            self.large.extend(batch.drain(..1).map(|request| (request, 0)));
            room = room.saturating_sub(1);
        }
    }

    /// Carries the first large request on by a slice.
    fn continue_large(&mut self) {
        let Some((mut request, done_bytes)) = self.large.pop_front() else {
            return;
        };
        let left_bytes = request.len_bytes.saturating_sub(done_bytes);
        let len_bytes = usize::try_from(left_bytes).unwrap_or(usize::MAX).min(SLICE_BYTES);
        let part = Part { skip_bytes: done_bytes, len_bytes };
        let offset_bytes = request.offset_bytes;
        self.carry_out(&mut request, offset_bytes, part, std::ptr::null());
        if request.operation.is_write() {
            self.arena.settle();
        }
        let done_bytes = done_bytes.saturating_add(len_bytes as u64);
        if request.result.is_ok() && done_bytes < request.len_bytes {
            self.large.push_front((request, done_bytes));
        } else {
            self.done.push(request);
        }
    }
}

impl BlockChannel for RamChannel {
    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        let mut done = std::mem::take(&mut self.done);
        self.carry_out_all(batch, done.len(), &mut done);
        self.done = done;
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        self.continue_large();
        completed.append(&mut self.done);
    }

    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        if !batch.is_empty() {
            self.carry_out_all(batch, self.done.len(), completed);
        }
        if !self.done.is_empty() || !self.large.is_empty() {
            self.poll(now, completed);
        }
    }

    fn exchange_mapped(&mut self, mapped: &Mapped, batch: &mut Batch, completed: &mut Batch) {
        self.carry_out_front((batch, usize::MAX), completed, |request| mapped.place(request));
    }

    fn takes_mapped(&self) -> bool {
        true
    }

    fn readiness(&self) -> Readiness {
        Readiness::polled(self.done.len().saturating_add(self.large.len()))
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
