//! Compare (NVM command set 1.0, 3.2.1): what is stored, read into memory of ours, against what the
//! guest has.

use sidecore_block::BlockRequest;

use super::steps::{Scratch, Stepper, Surroundings};
use crate::pointer::{self, Direction};
use crate::{Command, Status};

/// # Errors
/// The range or the data pointer is wrong.
pub(super) fn begin(
    stepper: &mut Stepper,
    command: &Command,
    around: &mut Surroundings<'_>,
) -> Result<(), Status> {
    stepper.range = around.rules.check_transfer(command)?;
    let (len_bytes, guest) = (stepper.range.len_bytes, &mut stepper.guest);
    pointer::gather(command, len_bytes, Direction::FromGuest, around.memory, around.hint, guest)?;
    Ok(())
}

/// Looks at what has been read. Each byte of the guest's is read once.
pub(super) fn look(stepper: &mut Stepper, request: &BlockRequest, scratch: &mut Scratch) {
    let mut at = 0_u64;
    while at < request.len_bytes {
        let ours = request.segments.copy_to_slice(at, scratch.ours.as_mut_slice());
        let count = ours.min(usize::try_from(request.len_bytes.saturating_sub(at)).unwrap_or(0));
        let theirs = scratch.theirs.get_mut(..count).unwrap_or(&mut []);
        let theirs_count =
            stepper.guest.copy_to_slice(stepper.done_bytes.saturating_add(at), theirs);
        if count == 0 || theirs_count != count || scratch.ours.get(..count) != Some(&*theirs) {
            stepper.status = Status::COMPARE_FAILURE;
            return;
        }
        at = at.saturating_add(count as u64);
    }
}
