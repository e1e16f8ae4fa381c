//! A submission queue of a completion queue's.

use sidecore_memory::{GuestAddress, GuestMemory};
use sidecore_ring::nvme::SubmissionQueue;

use super::doorbells::DoorbellView;
use crate::{Command, Done, StartError, SubmissionQueueSetup, SubmissionQueueState};

/// Its ring, and what is taken from it.
pub(super) struct Submission {
    pub(super) id: u16,
    ring: SubmissionQueue,
    entries: u32,
    /// The doorbell as it was seen last.
    seen_tail: u32,
    /// Where EventIdx was put while awake.
    event_at: u32,
    /// Taken from the ring, and not looked at: it came behind the first of two fused commands, and
    /// is not the second.
    pub(super) ahead: Option<Command>,
    /// Commands taken and not completed.
    pub(super) in_flight: u32,
    /// Nothing more is taken from it; what to say when it is empty.
    pub(super) stopping: Option<Done>,
}

impl Submission {
    /// # Errors
    /// It is not in the guest's memory.
    pub(super) fn new(setup: &SubmissionQueueSetup) -> Result<Self, StartError> {
        let SubmissionQueueSetup { id, memory, address, entries, .. } = setup;
        let ring = SubmissionQueue::new(memory, *address, *entries, 0);
        Ok(Self::of(*id, *entries, ring.map_err(|error| StartError::Memory { id: *id, error })?))
    }

    /// A queue that another process has left.
    ///
    /// # Errors
    /// There can be no such queue.
    pub(super) fn take_over(
        memory: &GuestMemory,
        state: &SubmissionQueueState,
    ) -> Result<Self, StartError> {
        let SubmissionQueueState { id, address, entries, head, ahead } = state;
        let ring = SubmissionQueue::resume(memory, GuestAddress(*address), *entries, *head);
        let ahead = ahead.as_ref().and_then(|bytes| Some(Command::new(*bytes.first_chunk()?)));
        let ring = ring.map_err(|error| StartError::Memory { id: *id, error })?;
        Ok(Self { ahead, ..Self::of(*id, *entries, ring) })
    }

    fn of(id: u16, entries: u32, ring: SubmissionQueue) -> Self {
        let head = u32::from(ring.head());
        Self {
            id,
            ring,
            entries,
            seen_tail: head,
            event_at: head,
            ahead: None,
            in_flight: 0,
            stopping: None,
        }
    }

    /// The state that another process needs to resume the queue; nothing is in flight.
    pub(super) fn state(&self) -> SubmissionQueueState {
        SubmissionQueueState {
            id: self.id,
            address: self.ring.address().0,
            entries: self.entries,
            head: self.ring.head(),
            ahead: self.ahead.as_ref().map(|command| command.bytes().to_vec()),
        }
    }

    /// Looks at the doorbell. False if the driver has written what the queue cannot have; then it
    /// was ignored.
    #[inline]
    pub(super) fn look(&mut self, doorbells: &DoorbellView) -> bool {
        // The command comes before its doorbell: both lines are on their way at once, and often the
        // command's already is.
        self.ring.prefetch();
        let tail = doorbells.tail(self.id).unwrap_or(self.seen_tail);
        if tail == self.seen_tail {
            return true;
        }
        self.seen_tail = tail;
        self.ring.set_tail(tail).is_ok()
    }

    /// The next command, if there is one.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Command> {
        if self.ahead.is_some() {
            return self.ahead.take();
        }
        self.ring.pop().map(Command::new)
    }

    /// Whether there is a next command, as far as the doorbell was seen.
    #[inline]
    pub(super) fn has_next(&self) -> bool {
        self.stopping.is_none() && (self.ring.pending() > 0 || self.ahead.is_some())
    }

    /// The head that completions report (SQHD).
    #[inline]
    pub(super) fn head(&self) -> u16 {
        self.ring.head()
    }

    /// The same queue in another table; one that is not there holds nothing and waits.
    pub(super) fn rebind(&mut self, memory: &GuestMemory) {
        if let Err(error) = self.ring.rebind(memory) {
            tracing::debug!(queue = self.id, "submission queue waits for its memory: {error}");
        }
    }

    /// Asks for a doorbell write that is a message, for the next command.
    pub(super) fn ask_for_kick(&self, doorbells: &DoorbellView) {
        doorbells.set_submission_event(self.id, self.position());
    }

    /// Asks for none; they come once round the queue at most.
    pub(super) fn ask_for_no_kick(&mut self, doorbells: &DoorbellView) {
        self.event_at = self.position();
        doorbells.set_submission_event(self.id, behind(self.event_at, self.entries));
    }

    /// Keeps EventIdx behind the driver, which comes round to it.
    #[inline]
    pub(super) fn keep_quiet(&mut self, doorbells: &DoorbellView) {
        if !doorbells.has_events() {
            return;
        }
        let position = self.position();
        let moved = match position.checked_sub(self.event_at) {
            Some(moved) => moved,
            None => position.wrapping_add(self.entries).wrapping_sub(self.event_at),
        };
        if moved >= self.entries / 2 {
            self.ask_for_no_kick(doorbells);
        }
    }

    /// The last tail that the queue can have.
    fn position(&self) -> u32 {
        if self.seen_tail < self.entries { self.seen_tail } else { self.event_at }
    }
}

/// The index before `index` in a ring.
pub(super) const fn behind(index: u32, entries: u32) -> u32 {
    match index.checked_sub(1) {
        Some(behind) => behind,
        None => entries.saturating_sub(1),
    }
}
