//! The admin submission and completion queue.

use std::collections::VecDeque;

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError};
use sidecore_ring::nvme::{Completion, CompletionQueue, DoorbellError, Doorbells, SubmissionQueue};

use crate::handover::AdminQueueState;
use crate::registers::AdminQueues;
use crate::{Command, EntryState, Status};

/// Most commands that wait for something before they complete. Those behind them are not taken
/// meanwhile.
const MAX_WAITING: usize = 128;

/// The pair of queues number 0. They belong to the thread that runs the controller, not to a
/// sidecore.
#[derive(Debug)]
pub(crate) struct AdminQueue {
    submission: SubmissionQueue,
    completion: CompletionQueue,
    /// The doorbells as they were seen last: the tail and the head.
    seen: (u32, u32),
    /// Completions queued because the completion queue is full: at most one for each command that
    /// waited.
    backlog: VecDeque<Completion>,
    /// Commands taken and not yet completed.
    waiting: usize,
    /// Whether completions have been posted since the last interrupt.
    unsignalled: bool,
}

impl AdminQueue {
    pub(crate) fn new(memory: &GuestMemory, at: AdminQueues) -> Result<Self, MemoryError> {
        let submission = GuestAddress(at.submission_address);
        let completion = GuestAddress(at.completion_address);
        Ok(Self {
            submission: SubmissionQueue::new(memory, submission, at.submission_entries, 0)?,
            completion: CompletionQueue::new(memory, completion, at.completion_entries)?,
            seen: (0, 0),
            backlog: VecDeque::new(),
            waiting: 0,
            unsignalled: false,
        })
    }

    /// Restores queues that another process has exported; its commands not yet completed are
    /// `waiting`.
    pub(crate) fn take_over(
        memory: &GuestMemory,
        at: AdminQueues,
        from: &AdminQueueState,
        waiting: usize,
    ) -> Result<Self, MemoryError> {
        let AdminQueueState { submission_head, submission_tail, completion, backlog } = from;
        let (address, entries) = (GuestAddress(at.submission_address), at.submission_entries);
        let mut submission = SubmissionQueue::resume(memory, address, entries, *submission_head)?;
        if submission.set_tail(*submission_tail).is_err() {
            return Err(MemoryError::OutOfRange {
                start: address.0,
                len_bytes: u64::from(*submission_tail),
            });
        }
        let address = GuestAddress(at.completion_address);
        let completion =
            CompletionQueue::resume(memory, address, at.completion_entries, (*completion).into())?;
        // The process before may have posted completions without an interrupt.
        let unsignalled = completion.unconsumed() > 0;
        let backlog = backlog.iter().map(|entry| Completion::from(*entry)).collect();
        let seen = (submission.tail(), completion.position().head);
        Ok(Self { submission, completion, seen, backlog, waiting, unsignalled })
    }

    /// Exports the state that another process needs to resume the queues.
    pub(crate) fn state(&self) -> AdminQueueState {
        AdminQueueState {
            submission_head: self.submission.head(),
            submission_tail: self.submission.tail(),
            completion: self.completion.position().into(),
            backlog: self.backlog.iter().map(EntryState::from).collect(),
        }
    }

    /// Takes the driver's tail doorbell.
    pub(crate) fn set_tail(&mut self, tail: u32) -> Result<(), DoorbellError> {
        self.seen.0 = tail;
        self.submission.set_tail(tail)
    }

    /// Takes the driver's head doorbell.
    pub(crate) fn set_head(&mut self, head: u32) -> Result<(), DoorbellError> {
        self.seen.1 = head;
        self.completion.set_head(head)
    }

    /// Reads the mapped doorbells. Returns an error for the last value that a queue cannot have.
    pub(crate) fn look(&mut self, doorbells: &Doorbells) -> Result<(), DoorbellError> {
        let (tail, head) = (doorbells.submission_tail(0), doorbells.completion_head(0));
        let (seen_tail, seen_head) = self.seen;
        let head = if head == seen_head { Ok(()) } else { self.set_head(head) };
        if tail == seen_tail { head } else { self.set_tail(tail).and(head) }
    }

    /// The doorbells as they were seen last: the tail and the head.
    pub(crate) const fn seen(&self) -> (u32, u32) {
        self.seen
    }

    /// Binds the queues to a new table. A queue outside of it is empty and idle until a later table
    /// has it.
    pub(crate) fn rebind(&mut self, memory: &GuestMemory) -> Result<(), MemoryError> {
        let submission = self.submission.rebind(memory);
        self.completion.rebind(memory).and(submission)
    }

    /// The next command, if there is room for its completion.
    pub(crate) fn take(&mut self) -> Option<Command> {
        self.flush();
        if !self.can_take() {
            return None;
        }
        let command = Command::new(self.submission.pop()?);
        self.waiting = self.waiting.saturating_add(1);
        Some(command)
    }

    /// Whether a command could be taken now.
    pub(crate) fn has_work(&self) -> bool {
        self.can_take() && self.submission.pending() > 0
    }

    fn can_take(&self) -> bool {
        self.backlog.is_empty() && self.completion.room() > 0 && self.waiting < MAX_WAITING
    }

    /// Completes a command that was taken.
    pub(crate) fn complete(&mut self, command_id: u16, result: u32, status: Status) {
        self.waiting = self.waiting.saturating_sub(1);
        self.backlog.push_back(Completion {
            result,
            reserved_or_result_high: 0,
            sq_head: 0,
            sq_id: 0,
            command_id,
            status: status.field(),
        });
        self.flush();
    }

    /// Posts queued completions as far as the queue has room.
    fn flush(&mut self) {
        while self.completion.room() > 0 {
            let Some(mut entry) = self.backlog.pop_front() else { return };
            entry.sq_head = self.submission.head();
            self.unsignalled |= self.completion.push(entry);
        }
    }

    /// Returns whether an interrupt is due, and clears that.
    pub(crate) fn take_unsignalled(&mut self) -> bool {
        std::mem::take(&mut self.unsignalled)
    }
}
