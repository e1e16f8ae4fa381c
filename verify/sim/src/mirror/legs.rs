//! The legs: disks that record in one order, delay and reorder requests, and fail.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Operation, Readiness,
};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::Random;
use crate::volumes::disk::{SECTOR_BYTES, SimDisk};

/// The order of all events: of legs, guests and the witness.
#[derive(Clone, Default)]
pub(crate) struct Order(Arc<Mutex<Events>>);

#[derive(Default)]
struct Events {
    now: u64,
    /// The store of each write and flush, and its time.
    of_legs: Vec<(usize, u64)>,
}

impl Order {
    fn lock(&self) -> MutexGuard<'_, Events> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of a new event.
    pub(crate) fn tick(&self) -> u64 {
        let mut events = self.lock();
        events.now += 1;
        events.now
    }

    fn note(&self, store: usize) {
        let at = self.tick();
        self.lock().of_legs.push((store, at));
    }

    /// The events of legs, in order.
    pub(crate) fn of_legs(&self) -> Vec<(usize, u64)> {
        self.lock().of_legs.clone()
    }
}

/// How a leg behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// A request advances at one in so many polls.
    pub(crate) delay: u64,
    /// One in so many requests fails.
    pub(crate) requests_per_fault: u64,
}

/// A leg at its best, to look at what a power cut left.
pub(crate) const QUICK: Manner = Manner { delay: 1, requests_per_fault: u64::MAX };

struct Luck {
    random: Random,
    manner: Manner,
    /// All requests fail from now on.
    is_broken: bool,
}

/// A leg's store. All clones share it.
#[derive(Clone)]
pub(crate) struct LegStore {
    /// Its place in the list of stores: it may have another number as a leg, or none.
    pub(crate) index: usize,
    pub(crate) disk: SimDisk,
    order: Order,
    luck: Arc<Mutex<Luck>>,
}

impl LegStore {
    pub(crate) fn new(index: usize, disk: SimDisk, order: &Order, random: Random) -> Self {
        let luck = Luck { random, manner: QUICK, is_broken: false };
        Self { index, disk, order: order.clone(), luck: Arc::new(Mutex::new(luck)) }
    }

    fn luck(&self) -> MutexGuard<'_, Luck> {
        self.luck.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_manner(&self, manner: Manner) {
        self.luck().manner = manner;
    }

    /// Whether all requests fail.
    pub(crate) fn set_broken(&self, is_broken: bool) {
        self.luck().is_broken = is_broken;
    }

    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.disk.write_sectors(offset_bytes, data)?;
        self.order.note(self.index);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.disk.flush_all()?;
        self.order.note(self.index);
        Ok(())
    }
}

impl BlockDevice for LegStore {
    fn geometry(&self) -> Geometry {
        let capacity_bytes = sidecore_volume::Disk::size_bytes(&self.disk);
        Geometry { volatile_cache: true, ..Geometry::new(capacity_bytes, SECTOR_BYTES as u32) }
    }

    fn open_channel(&self, _core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(Channel { store: self.clone(), depth, in_flight: Vec::new() }))
    }
}

struct InFlight {
    request: Box<BlockRequest>,
    done_bytes: u64,
    is_done: bool,
}

struct Channel {
    store: LegStore,
    depth: usize,
    in_flight: Vec<InFlight>,
}

impl InFlight {
    /// Does a part of the request, or all.
    fn advance(&mut self, store: &LegStore) {
        let request = &mut self.request;
        let sectors = (request.len_bytes - self.done_bytes) / SECTOR_BYTES as u64;
        let (count, fails, may_be_done) = {
            let mut luck = store.luck();
            let is_torn = sectors > 1 && luck.random.once_in(4);
            let count = if is_torn { 1 + luck.random.below(sectors) } else { sectors };
            let times = luck.manner.requests_per_fault;
            let fails = luck.is_broken || luck.random.once_in(times);
            (count, fails, luck.random.once_in(2))
        };
        let (skip_bytes, len_bytes) = (self.done_bytes, count * SECTOR_BYTES as u64);
        let offset_bytes = request.offset_bytes + skip_bytes;
        let mut data = vec![0; len_bytes as usize];
        // A request that fails may have been done all the same.
        let result = match request.operation {
            _ if fails && !may_be_done => Ok(()),
            Operation::Read => store.disk.read_sectors(offset_bytes, &mut data).map(|()| {
                request.segments.copy_from_slice(skip_bytes, &data);
            }),
            Operation::Write => {
                request.segments.copy_to_slice(skip_bytes, &mut data);
                store.write(offset_bytes, &data)
            }
            Operation::WriteZeroes { .. } | Operation::Discard => store.write(offset_bytes, &data),
            Operation::Flush => store.flush(),
        };
        request.result = if fails || result.is_err() { Err(BlockError::EIO) } else { Ok(()) };
        self.done_bytes += len_bytes;
        self.is_done = request.result.is_err() || self.done_bytes >= request.len_bytes;
    }
}

impl BlockChannel for Channel {
    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        let free = self.depth.saturating_sub(self.in_flight.len());
        for request in batch.drain(..free.min(batch.len())) {
            self.in_flight.push(InFlight { request, done_bytes: 0, is_done: false });
            if self.store.luck().random.once_in(4)
                && let Some(newest) = self.in_flight.last_mut()
            {
                newest.advance(&self.store);
            }
        }
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        for index in (0..self.in_flight.len()).rev() {
            let (moves, ends) = {
                let mut luck = self.store.luck();
                let delay = luck.manner.delay;
                (luck.random.once_in(delay), delay == 1 || luck.random.once_in(2))
            };
            let request = &mut self.in_flight[index];
            if moves && !request.is_done {
                request.advance(&self.store);
            }
            if moves && request.is_done && ends {
                completed.push(self.in_flight.swap_remove(index).request);
            }
        }
    }

    fn readiness(&self) -> Readiness {
        Readiness::polled(self.in_flight.len())
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
