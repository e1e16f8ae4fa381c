//! A store that does nothing, at once: what the path itself costs.

use std::io;
use std::os::fd::BorrowedFd;

use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::request::move_front;
use crate::{Batch, BlockChannel, BlockDevice, Geometry, Readiness};

/// Completes everything and touches nothing: a read leaves the guest's memory
/// as it is, a write is forgotten.
#[derive(Debug)]
pub struct NullStore {
    geometry: Geometry,
}

impl NullStore {
    /// A null store that claims this geometry.
    #[must_use]
    pub const fn new(geometry: Geometry) -> Self {
        Self { geometry }
    }
}

impl BlockDevice for NullStore {
    fn geometry(&self) -> Geometry {
        // Nothing is ever read.
        Geometry { discard_zeroes: false, ..self.geometry }
    }

    fn open_channel(&self, _core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(NullChannel { depth, done: Batch::with_capacity(depth) }))
    }
}

struct NullChannel {
    depth: usize,
    done: Batch,
}

impl BlockChannel for NullChannel {
    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        end(batch, self.depth.saturating_sub(self.done.len()), &mut self.done);
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        completed.append(&mut self.done);
    }

    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        end(batch, self.depth.saturating_sub(self.done.len()), completed);
        if !self.done.is_empty() {
            self.poll(now, completed);
        }
    }

    fn readiness(&self) -> Readiness {
        Readiness::polled(self.done.len())
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Completes `room` requests at most.
#[inline]
fn end(batch: &mut Batch, room: usize, completed: &mut Batch) {
    let count = room.min(batch.len());
    for request in batch.iter_mut().take(count) {
        request.result = Ok(());
    }
    move_front(batch, count, completed);
}
