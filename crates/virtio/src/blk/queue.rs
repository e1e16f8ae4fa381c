//! One queue on its sidecore: ring, parser, store and back, on one thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use sidecore_block::{
    BATCH, BlockChannel, BlockError, BlockRequest, Budget, Context, Flush, InFlight, Operation,
    Paused, QueueName, SwapChannel,
};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_reactor::{Arm, EventFd, IdleMode, MakeSignal, Pollable, Polled, Signal, Unit};
use sidecore_ring::{Chain, DeviceRing, RingError, RingState, Token};
use sidecore_spec_virtio::blk::{ID_BYTES, feature};
use sidecore_units::Nanos;

use super::BlkDevice;
use super::log::Log;
use super::request::{Parsed, RequestRules, Status, Verdict};
use crate::{QueueResources, StartError};

/// Descriptors in a chain beyond its data: header, status, and some grace for
/// drivers that cut them up.
const FRAMING_DESCRIPTORS: usize = 4;

/// Turns with new work after which an outstanding call is considered all the same.
const MAX_CALL_DELAY: u32 = 4;

/// The data that a queue needs to answer a chain in flight.
struct Taken {
    token: Token,
    /// Where the status byte goes.
    status: GuestAddress,
}

impl Context for Taken {
    #[inline]
    fn into_words(self) -> [u64; 2] {
        [self.token.into_bits(), self.status.0]
    }

    #[inline]
    fn from_words([token, status]: [u64; 2]) -> Self {
        Self { token: Token::from_bits(token), status: GuestAddress(status) }
    }
}

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
    engine: InFlight<Taken>,
    kick: Option<EventFd>,
    call: Option<Box<dyn Signal>>,
    /// Signalled once, when the queue breaks.
    err: Option<EventFd>,
    /// Where writes to guest memory are logged, while the guest migrates.
    log: Option<Log>,
    signal: MakeSignal,
    mode: IdleMode,
    /// Takes nothing more from the ring: broken or stopping.
    halted: bool,
    stopping: Option<StopReply>,
    /// Whether the ring holds completions that the guest cannot see yet.
    unpublished: bool,
    /// Turns since something was published that no call was considered for.
    call_delay: Option<u32>,
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
        let Some(stats) = device.queue_stats(index).cloned() else {
            return Err(StartError::NoSuchQueue { index, queue_count: device.options().queues });
        };
        let QueueResources { memory, layout, features, kick, call, err, log, .. } = resources;
        let mut ring = DeviceRing::new(&memory, &layout, state).map_err(|error| match error {
            // The ring's description may be right and its memory not there yet.
            RingError::Memory(error) => StartError::Memory { index, error },
            error => StartError::Ring { index, error },
        })?;
        let log = log.map(|log| Log::new(log, signal)).transpose().map_err(io)?;
        ring.set_log(log.as_ref().map(Log::pages));
        ring.suppress_kicks();
        channel.attach_memory(&memory).map_err(io)?;
        let options = device.options();
        let max_segments = usize::try_from(options.seg_max)
            .unwrap_or(usize::MAX)
            .saturating_add(FRAMING_DESCRIPTORS);
        let mut engine = InFlight::new(stats);
        engine.add_requests(layout.size.into(), max_segments);
        engine.set_channel(Some(channel));
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
                size_max_bytes: options
                    .size_max_bytes
                    .filter(|_| features & feature::SIZE_MAX != 0),
                id,
            },
            memory,
            ring,
            chain: Chain::with_limit(max_segments),
            hint: RegionHint::default(),
            engine,
            kick: event(kick)?,
            call: call.map(|call| signal(call.as_fd())).transpose().map_err(io)?,
            err: event(err)?,
            log,
            signal,
            mode,
            halted: false,
            stopping: None,
            // The guest may have missed a call before a stop or a takeover;
            // one too many does no harm.
            call_delay: Some(0),
            unpublished: false,
        })
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

    /// Replaces the log of writes to guest memory. Requests in flight are logged in the new one
    /// when they complete. Returns the old one.
    pub fn set_log(&mut self, log: Option<Log>) -> Option<Log> {
        self.ring.set_log(log.as_ref().map(Log::pages));
        std::mem::replace(&mut self.log, log)
    }

    /// Stops taking requests, says why, and tells the guest as far as virtio
    /// can: DEVICE_NEEDS_RESET by way of the transport, and the error eventfd.
    fn break_with(&mut self, reason: &dyn std::fmt::Display) {
        self.halted = true;
        let index = self.index;
        // If guest memory is gone, the ring's error is only a symptom: report the cause.
        let reason = if self.memory.is_lost() {
            format!("queue {index}: the file behind guest memory was truncated")
        } else {
            format!("queue {index}: {reason}")
        };
        self.device.break_with(&reason);
        if let Some(err) = self.err.take() {
            match (self.signal)(err.as_fd()) {
                Ok(mut err) => err.signal(),
                Err(error) => tracing::warn!(
                    device = self.device.name(),
                    index,
                    "cannot tell the VMM: {error}"
                ),
            }
        }
    }

    /// Takes up to [`BATCH`] requests from the ring, as far as the `budget` goes. Returns their
    /// number.
    #[inline]
    fn take(&mut self, now: Nanos, budget: &mut Budget) -> usize {
        // A volume that is served may grow, and does not shrink.
        self.rules.geometry.capacity_bytes = self.device.capacity_bytes();
        let mut taken = 0_usize;
        while taken < BATCH && budget.take() {
            let Some(mut request) = self.engine.blank() else {
                break;
            };
            let token = match self.ring.pop(&self.memory, &mut self.chain) {
                Ok(Some(token)) => token,
                Ok(None) => {
                    self.engine.recycle(request);
                    break;
                }
                Err(error) => {
                    self.engine.recycle(request);
                    self.break_with(&error);
                    break;
                }
            };
            taken = taken.wrapping_add(1);
            request.taken_at = now;
            match self.rules.parse(&self.memory, &self.chain, &mut self.hint, &mut request) {
                Ok(Parsed { verdict: Verdict::Submit, status }) => {
                    budget.spend_bytes(request.len_bytes);
                    let flush = self.flush_of(request.operation);
                    self.engine.submit(request, Taken { token, status }, flush);
                }
                Ok(Parsed { verdict: Verdict::Done(answer, written_bytes), status }) => {
                    self.engine.recycle(request);
                    if answer != Status::Ok {
                        self.engine.stats().rejected.add(1);
                    }
                    if let Some(log) = &self.log {
                        log.mark_buffers(self.chain.writable());
                    }
                    self.answer(Taken { token, status }, answer, written_bytes);
                }
                Err(error) => {
                    self.ring.abandon(token);
                    self.engine.recycle(request);
                    self.break_with(&error);
                    break;
                }
            }
        }
        taken
    }

    /// Whether a write must reach the medium before it completes: the driver can turn the cache off
    /// (5.2.5.2), and one that cannot flush must not be left with one (5.2.6.2).
    #[inline]
    fn flush_of(&self, operation: Operation) -> Flush {
        let cached = self.rules.features & feature::FLUSH != 0 && self.device.writeback();
        if operation.is_write() && self.rules.geometry.volatile_cache && !cached {
            Flush::After
        } else {
            Flush::Never
        }
    }

    #[inline]
    fn finish_request(&mut self, now: Nanos, taken: Taken, request: Box<BlockRequest>) {
        self.engine.stats().requests.add(1);
        self.engine.account(now, &request);
        let (status, written_bytes) = match request.result {
            Ok(()) if request.operation == Operation::Read => {
                (Status::Ok, u32::try_from(request.len_bytes).unwrap_or(0))
            }
            Ok(()) => (Status::Ok, 0),
            Err(error) => {
                let name = QueueName { device: self.device.name(), queue: self.index };
                self.engine.log_error(name, &request, error);
                (status_of(error), 0)
            }
        };
        if let Some(log) = &self.log {
            log.mark_data(&request);
        }
        self.engine.recycle(request);
        self.answer(taken, status, written_bytes);
    }

    /// Writes the status and gives the chain back to the ring.
    #[inline]
    fn answer(&mut self, taken: Taken, status: Status, written_bytes: u32) {
        let Taken { token, status: address } = taken;
        if let Err(error) = self.memory.write_slice(address, &[status as u8], &mut self.hint) {
            self.ring.abandon(token);
            self.break_with(&error);
            return;
        }
        if let Some(log) = &self.log {
            log.pages().mark(address, 1);
        }
        self.ring.complete(token, written_bytes.saturating_add(1));
        self.unpublished = true;
        self.call_delay.get_or_insert(0);
    }

    /// Submits what is queued, takes what is done, shows the guest. Returns the number of requests
    /// that came back.
    #[inline]
    fn exchange(&mut self, now: Nanos) -> usize {
        let returned = self.engine.exchange(now);
        while let Some((taken, request)) = self.engine.next_completed(now) {
            self.finish_request(now, taken, request);
        }
        if std::mem::take(&mut self.unpublished) {
            self.ring.publish();
            if let Some(log) = &mut self.log {
                log.notify();
            }
        }
        returned
    }

    /// Calls the guest if it asked for it. Deferred until a turn has nothing
    /// new, because finding that out needs a full fence.
    fn consider_call(&mut self) {
        self.call_delay = None;
        if let Some(call) = &mut self.call
            && self.ring.take_call()
        {
            call.signal();
            self.engine.stats().interrupts.add(1);
        }
    }
}

impl SwapChannel for BlkQueue {
    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn set_spare(
        &mut self,
        spare: Option<Box<dyn BlockChannel>>,
    ) -> io::Result<Option<Box<dyn BlockChannel>>> {
        self.engine.set_spare(spare, &self.memory)
    }

    fn pause(&mut self, paused: Paused) {
        self.engine.pause(paused);
    }

    fn resume(&mut self, swaps: bool) {
        self.engine.resume(swaps);
    }
}

impl Unit for BlkQueue {
    type State = RingState;

    fn stop(&mut self, stopped: StopReply) {
        self.halted = true;
        self.stopping = Some(stopped);
    }
}

impl Pollable for BlkQueue {
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        self.engine.begin_poll(now);
        let mut work = 0_usize;
        if self.engine.is_due() {
            work = self.exchange(now);
        }
        let mut taken = 0_usize;
        let mut budget = Budget::new(budget);
        while !self.halted && !self.engine.is_paused() {
            let batch = self.take(now, &mut budget);
            if batch == 0 {
                break;
            }
            taken = taken.saturating_add(batch);
            self.engine.stats().batches.add(1);
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
            } else if self.log.as_ref().is_some_and(Log::is_lost) {
                self.break_with(&"the file behind the log of written pages was truncated");
            }
        }
        if let Some(delay) = self.call_delay {
            if taken == 0 || delay >= MAX_CALL_DELAY {
                self.consider_call();
            } else {
                self.call_delay = Some(delay.wrapping_add(1));
            }
        }
        self.engine.end_poll(work);
        if self.stopping.is_some() && self.engine.in_flight() == 0 {
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
        if !self.engine.may_sleep() {
            return Arm::CannotSleep;
        }
        // A queue that resumes is polled.
        if self.halted || self.engine.is_paused() {
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
        let channels = self.engine.channel().into_iter().chain(self.engine.spare());
        channels.filter_map(BlockChannel::wake_fd).for_each(watch);
    }

    fn on_wake(&mut self) {
        let kicks = self.kick.as_ref().map_or(0, EventFd::drain);
        self.engine.stats().kicks.add(kicks);
        if kicks == 0 {
            // The store's descriptor, which only the store can clear.
            self.engine.call();
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        self.engine.readiness().next.deadline()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.engine.channel().and_then(BlockChannel::waits_since)
    }

    fn finish(mut self: Box<Self>) {
        self.on_wake();
        self.consider_call();
        let state = self.ring.state();
        if let Some(reply) = self.stopping.take() {
            // Everything that holds guest memory goes before the acknowledgement does.
            drop(self);
            reply(state);
        }
    }
}

/// The virtio status of a store's error.
fn status_of(error: BlockError) -> Status {
    match error {
        BlockError::Unsupported => Status::Unsupported,
        _ => Status::IoError,
    }
}
