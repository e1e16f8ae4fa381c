//! The layer above a contained stage.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_units::Nanos;

use super::account::ChannelStats;
use super::floor::Lower;
use super::{LONG, Sampler, StageAccount};
use crate::in_flight::Phase;
use crate::{
    Batch, BlockChannel, BlockError, BlockRequest, Detour, Next, Operation, Readiness, Tag,
};

/// The time of a call in which a stage does nothing but wait for the store.
const IDLE: Nanos = Nanos::from_micros(1);

/// A request that the stage has, as far as it is needed to answer it.
#[derive(Default)]
struct Slot {
    is_taken: bool,
    tag: Option<Tag>,
    context: [u64; 2],
    phase: Phase,
    operation: Operation,
    offset_bytes: u64,
    len_bytes: u64,
    write_through: bool,
    detour: Detour,
    taken_at: Nanos,
    max_segments: usize,
    /// The request, if the store has handed it back after the failure of the stage.
    request: Option<Box<BlockRequest>>,
}

/// A queue's path through a contained stage.
///
/// The context of a request that the stage has, names its slot: stages and stores cannot touch it.
pub(super) struct ContainedChannel {
    account: Arc<StageAccount>,
    /// `None` when the stage has failed.
    stage: Option<Box<dyn BlockChannel>>,
    lower: Rc<Lower>,
    takes_write_through: bool,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// The channels to the store of a stage that has failed.
    below: Vec<Box<dyn BlockChannel>>,
    /// Whether the descriptor that wakes the queue is that of the channel below.
    is_woken: bool,
    /// Requests that came after the failure.
    refused: Batch,
    /// Of these, flushes on their way to the store; `None` if flushes fail, too.
    flushes: Option<Batch>,
    /// Requests for which there is no slot, during a call of the stage.
    surplus: Batch,
    /// Kept for its capacity.
    arrived: Batch,
    stats: Arc<ChannelStats>,
    /// The last turn in which the stage did something, by its time, and the stage's part of it.
    turn: (Nanos, Nanos),
    sampler: Sampler,
}

impl ContainedChannel {
    /// The layer above `stage`.
    pub(super) fn new(
        account: Arc<StageAccount>,
        stage: Box<dyn BlockChannel>,
        lower: Rc<Lower>,
        depth: usize,
    ) -> Self {
        let takes_write_through =
            account.contain(&lower, || stage.takes_write_through()).unwrap_or(false);
        let stats = account.open_channel();
        Self {
            account,
            stage: Some(stage),
            lower,
            takes_write_through,
            slots: (0..depth).map(|_| Slot::default()).collect(),
            free: (0..depth).rev().collect(),
            below: Vec::new(),
            is_woken: false,
            refused: Batch::with_capacity(depth),
            flushes: None,
            surplus: Batch::new(),
            arrived: Batch::with_capacity(depth),
            stats,
            turn: (Nanos::MAX, Nanos::ZERO),
            sampler: Sampler::default(),
        }
    }

    /// In the place of a stage that had failed before: all requests fail but flushes, which go to
    /// the store. So the daemon's last flush covers all writes that were answered.
    pub(super) fn new_failed(
        account: Arc<StageAccount>,
        below: Box<dyn BlockChannel>,
        lower: Rc<Lower>,
        depth: usize,
    ) -> Self {
        Self {
            account,
            stage: None,
            lower,
            takes_write_through: false,
            slots: Vec::new(),
            free: Vec::new(),
            below: vec![below],
            is_woken: true,
            refused: Batch::with_capacity(depth),
            flushes: Some(Batch::with_capacity(depth)),
            surplus: Batch::new(),
            arrived: Batch::new(),
            stats: Arc::default(),
            turn: (Nanos::MAX, Nanos::ZERO),
            sampler: Sampler::default(),
        }
    }

    /// The second word of contexts: no other channel that is open has it.
    #[inline]
    fn mark(&self) -> u64 {
        Rc::as_ptr(&self.lower).addr() as u64
    }

    /// The requests in slots.
    #[inline]
    fn outstanding(&self) -> usize {
        self.slots.len().saturating_sub(self.free.len())
    }

    /// Moves requests that are submitted to slots, and those for which there is none to `surplus`:
    /// a front end that respects the depth has no such requests.
    #[inline]
    fn keep(&mut self, batch: &mut Batch) {
        let room = self.free.len();
        if batch.len() > room {
            self.surplus.extend(batch.drain(room..));
        }
        let mark = self.mark();
        for request in batch.iter_mut() {
            let Some(index) = self.free.pop() else { break };
            let Some(slot) = self.slots.get_mut(index) else { break };
            slot.is_taken = true;
            slot.tag = request.tag.replace(Tag::from_bits(index as u64));
            slot.context = std::mem::replace(&mut request.context, [index as u64, mark]);
            slot.phase = request.phase;
            slot.operation = request.operation;
            slot.offset_bytes = request.offset_bytes;
            slot.len_bytes = request.len_bytes;
            slot.write_through = request.write_through;
            slot.detour = request.detour;
            slot.taken_at = request.taken_at;
            slot.max_segments = request.segments.max_segments();
        }
    }

    /// The occupied slot of a request.
    #[inline]
    fn slot_of(&mut self, request: &BlockRequest) -> Option<(usize, &mut Slot)> {
        let [index, mark] = request.context;
        if mark != self.mark() {
            return None;
        }
        let index = usize::try_from(index).ok()?;
        self.slots.get_mut(index).filter(|slot| slot.is_taken).map(|slot| (index, slot))
    }

    /// Gives a request its tag back, and frees its slot. False if the stage was not given this
    /// request.
    #[inline]
    fn restore(&mut self, request: &mut BlockRequest) -> bool {
        // The slot's number, or the stage's own tag.
        request.tag.take().map(Tag::into_bits);
        let Some((index, slot)) = self.slot_of(request) else { return false };
        slot.is_taken = false;
        request.tag = slot.tag.take();
        request.context = slot.context;
        self.free.push(index);
        true
    }

    /// Takes back the requests of a batch that the stage did not take.
    #[inline]
    fn take_rest(&mut self, batch: &mut Batch) {
        for request in batch.iter_mut() {
            self.restore(request);
        }
        batch.append(&mut self.surplus);
    }

    /// Takes back the requests that the stage has appended behind the first `before`. False if the
    /// stage was not given one of them.
    #[inline]
    fn take_back(&mut self, completed: &mut Batch, before: usize) -> bool {
        let (mut index, mut is_right) = (before, true);
        while let Some(request) = completed.get_mut(index) {
            if self.restore(request) {
                index = index.wrapping_add(1);
            } else {
                completed.remove(index);
                self.account.fail("it has completed a request that it was not given".to_owned());
                is_right = false;
            }
        }
        is_right
    }

    /// Ends a poll in which the stage has failed, or had before. The requests behind the first
    /// `before` fail: in what state the stage has left them is unknown.
    #[cold]
    fn fail(&mut self, now: Nanos, completed: &mut Batch, before: usize) {
        self.drop_stage();
        for request in completed.get_mut(before..).unwrap_or_default() {
            request.result = Err(BlockError::EIO);
        }
        self.poll_failed(now, completed);
    }

    /// Calls the stage. `None` if it has failed, perhaps on another queue.
    #[inline]
    fn call<T>(&mut self, call: impl FnOnce(&mut dyn BlockChannel) -> T) -> Option<T> {
        if let Some(stage) = &mut self.stage
            && self.account.failure().is_none()
            && let Some(result) = self.account.contain(&self.lower, || call(stage.as_mut()))
        {
            return Some(result);
        }
        self.drop_stage();
        None
    }

    /// Calls the stage to do something, and counts it: `done` are the requests that it took, and
    /// those that it gave back.
    #[inline]
    fn work(
        &mut self,
        now: Nanos,
        call: impl FnOnce(&mut dyn BlockChannel) -> (usize, usize),
    ) -> Option<()> {
        let weight = if self.outstanding() > 0 { self.sampler.weight(now) } else { 0 };
        if weight > 0 {
            self.lower.watch.start();
        }
        let done = self.call(call);
        let spent = self.lower.watch.take();
        let (taken, returned) = done?;
        if taken | returned != 0 || spent >= IDLE {
            self.count(now, taken, spent, weight);
        }
        Some(())
    }

    #[inline]
    fn count(&mut self, now: Nanos, taken: usize, spent: Nanos, weight: u64) {
        self.stats.requests.add(taken as u64);
        self.stats.busy_ns.add(spent.0.saturating_mul(weight));
        let (at, before) = self.turn;
        let before = if at == now { before } else { Nanos::ZERO };
        self.stats.turns.add((at != now).into());
        self.turn = (now, before.after(spent));
        if before < LONG && self.turn.1 >= LONG {
            self.account.long_turn(&self.stats, self.turn.1);
        }
    }

    /// Drops a stage that has failed, and keeps its channels to the store.
    #[cold]
    fn drop_stage(&mut self) {
        let Some(stage) = self.stage.take() else { return };
        let fd = catch_unwind(AssertUnwindSafe(|| raw(stage.wake_fd()))).unwrap_or_default();
        // The requests that are dropped with it are made anew.
        Tag::abandon(|| {
            if catch_unwind(AssertUnwindSafe(|| drop(stage))).is_err() {
                tracing::error!(stage = self.account.word(), "it has panicked as it was dropped");
            }
        });
        self.below = self.lower.take_left();
        self.is_woken = match self.below.as_slice() {
            [below] => raw(below.wake_fd()) == fd,
            _ => false,
        };
    }

    /// Fails requests that come after the failure of the stage.
    #[cold]
    fn refuse(&mut self, batch: &mut Batch) {
        for mut request in batch.drain(..) {
            match &mut self.flushes {
                Some(flushes) if request.operation == Operation::Flush => flushes.push(request),
                _ => {
                    request.result = Err(BlockError::EIO);
                    self.refused.push(request);
                }
            }
        }
    }

    /// Polls the store of a stage that has been dropped, and answers the stage's requests when
    /// nothing of it is in flight any more.
    #[cold]
    fn poll_failed(&mut self, now: Nanos, completed: &mut Batch) {
        completed.append(&mut self.refused);
        if let (Some(flushes), Some(below)) = (&mut self.flushes, self.below.first_mut()) {
            return below.exchange(now, flushes, completed);
        }
        if self.outstanding() == 0 {
            return;
        }
        let mut arrived = std::mem::take(&mut self.arrived);
        for below in &mut self.below {
            below.poll(now, &mut arrived);
        }
        for mut request in arrived.drain(..) {
            request.tag.take().map(Tag::into_bits);
            // All others are of the stage's own making.
            if let Some((_, slot)) = self.slot_of(&request) {
                slot.request = Some(request);
            }
        }
        self.arrived = arrived;
        if self.below.iter().all(|below| below.readiness().in_flight == 0) {
            self.answer(completed);
        }
    }

    /// Fails all requests that the stage has.
    fn answer(&mut self, completed: &mut Batch) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if !std::mem::take(&mut slot.is_taken) {
                continue;
            }
            let blank = || BlockRequest::blank(slot.max_segments);
            let mut request = slot.request.take().unwrap_or_else(blank);
            request.operation = slot.operation;
            request.offset_bytes = slot.offset_bytes;
            request.len_bytes = slot.len_bytes;
            request.write_through = slot.write_through;
            request.tag = slot.tag.take();
            request.context = slot.context;
            request.phase = slot.phase;
            request.detour = slot.detour;
            request.taken_at = slot.taken_at;
            request.result = Err(BlockError::EIO);
            completed.push(request);
            self.free.push(index);
        }
    }

    fn readiness_of_failed(&self) -> Readiness {
        if let (Some(flushes), Some(below)) = (&self.flushes, self.below.first()) {
            let queued = self.refused.len().saturating_add(flushes.len());
            let next = if queued > 0 { Next::Now } else { Next::OnWake };
            return below.readiness().behind(queued, next);
        }
        let in_flight = self.outstanding().saturating_add(self.refused.len());
        let next = match self.below.as_slice() {
            _ if in_flight == 0 => Next::OnWake,
            [below] if self.is_woken && self.refused.is_empty() => below.readiness().next,
            _ => Next::Now,
        };
        Readiness { in_flight, next }
    }
}

impl Drop for ContainedChannel {
    fn drop(&mut self) {
        let stage = self.stage.take();
        self.account.contain(&self.lower, || drop(stage));
    }
}

fn raw(fd: Option<BorrowedFd<'_>>) -> Option<RawFd> {
    fd.map(|fd| fd.as_raw_fd())
}

impl BlockChannel for ContainedChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        match self.call(|stage| stage.attach_memory(memory)) {
            Some(attached) => attached,
            None => self.below.iter_mut().try_for_each(|below| below.attach_memory(memory)),
        }
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.keep(batch);
        let submitted = self.work(now, |stage| {
            let before = batch.len();
            stage.submit(now, batch);
            (before.saturating_sub(batch.len()), 0)
        });
        self.take_rest(batch);
        if submitted.is_none() {
            self.refuse(batch);
        }
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        let before = completed.len();
        let polled = self.work(now, |stage| {
            stage.poll(now, completed);
            (0, completed.len().saturating_sub(before))
        });
        if !self.take_back(completed, before) || polled.is_none() {
            self.fail(now, completed, before);
        }
    }

    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        let before = completed.len();
        self.keep(batch);
        let exchanged = self.work(now, |stage| {
            let offered = batch.len();
            stage.exchange(now, batch, completed);
            (offered.saturating_sub(batch.len()), completed.len().saturating_sub(before))
        });
        self.take_rest(batch);
        if !self.take_back(completed, before) || exchanged.is_none() {
            self.refuse(batch);
            self.fail(now, completed, before);
        }
    }

    fn takes_write_through(&self) -> bool {
        self.takes_write_through
    }

    fn readiness(&self) -> Readiness {
        let Some(stage) = &self.stage else { return self.readiness_of_failed() };
        let readiness = match self.account.failure() {
            Some(_) => None,
            None => self.account.contain(&self.lower, || stage.readiness()),
        };
        // The next poll drops the stage.
        readiness.unwrap_or_else(|| Readiness::polled(self.outstanding()))
    }

    fn waits_since(&self) -> Option<Nanos> {
        match &self.stage {
            // The next poll drops the stage.
            Some(_) if self.account.failure().is_some() => None,
            Some(stage) => self.account.contain(&self.lower, || stage.waits_since()).flatten(),
            None => self.below.iter().filter_map(|below| below.waits_since()).min(),
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.stage {
            Some(stage) => self.account.contain(&self.lower, || stage.wake_fd()).flatten(),
            None => self.below.first()?.wake_fd(),
        }
    }
}
