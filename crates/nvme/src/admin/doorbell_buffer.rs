//! Doorbell Buffer Config (NVMe base 2.0, 5.8): doorbells in the host's memory, which cost it no
//! exit.

use sidecore_memory::GuestAddress;
use sidecore_units::PAGE_BYTES;

use crate::controller::{Controller, Outcome};
use crate::{Command, Status};

impl Controller {
    /// The shadow doorbells and their EventIdx, a page each.
    pub(crate) fn doorbell_buffer_config(&mut self, command: &Command) -> Result<Outcome, Status> {
        if self.doorbells_are_mapped {
            return Err(Status::INVALID_OPCODE);
        }
        let (shadow, event_index) = (command.prp1(), command.prp2());
        let page = usize::try_from(PAGE_BYTES).unwrap_or(usize::MAX);
        for address in [shadow, event_index] {
            if !address.is_multiple_of(PAGE_BYTES) {
                return Err(Status::INVALID_FIELD);
            }
            self.memory
                .guest_window(GuestAddress(address), page, 4)
                .map_err(|_| Status::INVALID_FIELD)?;
        }
        self.host.set_shadow_doorbells(Some((GuestAddress(shadow), GuestAddress(event_index))));
        Ok(Outcome::Now(0))
    }
}
