//! A Read with bit buckets: a store has no place to put what the guest does not want, so it reads
//! into memory of ours, and the rest is copied from there.

use sidecore_block::BlockRequest;

use super::steps::{Scratch, Stepper, Surroundings};
use crate::pointer::{self, Hole};
use crate::{Command, Status};

/// # Errors
/// The range or the data pointer is wrong.
pub(super) fn begin(
    stepper: &mut Stepper,
    command: &Command,
    around: &mut Surroundings<'_>,
) -> Result<(), Status> {
    stepper.range = around.rules.check_transfer(command)?;
    let Stepper { range, guest, holes, .. } = stepper;
    pointer::gather_with_holes(command, range.len_bytes, around.memory, around.hint, guest, holes)
}

/// Copies the wanted parts of the data that was read.
pub(super) fn copy(stepper: &mut Stepper, request: &BlockRequest, scratch: &mut Scratch) {
    let (mut at, end) = (stepper.done_bytes, stepper.done_bytes.saturating_add(request.len_bytes));
    while at < end {
        let (skipped, next) = place(&stepper.holes, at);
        let Some(next) = next else {
            // Inside of a hole, which ends there.
            at = skipped;
            continue;
        };
        let count = next.min(end).saturating_sub(at);
        let to = scratch.ours.as_mut_slice();
        let to = match usize::try_from(count) {
            Ok(count) if count < to.len() => to.get_mut(..count).unwrap_or(&mut []),
            _ => to,
        };
        let count = request.segments.copy_to_slice(at.saturating_sub(stepper.done_bytes), to);
        let from = to.get(..count).unwrap_or(&[]);
        let copied = stepper.guest.copy_from_slice(at.saturating_sub(skipped), from);
        if count == 0 || copied != count {
            stepper.status = Status::INTERNAL_ERROR;
            return;
        }
        at = at.saturating_add(count as u64);
    }
}

/// Where byte `at` of a transfer is: how many bytes of holes are before it and where the next hole
/// begins; or, in a hole, where that ends, and `None`.
fn place(holes: &[Hole], at: u64) -> (u64, Option<u64>) {
    let mut skipped = 0_u64;
    for hole in holes {
        if at < hole.start_bytes {
            return (skipped, Some(hole.start_bytes));
        }
        let end = hole.start_bytes.saturating_add(hole.len_bytes);
        if at < end {
            return (end, None);
        }
        skipped = skipped.saturating_add(hole.len_bytes);
    }
    (skipped, Some(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_is_in_a_hole_or_behind_so_many_bytes_of_holes() {
        let holes =
            [Hole { start_bytes: 10, len_bytes: 5 }, Hole { start_bytes: 15, len_bytes: 1 }];
        assert_eq!(place(&holes, 0), (0, Some(10)));
        assert_eq!(place(&holes, 9), (0, Some(10)));
        assert_eq!(place(&holes, 10), (15, None));
        assert_eq!(place(&holes, 15), (16, None));
        assert_eq!(place(&holes, 16), (6, Some(u64::MAX)));
        assert_eq!(place(&[], 7), (0, Some(u64::MAX)));
    }
}
