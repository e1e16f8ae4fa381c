//! Control requests to a queue, which run between its polls.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::{BlockChannel, Paused, SwapChannel};
use sidecore_memory::{GuestAddress, GuestMemory};
use sidecore_reactor::{CoreContext, Signal, Unit};
use sidecore_ring::nvme::ShadowDoorbells;

use super::command::Rules;
use super::completions::Coalescing;
use super::doorbells::Source;
use super::queue::{IoQueue, State};
use super::submission::Submission;
use crate::{
    CompletionQueueState, Done, Namespace, StartError, Status, SubmissionQueueSetup,
    SubmissionQueueState,
};

/// From one shadow doorbell to the next: functions that offer them have CAP.DSTRD = 0.
const SHADOW_STRIDE_BYTES: u32 = 4;

/// A change that has to wait until nothing is in flight.
pub(super) enum Change {
    Memory(GuestMemory, Done),
    Namespace(Option<Arc<Namespace>>, Done),
    Pause(Paused),
    Stop(StopReply),
}

type StopReply = Box<dyn FnOnce(CompletionQueueState) + Send>;

impl Unit for IoQueue {
    type State = CompletionQueueState;

    fn stop(&mut self, stopped: StopReply) {
        self.changes.push_back(Change::Stop(stopped));
        self.attention = true;
    }
}

impl SwapChannel for IoQueue {
    fn depth(&self) -> usize {
        self.engine.depth()
    }

    fn set_spare(
        &mut self,
        spare: Option<Box<dyn BlockChannel>>,
    ) -> io::Result<Option<Box<dyn BlockChannel>>> {
        if let Some(fd) = spare.as_ref().and_then(|spare| spare.wake_fd()) {
            self.wake.add(fd)?;
        }
        let before = self.engine.set_spare(spare, &self.memory)?;
        if let Some(fd) = before.as_ref().and_then(|before| before.wake_fd()) {
            self.wake.remove(fd);
        }
        Ok(before)
    }

    fn pause(&mut self, paused: Paused) {
        self.changes.push_back(Change::Pause(paused));
        self.attention = true;
    }

    fn resume(&mut self, swaps: bool) {
        if swaps && self.is_paused {
            self.engine.swap();
        }
        self.is_paused = false;
        self.changes.retain(|change| !matches!(change, Change::Pause(_)));
        self.attention = true;
    }
}

impl IoQueue {
    /// The state that the units of its sidecore share.
    #[must_use]
    pub fn core(&self) -> &Rc<CoreContext> {
        &self.core
    }

    /// Takes commands from one more submission queue.
    ///
    /// # Errors
    /// It is not in the guest's memory.
    pub(super) fn add_submission(
        &mut self,
        setup: &SubmissionQueueSetup,
    ) -> Result<(), StartError> {
        let submission = Submission::new(setup)?;
        self.doorbells.reset_tail(setup.id);
        self.add(submission);
        Ok(())
    }

    /// Goes on with a submission queue of another process.
    ///
    /// # Errors
    /// It is not in the guest's memory.
    pub(super) fn take_over_submission(
        &mut self,
        state: &SubmissionQueueState,
    ) -> Result<(), StartError> {
        let submission = Submission::take_over(&self.memory, state)?;
        self.add(submission);
        Ok(())
    }

    fn add(&mut self, mut submission: Submission) {
        submission.ask_for_no_kick(&self.doorbells);
        match self.submissions.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(submission),
            None => self.submissions.push(Some(submission)),
        }
    }

    /// Takes nothing more from a submission queue; done when all of its commands are completed.
    pub(super) fn remove_submission(&mut self, id: u16, done: Done) {
        let found = self.submissions.iter_mut().flatten().find(|submission| submission.id == id);
        if let Some(submission) = found {
            // Not looked at yet: as if it had not been fetched.
            submission.ahead = None;
            submission.stopping = Some(done);
            self.attention = true;
            self.remove_stopped();
        }
    }

    /// Drops submission queues that are to go, and whose commands are completed.
    pub(super) fn remove_stopped(&mut self) {
        for slot in &mut self.submissions {
            if slot.as_ref().is_some_and(|submission| {
                submission.stopping.is_some() && submission.in_flight == 0
            }) {
                let stopped = slot.take().and_then(|mut submission| submission.stopping.take());
                // Its memory is let go of by now.
                drop(stopped);
            }
        }
        while self.submissions.last().is_some_and(Option::is_none) {
            self.submissions.pop();
        }
    }

    /// Ends the queue: it takes and posts nothing more, and `done` is called once the store has
    /// answered everything.
    pub(super) fn end(&mut self, done: Done) {
        self.engine.abandon();
        self.steps.queued.clear();
        self.state = State::Stopping(done);
        self.attention = true;
    }

    /// The guest's memory has changed.
    pub(super) fn set_memory(&mut self, memory: GuestMemory, done: Done) {
        self.changes.push_back(Change::Memory(memory, done));
        self.attention = true;
    }

    /// Sets the namespace for new commands.
    pub(super) fn set_namespace(&mut self, namespace: Option<Arc<Namespace>>, done: Done) {
        self.changes.push_back(Change::Namespace(namespace, done));
        self.attention = true;
    }

    /// Applies a change; nothing is in flight.
    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Memory(memory, done) => {
                self.move_to(&memory);
                done.call();
            }
            Change::Pause(paused) => {
                self.is_paused = true;
                paused();
            }
            Change::Stop(stopped) => {
                let mut state = self.completions.state();
                state.submission_queues =
                    self.submissions.iter().flatten().map(Submission::state).collect();
                self.end(Done::new(move || stopped(state)));
            }
            Change::Namespace(namespace, done) => {
                if let Err(error) = self.attach(namespace.as_deref()) {
                    self.break_with(&format_args!("cannot open the store: {error}"));
                }
                done.call();
            }
        }
    }

    /// Lets go of the old table, everywhere, and takes up the new one.
    fn move_to(&mut self, memory: &GuestMemory) {
        self.steps.release();
        self.completions.rebind(memory);
        for submission in self.submissions.iter_mut().flatten() {
            submission.rebind(memory);
        }
        if let Err(error) = self.engine.attach_memory(memory) {
            tracing::warn!(
                device = self.shared.options.name,
                queue = self.id,
                "the store refuses the memory: {error}"
            );
        }
        self.memory = memory.clone();
        self.set_shadow_doorbells(self.shadow_pages);
    }

    /// Opens a channel to the namespace's store, in place of the one there is.
    ///
    /// # Errors
    /// The kernel refuses what it needs; there is no channel then, and no namespace.
    pub(super) fn attach(&mut self, namespace: Option<&Namespace>) -> io::Result<()> {
        if let Some(channel) = self.engine.set_channel(None)
            && let Some(fd) = channel.wake_fd()
        {
            self.wake.remove(fd);
        }
        let namespaces = self.shared.options.namespaces;
        self.rules = Rules::new(None, namespaces);
        if let Some(namespace) = namespace {
            let mut channel = namespace.store.open_channel(&self.core, self.engine.depth())?;
            channel.attach_memory(&self.memory)?;
            if let Some(fd) = channel.wake_fd() {
                self.wake.add(fd)?;
            }
            self.engine.set_channel(Some(channel));
            self.rules = Rules::new(Some(namespace), namespaces);
        }
        Ok(())
    }

    /// The driver's shadow doorbells; where they are not in its memory, nothing is taken until they
    /// are.
    pub(super) fn set_shadow_doorbells(&mut self, pages: Option<(GuestAddress, GuestAddress)>) {
        self.shadow_pages = pages;
        let pairs = self.shared.options.queue_pairs;
        let shadow = pages.map(|(shadow, event_index)| {
            ShadowDoorbells::new(&self.memory, shadow, event_index, pairs, SHADOW_STRIDE_BYTES)
        });
        self.doorbells.source = match shadow {
            None => Source::Registers,
            Some(Ok(shadow)) => Source::Shadow(shadow),
            Some(Err(error)) => {
                tracing::debug!(queue = self.id, "shadow doorbells wait for their memory: {error}");
                Source::Missing
            }
        };
        self.ask_for_no_kicks();
        self.attention = true;
    }

    /// Sets the event of the queue's vector. The caller drops the returned old event.
    pub(super) fn set_event(&mut self, event: Option<Box<dyn Signal>>) -> Option<Box<dyn Signal>> {
        self.completions.set_event(event)
    }

    /// When interrupts are raised from now on.
    pub(super) fn set_coalescing(&mut self, coalescing: Option<Coalescing>) {
        self.completions.set_coalescing(coalescing);
    }

    /// Aborts a command that the store has not got yet; whether there was one.
    pub(super) fn abort(&mut self, submission: u16, command_id: u16) -> bool {
        let is_its =
            |queue: &Option<Submission>| queue.as_ref().is_some_and(|queue| queue.id == submission);
        let Some(slot) = self.submissions.iter().position(is_its) else { return false };
        let queued = &mut self.steps.queued;
        let found = queued
            .iter()
            .position(|queued| queued.slot == slot && queued.command.id() == command_id);
        if found.and_then(|index| queued.remove(index)).is_none() {
            return false;
        }
        self.complete(slot, command_id, Status::ABORT_REQUESTED);
        true
    }
}
