//! Error log entries of failed commands (NVMe base 2.0, 5.16.1.2), announced by the completion's
//! More bit (figure 94).

use sidecore_block::BlockRequest;

use super::command::{Job, opcode};
use super::fused::Fused;
use super::origin::Whole;
use super::queue::IoQueue;
use super::steps::Stepper;
use crate::admin::errors::Failed;
use crate::{Command, Status};

/// A failed compare is what a command was to find out, and the other command of a fused pair says
/// why this one was aborted.
fn is_logged(status: Status) -> bool {
    !status.is_same_code(Status::COMPARE_FAILURE) && !status.is_same_code(Status::FAILED_FUSED)
}

impl Job {
    const fn opcode(self) -> u8 {
        match self {
            Self::Compare => opcode::COMPARE,
            Self::Verify => opcode::VERIFY,
            Self::ReadAround => opcode::READ,
            Self::Deallocate => opcode::DATASET_MANAGEMENT,
        }
    }
}

impl IoQueue {
    /// A command was refused.
    #[cold]
    pub(super) fn log_refusal(&self, slot: usize, command: &Command, status: Status) -> Status {
        let opcode = command.opcode();
        // Dwords 10 and 11 of the others are no block.
        let has_block = ![opcode::FLUSH, opcode::DATASET_MANAGEMENT].contains(&opcode);
        let lba = if has_block { command.qword10() } else { 0 };
        self.log(slot, command.id(), (opcode, command.nsid(), lba), status)
    }

    /// The store has failed a request, and with it its command.
    #[cold]
    pub(super) fn log_request(
        &self,
        whole: Whole,
        request: &BlockRequest,
        status: Status,
    ) -> Status {
        let Whole { slot, command_id, opcode } = whole;
        let (nsid, lba) = self.rules.place(request.offset_bytes);
        self.log(slot.into(), command_id, (opcode, nsid, lba), status)
    }

    /// A command in steps has failed: in the first block of a step, as far as is known.
    #[cold]
    pub(super) fn log_steps(&self, stepper: &Stepper, job: Job, status: Status) -> Status {
        let (nsid, lba) =
            self.rules.place(stepper.range.offset_bytes.saturating_add(stepper.done_bytes));
        let lba = if job == Job::Deallocate { 0 } else { lba };
        self.log(stepper.slot, stepper.command_id, (job.opcode(), nsid, lba), status)
    }

    /// The write of a fused pair has failed.
    #[cold]
    pub(super) fn log_fused_write(&self, fused: &Fused, status: Status) -> Status {
        let place = (opcode::WRITE, fused.compare.nsid(), fused.compare.qword10());
        self.log(fused.slot, fused.write_id, place, status)
    }

    fn log(
        &self,
        slot: usize,
        command_id: u16,
        (opcode, nsid, lba): (u8, u32, u64),
        status: Status,
    ) -> Status {
        let Some(submission_queue) =
            self.submissions.get(slot).and_then(Option::as_ref).map(|queue| queue.id)
        else {
            return status;
        };
        if !is_logged(status) {
            return status;
        }
        self.shared
            .errors
            .io_command(Failed { submission_queue, command_id, opcode, nsid, lba }, status)
    }
}
