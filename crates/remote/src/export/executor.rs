//! Requests of clients between the session engine and the stores, on one sidecore.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::{
    BlockChannel, BlockDevice, BlockError, BlockRequest, Context, Flush, InFlight, Next, Operation,
    QueueName, QueueStats,
};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_reactor::{CoreContext, WakeSet};
use sidecore_units::Nanos;

/// A request for the store of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    /// The engine's name for it.
    pub ticket: u64,
    /// Where its data are, in the memory that comes with it.
    pub data: GuestAddress,
    /// They are in a frame, whose memory is a peer's.
    pub is_lent: bool,
    pub operation: Operation,
    pub offset_bytes: u64,
    pub len_bytes: u64,
    /// Whether a write is durable before it is answered.
    pub fua: bool,
}

/// A request that the store has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub device: u16,
    pub ticket: u64,
    pub result: Result<(), BlockError>,
}

/// A device as an executor needs it.
#[derive(Clone)]
pub(crate) struct LaneSpec {
    pub name: Arc<str>,
    pub device: Arc<dyn BlockDevice>,
    /// Requests that the store may have at a time.
    pub depth: usize,
    /// The counters of this device on this sidecore.
    pub stats: Arc<QueueStats>,
}

/// The name that the engine has for a request in flight.
struct Ticket {
    number: u64,
    /// See [`Job::is_lent`].
    is_lent: bool,
}

impl Context for Ticket {
    #[inline]
    fn into_words(self) -> [u64; 2] {
        [self.number, self.is_lent.into()]
    }

    #[inline]
    fn from_words([number, is_lent]: [u64; 2]) -> Self {
        Self { number, is_lent: is_lent != 0 }
    }
}

/// A device's way to its store on this sidecore.
struct Lane {
    name: Arc<str>,
    engine: InFlight<Ticket>,
    /// Requests that wait for a blank one.
    queued: VecDeque<(GuestMemory, Job)>,
    hint: RegionHint,
    is_active: bool,
}

/// The ways of all devices to their stores, on one sidecore.
pub(crate) struct Executor {
    core: Rc<CoreContext>,
    /// By the devices' numbers.
    lanes: Vec<Option<Box<Lane>>>,
    /// The devices that have requests in flight.
    active: Vec<u16>,
    wakes: WakeSet,
}

impl Executor {
    /// An executor without devices.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new(core: &Rc<CoreContext>) -> io::Result<Self> {
        let wakes = WakeSet::new()?;
        Ok(Self { core: Rc::clone(core), lanes: Vec::new(), active: Vec::new(), wakes })
    }

    /// Opens the store of a device.
    ///
    /// # Errors
    /// The kernel refuses what the channel needs.
    pub fn add(&mut self, device: u16, spec: LaneSpec) -> io::Result<()> {
        let LaneSpec { name, device: store, depth, stats } = spec;
        let mut engine = InFlight::new(stats);
        engine.add_requests(depth.max(1), 1);
        let channel = store.open_channel(&self.core, engine.depth())?;
        if let Some(fd) = channel.wake_fd() {
            self.wakes.add(fd)?;
        }
        engine.set_channel(Some(channel));
        let queued = VecDeque::with_capacity(depth);
        let hint = RegionHint::default();
        let lane = Box::new(Lane { name, engine, queued, hint, is_active: false });
        let index = usize::from(device);
        if index >= self.lanes.len() {
            self.lanes.resize_with(index.saturating_add(1), || None);
        }
        if let Some(place) = self.lanes.get_mut(index) {
            *place = Some(lane);
        }
        self.active.reserve(self.lanes.len());
        Ok(())
    }

    /// Closes the store of a device, of which nothing is in flight.
    pub fn remove(&mut self, device: u16) {
        let Some(lane) = self.lanes.get_mut(usize::from(device)).and_then(Option::take) else {
            return;
        };
        self.active.retain(|number| *number != device);
        if let Some(fd) = lane.engine.channel().and_then(BlockChannel::wake_fd) {
            self.wakes.remove(fd);
        }
    }

    /// Takes a request whose data are in `memory`. A request for a device that is not here fails.
    #[inline]
    pub fn take(
        &mut self,
        now: Nanos,
        device: u16,
        (memory, job): (&GuestMemory, Job),
        done: &mut Vec<Done>,
    ) {
        let Some(lane) = self.lanes.get_mut(usize::from(device)).and_then(Option::as_mut) else {
            done.push(Done { device, ticket: job.ticket, result: Err(BlockError::EIO) });
            return;
        };
        if !lane.is_active {
            lane.is_active = true;
            self.active.push(device);
        }
        match lane.engine.blank() {
            Some(request) => lane.submit(now, memory, job, request),
            None => lane.queued.push_back((memory.clone(), job)),
        }
    }

    /// Gives the stores what was taken, and appends what they have ended. Returns the number of
    /// requests that came back.
    #[inline]
    pub fn exchange(&mut self, now: Nanos, done: &mut Vec<Done>) -> usize {
        let before = done.len();
        if let [device] = *self.active.as_slice() {
            let lane = self.lanes.get_mut(usize::from(device)).and_then(Option::as_mut);
            if !lane.is_some_and(|lane| lane.exchange(now, device, done)) {
                self.active.clear();
            }
            return done.len().saturating_sub(before);
        }
        let lanes = &mut self.lanes;
        self.active.retain(|device| {
            let Some(lane) = lanes.get_mut(usize::from(*device)).and_then(Option::as_mut) else {
                return false;
            };
            lane.exchange(now, *device, done)
        });
        done.len().saturating_sub(before)
    }

    /// Whether no store has a request.
    pub const fn is_idle(&self) -> bool {
        self.active.is_empty()
    }

    /// When to exchange next, if no descriptor wakes the sidecore before.
    pub fn next(&self) -> Next {
        let lanes = self.active_lanes().map(|lane| lane.engine.readiness().next);
        lanes.min().unwrap_or(Next::OnWake)
    }

    /// See [`BlockChannel::waits_since`].
    pub fn waits_since(&self) -> Option<Nanos> {
        self.active_lanes()
            .filter_map(|lane| lane.engine.channel().and_then(BlockChannel::waits_since))
            .min()
    }

    /// The descriptor that is readable while a store has ended requests.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wakes.as_fd()
    }

    fn active_lanes(&self) -> impl Iterator<Item = &Lane> {
        self.active.iter().filter_map(|device| self.lanes.get(usize::from(*device))?.as_deref())
    }
}

impl Lane {
    #[inline(always)]
    fn submit(
        &mut self,
        now: Nanos,
        memory: &GuestMemory,
        job: Job,
        mut request: Box<BlockRequest>,
    ) {
        let Job { ticket: number, data, is_lent, operation, offset_bytes, len_bytes, fua } = job;
        request.taken_at = now;
        request.operation = operation;
        request.offset_bytes = offset_bytes;
        request.len_bytes = len_bytes;
        match operation {
            Operation::Read | Operation::Write => {
                request.segments.bind(memory);
                // A buffer is as large as the largest request, so nothing is cut off.
                let bound = request.segments.push(data, len_bytes, &mut self.hint);
                debug_assert!(bound.is_ok(), "{bound:?}");
                if bound.is_err() {
                    request.len_bytes = request.segments.len_bytes();
                }
            }
            _ => request.segments.clear(),
        }
        let flush = if fua && operation.is_write() { Flush::After } else { Flush::Never };
        self.engine.submit(request, Ticket { number, is_lent }, flush);
    }

    /// Returns whether the lane is still active.
    #[inline]
    fn exchange(&mut self, now: Nanos, device: u16, done: &mut Vec<Done>) -> bool {
        self.engine.begin_poll(now);
        if self.engine.has_queued() {
            self.engine.stats().batches.add(1);
        }
        let returned = self.engine.exchange(now);
        while let Some((ticket, mut request)) = self.engine.next_completed(now) {
            self.engine.stats().requests.add(1);
            self.engine.account(now, &request);
            if let Err(error) = request.result {
                self.engine.log_error(QueueName { device: &self.name, queue: 0 }, &request, error);
            }
            done.push(Done { device, ticket: ticket.number, result: request.result });
            if ticket.is_lent {
                // A peer that leaves takes its memory along.
                request.segments.release();
            }
            match self.queued.pop_front() {
                Some((memory, job)) => self.submit(now, &memory, job, request),
                None => self.engine.recycle(request),
            }
        }
        self.engine.end_poll(returned);
        self.is_active = self.engine.in_flight() > 0 || !self.queued.is_empty();
        self.is_active
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sidecore_block::{Geometry, RamStore};
    use sidecore_memory::SharedPages;

    use super::*;

    const NOW: Nanos = Nanos::from_micros(1);

    fn job(ticket: u64, operation: Operation, offset_bytes: u64) -> Job {
        let (data, len_bytes) = (GuestAddress(4096), 4096);
        Job { ticket, data, is_lent: false, operation, offset_bytes, len_bytes, fua: false }
    }

    fn executor(depth: usize) -> (Executor, SharedPages, Arc<QueueStats>) {
        let mut executor = Executor::new(&Rc::default()).unwrap();
        let stats = Arc::new(QueueStats::default());
        let device = Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap());
        let spec = LaneSpec { name: "d".into(), device, depth, stats: Arc::clone(&stats) };
        executor.add(3, spec).unwrap();
        (executor, SharedPages::new("test", 1 << 16).unwrap(), stats)
    }

    #[test]
    fn a_request_for_a_device_that_is_not_here_fails() {
        let (mut executor, pages, _) = executor(4);
        let mut done = Vec::new();
        for device in [0, 4, u16::MAX] {
            executor.take(NOW, device, (pages.memory(), job(9, Operation::Read, 0)), &mut done);
            assert_eq!(done.pop(), Some(Done { device, ticket: 9, result: Err(BlockError::EIO) }));
        }
        executor.remove(3);
        executor.take(NOW, 3, (pages.memory(), job(1, Operation::Read, 0)), &mut done);
        assert_eq!(done.pop().unwrap().result, Err(BlockError::EIO));
        assert!(executor.is_idle());
    }

    #[test]
    fn more_requests_than_the_store_may_have_wait_and_all_end() {
        let (mut executor, pages, stats) = executor(4);
        let mut done = Vec::new();
        for ticket in 0..40 {
            let (operation, offset) = (Operation::Write, ticket * 4096);
            executor.take(NOW, 3, (pages.memory(), job(ticket, operation, offset)), &mut done);
        }
        assert!(done.is_empty() && !executor.is_idle());
        let mut polls = 0;
        while !executor.is_idle() {
            assert_eq!(executor.next(), Next::Now);
            executor.exchange(NOW, &mut done);
            polls += 1;
            assert!(polls < 100);
        }
        let ended: BTreeSet<u64> = done.iter().map(|done| done.ticket).collect();
        assert_eq!((done.len(), ended.len()), (40, 40));
        assert!(done.iter().all(|done| done.result.is_ok() && done.device == 3));
        assert_eq!((stats.requests.get(), stats.bytes_written.get()), (40, 40 * 4096));
        assert_eq!(executor.next(), Next::OnWake);
    }
}
