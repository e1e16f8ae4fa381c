//! One queue on its sidecore: ring, parser, store and back, on one thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use sidecore_block::{Batch, BlockChannel, BlockError, BlockRequest, Next, Operation, QueueStats, Tag};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_reactor::{Arm, EventFd, IdleMode, MakeSignal, Pollable, Polled, Signal};
use sidecore_ring::{Chain, DeviceRing, RingError, RingState, Token};
use sidecore_spec_virtio::blk::{ID_BYTES, feature};
use sidecore_units::Nanos;

use super::BlkDevice;
use super::request::{RequestRules, Status, Verdict};
use crate::{QueueResources, StartError};

/// Requests taken, submitted and published together. Small enough that the
/// guest prepares new ones while the rest is served, large enough that the
/// store can fetch ahead.
const BATCH: usize = 16;

/// Bytes of requests that a poll takes before the next queue has its turn, but
/// for the last request's.
const POLL_BYTES: u64 = 512 << 10;

/// Descriptors in a chain beyond its data: header, status, and some grace for
/// drivers that cut them up.
const FRAMING_DESCRIPTORS: usize = 4;

/// Turns with new work after which an outstanding call is considered all the
/// same.
const MAX_CALL_DELAY: u32 = 4;

/// Set in a tag: the write becomes a flush before it completes (write-through,
/// 5.2.6.2).
const FLUSH_AFTER: u64 = 1 << 32;

/// Called on the sidecore with the ring's state once nothing is in flight.
pub type StopReply = Box<dyn FnOnce(RingState) + Send>;

/// A virtqueue of a block device, with everything it needs to be polled.
pub struct BlkQueue {
    device: Arc<BlkDevice>,
    index: u16,
    memory: GuestMemory,
    ring: DeviceRing,
    chain: Chain,
    rules: RequestRules,
    hint: RegionHint,
    channel: Box<dyn BlockChannel>,
    /// Requests at rest: as many as the ring can have in flight.
    pool: Batch,
    /// Taken and not yet accepted by the channel.
    waiting: Batch,
    completed: Batch,
    kick: Option<EventFd>,
    call: Option<Box<dyn Signal>>,
    /// Signalled once, when the queue breaks.
    err: Option<EventFd>,
    signal: MakeSignal,
    mode: IdleMode,
    /// Takes nothing more from the ring: broken or stopping.
    halted: bool,
    stopping: Option<StopReply>,
    /// Whether the ring holds completions that the guest cannot see yet.
    unpublished: bool,
    /// Turns since something was published that no call was considered for.
    call_delay: Option<u32>,
    /// Completed in the turn they were taken in: when that was, and how many.
    /// Their end is the next turn's time, which saves a look at the clock.
    unmeasured: Option<(Nanos, u64)>,
}

impl BlkQueue {
    /// Takes up queue `index` of `device` where `state` says. `signal` makes
    /// what calls the guest, on this sidecore.
    ///
    /// # Errors
    /// The ring's layout, an eventfd or the store's channel is unusable.
    pub fn new(
        device: &Arc<BlkDevice>,
        index: u16,
        resources: QueueResources,
        state: RingState,
        mut channel: Box<dyn BlockChannel>,
        mode: IdleMode,
        signal: MakeSignal,
    ) -> Result<Self, StartError> {
        let io = |error| StartError::Io { index, error };
        let event = |fd: Option<OwnedFd>| fd.map(EventFd::from_peer).transpose().map_err(io);
        if device.queue_stats(index).is_none() {
            return Err(StartError::NoSuchQueue { index, queue_count: device.options().queues });
        }
        let QueueResources { memory, layout, features, kick, call, err } = resources;
        let mut ring = DeviceRing::new(&memory, &layout, state).map_err(|error| match error {
            // The ring's description may be right and its memory not there yet.
            RingError::Memory(error) => StartError::Memory { index, error },
            error => StartError::Ring { index, error },
        })?;
        ring.suppress_kicks();
        channel.attach_memory(&memory).map_err(io)?;
        let options = device.options();
        let depth = usize::from(layout.size);
        let max_segments = usize::try_from(options.seg_max).unwrap_or(usize::MAX).saturating_add(FRAMING_DESCRIPTORS);
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(options.serial.bytes()) {
            *to = from;
        }
        Ok(Self {
            device: Arc::clone(device),
            index,
            rules: RequestRules {
                geometry: device.geometry(),
                features,
                size_max_bytes: options.size_max_bytes.filter(|_| features & feature::SIZE_MAX != 0),
                id,
            },
            memory,
            ring,
            chain: Chain::with_limit(max_segments),
            hint: RegionHint::default(),
            channel,
            pool: (0..depth).map(|_| BlockRequest::blank(max_segments)).collect(),
            waiting: Batch::with_capacity(depth),
            completed: Batch::with_capacity(depth),
            kick: event(kick)?,
            call: call.map(|call| signal(call.as_fd())).transpose().map_err(io)?,
            err: event(err)?,
            signal,
            mode,
            halted: false,
            stopping: None,
            // The guest may have missed a call before a stop or a takeover;
            // one too many does no harm.
            call_delay: Some(0),
            unpublished: false,
            unmeasured: None,
        })
    }

    /// Takes nothing more from the ring, and once nothing is in flight, hands
    /// the ring's state to `reply`.
    pub fn stop(&mut self, reply: StopReply) {
        self.halted = true;
        self.stopping = Some(reply);
    }

    /// Replaces what calls the guest; what was completed and not announced is
    /// announced there. Gives the old one back: to drop it takes a while.
    pub fn set_call(&mut self, call: Option<Box<dyn Signal>>) -> Option<Box<dyn Signal>> {
        let old = std::mem::replace(&mut self.call, call);
        if let Some(call) = &mut self.call {
            // Whether the old one was signalled in vain cannot be known.
            call.signal();
        }
        old
    }

    fn stats(device: &BlkDevice, index: u16) -> Option<&QueueStats> {
        device.queue_stats(index)
    }

    /// Stops taking requests, says why, and tells the guest as far as virtio
    /// can: DEVICE_NEEDS_RESET by way of the transport, and the error eventfd.
    fn break_with(&mut self, reason: &dyn std::fmt::Display) {
        self.halted = true;
        let index = self.index;
        // What a vanished ring says, is no reason of its own.
        let reason = if self.memory.is_lost() {
            format!("queue {index}: the file behind guest memory was truncated")
        } else {
            format!("queue {index}: {reason}")
        };
        self.device.break_with(&reason);
        if let Some(err) = self.err.take() {
            match (self.signal)(err.as_fd()) {
                Ok(mut err) => err.signal(),
                Err(error) => tracing::warn!(device = self.device.name(), index, "cannot tell the VMM: {error}"),
            }
        }
    }

    /// Takes up to [`BATCH`] requests from the ring, or fewer if they are of
    /// `room_bytes`, which becomes less; how many there were.
    #[inline]
    fn take(&mut self, now: Nanos, room_bytes: &mut u64) -> usize {
        // A volume that is served may grow, and does not shrink.
        self.rules.geometry.capacity_bytes = self.device.capacity_bytes();
        let mut taken = 0_usize;
        while taken < BATCH && *room_bytes > 0 {
            let Some(mut request) = self.pool.pop() else {
                break;
            };
            let token = match self.ring.pop(&self.memory, &mut self.chain) {
                Ok(Some(token)) => token,
                Ok(None) => {
                    self.pool.push(request);
                    break;
                }
                Err(error) => {
                    self.pool.push(request);
                    self.break_with(&error);
                    break;
                }
            };
            taken = taken.wrapping_add(1);
            request.taken_at = now;
            let verdict = self.rules.parse(&self.memory, &self.chain, &mut self.hint, &mut request);
            match verdict {
                Ok(Verdict::Submit) => {
                    *room_bytes = room_bytes.saturating_sub(request.len_bytes);
                    request.tag = Some(Tag::from_bits(token.into_bits() | self.flush_after(request.operation)));
                    self.waiting.push(request);
                }
                Ok(Verdict::Done(status, written_bytes)) => {
                    if status != Status::Ok
                        && let Some(stats) = Self::stats(&self.device, self.index)
                    {
                        stats.rejected.add(1);
                    }
                    self.answer(token, request, status, written_bytes);
                }
                Err(error) => {
                    self.ring.abandon(token);
                    self.pool.push(request);
                    self.break_with(&error);
                    break;
                }
            }
        }
        taken
    }

    /// Whether a write must reach the medium before it completes: the driver
    /// can turn the cache off (5.2.5.2), and one that cannot flush must not be
    /// left with one (5.2.6.2).
    #[inline]
    fn flush_after(&self, operation: Operation) -> u64 {
        let cached = self.rules.features & feature::FLUSH != 0 && self.device.writeback();
        if operation.is_write() && self.rules.geometry.volatile_cache && !cached { FLUSH_AFTER } else { 0 }
    }

    #[inline]
    fn finish_request(&mut self, now: Nanos, mut request: Box<BlockRequest>) {
        let Some(bits) = request.tag.take().map(Tag::into_bits) else {
            self.pool.push(request);
            return;
        };
        let flushes = bits & FLUSH_AFTER != 0;
        if flushes && request.result.is_ok() && request.operation != Operation::Flush {
            // The write is done; what completes now is its flush.
            self.count(&request);
            request.operation = Operation::Flush;
            request.tag = Some(Tag::from_bits(bits));
            self.waiting.push(request);
            return;
        }
        if !(flushes && request.operation == Operation::Flush) {
            self.count(&request);
        }
        if request.taken_at == now {
            let (_, count) = self.unmeasured.unwrap_or((now, 0));
            self.unmeasured = Some((now, count.wrapping_add(1)));
        } else if let Some(stats) = Self::stats(&self.device, self.index) {
            stats.latency.record(now.since(request.taken_at), 1);
        }
        let (status, written_bytes) = match request.result {
            Ok(()) if request.operation == Operation::Read => {
                (Status::Ok, u32::try_from(request.len_bytes).unwrap_or(0))
            }
            Ok(()) => (Status::Ok, 0),
            Err(error) => {
                self.note_error(&request, error);
                (status_of(error), 0)
            }
        };
        self.answer(Token::from_bits(bits), request, status, written_bytes);
    }

    /// Counts what the store failed, and logs it each time that the count has
    /// doubled: a failing disk must not turn the sidecore into a log writer.
    #[cold]
    fn note_error(&self, request: &BlockRequest, error: BlockError) {
        let Some(stats) = Self::stats(&self.device, self.index) else { return };
        stats.errors.add(1);
        let errors = stats.errors.get();
        if errors.is_power_of_two() {
            tracing::warn!(
                device = self.device.name(),
                queue = self.index,
                operation = ?request.operation,
                offset_bytes = request.offset_bytes,
                len_bytes = request.len_bytes,
                errors,
                "the store failed a request: {error}"
            );
        }
    }

    /// Writes the status and gives the request back to the ring and the pool.
    #[inline]
    fn answer(&mut self, token: Token, request: Box<BlockRequest>, status: Status, written_bytes: u32) {
        let address = GuestAddress(request.private);
        self.pool.push(request);
        if let Err(error) = self.memory.write_slice(address, &[status as u8], &mut self.hint) {
            self.ring.abandon(token);
            self.break_with(&error);
            return;
        }
        self.ring.complete(token, written_bytes.saturating_add(1));
        self.unpublished = true;
        self.call_delay.get_or_insert(0);
    }

    #[inline]
    fn count(&self, request: &BlockRequest) {
        let Some(stats) = Self::stats(&self.device, self.index) else {
            return;
        };
        stats.requests.add(1);
        match request.operation {
            Operation::Read => {
                stats.reads.add(1);
                stats.bytes_read.add(request.len_bytes);
            }
            Operation::Write => {
                stats.writes.add(1);
                stats.bytes_written.add(request.len_bytes);
            }
            Operation::Flush => stats.flushes.add(1),
            Operation::Discard => stats.discards.add(1),
            Operation::WriteZeroes { .. } => stats.write_zeroes.add(1),
        }
    }

    /// Submits what waits, takes what is done, shows the guest.
    #[inline]
    fn exchange(&mut self, now: Nanos) -> usize {
        self.channel.exchange(now, &mut self.waiting, &mut self.completed);
        let reaped = self.completed.len();
        while let Some(request) = self.completed.pop() {
            self.finish_request(now, request);
        }
        if std::mem::take(&mut self.unpublished) {
            self.ring.publish();
        }
        reaped
    }

    /// Calls the guest if it asked for it. Deferred until a turn has nothing
    /// new, because finding that out needs a full fence.
    fn consider_call(&mut self) {
        self.call_delay = None;
        if let Some(call) = &mut self.call
            && self.ring.take_call()
        {
            call.signal();
            if let Some(stats) = Self::stats(&self.device, self.index) {
                stats.calls.add(1);
            }
        }
    }

    fn in_flight(&self) -> bool {
        self.ring.in_flight() > 0
    }
}

impl Pollable for BlkQueue {
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        if let Some((taken_at, count)) = self.unmeasured.take()
            && let Some(stats) = Self::stats(&self.device, self.index)
        {
            stats.latency.record(now.since(taken_at), count);
        }
        let mut work = 0_usize;
        if self.in_flight() {
            work = self.exchange(now);
        }
        let mut taken = 0_usize;
        let mut room_bytes = POLL_BYTES;
        while !self.halted && taken < budget {
            let batch = self.take(now, &mut room_bytes);
            if batch == 0 {
                break;
            }
            taken = taken.saturating_add(batch);
            if let Some(stats) = Self::stats(&self.device, self.index) {
                stats.batches.add(1);
            }
            self.exchange(now);
            if batch < BATCH {
                break;
            }
        }
        work = work.saturating_add(taken);
        if taken > 0 {
            self.ring.keep_suppressed();
            if self.device.is_broken() {
                self.halted = true;
            } else if self.memory.is_lost() {
                self.break_with(&"guest memory is gone");
            }
        }
        if let Some(delay) = self.call_delay {
            if taken == 0 || delay >= MAX_CALL_DELAY {
                self.consider_call();
            } else {
                self.call_delay = Some(delay.wrapping_add(1));
            }
        }
        if let Some(stats) = Self::stats(&self.device, self.index) {
            stats.polls.add(1);
            if work == 0 {
                stats.empty_polls.add(1);
            }
        }
        if self.stopping.is_some() && !self.in_flight() {
            return Polled::Finished;
        }
        if work > 0 { Polled::Busy(work) } else { Polled::Idle }
    }

    fn idle_mode(&self) -> IdleMode {
        self.mode
    }

    fn arm(&mut self) -> Arm {
        if self.call_delay.is_some() {
            self.consider_call();
        }
        self.halted |= self.device.is_broken();
        if !self.waiting.is_empty() || self.channel.readiness().next == Next::Now {
            return Arm::CannotSleep;
        }
        if self.halted {
            return Arm::Armed;
        }
        if self.kick.is_none() {
            return Arm::CannotSleep;
        }
        match self.ring.arm_kicks(&self.memory) {
            Ok(false) => Arm::Armed,
            Ok(true) => {
                self.ring.suppress_kicks();
                Arm::WorkPending
            }
            Err(error) => {
                self.break_with(&error);
                Arm::Armed
            }
        }
    }

    fn disarm(&mut self) {
        self.ring.suppress_kicks();
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        if let Some(kick) = &self.kick {
            watch(kick.as_fd());
        }
        if let Some(store) = self.channel.wake_fd() {
            watch(store);
        }
    }

    fn on_wake(&mut self) {
        if let Some(kick) = &self.kick
            && let Some(stats) = Self::stats(&self.device, self.index)
        {
            stats.kicks.add(kick.drain());
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        self.channel.readiness().next.deadline()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.channel.waits_since()
    }

    fn finish(mut self) {
        self.on_wake();
        self.consider_call();
        let state = self.ring.state();
        if let Some(reply) = self.stopping.take() {
            // Everything that holds guest memory goes before the
            // acknowledgement does.
            drop(self);
            reply(state);
        }
    }
}

/// What the guest is told of a store's error.
fn status_of(error: BlockError) -> Status {
    match error {
        BlockError::Unsupported => Status::Unsupported,
        _ => Status::IoError,
    }
}
