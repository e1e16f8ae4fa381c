//! The executor of another sidecore, and the messages to it and back.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::Next;
use sidecore_memory::{GuestAddress, GuestMemory};
use sidecore_reactor::{Arm, CoreContext, IdleMode, Pollable, Polled};
use sidecore_units::Nanos;

use super::executor::{Done, Executor, Job, LaneSpec};
use super::steering::{ExecutorStats, Load};
use crate::crossing::{Inbox, Sender, crossing};

/// Requests in a message: of one device, whose session's memory the message has a hold on.
const SUB_BATCH: usize = 8;
/// Results in a message.
const RESULTS: usize = 16;
/// Messages on their way to a helper; more wait at the sender.
const MESSAGES: usize = 1024;
/// Messages that a helper takes in one poll.
const POLL_MESSAGES: usize = 32;

const NO_JOB: Job = Job {
    ticket: 0,
    data: GuestAddress(0),
    is_lent: false,
    operation: sidecore_block::Operation::Flush,
    offset_bytes: 0,
    len_bytes: 0,
    fua: false,
};
const NO_RESULT: Done = Done { device: 0, ticket: 0, result: Ok(()) };

/// A batch of requests of one device.
struct SubBatch {
    device: u16,
    memory: GuestMemory,
    jobs: [Job; SUB_BATCH],
    count: usize,
}

#[allow(clippy::large_enum_variant)] // nearly all messages are batches
enum ToHelper {
    Open(u16, LaneSpec),
    Close(u16),
    Execute(SubBatch),
}

struct Results {
    done: [Done; RESULTS],
    count: usize,
    /// A device whose store was closed.
    closed: Option<u16>,
}

/// The end of a helper that the unit of a link has.
pub struct HelperEnd {
    to: Sender<ToHelper>,
    results: Inbox<Results>,
    load: Arc<Load>,
    /// The batch that is being filled.
    filling: Option<SubBatch>,
    /// Messages that found no room.
    unsent: VecDeque<ToHelper>,
    /// Requests without a result.
    in_flight: usize,
    pub(super) stats: ExecutorStats,
}

/// The parts of a [`Helper`], on their way to its sidecore.
pub struct HelperSeed {
    inbox: Inbox<ToHelper>,
    results: Sender<Results>,
}

/// Makes a helper on a sidecore with this load: [`Helper::new`] takes the one part, on that
/// sidecore, and [`Export::add_helper`](super::Export::add_helper) the other one.
///
/// # Errors
/// The process has no descriptor left.
pub fn helper(load: &Arc<Load>) -> io::Result<(HelperEnd, HelperSeed)> {
    let (to, inbox) = crossing(MESSAGES)?;
    let (sender, results) = crossing(MESSAGES)?;
    let end = HelperEnd {
        to,
        results,
        load: Arc::clone(load),
        filling: None,
        unsent: VecDeque::with_capacity(MESSAGES),
        in_flight: 0,
        stats: ExecutorStats::default(),
    };
    Ok((end, HelperSeed { inbox, results: sender }))
}

impl HelperEnd {
    pub(super) const fn load(&self) -> &Arc<Load> {
        &self.load
    }

    /// Has the helper open the store of a device, before all requests that follow.
    pub(super) fn open(&mut self, device: u16, spec: LaneSpec) {
        self.push(ToHelper::Open(device, spec));
    }

    /// Has the helper close the store of a device, of which nothing is in flight.
    pub(super) fn close(&mut self, device: u16) {
        self.push(ToHelper::Close(device));
    }

    /// Takes a request.
    #[inline]
    pub(super) fn take(&mut self, device: u16, memory: &GuestMemory, job: Job) {
        self.in_flight = self.in_flight.saturating_add(1);
        self.load.add(1);
        self.stats.requests.add(1);
        let fits = |batch: &SubBatch| {
            batch.device == device && batch.count < SUB_BATCH && batch.memory.is_same(memory)
        };
        if !self.filling.as_ref().is_some_and(fits) {
            self.push_filled();
            let (memory, jobs) = (memory.clone(), [NO_JOB; SUB_BATCH]);
            self.filling = Some(SubBatch { device, memory, jobs, count: 0 });
        }
        if let Some(batch) = &mut self.filling
            && let Some(place) = batch.jobs.get_mut(batch.count)
        {
            *place = job;
            batch.count = batch.count.saturating_add(1);
        }
    }

    fn push_filled(&mut self) {
        if let Some(batch) = self.filling.take() {
            self.stats.sub_batches.add(1);
            self.push(ToHelper::Execute(batch));
        }
    }

    fn push(&mut self, message: ToHelper) {
        if !self.unsent.is_empty() {
            self.unsent.push_back(message);
        } else if let Err(message) = self.to.send(message) {
            self.unsent.push_back(message);
        }
    }

    /// Sends what was taken. Returns the number of messages that wait for room.
    pub(super) fn send(&mut self) -> usize {
        while let Some(message) = self.unsent.pop_front() {
            if let Err(message) = self.to.send(message) {
                self.unsent.push_front(message);
                break;
            }
        }
        self.push_filled();
        self.to.wake();
        self.unsent.len()
    }

    /// Appends results, and devices whose stores were closed. Returns the number of results.
    #[inline]
    pub(super) fn receive(&mut self, done: &mut Vec<Done>, closed: &mut Vec<u16>) -> usize {
        let mut received = 0_usize;
        while let Some(results) = self.results.receive() {
            closed.extend(results.closed);
            let results = results.done.get(..results.count).unwrap_or_default();
            done.extend_from_slice(results);
            received = received.saturating_add(results.len());
        }
        self.in_flight = self.in_flight.saturating_sub(received);
        self.load.sub(u32::try_from(received).unwrap_or(u32::MAX));
        received
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.unsent.is_empty()
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    pub(super) fn arm(&mut self) -> Arm {
        self.results.arm()
    }

    pub(super) fn disarm(&mut self) {
        self.results.disarm();
    }

    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.results.wake_fd()
    }

    pub(super) fn on_wake(&self) {
        self.results.on_wake();
    }
}

impl Drop for HelperEnd {
    fn drop(&mut self) {
        self.load.sub(u32::try_from(self.in_flight).unwrap_or(u32::MAX));
    }
}

/// Executes requests that another sidecore has received. It ends when the unit there has ended, and
/// the stores have nothing of it any more.
pub struct Helper {
    inbox: Inbox<ToHelper>,
    results: Sender<Results>,
    executor: Executor,
    done: Vec<Done>,
    /// Devices whose stores were closed.
    closed: Vec<u16>,
    mode: IdleMode,
}

impl Helper {
    /// Makes a helper, on its sidecore.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new(core: &Rc<CoreContext>, seed: HelperSeed, mode: IdleMode) -> io::Result<Self> {
        let HelperSeed { inbox, results } = seed;
        let done = Vec::with_capacity(MESSAGES);
        let executor = Executor::new(core)?;
        Ok(Self { inbox, results, executor, done, closed: Vec::new(), mode })
    }

    fn take(&mut self, now: Nanos, message: ToHelper) {
        match message {
            ToHelper::Execute(batch) => {
                for job in batch.jobs.iter().take(batch.count) {
                    let job = (&batch.memory, *job);
                    self.executor.take(now, batch.device, job, &mut self.done);
                }
            }
            ToHelper::Open(device, spec) => {
                let name = Arc::clone(&spec.name);
                // Its requests fail here; where the link is polled the store is open.
                if let Err(error) = self.executor.add(device, spec) {
                    tracing::error!(
                        device = &*name,
                        "cannot open the store on a sidecore: {error}"
                    );
                }
            }
            ToHelper::Close(device) => {
                self.executor.remove(device);
                self.closed.push(device);
            }
        }
    }

    /// Sends the results, as far as there is room.
    fn answer(&mut self) {
        while let Some(part) = self.done.get(..self.done.len().min(RESULTS))
            && !(part.is_empty() && self.closed.is_empty())
        {
            let closed = self.closed.last().copied();
            let mut results = Results { done: [NO_RESULT; RESULTS], count: part.len(), closed };
            for (to, from) in results.done.iter_mut().zip(part) {
                *to = *from;
            }
            let count = results.count;
            if self.results.send(results).is_err() {
                break;
            }
            self.done.drain(..count);
            self.closed.pop();
        }
        self.results.wake();
    }
}

impl Pollable for Helper {
    fn poll(&mut self, now: Nanos, _budget: usize) -> Polled {
        let mut work = 0_usize;
        for _ in 0..POLL_MESSAGES {
            let Some(message) = self.inbox.receive() else { break };
            self.take(now, message);
            work = work.saturating_add(1);
        }
        if !self.executor.is_idle() {
            work = work.saturating_add(self.executor.exchange(now, &mut self.done));
        }
        self.answer();
        if self.inbox.is_over() && self.executor.is_idle() {
            return Polled::Finished;
        }
        if work > 0 { Polled::Busy(work) } else { Polled::Idle }
    }

    fn idle_mode(&self) -> IdleMode {
        self.mode
    }

    fn arm(&mut self) -> Arm {
        let owes = !(self.done.is_empty() && self.closed.is_empty());
        if owes || self.executor.next() == Next::Now {
            return Arm::CannotSleep;
        }
        self.inbox.arm()
    }

    fn disarm(&mut self) {
        self.inbox.disarm();
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.inbox.wake_fd());
        watch(self.executor.wake_fd());
    }

    fn on_wake(&mut self) {
        self.inbox.on_wake();
    }

    fn deadline(&self) -> Option<Nanos> {
        self.executor.next().deadline()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.executor.waits_since()
    }

    fn finish(self: Box<Self>) {}
}
