//! The completion queue: entries, and the interrupts that tell of them.

use std::collections::VecDeque;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_reactor::Signal;
use sidecore_ring::nvme::{Completion, CompletionQueue};
use sidecore_units::Nanos;

use super::doorbells::DoorbellView;
use super::shared::Shared;
use super::submission::{Submission, behind};
use crate::{CompletionQueueSetup, CompletionQueueState, EntryState, StartError, Status};

/// An interrupt that the driver has not reacted to for so long is raised again, if there is
/// anything new to tell.
const OUTSTANDING: Nanos = Nanos::from_micros(500);

/// Interrupt coalescing (5.27.1.6): wait for so many completions, or for so long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Coalescing {
    pub(super) threshold: u32,
    pub(super) time: Nanos,
}

/// How the queue interrupts.
struct Interrupt {
    vector: u16,
    /// `None` while the vector is masked.
    event: Option<Box<dyn Signal>>,
    coalescing: Option<Coalescing>,
    /// It would have been raised, but for the mask.
    pending: bool,
    /// When it was raised last, and where the head was then.
    raised: Option<(Nanos, u32)>,
}

pub(super) struct Completions {
    id: u16,
    ring: CompletionQueue,
    entries: u32,
    /// Completions that found the queue full. Commands are taken only if there is room for their
    /// completions, so that only the second of two fused commands, or a driver that moves its head
    /// backwards, leads here.
    backlog: VecDeque<Completion>,
    seen_head: u32,
    /// `None` for a queue that is polled.
    interrupt: Option<Interrupt>,
    /// The number of completions since the last interrupt, and the time of the first of them.
    unsignalled: u32,
    unsignalled_since: Nanos,
    shared: Arc<Shared>,
}

impl Completions {
    /// A new queue, or one that was left by another process: what it has posted last may not have
    /// been told of.
    ///
    /// # Errors
    /// It is not in the guest's memory.
    pub(super) fn new(
        setup: &CompletionQueueSetup,
        from: Option<&CompletionQueueState>,
        depth: usize,
        event: Option<Box<dyn Signal>>,
        coalescing: Option<Coalescing>,
        shared: &Arc<Shared>,
    ) -> Result<Self, StartError> {
        let CompletionQueueSetup { id, memory, address, entries, vector } = setup;
        let ring = match from {
            None => CompletionQueue::new(memory, *address, *entries),
            Some(from) => CompletionQueue::resume(memory, *address, *entries, from.position.into()),
        };
        let ring = ring.map_err(|error| StartError::Memory { id: *id, error })?;
        let unsignalled = if vector.is_some() { ring.unconsumed() } else { 0 };
        let interrupt = vector.map(|vector| Interrupt {
            vector,
            event,
            coalescing,
            pending: false,
            raised: None,
        });
        let mut backlog = VecDeque::with_capacity(depth.saturating_add(2));
        backlog.extend(
            from.iter().flat_map(|from| &from.backlog).map(|entry| Completion::from(*entry)),
        );
        Ok(Self {
            id: *id,
            entries: *entries,
            backlog,
            seen_head: ring.position().head,
            ring,
            interrupt,
            unsignalled,
            unsignalled_since: Nanos::ZERO,
            shared: Arc::clone(shared),
        })
    }

    /// The state that another process needs to resume the queue, without its submission queues.
    pub(super) fn state(&self) -> CompletionQueueState {
        CompletionQueueState {
            id: self.id,
            address: self.ring.address().0,
            entries: self.entries,
            vector: self.interrupt.as_ref().map(|interrupt| interrupt.vector),
            position: self.ring.position().into(),
            backlog: self.backlog.iter().map(EntryState::from).collect(),
            submission_queues: Vec::new(),
        }
    }

    /// How many more commands may be taken while `in_flight` are: looks at the doorbell if they are
    /// not `enough`. The other value is false if the driver has written what the queue cannot have.
    #[inline]
    pub(super) fn room(
        &mut self,
        in_flight: u32,
        enough: u32,
        doorbells: &DoorbellView,
    ) -> (u32, bool) {
        let room = self.ring.room().saturating_sub(in_flight);
        if room >= enough {
            return (room, true);
        }
        let valid = self.look(doorbells);
        (self.ring.room().saturating_sub(in_flight), valid)
    }

    /// Looks at the doorbell; false if it was ignored.
    #[inline]
    pub(super) fn look(&mut self, doorbells: &DoorbellView) -> bool {
        let head = doorbells.head(self.id).unwrap_or(self.seen_head);
        if head == self.seen_head {
            return true;
        }
        self.seen_head = head;
        self.ring.set_head(head).is_ok()
    }

    /// Fetches the entry that is written next: a command is about to be carried out.
    #[inline]
    pub(super) fn prefetch(&self) {
        self.ring.prefetch();
    }

    /// Posts a command's completion.
    #[inline]
    pub(super) fn post(
        &mut self,
        submission: &Submission,
        command_id: u16,
        status: Status,
        now: Nanos,
    ) {
        let entry = Completion {
            result: 0,
            reserved_or_result_high: 0,
            sq_head: submission.head(),
            sq_id: submission.id,
            command_id,
            status: status.field(),
        };
        if self.ring.room() > 0 && self.backlog.is_empty() {
            self.push(entry, now);
        } else {
            self.backlog.push_back(entry);
        }
    }

    #[inline]
    fn push(&mut self, entry: Completion, now: Nanos) {
        self.ring.push(entry);
        if self.interrupt.is_some() {
            if self.unsignalled == 0 {
                self.unsignalled_since = now;
            }
            self.unsignalled = self.unsignalled.saturating_add(1);
        }
    }

    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Whether something is held back until the driver moves its head: completions that there is no
    /// room for, or an interrupt.
    pub(super) fn waits_for_head(&self) -> bool {
        self.has_backlog() || self.unsignalled > 0
    }

    /// Posts what there is room for by now; false if the doorbell was ignored.
    pub(super) fn post_backlog(&mut self, doorbells: &DoorbellView, now: Nanos) -> bool {
        if self.backlog.is_empty() {
            return true;
        }
        let valid = self.look(doorbells);
        while self.ring.room() > 0
            && let Some(entry) = self.backlog.pop_front()
        {
            self.push(entry, now);
        }
        valid
    }

    /// Raises an interrupt if one is due; to be called once a turn, because it may be a system
    /// call. The other value is false if the doorbell was ignored.
    #[inline]
    pub(super) fn signal_if_due(&mut self, doorbells: &DoorbellView, now: Nanos) -> bool {
        if self.unsignalled == 0 { true } else { self.consider(doorbells, now) }
    }

    fn consider(&mut self, doorbells: &DoorbellView, now: Nanos) -> bool {
        let valid = self.look(doorbells);
        // Completions that the driver has consumed already need no interrupt.
        self.unsignalled = self.unsignalled.min(self.ring.unconsumed());
        let due = self.due_at();
        let Some(interrupt) = &mut self.interrupt else { return valid };
        if self.unsignalled == 0 || due > now {
            return valid;
        }
        self.unsignalled = 0;
        match &mut interrupt.event {
            Some(event) => {
                interrupt.raised = Some((now, self.seen_head));
                event.signal();
                if let Some(stats) = self.shared.stats(self.id) {
                    stats.interrupts.add(1);
                }
            }
            None => {
                interrupt.pending = true;
                self.shared.set_pending(interrupt.vector, true);
            }
        }
        valid
    }

    /// When an interrupt is due for what is untold, if the driver does not move its head until
    /// then.
    fn due_at(&self) -> Nanos {
        let Some(interrupt) = &self.interrupt else { return Nanos::MAX };
        let outstanding = match interrupt.raised {
            Some((raised_at, head)) if head == self.seen_head => raised_at.after(OUTSTANDING),
            _ => Nanos::ZERO,
        };
        let coalesced = match interrupt.coalescing {
            Some(coalescing) if self.unsignalled < coalescing.threshold => {
                self.unsignalled_since.after(coalescing.time)
            }
            _ => Nanos::ZERO,
        };
        outstanding.max(coalesced)
    }

    /// When [`signal_if_due`](Self::signal_if_due) is to be called next though nothing is posted.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        (self.unsignalled > 0 && self.interrupt.is_some()).then(|| self.due_at())
    }

    /// Sets the event of the vector, and signals an interrupt that was held back. Returns the old
    /// event.
    pub(super) fn set_event(&mut self, event: Option<Box<dyn Signal>>) -> Option<Box<dyn Signal>> {
        let Some(interrupt) = &mut self.interrupt else { return event };
        let old = std::mem::replace(&mut interrupt.event, event);
        if let Some(event) = &mut interrupt.event
            && std::mem::take(&mut interrupt.pending)
        {
            event.signal();
            self.shared.set_pending(interrupt.vector, false);
            if let Some(stats) = self.shared.stats(self.id) {
                stats.interrupts.add(1);
            }
        }
        old
    }

    pub(super) fn set_coalescing(&mut self, coalescing: Option<Coalescing>) {
        if let Some(interrupt) = &mut self.interrupt {
            interrupt.coalescing = coalescing;
        }
    }

    /// The same queue in another table; one that is not there has no room.
    pub(super) fn rebind(&mut self, memory: &GuestMemory) {
        if let Err(error) = self.ring.rebind(memory) {
            tracing::debug!(queue = self.id, "completion queue waits for its memory: {error}");
        }
    }

    /// Asks for a doorbell write that is a message when the head moves.
    pub(super) fn ask_for_kick(&self, doorbells: &DoorbellView) {
        if self.seen_head < self.entries {
            doorbells.set_completion_event(self.id, self.seen_head);
        }
    }

    /// Asks for none.
    pub(super) fn ask_for_no_kick(&self, doorbells: &DoorbellView) {
        if self.seen_head < self.entries {
            doorbells.set_completion_event(self.id, behind(self.seen_head, self.entries));
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        if let Some(interrupt) = &self.interrupt
            && interrupt.pending
        {
            self.shared.set_pending(interrupt.vector, false);
        }
    }
}
