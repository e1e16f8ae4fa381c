//! From the store back to the guest: the completion of requests.

use sidecore_block::{BlockError, BlockRequest, Operation, QueueName};
use sidecore_units::Nanos;

use super::command::Job;
use super::origin::{Origin, Whole};
use super::outcome::status_of;
use super::queue::IoQueue;
use super::steps::{FUSED_STEP, Steps};
use crate::Status;

impl IoQueue {
    /// Submits what is queued, and takes what is done. Returns the number of requests that came
    /// back. A command in steps takes one step at a time, and lets others have their turn between
    /// them.
    #[inline]
    pub(super) fn exchange(&mut self, now: Nanos) -> usize {
        let returned = self.engine.exchange(now);
        while let Some((origin, request)) = self.engine.next_completed(now) {
            match origin {
                Origin::Whole(whole) => self.finish_whole(now, whole, request),
                Origin::Step(index) => self.finish_step(now, index, request),
                Origin::FusedWrite => self.finish_fused_write(now, request),
            }
        }
        returned
    }

    /// The end of a command that was one request.
    #[inline]
    fn finish_whole(&mut self, now: Nanos, whole: Whole, request: Box<BlockRequest>) {
        self.engine.account(now, &request);
        let status = match request.result {
            Ok(()) => Status::SUCCESS,
            Err(error) => {
                self.note_error(&request, error);
                self.log_request(whole, &request, status_of(request.operation, error))
            }
        };
        self.engine.recycle(request);
        self.complete(whole.slot.into(), whole.command_id, status);
    }

    /// The end of a fused pair, whose write is over.
    fn finish_fused_write(&mut self, now: Nanos, request: Box<BlockRequest>) {
        self.stats().count(&request);
        let status = match request.result {
            Ok(()) => Status::SUCCESS,
            Err(error) => {
                self.note_error(&request, error);
                status_of(request.operation, error)
            }
        };
        self.engine.recycle(request);
        self.end_fused(now, Status::SUCCESS, status);
    }

    /// A stepper's request has come back.
    fn finish_step(&mut self, now: Nanos, index: usize, request: Box<BlockRequest>) {
        let read_bytes = if request.operation == Operation::Read { request.len_bytes } else { 0 };
        self.stats().bytes_read.add(read_bytes);
        let is_expected = request.operation == Operation::Discard
            && request.result == Err(BlockError::Unsupported);
        if let Err(error) = request.result
            && !is_expected
        {
            self.note_error(&request, error);
        }
        let Steps { steppers, scratch, .. } = &mut self.steps;
        let Some(stepper) = steppers.get_mut(index) else { return self.engine.recycle(request) };
        let job = stepper.job;
        stepper.take_back(request, scratch);
        let (slot, command_id, taken_at) = (stepper.slot, stepper.command_id, stepper.taken_at);
        let Some(mut status) = self.advance(index) else { return };
        self.count_job(job);
        if index == FUSED_STEP {
            self.compared(now, status);
        } else {
            if !status.is_success()
                && let (Some(stepper), Some(job)) = (self.steps.steppers.get(index), job)
            {
                status = self.log_steps(stepper, job, status);
            }
            self.engine.measure(now, taken_at);
            self.complete(slot, command_id, status);
        }
        self.attention = true;
    }

    #[cold]
    fn note_error(&self, request: &BlockRequest, error: BlockError) {
        let name = QueueName { device: &self.shared.options.name, queue: self.id };
        self.engine.log_error(name, request, error);
    }

    pub(super) fn count_job(&self, job: Option<Job>) {
        let stats = self.stats();
        match job {
            Some(Job::Compare) => stats.compares.add(1),
            Some(Job::Verify) => stats.verifies.add(1),
            Some(Job::ReadAround) => stats.reads.add(1),
            Some(Job::Deallocate) => stats.discards.add(1),
            None => {}
        }
    }
}
