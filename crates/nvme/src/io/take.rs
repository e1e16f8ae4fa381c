//! Taking commands: no more than there is room for completions.

use sidecore_block::{BATCH, BlockRequest, Budget};
use sidecore_units::Nanos;

use super::command::Verdict;
use super::fused::{self, Fused, Phase};
use super::origin::{Origin, Whole};
use super::queue::IoQueue;
use super::steps::QueuedCommand;
use crate::{Command, Fuse, Status};

impl IoQueue {
    /// Takes commands from all submission queues in turn; how many there were.
    #[inline]
    pub(super) fn take_from_all(&mut self, now: Nanos, budget: usize) -> usize {
        let count = self.submissions.len();
        let mut taken = 0_usize;
        let mut budget = Budget::new(budget);
        let mut slot = self.first;
        for _ in 0..count {
            slot = if slot < count { slot } else { 0 };
            taken = taken.saturating_add(self.take_from(slot, now, &mut budget));
            slot = slot.wrapping_add(1);
        }
        let next = self.first.wrapping_add(1);
        self.first = if next < count { next } else { 0 };
        taken
    }

    /// Takes commands from one submission queue, as far as the `budget` goes, and gives them to the
    /// store. Returns their number.
    #[inline]
    pub(super) fn take_from(&mut self, slot: usize, now: Nanos, budget: &mut Budget) -> usize {
        let Some(Some(submission)) = self.submissions.get_mut(slot) else { return 0 };
        let valid = submission.look(&self.doorbells);
        let has_next = submission.has_next();
        if !valid {
            self.report_invalid_doorbell();
        }
        let mut taken = 0_usize;
        while has_next && self.fused.is_none() {
            let batch = self.take(slot, now, budget);
            if batch == 0 {
                break;
            }
            taken = taken.saturating_add(batch);
            self.stats().batches.add(1);
            if !self.steps.queued.is_empty() {
                self.start_queued();
            }
            if self.engine.in_flight() > 0 {
                self.exchange(now);
            }
            if batch < BATCH {
                break;
            }
        }
        if taken > 0
            && let Some(Some(submission)) = self.submissions.get_mut(slot)
        {
            submission.keep_quiet(&self.doorbells);
        }
        taken
    }

    /// Takes up to [`BATCH`] commands, as far as the `budget` goes. Returns their number.
    #[inline]
    pub(super) fn take(&mut self, slot: usize, now: Nanos, budget: &mut Budget) -> usize {
        let write_through = self.shared.is_write_through();
        let (room, valid) = self.completions.room(self.in_flight, BATCH as u32, &self.doorbells);
        if !valid {
            self.report_invalid_doorbell();
        }
        let mut taken = 0_usize;
        let room = (room.min(self.depth.saturating_sub(self.in_flight)) as usize).min(BATCH);
        self.completions.prefetch();
        while taken < room && budget.take() {
            let Some(mut request) = self.engine.blank() else { break };
            let Some(Some(submission)) = self.submissions.get_mut(slot) else {
                self.engine.recycle(request);
                break;
            };
            let Some(command) = submission.next() else {
                self.engine.recycle(request);
                break;
            };
            taken = taken.wrapping_add(1);
            submission.in_flight = submission.in_flight.wrapping_add(1);
            self.in_flight = self.in_flight.wrapping_add(1);
            request.taken_at = now;
            if command.fuse() != Fuse::Normal {
                self.take_fused(slot, &command, request);
                if self.fused.is_some() {
                    break;
                }
                continue;
            }
            let verdict = self.rules.parse(
                &command,
                write_through,
                &self.memory,
                &mut self.hint,
                &mut request,
            );
            if let Ok(Verdict::Submit(flush)) = verdict {
                budget.spend_bytes(request.len_bytes);
                let whole =
                    Whole { slot: slot as u16, command_id: command.id(), opcode: command.opcode() };
                self.engine.submit(request, Origin::Whole(whole), flush);
            } else {
                self.engine.recycle(request);
                self.take_other(slot, command, verdict);
            }
        }
        taken
    }

    /// A command that is not one request.
    pub(super) fn take_other(
        &mut self,
        slot: usize,
        command: Command,
        verdict: Result<Verdict, Status>,
    ) {
        match verdict {
            Ok(Verdict::Steps(job)) => {
                self.steps.queued.push_back(QueuedCommand {
                    command,
                    job,
                    slot,
                    taken_at: self.now,
                });
                self.attention = true;
            }
            Ok(_) => self.complete(slot, command.id(), Status::SUCCESS),
            Err(status) => self.reject(slot, &command, status),
        }
    }

    /// One of two commands that are to be one, if the other is next to it.
    #[cold]
    pub(super) fn take_fused(
        &mut self,
        slot: usize,
        first: &Command,
        mut request: Box<BlockRequest>,
    ) {
        let alone = match first.fuse() {
            Fuse::First => None,
            Fuse::Normal | Fuse::Second => Some(Status::MISSING_FUSED),
            Fuse::Reserved => Some(Status::INVALID_FIELD),
        };
        let second = match self.submissions.get_mut(slot) {
            Some(Some(submission)) if alone.is_none() => match submission.next() {
                Some(second) if second.fuse() == Fuse::Second => {
                    submission.in_flight = submission.in_flight.wrapping_add(1);
                    Some(second)
                }
                other => {
                    submission.ahead = other;
                    None
                }
            },
            _ => None,
        };
        let Some(second) = second else {
            self.engine.recycle(request);
            // 3.4.2: one doorbell write is for both, so a second one that is not there now is
            // missing.
            self.reject(slot, first, alone.unwrap_or(Status::MISSING_FUSED));
            return;
        };
        self.in_flight = self.in_flight.wrapping_add(1);
        let write_through = self.shared.is_write_through();
        let pair = (first, &second);
        match fused::check(
            pair,
            write_through,
            &self.rules,
            &self.memory,
            &mut self.hint,
            &mut request,
        ) {
            Ok(flush) => {
                self.fused = Some(Fused {
                    slot,
                    compare: *first,
                    write_id: second.id(),
                    taken_at: self.now,
                    write: Some(request),
                    flush,
                    phase: Phase::Closing,
                });
                self.attention = true;
            }
            Err((first_status, second_status)) => {
                self.engine.recycle(request);
                self.reject(slot, first, first_status);
                self.reject(slot, &second, second_status);
            }
        }
    }

    /// Completes a command that was refused.
    pub(super) fn reject(&mut self, slot: usize, command: &Command, status: Status) {
        self.stats().rejected.add(1);
        let status = self.log_refusal(slot, command, status);
        self.complete(slot, command.id(), status);
    }

    /// Posts a completion.
    #[inline]
    pub(super) fn complete(&mut self, slot: usize, command_id: u16, status: Status) {
        self.stats().requests.add(1);
        let Some(Some(submission)) = self.submissions.get_mut(slot) else { return };
        submission.in_flight = submission.in_flight.saturating_sub(1);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.completions.post(submission, command_id, status, self.now);
        self.attention |= self.completions.has_backlog();
    }
}
