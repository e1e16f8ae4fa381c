//! Questions to the hypervisor side, each about one slot, and its answers.

use std::sync::atomic::Ordering;

use sidecore_block::BlockError;

use super::FunctionChannel;
use super::slot::Phase;
use crate::mail::{Answer, Question, Slot};
use crate::multiplexer::Multiplexer;

impl FunctionChannel {
    /// Asks the hypervisor side about the request in `slot`, which waits for the answer.
    pub(super) fn ask(&mut self, slot: Slot, question: Question) {
        if let Question::Regenerate { range } | Question::Allocate { range, .. } = &question {
            self.function.stats.miss_address.store(range.first.0, Ordering::Relaxed);
            self.function.stats.miss_size.store(range.count, Ordering::Relaxed);
        }
        if self.line.ask(slot, question) {
            self.asked = self.asked.saturating_add(1);
            self.stats.stalled.set(self.asked as u64);
            if let Some(parts) = self.slots.parts(slot)
                && parts.phase != Phase::Linking
            {
                parts.phase = Phase::Asked;
            }
        } else {
            self.fail(slot, BlockError::EIO);
        }
    }

    /// Ends the request in `slot` with `error` once all its parts have completed.
    pub(super) fn fail(&mut self, slot: Slot, error: BlockError) {
        if let Some(parts) = self.slots.parts(slot) {
            parts.phase = Phase::Finishing;
            parts.result = parts.result.and(Err(error));
        }
        self.finish_if_done(slot);
    }

    pub(super) fn finish_if_done(&mut self, slot: Slot) {
        if self.slots.parts(slot).is_some_and(|parts| parts.is_finished())
            && let Some(parts) = self.slots.take_parts(slot)
        {
            self.finish(parts.request, parts.result);
        }
    }

    /// Handles the answers of the hypervisor side.
    pub(super) fn read_answers(&mut self, multiplexer: &mut Multiplexer) {
        if self.asked == 0 {
            return;
        }
        let mut received = 0_u64;
        while let Ok(reply) = self.line.replies.try_recv() {
            received = received.saturating_add(1);
            self.asked = self.asked.saturating_sub(1);
            self.stats.stalled.set(self.asked as u64);
            self.handle(multiplexer, reply.slot, reply.answer);
        }
        if received > 0 {
            // Each answer's signal comes before it: if there were more signals than answers, the
            // rest of the answers is about to arrive.
            self.announced =
                self.announced.saturating_add(self.line.wake.drain()).saturating_sub(received);
        }
    }

    fn handle(&mut self, multiplexer: &mut Multiplexer, slot: Slot, answer: Answer) {
        match answer {
            Answer::Rewalk => {
                self.stats.rewalks.add(1);
                if let Some(parts) = self.slots.parts(slot) {
                    if parts.phase == Phase::Linking {
                        parts.next_bytes = parts.grant_start_bytes;
                    }
                    parts.phase = Phase::Ready;
                }
                self.resume(multiplexer, slot);
            }
            Answer::Grant { grant, range, extents } => {
                self.use_grant(multiplexer, slot, grant, range, extents)
            }
            Answer::Done => self.handle_done(multiplexer, slot),
            Answer::Failed(error) => self.fail(slot, error),
        }
    }
}
