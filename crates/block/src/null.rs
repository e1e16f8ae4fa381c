//! A store that does nothing, at once: what the path itself costs.

use std::io;

use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::{Batch, BlockChannel, BlockDevice, BlockRequest, Geometry};

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
    fn submit(&mut self, batch: &mut Batch) {
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

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}

fn end(mut request: Box<BlockRequest>) -> Box<BlockRequest> {
    request.result = Ok(());
    request
}
