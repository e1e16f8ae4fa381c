//! One completion queue and the submission queues that complete into it: doorbells, commands, store
//! and back, on one thread.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use sidecore_block::BlockChannel;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_reactor::{Arm, CoreContext, EventFd, IdleMode, Pollable, Polled, Signal, WakeSet};
use sidecore_ring::nvme::Doorbells;
use sidecore_units::Nanos;

use super::QueueStats;
use super::command::Rules;
use super::completions::{Coalescing, Completions};
use super::control::Change;
use super::doorbells::DoorbellView;
use super::fence::Seat;
use super::fused::Fused;
use super::origin::Engine;
use super::shared::Shared;
use super::steps::Steps;
use super::submission::Submission;
use crate::pointer::MAX_PIECES;
use crate::{CompletionQueueSetup, CompletionQueueState, Done, Namespace, QueueEvent, StartError};

/// Most commands in flight, whatever the completion queue has room for.
const DEPTH: usize = 256;

/// Polls with commands from one look for truncated guest memory to the next.
const LOSS_INTERVAL: u32 = 64;

/// Invalid doorbell values are reported once in this time: a driver may write as many as it likes.
const REPORT_INTERVAL: Nanos = Nanos::from_millis(1);

/// Whether a queue serves its driver.
pub(super) enum State {
    Serving,
    /// Takes nothing more: guest memory is gone, or the store is.
    Halted,
    /// Takes and posts nothing more, and ends when the store has answered everything.
    Stopping(Done),
}

/// The arguments of [`IoQueue::new`].
pub(super) struct Start {
    pub(super) shared: Arc<Shared>,
    pub(super) setup: CompletionQueueSetup,
    /// The state that another process has exported; `None` for a new queue.
    pub(super) from: Option<CompletionQueueState>,
    pub(super) kick: Arc<EventFd>,
    pub(super) event: Option<Box<dyn Signal>>,
    pub(super) coalescing: Option<Coalescing>,
    pub(super) namespace: Option<Arc<Namespace>>,
    pub(super) shadow: Option<(GuestAddress, GuestAddress)>,
    pub(super) doorbells: Arc<Doorbells>,
}

/// A completion queue with its submission queues and everything it needs to be polled.
pub struct IoQueue {
    pub(super) shared: Arc<Shared>,
    pub(super) id: u16,
    pub(super) core: Rc<CoreContext>,
    pub(super) memory: GuestMemory,
    pub(super) hint: RegionHint,
    pub(super) rules: Rules,
    /// Without a channel while no namespace is attached.
    pub(super) engine: Engine,
    stats: Arc<QueueStats>,
    pub(super) completions: Completions,
    /// By slot; a slot keeps its queue until all of its commands are completed.
    pub(super) submissions: Vec<Option<Submission>>,
    /// The slot that is served first in the next poll.
    pub(super) first: usize,
    pub(super) doorbells: DoorbellView,
    pub(super) shadow_pages: Option<(GuestAddress, GuestAddress)>,
    /// Commands taken and not completed, and how many there may be.
    pub(super) in_flight: u32,
    pub(super) depth: u32,
    pub(super) steps: Steps,
    pub(super) fused: Option<Fused>,
    pub(super) seat: Seat,
    /// Changes queued until nothing is in flight.
    pub(super) changes: VecDeque<Change>,
    pub(super) state: State,
    /// Takes nothing for now: the channel is being replaced.
    pub(super) is_paused: bool,
    /// The next poll takes the slow path, `slow_path.rs`.
    pub(super) attention: bool,
    kick: Arc<EventFd>,
    /// The kick and the store, whose descriptor changes with the namespace.
    pub(super) wake: WakeSet,
    /// The time of the last poll.
    pub(super) now: Nanos,
    polls_to_loss: u32,
    reported_at: Option<Nanos>,
}

impl IoQueue {
    /// Its completion queue's number.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Takes up a completion queue, empty and without submission queues, or where another process
    /// has left it. To be called on its sidecore.
    ///
    /// # Errors
    /// Its memory or the store's channel is unusable, or the kernel has no descriptor for it.
    pub(super) fn new(start: Start, core: &Rc<CoreContext>) -> Result<Self, StartError> {
        let Start { shared, setup, from, kick, event, coalescing, namespace, shadow, doorbells } =
            start;
        let id = setup.id;
        let io = |error| StartError::Io { id, error };
        let entries = usize::try_from(setup.entries).unwrap_or(usize::MAX);
        let depth = entries.saturating_sub(1).clamp(1, DEPTH);
        let wake = WakeSet::new().map_err(io)?;
        wake.add(kick.as_fd()).map_err(io)?;
        let stats: Arc<QueueStats> = shared.stats(id).cloned().unwrap_or_default();
        let mut engine = Engine::new(Arc::clone(&stats.block));
        // One more for the write of a fused pair, whose compare has been taken as well.
        engine.add_requests(depth.saturating_add(1), MAX_PIECES);
        let doorbells = DoorbellView::new(doorbells);
        if from.is_none() {
            doorbells.reset_head(id);
        }
        let mut queue = Self {
            id,
            core: Rc::clone(core),
            hint: RegionHint::default(),
            rules: Rules::new(None, shared.options.namespaces),
            completions: Completions::new(
                &setup,
                from.as_ref(),
                depth,
                event,
                coalescing,
                &shared,
            )?,
            submissions: Vec::new(),
            first: 0,
            doorbells,
            shadow_pages: None,
            in_flight: 0,
            depth: u32::try_from(depth).unwrap_or(1),
            steps: Steps::new(&shared, id, depth, &mut engine),
            engine,
            stats,
            fused: None,
            seat: Seat::new(&shared.fence, usize::from(id).saturating_sub(1)),
            changes: VecDeque::new(),
            state: State::Serving,
            is_paused: false,
            attention: false,
            kick,
            wake,
            now: Nanos::ZERO,
            polls_to_loss: LOSS_INTERVAL,
            reported_at: None,
            memory: setup.memory,
            shared,
        };
        queue.attach(namespace.as_deref()).map_err(io)?;
        queue.set_shadow_doorbells(shadow);
        for submission in from.iter().flat_map(|from| &from.submission_queues) {
            queue.take_over_submission(submission)?;
        }
        Ok(queue)
    }

    #[inline]
    pub(super) fn stats(&self) -> &QueueStats {
        &self.stats
    }

    pub(super) fn is_serving(&self) -> bool {
        matches!(self.state, State::Serving)
    }

    #[inline]
    pub(super) fn is_stopping(&self) -> bool {
        matches!(self.state, State::Stopping(_))
    }

    /// The driver has written a doorbell value that its queue cannot have.
    #[cold]
    pub(super) fn report_invalid_doorbell(&mut self) {
        self.stats().invalid_doorbells.add(1);
        if self.reported_at.is_some_and(|at| self.now.since(at) < REPORT_INTERVAL) {
            return;
        }
        self.reported_at = Some(self.now);
        (self.shared.report)(QueueEvent::InvalidDoorbellValue { queue: self.id });
    }

    /// Makes the queue unusable until the driver resets the controller.
    #[cold]
    pub(super) fn break_with(&mut self, reason: &dyn std::fmt::Display) {
        tracing::error!(
            device = self.shared.options.name,
            queue = self.id,
            "queue stopped: {reason}"
        );
        if self.is_serving() {
            self.state = State::Halted;
        }
        self.attention = true;
        (self.shared.report)(QueueEvent::Fatal { queue: self.id });
    }

    /// Looks now and then whether the file behind guest memory was truncated.
    #[inline]
    pub(super) fn look_for_loss(&mut self) {
        self.polls_to_loss = self.polls_to_loss.saturating_sub(1);
        if self.polls_to_loss == 0 {
            self.polls_to_loss = LOSS_INTERVAL;
            if self.memory.is_lost() {
                self.break_with(&"the file behind guest memory was truncated");
            }
        }
    }

    /// Whether there is something to take or to post, at another look.
    fn finds_work(&mut self) -> bool {
        let mut valid = true;
        for submission in self.submissions.iter_mut().flatten() {
            valid &= submission.look(&self.doorbells);
        }
        valid &= self.completions.look(&self.doorbells);
        if !valid {
            self.report_invalid_doorbell();
        }
        let (room, _) = self.completions.room(self.in_flight, 0, &self.doorbells);
        if self.completions.has_backlog() {
            return room > 0;
        }
        let is_free = self.is_serving() && !self.is_paused && self.changes.is_empty();
        let may_take = is_free && self.engine.has_blank() && room > 0;
        may_take && self.submissions.iter().flatten().any(Submission::has_next)
    }

    fn ask_for_kicks(&mut self) {
        for submission in self.submissions.iter().flatten() {
            submission.ask_for_kick(&self.doorbells);
        }
        // A head that moves means something only where something waits for it: else it would be a
        // message for each completion.
        let (room, _) = self.completions.room(self.in_flight, 1, &self.doorbells);
        if room == 0 || self.completions.waits_for_head() {
            self.completions.ask_for_kick(&self.doorbells);
        } else {
            self.completions.ask_for_no_kick(&self.doorbells);
        }
    }

    pub(super) fn ask_for_no_kicks(&mut self) {
        for submission in self.submissions.iter_mut().flatten() {
            submission.ask_for_no_kick(&self.doorbells);
        }
        self.completions.ask_for_no_kick(&self.doorbells);
    }
}

impl Pollable for IoQueue {
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        self.now = now;
        self.engine.begin_poll(now);
        let mut work = 0_usize;
        if self.engine.is_due() {
            work = self.exchange(now);
        }
        let ordinary = !self.attention && !self.seat.is_closed();
        if ordinary || self.slow_path(now) {
            let taken = self.take_from_all(now, budget);
            if taken > 0 {
                work = work.saturating_add(taken);
                self.look_for_loss();
            }
        }
        if !self.completions.signal_if_due(&self.doorbells, now) {
            self.report_invalid_doorbell();
        }
        self.engine.end_poll(work);
        if self.is_stopping() && self.engine.in_flight() == 0 {
            return Polled::Finished;
        }
        if work > 0 { Polled::Busy(work) } else { Polled::Idle }
    }

    fn idle_mode(&self) -> IdleMode {
        self.shared.options.idle
    }

    fn arm(&mut self) -> Arm {
        let stuck = self.seat.is_closed()
            || self.fused.is_some()
            || (self.engine.in_flight() == 0 && !self.steps.queued.is_empty())
            || !self.engine.may_sleep();
        if stuck {
            return Arm::CannotSleep;
        }
        self.ask_for_kicks();
        // Arm, then look again: a doorbell written before the driver could see the wish would
        // otherwise sleep with us.
        fence(Ordering::SeqCst);
        if self.finds_work() {
            self.ask_for_no_kicks();
            return Arm::WorkPending;
        }
        if self.engine.in_flight() == 0 {
            self.seat.rest();
            self.attention = true;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        self.seat.rise();
        self.ask_for_no_kicks();
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.wake.as_fd());
    }

    fn on_wake(&mut self) {
        let kicks = self.kick.drain();
        self.stats().kicks.add(kicks);
        if kicks == 0 {
            // The store's descriptor, which only the store can clear.
            self.engine.call();
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        self.engine.readiness().next.deadline().into_iter().chain(self.completions.deadline()).min()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.engine.channel().and_then(BlockChannel::waits_since)
    }

    fn finish(mut self: Box<Self>) {
        self.on_wake();
        let state = std::mem::replace(&mut self.state, State::Halted);
        let changes = std::mem::take(&mut self.changes);
        let stopped: Vec<_> = self
            .submissions
            .iter_mut()
            .flatten()
            .filter_map(|submission| submission.stopping.take())
            .collect();
        // Drop all guest memory before any completion is called.
        drop(self);
        drop((changes, stopped));
        if let State::Stopping(done) = state {
            done.call();
        }
    }
}
