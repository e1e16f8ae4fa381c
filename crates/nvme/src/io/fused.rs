//! Compare and Write as one (NVM command set 1.0, 2.1.4 and 3.3; NVMe base 2.0, 3.4.2).
//!
//! The two commands stand next to each other in one submission queue and come with one doorbell
//! write. Either both are carried out, or neither: a compare that fails keeps its status, and its
//! write gets Command Aborted due to Failed Fused Command. What keeps other commands away from the
//! store meanwhile is in `fence.rs`.

use sidecore_block::{BlockRequest, Flush, Operation};
use sidecore_memory::{GuestMemory, RegionHint};
use sidecore_units::Nanos;

use super::command::{Rules, Verdict, opcode};
use super::steps::STEP_BYTES;
use crate::{Command, Status};

/// Most bytes of a fused Compare and Write (ACWU): what is compared in one step, so that the others
/// do not wait for long.
pub const COMPARE_AND_WRITE_BYTES: u64 = STEP_BYTES;

/// How far a pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It waits to be alone.
    Closing,
    /// The compare is under way.
    Comparing,
    /// The write is.
    Writing,
}

/// A pair that nothing is wrong with.
pub(super) struct Fused {
    pub(super) slot: usize,
    pub(super) compare: Command,
    pub(super) write_id: u16,
    pub(super) taken_at: Nanos,
    /// The write, translated; at the store while it is written.
    pub(super) write: Option<Box<BlockRequest>>,
    /// The flush that the write needs.
    pub(super) flush: Flush,
    pub(super) phase: Phase,
}

/// Checks both commands and fills in the write. Returns the flush that the write needs.
///
/// # Errors
/// The status of each: the one that is wrong says why, and the other that it was aborted for it.
pub(super) fn check(
    (compare, write): (&Command, &Command),
    write_through: bool,
    rules: &Rules,
    memory: &GuestMemory,
    hint: &mut RegionHint,
    request: &mut BlockRequest,
) -> Result<Flush, (Status, Status)> {
    let same_range = compare.nsid() == write.nsid()
        && compare.qword10() == write.qword10()
        && compare.dword12() & 0xFFFF == write.dword12() & 0xFFFF;
    if compare.opcode() != opcode::COMPARE || write.opcode() != opcode::WRITE || !same_range {
        return Err((Status::INVALID_FIELD, Status::INVALID_FIELD));
    }
    let range = rules.check_transfer(compare).map_err(|status| (status, Status::FAILED_FUSED))?;
    if range.len_bytes > COMPARE_AND_WRITE_BYTES {
        return Err((Status::ATOMIC_WRITE_UNIT_EXCEEDED, Status::FAILED_FUSED));
    }
    match rules.parse(write, write_through, memory, hint, request) {
        Ok(Verdict::Submit(flush)) if request.operation == Operation::Write => Ok(flush),
        Ok(_) => Err((Status::FAILED_FUSED, Status::INVALID_FIELD)),
        Err(status) => Err((Status::FAILED_FUSED, status)),
    }
}
