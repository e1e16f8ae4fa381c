//! Dataset Management (NVM command set 1.0, 3.2.3): up to 256 ranges, whose blocks may be
//! deallocated.

use sidecore_block::Operation;
use sidecore_spec_nvme::command::{DatasetRange, MAX_RANGES};

use super::command::{Range, Rules};
use super::origin::Engine;
use super::steps::{Stepper, Surroundings};
use crate::pointer::{self, Direction};
use crate::{Command, Status};

const RANGE_BYTES: usize = DatasetRange::BYTES;

/// The ranges of a command, in memory of ours: read once, checked, and carried out as they were
/// checked.
pub(super) struct Ranges {
    bytes: Box<[u8; RANGE_BYTES * MAX_RANGES]>,
    parsed: Vec<Range>,
    next: usize,
}

impl Default for Ranges {
    fn default() -> Self {
        Self {
            bytes: Box::new([0; RANGE_BYTES * MAX_RANGES]),
            parsed: Vec::with_capacity(MAX_RANGES),
            next: 0,
        }
    }
}

impl Ranges {
    /// Checks the first `count` ranges; those of no blocks are left out.
    fn parse(&mut self, count: usize, rules: &Rules) -> Result<(), Status> {
        self.next = 0;
        self.parsed.clear();
        let (ranges, _) = self.bytes.as_chunks::<RANGE_BYTES>();
        for bytes in ranges.iter().take(count) {
            let DatasetRange { blocks, lba, .. } = DatasetRange::decode(bytes);
            let range = rules.blocks(lba, u64::from(blocks))?;
            if blocks > 0 {
                self.parsed.push(range);
            }
        }
        Ok(())
    }
}

/// # Errors
/// The data pointer is wrong, or a range ends past the namespace: nothing is deallocated then.
pub(super) fn begin(
    stepper: &mut Stepper,
    command: &Command,
    around: &mut Surroundings<'_>,
) -> Result<(), Status> {
    // NR is 0's based.
    let count = usize::from((command.dword10() & 0xFF) as u8).saturating_add(1);
    let len_bytes = count.saturating_mul(RANGE_BYTES);
    let Stepper { guest, ranges, .. } = stepper;
    pointer::gather(
        command,
        len_bytes as u64,
        Direction::FromGuest,
        around.memory,
        around.hint,
        guest,
    )?;
    let bytes = ranges.bytes.get_mut(..len_bytes).unwrap_or(&mut []);
    if guest.copy_to_slice(0, bytes) != len_bytes {
        return Err(Status::DATA_TRANSFER_ERROR);
    }
    ranges.parse(count, around.rules)?;
    // Dword 12, where others have FUA, is reserved.
    stepper.flush_first = false;
    Ok(())
}

/// As many of the next ranges as there are requests for.
pub(super) fn issue(stepper: &mut Stepper, engine: &mut Engine) {
    while stepper.can_issue()
        && let Some(range) = stepper.ranges.parsed.get(stepper.ranges.next).copied()
    {
        stepper.ranges.next = stepper.ranges.next.saturating_add(1);
        stepper.issue(Operation::Discard, range, engine);
    }
}
