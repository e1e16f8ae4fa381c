//! The store below a controller: it delays and reorders requests, and fails some.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Operation, Readiness,
};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;
use sidecore_volume::Disk;

use super::Bug;
use crate::Random;
use crate::volumes::disk::{SECTOR_BYTES, SimDisk};
use crate::volumes::model::fill;

/// The content of a discarded sector, which no read may ever show.
const DISCARDED: u64 = 0xd15c_a4de_d15c_a4de;

/// How a store behaves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    /// A request advances at one in so many polls.
    pub(super) delay: u64,
    /// One in so many requests fails.
    pub(super) requests_per_fault: u64,
    pub(super) bug: Option<Bug>,
}

/// A [`SimDisk`] as a device. All clones share it.
#[derive(Clone)]
pub(super) struct SimStore {
    disk: SimDisk,
    luck: Arc<Mutex<Luck>>,
}

struct Luck {
    random: Random,
    manner: Manner,
    faults: u64,
    /// Writes that were completed and not done.
    owed: Vec<(u64, Vec<u8>)>,
}

impl SimStore {
    pub(super) fn new(disk: SimDisk, random: Random, manner: Manner) -> Self {
        Self {
            disk,
            luck: Arc::new(Mutex::new(Luck { random, manner, faults: 0, owed: Vec::new() })),
        }
    }

    fn luck(&self) -> MutexGuard<'_, Luck> {
        self.luck.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of failures so far.
    pub(super) fn faults(&self) -> u64 {
        self.luck().faults
    }

    /// Counts a failure that another part has injected.
    pub(super) fn note_fault(&self) {
        self.luck().faults += 1;
    }

    /// Stops all failures.
    pub(super) fn stop_failing(&self) {
        self.luck().manner.requests_per_fault = u64::MAX;
    }
}

impl BlockDevice for SimStore {
    fn geometry(&self) -> Geometry {
        Geometry {
            volatile_cache: true,
            ..Geometry::new(self.disk.size_bytes(), SECTOR_BYTES as u32)
        }
    }

    fn open_channel(&self, _core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(Channel { store: self.clone(), depth, in_flight: Vec::new() }))
    }
}

/// The hypervisor side's interface. Accesses are whole sectors.
impl Disk for SimStore {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.disk.read_sectors(offset_bytes, buffer)
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.disk.write_sectors(offset_bytes, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.disk.flush_all()
    }

    fn discard(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.disk
            .write_sectors(offset_bytes, &fill(DISCARDED).repeat(len_bytes as usize / SECTOR_BYTES))
    }
}

/// A request in the store.
struct InFlight {
    request: Box<BlockRequest>,
    /// The part of the request that is done.
    done_bytes: u64,
    is_done: bool,
}

struct Channel {
    store: SimStore,
    depth: usize,
    in_flight: Vec<InFlight>,
}

impl InFlight {
    /// Does a part of the request, or all.
    fn advance(&mut self, store: &SimStore) {
        let mut luck = store.luck();
        let request = &mut self.request;
        let sectors = (request.len_bytes - self.done_bytes) / SECTOR_BYTES as u64;
        let count = if sectors > 1 && luck.random.once_in(4) {
            1 + luck.random.below(sectors)
        } else {
            sectors
        };
        let (skip_bytes, len_bytes) = (self.done_bytes, count * SECTOR_BYTES as u64);
        let offset_bytes = request.offset_bytes + skip_bytes;
        let mut data = vec![0; len_bytes as usize];
        let times = luck.manner.requests_per_fault;
        let fails = luck.random.once_in(times);
        // A request that fails may have been done all the same.
        let result = match request.operation {
            _ if fails && luck.random.once_in(2) => Ok(()),
            Operation::Read => store.disk.read_sectors(offset_bytes, &mut data).map(|()| {
                request.segments.copy_from_slice(skip_bytes, &data);
            }),
            Operation::Write => {
                request.segments.copy_to_slice(skip_bytes, &mut data);
                if luck.manner.bug == Some(Bug::EarlyCompletions) {
                    luck.owed.push((offset_bytes, data));
                    Ok(())
                } else {
                    store.disk.write_sectors(offset_bytes, &data)
                }
            }
            Operation::WriteZeroes { .. } => store.disk.write_sectors(offset_bytes, &data),
            Operation::Discard => store.clone().discard(offset_bytes, len_bytes),
            Operation::Flush => store.disk.flush_all(),
        };
        let fails = fails || result.is_err();
        luck.faults += u64::from(fails);
        request.result = if fails { Err(BlockError::EIO) } else { Ok(()) };
        self.done_bytes += len_bytes;
        self.is_done = request.result.is_err() || self.done_bytes >= request.len_bytes;
    }
}

impl BlockChannel for Channel {
    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.in_flight.len()).min(batch.len());
        for request in batch.drain(..room) {
            let mut request = InFlight { request, done_bytes: 0, is_done: false };
            let at_once = self.store.luck().random.once_in(4);
            if at_once {
                request.advance(&self.store);
            }
            self.in_flight.push(request);
        }
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        for index in (0..self.in_flight.len()).rev() {
            let delay = self.store.luck().manner.delay;
            if !self.store.luck().random.once_in(delay) {
                continue;
            }
            let request = &mut self.in_flight[index];
            if !request.is_done {
                request.advance(&self.store);
            }
            if request.is_done && self.store.luck().random.once_in(2) {
                completed.push(self.in_flight.swap_remove(index).request);
            }
        }
        let mut luck = self.store.luck();
        if luck.random.once_in(8) {
            for (offset_bytes, data) in std::mem::take(&mut luck.owed) {
                let _ = self.store.disk.write_sectors(offset_bytes, &data);
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
