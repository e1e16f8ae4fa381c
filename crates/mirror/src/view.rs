//! The bytes of one leg, for reading.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, FilterChannel, Geometry, Operation,
    Readiness,
};
use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

/// See the module.
pub(crate) struct LegView {
    device: Arc<dyn BlockDevice>,
    data_bytes: u64,
    geometry: Geometry,
}

impl LegView {
    pub(crate) fn new(device: Arc<dyn BlockDevice>, data_bytes: u64, mirror: Geometry) -> Self {
        let geometry = Geometry { read_only: true, discard: false, write_zeroes: false, ..mirror };
        Self { device, data_bytes, geometry }
    }
}

impl BlockDevice for LegView {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let below = self.device.open_channel(core, depth)?;
        let shifted = Box::new(Shifted { below, by_bytes: self.data_bytes });
        let geometry = self.geometry;
        let judge = move |request: &BlockRequest| match request.operation {
            Operation::Flush => Ok(()),
            Operation::Read => {
                let inside = geometry.check(request.offset_bytes, request.len_bytes);
                inside.map_err(|_| BlockError::OutOfBounds)
            }
            _ => Err(BlockError::ReadOnly),
        };
        Ok(Box::new(FilterChannel::new(shifted, depth, judge)))
    }
}

/// A channel whose first byte is another one of the store.
struct Shifted {
    below: Box<dyn BlockChannel>,
    by_bytes: u64,
}

impl BlockChannel for Shifted {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.below.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        for request in batch.iter_mut() {
            request.offset_bytes = request.offset_bytes.saturating_add(self.by_bytes);
        }
        self.below.submit(now, batch);
        for request in batch.iter_mut() {
            request.offset_bytes = request.offset_bytes.saturating_sub(self.by_bytes);
        }
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        let before = completed.len();
        self.below.poll(now, completed);
        for request in completed.iter_mut().skip(before) {
            request.offset_bytes = request.offset_bytes.saturating_sub(self.by_bytes);
        }
    }

    fn readiness(&self) -> Readiness {
        self.below.readiness()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.below.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.below.wake_fd()
    }
}
