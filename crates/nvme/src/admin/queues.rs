//! Creating and deleting I/O queues (NVMe base 2.0, 5.4 to 5.7).

use std::collections::BTreeMap;

use sidecore_memory::GuestAddress;
use sidecore_spec_nvme::command::{
    COMMAND_BYTES_LOG2, COMPLETION_BYTES_LOG2, CONTIGUOUS, INTERRUPTS_ENABLED,
};
use sidecore_units::PAGE_BYTES;

use crate::controller::{Controller, Outcome, Waiting};
use crate::registers::MAX_QUEUE_ENTRIES;
use crate::{Command, CompletionQueueSetup, QueuesState, StartError, Status, SubmissionQueueSetup};

/// The I/O queues that exist.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    completion: BTreeMap<u16, State>,
    submission: BTreeMap<u16, SubmissionState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// Being deleted: waits for the queue's sidecore.
    Deleting,
}

#[derive(Clone, Copy, Debug)]
struct SubmissionState {
    completion_queue: u16,
    state: State,
}

impl Queues {
    pub(crate) fn is_empty(&self) -> bool {
        self.completion.is_empty() && self.submission.is_empty()
    }

    pub(crate) fn has_submission_queue(&self, id: u16) -> bool {
        self.submission.contains_key(&id)
    }

    pub(crate) fn has_completion_queue(&self, id: u16) -> bool {
        self.completion.contains_key(&id)
    }

    /// Whether the queue takes commands: a queue that is being deleted does not.
    pub(crate) fn runs_submission_queue(&self, id: u16) -> bool {
        self.submission.get(&id).is_some_and(|queue| queue.state == State::Running)
    }

    /// Whether the completion queue runs and is not being deleted.
    pub(crate) fn runs_completion_queue(&self, id: u16) -> bool {
        self.completion.get(&id) == Some(&State::Running)
    }

    /// Restores the queues that another process has exported.
    pub(crate) fn take_over(&mut self, queues: &QueuesState) {
        for queue in &queues.completion_queues {
            self.completion.insert(queue.id, State::Running);
            for submission in &queue.submission_queues {
                let state = SubmissionState { completion_queue: queue.id, state: State::Running };
                self.submission.insert(submission.id, state);
            }
        }
    }

    pub(crate) fn clear(&mut self) {
        self.completion.clear();
        self.submission.clear();
    }
}

/// The fields that both Create commands have.
struct Creation {
    id: u16,
    entries: u32,
    address: GuestAddress,
}

/// Dword 10: QID in bits 15:0, QSIZE, a 0's based value, in bits 31:16.
fn creation(command: &Command, supported_entry_size: bool) -> Result<Creation, Status> {
    let id = (command.dword10() & 0xFFFF) as u16;
    let entries = (command.dword10() >> 16).saturating_add(1);
    if !(2..=MAX_QUEUE_ENTRIES).contains(&entries) || !supported_entry_size {
        return Err(Status::INVALID_QUEUE_SIZE);
    }
    if command.dword11() & CONTIGUOUS == 0 {
        return Err(Status::INVALID_FIELD);
    }
    if !command.prp1().is_multiple_of(PAGE_BYTES) {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    Ok(Creation { id, entries, address: GuestAddress(command.prp1()) })
}

fn start_status(error: &StartError) -> Status {
    match error {
        // The guest can cause this error as often as it likes: it is not logged.
        StartError::Memory { .. } => Status::DATA_TRANSFER_ERROR,
        _ => {
            tracing::warn!(%error, "an I/O queue cannot be started");
            Status::INTERNAL_ERROR
        }
    }
}

impl Controller {
    /// Whether a queue may have this number: from 1, and as many as the host has been granted
    /// (5.27.1.5).
    fn is_queue_id(&self, id: u16, granted: u16) -> bool {
        (1..=granted.min(self.limits.queue_pairs)).contains(&id)
    }

    /// Create I/O Completion Queue (5.4).
    pub(crate) fn create_completion_queue(&mut self, command: &Command) -> Result<Outcome, Status> {
        let id = (command.dword10() & 0xFFFF) as u16;
        if !self.is_queue_id(id, self.features.completion_queues())
            || self.queues.has_completion_queue(id)
        {
            return Err(Status::INVALID_QUEUE_ID);
        }
        let size = self.registers.configuration().completion_entry_size();
        let Creation { id, entries, address } = creation(command, size == COMPLETION_BYTES_LOG2)?;
        let vector = (command.dword11() >> 16) as u16;
        let vector = (command.dword11() & INTERRUPTS_ENABLED != 0).then_some(vector);
        if vector.is_some_and(|vector| vector >= self.limits.vectors) {
            return Err(Status::INVALID_INTERRUPT_VECTOR);
        }
        self.doorbells.set_completion_head(id, 0);
        let memory = self.memory.clone();
        let setup = CompletionQueueSetup { id, memory, address, entries, vector };
        self.host.start_completion_queue(setup).map_err(|error| start_status(&error))?;
        self.queues.completion.insert(id, State::Running);
        Ok(Outcome::Now(0))
    }

    /// Create I/O Submission Queue (5.5).
    pub(crate) fn create_submission_queue(&mut self, command: &Command) -> Result<Outcome, Status> {
        let id = (command.dword10() & 0xFFFF) as u16;
        if !self.is_queue_id(id, self.features.submission_queues())
            || self.queues.has_submission_queue(id)
        {
            return Err(Status::INVALID_QUEUE_ID);
        }
        let size = self.registers.configuration().submission_entry_size();
        let Creation { id, entries, address } = creation(command, size == COMMAND_BYTES_LOG2)?;
        let completion_queue = (command.dword11() >> 16) as u16;
        if !self.is_queue_id(completion_queue, self.features.completion_queues()) {
            return Err(Status::INVALID_QUEUE_ID);
        }
        if !self.queues.runs_completion_queue(completion_queue) {
            return Err(Status::INVALID_COMPLETION_QUEUE);
        }
        self.doorbells.set_submission_tail(id, 0);
        let memory = self.memory.clone();
        let setup = SubmissionQueueSetup { id, completion_queue, memory, address, entries };
        self.host.start_submission_queue(setup).map_err(|error| start_status(&error))?;
        self.queues
            .submission
            .insert(id, SubmissionState { completion_queue, state: State::Running });
        Ok(Outcome::Now(0))
    }

    /// Delete I/O Submission Queue (5.7): it completes when the queue's commands have.
    pub(crate) fn delete_submission_queue(&mut self, command: &Command) -> Result<Outcome, Status> {
        let id = (command.dword10() & 0xFFFF) as u16;
        match self.queues.submission.get_mut(&id) {
            Some(queue) if queue.state == State::Running => queue.state = State::Deleting,
            _ => return Err(Status::INVALID_QUEUE_ID),
        }
        let done =
            self.wait(Waiting::DeleteSubmissionQueue { command_id: command.id(), queue: id });
        self.host.stop_submission_queue(id, done);
        Ok(Outcome::Later)
    }

    /// Delete I/O Completion Queue (5.6).
    pub(crate) fn delete_completion_queue(&mut self, command: &Command) -> Result<Outcome, Status> {
        let id = (command.dword10() & 0xFFFF) as u16;
        if !self.queues.runs_completion_queue(id) {
            return Err(Status::INVALID_QUEUE_ID);
        }
        // Also one that is being deleted may have completions to come.
        if self.queues.submission.values().any(|queue| queue.completion_queue == id) {
            return Err(Status::INVALID_QUEUE_DELETION);
        }
        self.queues.completion.insert(id, State::Deleting);
        let done =
            self.wait(Waiting::DeleteCompletionQueue { command_id: command.id(), queue: id });
        self.host.stop_completion_queue(id, done);
        Ok(Outcome::Later)
    }

    /// Completes a deletion: the queue's sidecore has stopped using the submission queue.
    pub(crate) fn submission_queue_deleted(&mut self, command_id: u16, queue: u16) {
        self.queues.submission.remove(&queue);
        self.complete(command_id, Ok(0));
    }

    /// Completes a deletion: the queue's sidecore has stopped using the completion queue.
    pub(crate) fn completion_queue_deleted(&mut self, command_id: u16, queue: u16) {
        self.queues.completion.remove(&queue);
        self.complete(command_id, Ok(0));
    }
}
