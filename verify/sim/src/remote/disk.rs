//! The store behind the block seam, for an IOhost whose sidecores execute requests.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::{Batch, BlockChannel, BlockDevice, BlockRequest, Geometry, Next, Readiness};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;
use sidecore_vrio::Request;

use super::store::Store;

/// The store of a device, whatever the process that uses it. Clones are the same store.
#[derive(Clone, Debug)]
pub(super) struct Disk(Arc<Mutex<Shared>>);

#[derive(Debug)]
struct Shared {
    store: Store,
    geometry: Geometry,
    /// The requests of each channel, in the order of their opening: the first one is of the
    /// sidecore that polls the link.
    channels: Vec<usize>,
    /// Channels that are open.
    open: usize,
}

impl Disk {
    pub(super) fn new(store: Store, geometry: Geometry) -> Self {
        let shared = Shared { store, geometry, channels: Vec::new(), open: 0 };
        Self(Arc::new(Mutex::new(shared)))
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the store, or changes it.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        change(&mut self.shared().store)
    }

    /// Requests that it has: of the sidecore that polls the link, and of all others.
    pub(super) fn in_flight(&self) -> (usize, usize) {
        let shared = self.shared();
        let here = shared.store.executing() + shared.channels.first().copied().unwrap_or(0);
        (here, shared.channels.iter().skip(1).sum())
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> Geometry {
        self.shared().geometry
    }

    fn open_channel(
        &self,
        _core: &CoreContext,
        _depth: usize,
    ) -> io::Result<Box<dyn BlockChannel>> {
        let mut shared = self.shared();
        shared.channels.push(0);
        shared.open += 1;
        let index = shared.channels.len() - 1;
        Ok(Box::new(Channel { disk: self.clone(), index, requests: Vec::new() }))
    }
}

/// A sidecore's way to the store.
struct Channel {
    disk: Disk,
    index: usize,
    /// Requests, and when each ends.
    #[allow(clippy::vec_box)] // as the seam has them
    requests: Vec<(Nanos, Box<BlockRequest>)>,
}

/// The request without its memory.
fn plain(request: &BlockRequest) -> Request {
    let BlockRequest { operation, offset_bytes, len_bytes, write_through, .. } = *request;
    Request { operation, offset_bytes, len_bytes, fua: write_through }
}

fn data_of(request: &BlockRequest) -> Vec<u8> {
    let mut data = vec![0; request.segments.len_bytes() as usize];
    request.segments.copy_to_slice(0, &mut data);
    data
}

impl BlockChannel for Channel {
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let mut shared = self.disk.shared();
        for request in batch.drain(..) {
            let mut channels = shared.channels.iter().enumerate();
            let other = channels.find(|(index, count)| *index != self.index && **count > 0);
            assert!(
                other.is_none(),
                "sidecore {} has requests of the device, and sidecore {} is given {:?}",
                other.map_or(0, |(index, _)| index),
                self.index,
                plain(&request)
            );
            shared.channels[self.index] += 1;
            let end = shared.store.end_of(now);
            self.requests.push((end, request));
        }
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        while let Some(index) = self.requests.iter().position(|(end, _)| *end <= now) {
            let (_, mut request) = self.requests.swap_remove(index);
            let mut shared = self.disk.shared();
            let mut data = data_of(&request);
            let result = shared.store.carry_out(&plain(&request), &mut data);
            shared.channels[self.index] -= 1;
            drop(shared);
            result.unwrap_or_else(|what| panic!("{what}"));
            if request.operation == sidecore_block::Operation::Read {
                request.segments.copy_from_slice(0, &data);
            }
            request.result = Ok(());
            completed.push(request);
        }
    }

    fn readiness(&self) -> Readiness {
        let next = self.requests.iter().map(|(end, _)| Next::At(*end)).min();
        Readiness { in_flight: self.requests.len(), next: next.unwrap_or(Next::OnWake) }
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for Channel {
    /// The process dies.
    fn drop(&mut self) {
        let mut shared = self.disk.shared();
        for (_, mut request) in self.requests.drain(..) {
            shared.store.abandon(&plain(&request), &data_of(&request));
            request.tag.take().map(sidecore_block::Tag::into_bits);
        }
        shared.open -= 1;
        shared.channels[self.index] = 0;
        if shared.open == 0 {
            shared.channels.clear();
        }
    }
}
