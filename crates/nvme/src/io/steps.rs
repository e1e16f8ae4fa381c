//! Commands that take several requests of the store, and memory of our own.
//!
//! A queue has [`STEP_COUNT`] steppers, set aside when it is started: each with a buffer, requests,
//! and room for whatever a command needs to remember from one request to the next. Nothing is
//! allocated for a command. If all are busy the command waits in its queue's memory, and the
//! commands behind it do not.

use std::collections::VecDeque;

use sidecore_block::{Batch, BlockError, BlockRequest, Flush, Operation};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, Segments};
use sidecore_units::Nanos;

use super::command::{Job, Range, Rules};
use super::dataset::Ranges;
use super::origin::{Engine, Origin};
use super::outcome::status_of;
use super::shared::Shared;
use super::{compare, dataset, read_around, verify};
use crate::pointer::{Hole, MAX_HOLES, MAX_PIECES};
use crate::{Command, Status};

/// Bytes of a buffer: what a step reads at once.
pub(super) const STEP_BYTES: u64 = 64 << 10;

/// How many commands of a queue can be under way in steps; the last is for the compare of a fused
/// pair.
pub(super) const STEP_COUNT: usize = 5;

/// The stepper of fused pairs: there is one at a time.
pub(super) const FUSED_STEP: usize = STEP_COUNT - 1;

/// Requests that one command may have at the store at once.
pub(super) const STEP_REQUESTS: usize = 8;

/// Bytes that are compared or copied at once, between the guest's memory and ours.
const SCRATCH_BYTES: usize = 4096;

/// A command queued for a stepper.
#[derive(Debug)]
pub(super) struct QueuedCommand {
    pub(super) command: Command,
    pub(super) job: Job,
    /// Where it came from, in the queue's list of submission queues.
    pub(super) slot: usize,
    pub(super) taken_at: Nanos,
}

/// The state of the queue that a stepper uses.
pub(super) struct Surroundings<'a> {
    pub(super) rules: &'a Rules,
    pub(super) memory: &'a GuestMemory,
    pub(super) hint: &'a mut RegionHint,
}

/// A command on its way.
pub(super) struct Stepper {
    index: usize,
    /// `None` while it is free.
    pub(super) job: Option<Job>,
    pub(super) slot: usize,
    pub(super) command_id: u16,
    pub(super) taken_at: Nanos,
    /// The range of the command, and how much of it is done.
    pub(super) range: Range,
    pub(super) done_bytes: u64,
    /// The first thing that went wrong.
    pub(super) status: Status,
    /// The medium itself is asked for: a flush comes first.
    pub(super) flush_first: bool,
    /// The command's data, and what of it is not wanted.
    pub(super) guest: Segments,
    pub(super) holes: Vec<Hole>,
    pub(super) ranges: Ranges,
    /// Its requests that are not at the store, and how many are.
    rest: Batch,
    out: usize,
    private: GuestMemory,
    buffer: GuestAddress,
}

/// Memory of ours that is compared with, or copied through.
pub(super) struct Scratch {
    pub(super) ours: Box<[u8; SCRATCH_BYTES]>,
    pub(super) theirs: Box<[u8; SCRATCH_BYTES]>,
}

impl Stepper {
    fn new(index: usize, rest: Batch, private: &GuestMemory, buffer: GuestAddress) -> Self {
        Self {
            index,
            job: None,
            slot: 0,
            command_id: 0,
            taken_at: Nanos::ZERO,
            range: Range { offset_bytes: 0, len_bytes: 0 },
            done_bytes: 0,
            status: Status::SUCCESS,
            flush_first: false,
            guest: Segments::with_capacity(MAX_PIECES),
            holes: Vec::with_capacity(MAX_HOLES),
            ranges: Ranges::default(),
            rest,
            out: 0,
            private: private.clone(),
            buffer,
        }
    }

    /// Takes on a command.
    ///
    /// # Errors
    /// What is wrong with it; the stepper is free then.
    pub(super) fn begin(
        &mut self,
        queued: &QueuedCommand,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Status> {
        self.slot = queued.slot;
        self.command_id = queued.command.id();
        self.taken_at = queued.taken_at;
        self.done_bytes = 0;
        self.status = Status::SUCCESS;
        self.flush_first = around.rules.wants_flush_first(&queued.command);
        self.holes.clear();
        self.guest.clear();
        match queued.job {
            Job::Compare => compare::begin(self, &queued.command, around)?,
            Job::Verify => verify::begin(self, &queued.command, around)?,
            Job::ReadAround => read_around::begin(self, &queued.command, around)?,
            Job::Deallocate => dataset::begin(self, &queued.command, around)?,
        }
        self.job = Some(queued.job);
        Ok(())
    }

    /// Submits the next requests. With none left to wait for, the stepper is free, and the command
    /// has ended with the status.
    pub(super) fn advance(&mut self, engine: &mut Engine) -> Option<Status> {
        if self.status.is_success() {
            if std::mem::take(&mut self.flush_first) {
                self.issue(Operation::Flush, Range { offset_bytes: 0, len_bytes: 0 }, engine);
            } else if self.job == Some(Job::Deallocate) {
                dataset::issue(self, engine);
            } else {
                self.read_on(engine);
            }
        }
        if self.out > 0 {
            return None;
        }
        self.job = None;
        Some(self.status)
    }

    /// The next part of the range, into the buffer: one at a time.
    fn read_on(&mut self, engine: &mut Engine) {
        let left_bytes = self.range.len_bytes.saturating_sub(self.done_bytes);
        if self.out > 0 || left_bytes == 0 {
            return;
        }
        let offset_bytes = self.range.offset_bytes.saturating_add(self.done_bytes);
        self.issue(
            Operation::Read,
            Range { offset_bytes, len_bytes: left_bytes.min(STEP_BYTES) },
            engine,
        );
    }

    /// Gives a request to the store; false if all are there.
    pub(super) fn issue(
        &mut self,
        operation: Operation,
        range: Range,
        engine: &mut Engine,
    ) -> bool {
        let Some(mut request) = self.rest.pop() else { return false };
        request.segments.clear();
        if operation == Operation::Read {
            request.segments.bind(&self.private);
            if request
                .segments
                .push(self.buffer, range.len_bytes, &mut RegionHint::default())
                .is_err()
            {
                // A buffer has the size of the largest step.
                self.status = Status::INTERNAL_ERROR;
                self.rest.push(request);
                return false;
            }
        }
        request.operation = operation;
        request.offset_bytes = range.offset_bytes;
        request.len_bytes = range.len_bytes;
        request.taken_at = self.taken_at;
        engine.submit(request, Origin::Step(self.index), Flush::Never);
        self.out = self.out.saturating_add(1);
        true
    }

    /// Whether it has a request left to issue.
    pub(super) fn can_issue(&self) -> bool {
        !self.rest.is_empty()
    }

    /// Takes back a request that the store has answered, with its data or with the status that it
    /// means for the command.
    pub(super) fn take_back(&mut self, request: Box<BlockRequest>, scratch: &mut Scratch) {
        self.out = self.out.saturating_sub(1);
        let operation = request.operation;
        match request.result {
            Err(BlockError::Unsupported) if operation == Operation::Discard => {}
            Err(error) if self.status.is_success() => {
                // A command that reads fails to read, also if it is the flush before that fails.
                let asked =
                    if operation == Operation::Discard { operation } else { Operation::Read };
                self.status = status_of(asked, error);
            }
            Ok(()) if operation == Operation::Read => {
                match self.job {
                    Some(Job::Compare) => compare::look(self, &request, scratch),
                    Some(Job::ReadAround) => read_around::copy(self, &request, scratch),
                    _ => {}
                }
                self.done_bytes = self.done_bytes.saturating_add(request.len_bytes);
            }
            _ => {}
        }
        self.rest.push(request);
    }
}

/// All steppers of a queue, and the commands that wait for one.
pub(super) struct Steps {
    pub(super) steppers: Vec<Stepper>,
    pub(super) queued: VecDeque<QueuedCommand>,
    pub(super) scratch: Scratch,
}

impl Steps {
    /// Steppers for queue `queue`, and room for `depth` commands that wait.
    pub(super) fn new(shared: &Shared, queue: u16, depth: usize, engine: &mut Engine) -> Self {
        let (private, area) = shared.buffers(queue);
        let buffer = |index: usize| {
            GuestAddress(area.0.saturating_add(STEP_BYTES.saturating_mul(index as u64)))
        };
        Self {
            steppers: (0..STEP_COUNT)
                .map(|index| {
                    let rest = (0..STEP_REQUESTS).map(|_| engine.make_request(1)).collect();
                    Stepper::new(index, rest, private, buffer(index))
                })
                .collect(),
            queued: VecDeque::with_capacity(depth),
            scratch: Scratch {
                ours: Box::new([0; SCRATCH_BYTES]),
                theirs: Box::new([0; SCRATCH_BYTES]),
            },
        }
    }

    /// A stepper that is free, of those that are not for fused pairs.
    pub(super) fn free(&self) -> Option<usize> {
        self.steppers.iter().take(FUSED_STEP).position(|stepper| stepper.job.is_none())
    }

    /// Lets go of the guest's memory; nothing is under way.
    pub(super) fn release(&mut self) {
        for stepper in &mut self.steppers {
            stepper.guest.release();
        }
    }
}
