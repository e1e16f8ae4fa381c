//! From the store back to the guest: what becomes of a request that has been answered.

use sidecore_block::{BlockError, BlockRequest, Operation, Tag};
use sidecore_units::Nanos;

use super::command::{FLUSH_AFTER, FLUSH_FIRST, Job};
use super::fused::FUSED_WRITE;
use super::outcome::status_of;
use super::queue::{IoQueue, SLOT_BITS};
use super::steps::{self, FUSED_STEP, STEP, Steps};
use crate::Status;

/// How often the store is asked at once: for a write, and for the flush behind it; or for a fused pair.
const ROUNDS: usize = 3;

/// What makes a request's answer more than a command's end.
const SPECIAL: u64 = FLUSH_AFTER | FLUSH_FIRST | STEP | FUSED_WRITE;

impl IoQueue {
    /// Submits what waits, takes what is done, and again for the other half of what is half done; how many requests came
    /// back. A command in steps takes one step at a time, and lets others have their turn between them.
    #[inline]
    pub(super) fn exchange(&mut self, now: Nanos) -> usize {
        let mut reaped = 0_usize;
        for _ in 0..ROUNDS {
            let Some(channel) = &mut self.channel else { break };
            channel.exchange(now, &mut self.waiting, &mut self.completed);
            let count = self.completed.len();
            self.out = self.out.saturating_sub(count);
            reaped = reaped.saturating_add(count);
            let mut completed = std::mem::take(&mut self.completed);
            for request in completed.drain(..) {
                self.finish_request(now, request);
            }
            self.completed = completed;
            if !std::mem::take(&mut self.again) {
                break;
            }
        }
        reaped
    }

    #[inline]
    pub(super) fn finish_request(&mut self, now: Nanos, mut request: Box<BlockRequest>) {
        let Some(bits) = request.tag.take().map(Tag::into_bits) else {
            self.pool.push(request);
            return;
        };
        if bits & SPECIAL != 0 || self.stopping.is_some() {
            self.finish_special(now, bits, request);
            return;
        }
        self.count(&request);
        self.end(now, bits, request);
    }

    /// The end of a command that was one request, or of its last one.
    #[inline]
    pub(super) fn end(&mut self, now: Nanos, bits: u64, request: Box<BlockRequest>) {
        let status = match request.result {
            Ok(()) => Status::SUCCESS,
            Err(error) => {
                self.note_error(error);
                self.log_request(bits, &request, status_of(request.operation, error))
            }
        };
        self.measure(now, request.taken_at);
        self.pool.push(request);
        let (slot, command_id) = ((bits & 0xFFFF) as usize, (bits >> SLOT_BITS & 0xFFFF) as u16);
        self.complete(slot, command_id, status);
    }

    /// An answer that is not a command's end, or not only that.
    pub(super) fn finish_special(&mut self, now: Nanos, bits: u64, mut request: Box<BlockRequest>) {
        if self.stopping.is_some() {
            // Nothing more is posted, and nothing is gone on with.
            self.pool.push(request);
            return;
        }
        if bits & STEP != 0 {
            self.finish_step(now, steps::index_of(bits), request);
            return;
        }
        let done = request.result.is_ok();
        if bits & FLUSH_FIRST != 0 {
            request.operation = Operation::Read;
            if done {
                self.submit_again(bits & !FLUSH_FIRST, request);
                return;
            }
        } else if request.operation != Operation::Flush {
            self.count(&request);
            if done && bits & FLUSH_AFTER != 0 {
                // The write is done; what completes the command is its flush.
                request.operation = Operation::Flush;
                self.submit_again(bits, request);
                return;
            }
        }
        if bits & FUSED_WRITE != 0 {
            let status = match request.result {
                Ok(()) => Status::SUCCESS,
                Err(error) => {
                    self.note_error(error);
                    status_of(request.operation, error)
                }
            };
            if let Some(fused) = &mut self.fused {
                fused.write = Some(request);
            }
            self.end_fused(now, Status::SUCCESS, status);
            return;
        }
        self.end(now, bits, request);
    }

    pub(super) fn submit_again(&mut self, bits: u64, mut request: Box<BlockRequest>) {
        request.tag = Some(Tag::from_bits(bits));
        self.waiting.push(request);
        self.out = self.out.wrapping_add(1);
        self.again = true;
    }

    /// A stepper's request has come back.
    pub(super) fn finish_step(&mut self, now: Nanos, index: usize, request: Box<BlockRequest>) {
        let Steps { steppers, scratch, .. } = &mut self.steps;
        let Some(stepper) = steppers.get_mut(index) else {
            self.pool.push(request);
            return;
        };
        let job = stepper.job;
        let read_bytes = if request.operation == Operation::Read { request.len_bytes } else { 0 };
        let failed = stepper.take_back(request, scratch);
        let (slot, command_id, taken_at) = (stepper.slot, stepper.command_id, stepper.taken_at);
        let ended = self.advance(index);
        if let Some(error) = failed {
            self.note_error(error);
        }
        if let Some(stats) = self.stats() {
            stats.bytes_read.add(read_bytes);
        }
        let Some(mut status) = ended else { return };
        self.count_job(job);
        if index == FUSED_STEP {
            self.compared(now, status);
        } else {
            if !status.is_success()
                && let (Some(stepper), Some(job)) = (self.steps.steppers.get(index), job)
            {
                status = self.log_steps(stepper, job, status);
            }
            self.measure(now, taken_at);
            self.complete(slot, command_id, status);
        }
        self.attention = true;
    }

    /// Counts what the store failed, and logs it each time that the count has doubled: a failing disk must not turn the
    /// sidecore into a log writer.
    #[cold]
    pub(super) fn note_error(&self, error: BlockError) {
        let Some(stats) = self.stats() else { return };
        stats.errors.add(1);
        let errors = stats.errors.get();
        if errors.is_power_of_two() {
            let device = &self.shared.options.name;
            tracing::warn!(device, queue = self.id, errors, "the store failed a request: {error}");
        }
    }

    #[inline]
    pub(super) fn measure(&mut self, now: Nanos, taken_at: Nanos) {
        if taken_at == now {
            let (_, count) = self.unmeasured.unwrap_or((now, 0));
            self.unmeasured = Some((now, count.wrapping_add(1)));
        } else if let Some(stats) = self.stats() {
            stats.latency.record(now.since(taken_at), 1);
        }
    }

    #[inline]
    pub(super) fn count(&self, request: &BlockRequest) {
        let Some(stats) = self.stats() else { return };
        match request.operation {
            Operation::Read => {
                stats.reads.add(1);
                stats.bytes_read.add(request.len_bytes);
            }
            Operation::Write => {
                stats.writes.add(1);
                stats.bytes_written.add(request.len_bytes);
            }
            Operation::Flush => stats.flushes.add(1),
            Operation::Discard => stats.discards.add(1),
            Operation::WriteZeroes { .. } => stats.write_zeroes.add(1),
        }
    }

    pub(super) fn count_job(&self, job: Option<Job>) {
        let Some(stats) = self.stats() else { return };
        match job {
            Some(Job::Compare) => stats.compares.add(1),
            Some(Job::Verify) => stats.verifies.add(1),
            Some(Job::ReadAround) => stats.reads.add(1),
            Some(Job::Deallocate) => stats.discards.add(1),
            None => {}
        }
    }
}
