//! A disk in memory: one copy per request, between the guest and the arena.

use std::io;
use std::sync::Arc;

use sidecore_memory::{Arena, PageKind};
use sidecore_units::{CoreId, Nanos};

use crate::{Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Operation};

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
        let len_bytes =
            usize::try_from(geometry.capacity_bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { geometry, arena: Arc::new(Arena::new(len_bytes)?) })
    }

    /// What pages the disk lies on.
    #[must_use]
    pub fn pages(&self) -> PageKind {
        self.arena.pages()
    }
}

impl BlockDevice for RamStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_channel(&self, _core: Option<CoreId>, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(RamChannel {
            arena: Arc::clone(&self.arena),
            read_only: self.geometry.read_only,
            depth,
            held: None,
            unsettled: false,
            done: Batch::with_capacity(depth),
        }))
    }
}

struct RamChannel {
    arena: Arc<Arena>,
    read_only: bool,
    depth: usize,
    /// The latest request, not carried out yet: when the next one comes, its
    /// memory is fetched during this one's copy.
    held: Option<Box<BlockRequest>>,
    /// Whether stores may not be visible to other cores yet.
    unsettled: bool,
    done: Batch,
}

impl RamChannel {
    /// Where the request will read from, for fetching it ahead.
    #[inline]
    fn source(&self, request: &BlockRequest) -> *const u8 {
        match (request.operation, request.segments.pieces().first()) {
            (Operation::Read, _) => self.arena.address_of(request.offset_bytes),
            (Operation::Write, Some(piece)) => piece.as_ptr().cast_const(),
            _ => std::ptr::null(),
        }
    }

    fn execute(&self, request: &BlockRequest, next: *const u8) -> Result<(), BlockError> {
        if self.read_only && request.operation.is_write() {
            return Err(BlockError::ReadOnly);
        }
        let arena = &self.arena;
        let in_bounds = match request.operation {
            Operation::Read => arena.read(request.offset_bytes, &request.segments, next),
            Operation::Write => arena.write(request.offset_bytes, &request.segments, next),
            Operation::Flush => true,
            Operation::Discard | Operation::WriteZeroes { .. } => arena.zero(request.offset_bytes, request.len_bytes),
        };
        if in_bounds { Ok(()) } else { Err(BlockError::OutOfBounds) }
    }

    /// Carries the held request out, and meanwhile fetches `next`.
    #[inline]
    fn carry_out(&mut self, next: *const u8) {
        if let Some(mut request) = self.held.take() {
            request.result = self.execute(&request, next);
            self.unsettled |= request.operation.is_write();
            self.done.push(request);
        }
    }
}

impl BlockChannel for RamChannel {
    fn preferred_batch(&self) -> usize {
        1
    }

    fn submit(&mut self, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.in_flight()).min(batch.len());
        for request in batch.drain(..room) {
            self.carry_out(self.source(&request));
            self.held = Some(request);
        }
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        self.carry_out(std::ptr::null());
        if std::mem::take(&mut self.unsettled) {
            self.arena.settle();
        }
        completed.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.done.len().saturating_add(usize::from(self.held.is_some()))
    }
}
