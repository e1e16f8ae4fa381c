//! A queue on its sidecore: the kernel's ring, the parser, the store and back.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_block::{
    BATCH, BlockChannel, BlockRequest, Budget, Context, Flush, Geometry, InFlight, Operation,
    Paused, QueueName, QueueStats, SwapChannel,
};
use sidecore_linux::IoResult;
use sidecore_memory::RegionHint;
use sidecore_reactor::{Arm, IdleMode, Pollable, Polled, Unit};
use sidecore_units::Nanos;

use crate::Kernel;
use crate::request::{Parsed, parse, result_of};

/// The kernel's answer for a tag that it has taken back: the device is being stopped.
const ABORTED: i32 = -19;

/// The tag of a request in flight.
struct Tagged(u16);

impl Context for Tagged {
    #[inline]
    fn into_words(self) -> [u64; 2] {
        [self.0.into(), 0]
    }

    #[inline]
    fn from_words([tag, _]: [u64; 2]) -> Self {
        Self(tag as u16)
    }
}

/// The settings of a queue.
pub struct UnitOptions {
    /// The device's name.
    pub device: Arc<str>,
    /// The queue's number.
    pub index: u16,
    /// The store's size and rules, as the kernel was told them.
    pub geometry: Geometry,
    /// How the queue spends idle time.
    pub mode: IdleMode,
    /// The queue's counters.
    pub stats: Arc<QueueStats>,
    /// Called on the sidecore, once, if the kernel breaks the rules of the queue.
    pub broken: Box<dyn Fn(String) + Send>,
}

/// A queue of a block device of the kernel, with everything it needs to be polled.
pub struct UblkUnit<K> {
    kernel: K,
    engine: InFlight<Tagged>,
    options: UnitOptions,
    hint: RegionHint,
    answers: Vec<IoResult>,
    /// Tags with requests that were not taken yet.
    queued: VecDeque<u16>,
    /// Takes no more requests: stopping.
    halted: bool,
    stopping: Option<Box<dyn FnOnce(()) + Send>>,
}

impl<K: Kernel> UblkUnit<K> {
    /// A queue between `kernel` and a store. `channel` has to take as many requests as the queue
    /// has tags.
    ///
    /// # Errors
    /// The store's.
    pub fn new(
        kernel: K,
        channel: Box<dyn BlockChannel>,
        options: UnitOptions,
    ) -> io::Result<Self> {
        let depth = usize::from(kernel.depth());
        let mut engine = InFlight::new(Arc::clone(&options.stats));
        engine.add_requests(depth, 1);
        engine.set_channel(Some(channel));
        engine.attach_memory(kernel.memory())?;
        Ok(Self {
            kernel,
            engine,
            options,
            hint: RegionHint::default(),
            answers: Vec::with_capacity(depth),
            queued: VecDeque::with_capacity(depth),
            halted: false,
            stopping: None,
        })
    }

    /// Takes requests up to another size of the store from now on.
    pub fn resize(&mut self, capacity_bytes: u64) {
        self.options.geometry.capacity_bytes = capacity_bytes;
    }

    /// Has one exchange with the kernel, of one system call at most.
    #[inline]
    fn turn(&mut self) {
        if self.kernel.turn(&mut self.answers) {
            self.options.stats.enters.add(1);
        }
        for IoResult { tag, code } in self.answers.drain(..) {
            match code {
                0 if tag < self.kernel.depth() => self.queued.push_back(tag),
                ABORTED => {}
                code => {
                    let index = self.options.index;
                    let reason = format!(
                        "queue {index}: the kernel's ublk answers tag {tag} with {code}; restart \
                         the daemon, which recovers the device"
                    );
                    (self.options.broken)(reason);
                }
            }
        }
    }

    /// Takes up to [`BATCH`] requests. Returns their number.
    #[inline]
    fn take(&mut self, now: Nanos, budget: &mut Budget) -> usize {
        let mut taken = 0_usize;
        while taken < BATCH && !self.queued.is_empty() && budget.take() {
            let Some(request) = self.engine.blank() else { break };
            let Some(tag) = self.queued.pop_front() else {
                self.engine.recycle(request);
                break;
            };
            taken = taken.wrapping_add(1);
            self.start(now, tag, request, budget);
        }
        taken
    }

    #[inline]
    fn start(&mut self, now: Nanos, tag: u16, mut request: Box<BlockRequest>, budget: &mut Budget) {
        let descriptor = self.kernel.descriptor(tag);
        let parsed = parse(descriptor, &self.options.geometry, self.kernel.buffer_bytes());
        let Parsed { operation, offset_bytes, len_bytes, fua } = match parsed {
            Ok(parsed) => parsed,
            Err(result) => {
                self.engine.recycle(request);
                self.engine.stats().rejected.add(1);
                self.kernel.commit(tag, result);
                return;
            }
        };
        request.taken_at = now;
        request.operation = operation;
        request.offset_bytes = offset_bytes;
        request.len_bytes = len_bytes;
        match operation {
            Operation::Read | Operation::Write => {
                request.segments.bind(self.kernel.memory());
                // The parser has checked that the buffer is large enough.
                let bound =
                    request.segments.push(self.kernel.buffer(tag), len_bytes, &mut self.hint);
                debug_assert!(bound.is_ok(), "{bound:?}");
                if bound.is_err() {
                    request.len_bytes = request.segments.len_bytes();
                }
            }
            _ => request.segments.clear(),
        }
        budget.spend_bytes(len_bytes);
        let flush = if fua { Flush::After } else { Flush::Never };
        self.engine.submit(request, Tagged(tag), flush);
    }

    /// Gives the store what was taken, and completes what it has done. Returns the number of
    /// requests that came back.
    #[inline]
    fn exchange(&mut self, now: Nanos) -> usize {
        let returned = self.engine.exchange(now);
        while let Some((Tagged(tag), request)) = self.engine.next_completed(now) {
            self.engine.stats().requests.add(1);
            self.engine.account(now, &request);
            if let Err(error) = request.result {
                let name = QueueName { device: &self.options.device, queue: self.options.index };
                self.engine.log_error(name, &request, error);
            }
            self.kernel.commit(tag, result_of(&request));
            self.engine.recycle(request);
        }
        returned
    }
}

impl<K: Kernel> SwapChannel for UblkUnit<K> {
    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn set_spare(
        &mut self,
        spare: Option<Box<dyn BlockChannel>>,
    ) -> io::Result<Option<Box<dyn BlockChannel>>> {
        self.engine.set_spare(spare, self.kernel.memory())
    }

    fn pause(&mut self, paused: Paused) {
        self.engine.pause(paused);
    }

    fn resume(&mut self, swaps: bool) {
        self.engine.resume(swaps);
    }
}

impl<K: Kernel> Unit for UblkUnit<K> {
    type State = ();

    /// Requests that the kernel has sent and that were not begun stay the kernel's: it sends them
    /// to the next process.
    fn stop(&mut self, stopped: Box<dyn FnOnce(()) + Send>) {
        self.halted = true;
        self.stopping = Some(stopped);
    }
}

impl<K: Kernel> Pollable for UblkUnit<K> {
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        self.engine.begin_poll(now);
        let mut work = 0_usize;
        if self.engine.is_due() {
            work = self.exchange(now);
        }
        self.turn();
        let mut budget = Budget::new(budget);
        while !self.halted && !self.engine.is_paused() {
            let batch = self.take(now, &mut budget);
            if batch == 0 {
                break;
            }
            work = work.saturating_add(batch);
            self.engine.stats().batches.add(1);
            self.exchange(now);
        }
        self.engine.end_poll(work);
        let is_over = self.engine.in_flight() == 0 && !self.kernel.has_queued();
        if self.stopping.is_some() && is_over {
            return Polled::Finished;
        }
        if work > 0 { Polled::Busy(work) } else { Polled::Idle }
    }

    fn idle_mode(&self) -> IdleMode {
        self.options.mode
    }

    fn arm(&mut self) -> Arm {
        if !self.engine.may_sleep() {
            return Arm::CannotSleep;
        }
        let takes = !self.halted && !self.engine.is_paused();
        let has_requests = takes && !self.queued.is_empty();
        if has_requests || self.kernel.is_ready() { Arm::WorkPending } else { Arm::Armed }
    }

    fn disarm(&mut self) {}

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.kernel.wake_fd());
        let channels = self.engine.channel().into_iter().chain(self.engine.spare());
        channels.filter_map(BlockChannel::wake_fd).for_each(watch);
    }

    fn on_wake(&mut self) {
        if !self.kernel.is_ready() {
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
        if let Some(reply) = self.stopping.take() {
            // The queue is closed before the acknowledgement, which the removal of the device
            // waits for.
            drop(self);
            reply(());
        }
    }
}

#[cfg(test)]
mod tests;
