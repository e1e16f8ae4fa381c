//! The slow path of a poll: commands in steps, fused pairs, the fence, and pending changes.

use sidecore_units::Nanos;

use super::command::Job;
use super::fused::Phase;
use super::origin::Origin;
use super::queue::IoQueue;
use super::steps::{FUSED_STEP, QueuedCommand, Surroundings};
use crate::Status;

impl IoQueue {
    /// Gives a stepper's next requests to the store.
    pub(super) fn advance(&mut self, index: usize) -> Option<Status> {
        self.steps.steppers.get_mut(index)?.advance(&mut self.engine)
    }

    /// Starts commands that wait for a stepper, as many as there are steppers.
    pub(super) fn start_queued(&mut self) {
        while self.fused.is_none()
            && let Some(index) = self.steps.free()
            && let Some(queued) = self.steps.queued.pop_front()
        {
            if let Some(status) = self.begin(index, &queued) {
                if status.is_success() {
                    self.count_job(Some(queued.job));
                    self.complete(queued.slot, queued.command.id(), status);
                } else {
                    self.reject(queued.slot, &queued.command, status);
                }
            }
        }
    }

    /// Starts a command in steps; its status, if it is over already.
    pub(super) fn begin(&mut self, index: usize, queued: &QueuedCommand) -> Option<Status> {
        let mut around =
            Surroundings { rules: &self.rules, memory: &self.memory, hint: &mut self.hint };
        let begun = self.steps.steppers.get_mut(index)?.begin(queued, &mut around);
        match begun {
            Ok(()) => self.advance(index),
            Err(status) => Some(status),
        }
    }

    /// Carries a fused pair on, once this queue is alone.
    pub(super) fn drive_fused(&mut self, now: Nanos) {
        let Some(fused) = &self.fused else { return };
        if fused.phase != Phase::Closing
            || !self.seat.close()
            || self.engine.in_flight() > 0
            || !self.seat.is_alone()
        {
            return;
        }
        let queued = QueuedCommand {
            command: fused.compare,
            job: Job::Compare,
            slot: fused.slot,
            taken_at: fused.taken_at,
        };
        if let Some(fused) = &mut self.fused {
            fused.phase = Phase::Comparing;
        }
        if let Some(status) = self.begin(FUSED_STEP, &queued) {
            self.compared(now, status);
        }
    }

    /// The compare of a fused pair is over.
    pub(super) fn compared(&mut self, now: Nanos, status: Status) {
        let Some(fused) = &mut self.fused else { return };
        if status.is_success()
            && let Some(write) = fused.write.take()
        {
            fused.phase = Phase::Writing;
            self.engine.submit(write, Origin::FusedWrite, fused.flush);
            self.engine.continue_now();
            return;
        }
        self.end_fused(now, status, Status::FAILED_FUSED);
    }

    /// Both commands of a fused pair are over: the others may go on.
    pub(super) fn end_fused(&mut self, now: Nanos, compare_status: Status, write_status: Status) {
        let Some(mut fused) = self.fused.take() else { return };
        self.seat.open();
        if let Some(write) = fused.write.take() {
            self.engine.recycle(write);
        }
        self.engine.measure(now, fused.taken_at);
        let is_well = compare_status.is_success();
        let compare_status = if is_well {
            compare_status
        } else {
            self.log_refusal(fused.slot, &fused.compare, compare_status)
        };
        let is_well = write_status.is_success();
        let write_status =
            if is_well { write_status } else { self.log_fused_write(&fused, write_status) };
        self.complete(fused.slot, fused.compare.id(), compare_status);
        self.complete(fused.slot, fused.write_id, write_status);
        self.attention = true;
    }

    /// The slow path of a poll. Returns whether commands may be taken.
    #[cold]
    pub(super) fn slow_path(&mut self, now: Nanos) -> bool {
        self.seat.rise();
        let fenced = self.seat.look();
        if fenced && self.engine.in_flight() == 0 {
            self.seat.answer();
        }
        if self.is_stopping() {
            return false;
        }
        if !self.completions.post_backlog(&self.doorbells, now) {
            self.report_invalid_doorbell();
        }
        if !fenced && self.fused.is_none() {
            self.start_queued();
        }
        if !fenced {
            self.drive_fused(now);
        }
        if self.engine.has_queued() {
            self.exchange(now);
        }
        self.remove_stopped();
        while self.in_flight == 0
            && !self.is_stopping()
            && let Some(change) = self.changes.pop_front()
        {
            self.apply(change);
        }
        let busy = fenced
            || self.fused.is_some()
            || self.completions.has_backlog()
            || !self.changes.is_empty()
            || !self.is_serving()
            || self.is_paused
            || self.doorbells.is_missing();
        let ending =
            self.submissions.iter().flatten().any(|submission| submission.stopping.is_some());
        self.attention = busy || ending || !self.steps.queued.is_empty();
        !busy
    }
}
