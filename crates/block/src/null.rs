//! A store that does nothing, at once: what the path itself costs.

use std::io;
use std::os::fd::BorrowedFd;

use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::{Batch, BlockChannel, BlockDevice, BlockRequest, Geometry, Readiness};

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
        let room = self.depth.saturating_sub(self.done.len()).min(batch.len());
        self.done.extend(batch.drain(..room).map(end));
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        completed.append(&mut self.done);
    }

    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        let room = self.depth.saturating_sub(self.done.len()).min(batch.len());
        completed.extend(batch.drain(..room).map(end));
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

fn end(mut request: Box<BlockRequest>) -> Box<BlockRequest> {
    request.result = Ok(());
    request
}
