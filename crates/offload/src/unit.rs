//! A stage's channel on a thread of the stage.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use sidecore_block::{Batch, BlockChannel, Next};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{Arm, IdleMode, Listener, Pollable, Polled};
use sidecore_ring::{Consumer, Producer};
use sidecore_units::Nanos;

use crate::desk::{Boxed, Line, Message};

/// How long a stage's thread polls after its last work: a wake-up takes about as long.
const SPIN: Nanos = Nanos::from_micros(50);

/// The part of a lane that both sides see.
#[derive(Default)]
pub(crate) struct Shared {
    /// The queue has closed its channel.
    pub(crate) is_closed: AtomicBool,
    /// See [`BlockChannel::takes_write_through`]: set before the unit runs.
    pub(crate) takes_write_through: AtomicBool,
}

/// The rings between a queue and a channel of its stage, at the stage's end.
pub(crate) struct Ends {
    pub(crate) requests: Consumer<Boxed>,
    pub(crate) returns: Producer<Boxed>,
    pub(crate) listener: Listener,
    pub(crate) shared: Arc<Shared>,
}

/// A channel of a stage, which serves a ring of requests.
pub(crate) struct StageUnit {
    stage: Box<dyn BlockChannel>,
    ends: Ends,
    line: Rc<Line>,
    /// Requests that the stage has not taken yet.
    queued: Batch,
    /// Requests on their way to the ring.
    ended: Batch,
    /// `Line::moved` at the last poll.
    moved: usize,
}

impl StageUnit {
    pub(crate) fn new(
        stage: Box<dyn BlockChannel>,
        ends: Ends,
        line: Rc<Line>,
        depth: usize,
    ) -> Self {
        ends.shared.takes_write_through.store(stage.takes_write_through(), Ordering::Release);
        Self {
            stage,
            ends,
            line,
            queued: Batch::with_capacity(depth),
            ended: Batch::with_capacity(depth),
            moved: 0,
        }
    }

    /// Attaches memory, and answers at `desk`, where the sidecore waits.
    pub(crate) fn attach(&mut self, memory: &GuestMemory, desk: &Sender<Message>) {
        let stage = &mut self.stage;
        let attached: io::Result<()> = self.line.served(desk, || stage.attach_memory(memory));
        let _ = desk.send(Message::Attached(attached));
    }

    /// Whether a poll would find something.
    fn has_work(&self) -> bool {
        !self.ends.requests.is_empty()
            || !self.queued.is_empty()
            || !self.ended.is_empty()
            || self.has_ended()
            || self.stage.readiness().next == Next::Now
    }

    /// Whether the queue is gone and all of its requests have come back.
    fn has_ended(&self) -> bool {
        self.ends.shared.is_closed.load(Ordering::Acquire)
            && self.ends.requests.is_empty()
            && self.queued.is_empty()
            && self.stage.readiness().in_flight == 0
    }
}

impl Pollable for StageUnit {
    /// A turn serves all that is there: a queue has no more in flight than its depth, and a stage
    /// bounds the work of a poll.
    fn poll(&mut self, now: Nanos, _budget: usize) -> Polled {
        self.ends.listener.wake();
        let taken = self.ends.requests.receive(&mut self.queued);
        self.stage.exchange(now, &mut self.queued, &mut self.ended);
        let returned = self.ends.returns.send(&mut self.ended);
        if returned > 0 {
            self.line.queue.ring();
        }
        let moved = self.line.moved.get().wrapping_sub(self.moved);
        self.moved = self.line.moved.get();
        match taken.saturating_add(returned).saturating_add(moved) {
            0 if self.has_ended() => Polled::Finished,
            0 => Polled::Idle,
            work => Polled::Busy(work),
        }
    }

    fn idle_mode(&self) -> IdleMode {
        IdleMode::Adaptive { spin: SPIN }
    }

    fn arm(&mut self) -> Arm {
        self.ends.listener.sleep();
        if self.has_work() {
            self.ends.listener.wake();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        self.ends.listener.wake();
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        let own = self.ends.listener.as_fd();
        watch(own);
        // Mostly that of the channel to the store, which is the same.
        if let Some(fd) = self.stage.wake_fd()
            && fd.as_raw_fd() != own.as_raw_fd()
        {
            watch(fd);
        }
    }

    /// The next poll takes the signal.
    fn on_wake(&mut self) {}

    fn deadline(&self) -> Option<Nanos> {
        self.stage.readiness().next.deadline()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.stage.waits_since()
    }

    fn finish(self: Box<Self>) {}
}
