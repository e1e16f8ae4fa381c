//! Virtualization Management (NVMe base 2.0, 5.28), of a primary controller.

use crate::controller::{Controller, Outcome, Waiting};
use crate::manager::Resource;
use crate::{Command, Status};

/// Actions (figure 337).
const PRIMARY_ALLOCATE: u32 = 0x1;
const SECONDARY_OFFLINE: u32 = 0x7;
const SECONDARY_ASSIGN: u32 = 0x8;
const SECONDARY_ONLINE: u32 = 0x9;

impl Controller {
    /// Virtualization Management.
    pub(crate) fn virtualization_management(
        &mut self,
        command: &Command,
    ) -> Result<Outcome, Status> {
        let manager = self.managed()?;
        let action = command.dword10() & 0xF;
        let controller = (command.dword10() >> 16) as u16;
        let resource = match command.dword10() >> 8 & 0b111 {
            0 => Ok(Resource::Queue),
            1 => Ok(Resource::Interrupt),
            _ => Err(Status::INVALID_RESOURCE_ID),
        };
        let count = (command.dword11() & 0xFFFF) as u16;
        let is_secondary =
            |id| manager.secondary_controllers().into_iter().find(|controller| controller.id == id);
        match action {
            PRIMARY_ALLOCATE => {
                if controller != self.identity.controller_id {
                    return Err(Status::INVALID_CONTROLLER_ID);
                }
                let resource = resource?;
                manager.flexible(resource).ok_or(Status::INVALID_RESOURCE_ID)?;
                let reply = self.wait_for_result(Waiting::Created { command_id: command.id() });
                manager.allocate(resource, count, reply);
            }
            SECONDARY_OFFLINE | SECONDARY_ONLINE => {
                is_secondary(controller).ok_or(Status::INVALID_CONTROLLER_ID)?;
                let reply = self.wait_for_result(Waiting::Managed { command_id: command.id() });
                manager.set_online(controller, action == SECONDARY_ONLINE, reply);
            }
            SECONDARY_ASSIGN => {
                let secondary = is_secondary(controller).ok_or(Status::INVALID_CONTROLLER_ID)?;
                if secondary.online {
                    return Err(Status::INVALID_SECONDARY_STATE);
                }
                let resource = resource?;
                let flexible = manager.flexible(resource).ok_or(Status::INVALID_RESOURCE_ID)?;
                if count > flexible.secondary_max {
                    return Err(Status::INVALID_RESOURCE_COUNT);
                }
                let reply = self.wait_for_result(Waiting::Created { command_id: command.id() });
                manager.assign(controller, resource, count, reply);
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(Outcome::Later)
    }
}
