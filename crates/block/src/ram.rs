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
            done: Batch::with_capacity(depth),
        }))
    }
}

struct RamChannel {
    arena: Arc<Arena>,
    read_only: bool,
    depth: usize,
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

    fn carry_out(&self, request: &BlockRequest, next: *const u8) -> Result<(), BlockError> {
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
}

impl BlockChannel for RamChannel {
    fn submit(&mut self, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.done.len()).min(batch.len());
        let mut rest = batch.get_mut(..room).unwrap_or_default();
        let mut wrote = false;
        while let Some((request, later)) = rest.split_first_mut() {
            let next = later.first().map_or(std::ptr::null(), |next| self.source(next));
            request.result = self.carry_out(request, next);
            wrote |= request.operation.is_write();
            rest = later;
        }
        if wrote {
            self.arena.settle();
        }
        self.done.extend(batch.drain(..room));
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        completed.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}
