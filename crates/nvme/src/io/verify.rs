//! Verify (NVM command set 1.0, 3.2.5): reads the blocks and discards the data.

use super::steps::{Stepper, Surroundings};
use crate::{Command, Status};

/// # Errors
/// The range is wrong.
pub(super) fn begin(
    stepper: &mut Stepper,
    command: &Command,
    around: &mut Surroundings<'_>,
) -> Result<(), Status> {
    stepper.range = around.rules.range(command)?;
    Ok(())
}
