//! Namespace Management and Namespace Attachment (NVMe base 2.0, 5.23 and 5.22), of a primary
//! controller.

use sidecore_spec_nvme::command::BROADCAST_NSID;

use crate::admin::identify::block_bytes_of;
use crate::controller::{Controller, Outcome, Waiting};
use crate::manager::{CreateNamespace, Manager};
use crate::{Command, Status};
use std::sync::Arc;

impl Controller {
    /// The manager; without one there are no such commands.
    pub(super) fn managed(&self) -> Result<Arc<dyn Manager>, Status> {
        self.manager.clone().ok_or(Status::INVALID_OPCODE)
    }

    /// Namespace Management.
    pub(crate) fn namespace_management(&mut self, command: &Command) -> Result<Outcome, Status> {
        let manager = self.managed()?;
        match command.dword10() & 0xF {
            0 => {
                // CSI: the NVM command set.
                if command.dword11() >> 24 != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                let namespace = creation(&self.receive_structure(command)?)?;
                let reply = self.wait_for_result(Waiting::Created { command_id: command.id() });
                manager.create(namespace, reply);
            }
            1 => {
                let namespace = match command.nsid() {
                    BROADCAST_NSID => None,
                    nsid => Some(self.check_managed_namespace(&*manager, nsid)?),
                };
                let reply = self.wait_for_result(Waiting::Managed { command_id: command.id() });
                manager.delete(namespace, reply);
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(Outcome::Later)
    }

    /// Namespace Attachment.
    pub(crate) fn namespace_attachment(&mut self, command: &Command) -> Result<Outcome, Status> {
        let manager = self.managed()?;
        let attach = match command.dword10() & 0xF {
            0 => true,
            1 => false,
            _ => return Err(Status::INVALID_FIELD),
        };
        let namespace = self.check_managed_namespace(&*manager, command.nsid())?;
        let controllers = controllers(&self.receive_structure(command)?)
            .ok_or(Status::CONTROLLER_LIST_INVALID)?;
        // Namespaces attach to secondary controllers only: the primary's own is the whole store.
        let secondary = manager.secondary_controllers();
        if controllers.iter().any(|id| secondary.iter().all(|controller| controller.id != *id)) {
            return Err(Status::CONTROLLER_LIST_INVALID);
        }
        let reply = self.wait_for_result(Waiting::Managed { command_id: command.id() });
        if attach {
            manager.attach(namespace, controllers, reply);
        } else {
            manager.detach(namespace, controllers, reply);
        }
        Ok(Outcome::Later)
    }

    /// Checks that the manager has this namespace, and that it is not the controller's own.
    fn check_managed_namespace(&self, manager: &dyn Manager, nsid: u32) -> Result<u32, Status> {
        if self.namespace.as_ref().is_some_and(|namespace| namespace.id == nsid) {
            return Err(Status::OPERATION_DENIED);
        }
        if manager.allocated().iter().any(|namespace| namespace.id == nsid) {
            return Ok(nsid);
        }
        let could_be = (1..=manager.max_namespaces()).contains(&nsid);
        Err(if could_be { Status::INVALID_FIELD } else { Status::INVALID_NAMESPACE })
    }
}

/// A little-endian field of a structure.
fn field<const N: usize>(structure: &[u8], offset: usize) -> [u8; N] {
    structure.get(offset..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

/// The fields of a namespace to be created (figure 289; NVM command set 1.0, figure 105).
fn creation(structure: &[u8]) -> Result<CreateNamespace, Status> {
    let size = u64::from_le_bytes(field(structure, 0));
    let capacity = u64::from_le_bytes(field(structure, 8));
    let [format] = field(structure, 26);
    let [protection] = field(structure, 29);
    let [sharing] = field(structure, 30);
    let nvm_set = u16::from_le_bytes(field(structure, 100));
    // Bits 3:0 select the format; bits 6:5 extend them and must be zero; bit 4 is about metadata.
    let block_bytes = block_bytes_of(format).ok_or(Status::INVALID_FORMAT)?;
    if protection != 0 {
        return Err(Status::INVALID_FORMAT);
    }
    if sharing != 0 || nvm_set != 0 || size == 0 || capacity > size {
        return Err(Status::INVALID_FIELD);
    }
    if capacity < size {
        return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED);
    }
    let capacity_bytes =
        size.checked_mul(block_bytes.into()).ok_or(Status::NAMESPACE_INSUFFICIENT_CAPACITY)?;
    Ok(CreateNamespace { capacity_bytes, block_bytes })
}

/// A controller list (4.4.1): how many, and then their identifiers in ascending order.
fn controllers(structure: &[u8]) -> Option<Vec<u16>> {
    let count = usize::from(u16::from_le_bytes(field(structure, 0)));
    if !(1..=2047).contains(&count) {
        return None;
    }
    let ids: Vec<u16> = structure
        .get(2..)?
        .chunks_exact(2)
        .take(count)
        .map(|id| u16::from_le_bytes(id.first_chunk().copied().unwrap_or_default()))
        .collect();
    ids.is_sorted_by(|one, next| one < next).then_some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn structure(fields: &[(usize, &[u8])]) -> Vec<u8> {
        let mut structure = vec![0; 4096];
        for (offset, bytes) in fields {
            structure[*offset..*offset + bytes.len()].copy_from_slice(bytes);
        }
        structure
    }

    #[test]
    fn a_namespace_is_created_as_specified() {
        let thousand = 1000_u64.to_le_bytes();
        let whole = [(0, &thousand[..]), (8, &thousand[..])];
        assert_eq!(
            creation(&structure(&whole)),
            Ok(CreateNamespace { capacity_bytes: 512_000, block_bytes: 512 })
        );
        let with = |extra| creation(&structure(&[whole[0], whole[1], extra]));
        assert_eq!(
            with((26, &[1])),
            Ok(CreateNamespace { capacity_bytes: 4_096_000, block_bytes: 4096 })
        );
        assert_eq!(with((26, &[2])), Err(Status::INVALID_FORMAT));
        assert_eq!(with((29, &[1])), Err(Status::INVALID_FORMAT));
        assert_eq!(with((30, &[1])), Err(Status::INVALID_FIELD));
        assert_eq!(with((9, &[0xFF])), Err(Status::INVALID_FIELD), "more capacity than size");
        assert_eq!(with((8, &[0; 8])), Err(Status::THIN_PROVISIONING_NOT_SUPPORTED));
        assert_eq!(creation(&structure(&[])), Err(Status::INVALID_FIELD));
        let huge = u64::MAX.to_le_bytes();
        assert_eq!(
            creation(&structure(&[(0, &huge), (8, &huge)])),
            Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY)
        );
    }

    #[test]
    fn a_controller_list_is_sorted_and_not_empty() {
        assert_eq!(controllers(&structure(&[(0, &[2, 0, 1, 0, 5, 0])])), Some(vec![1, 5]));
        assert_eq!(controllers(&structure(&[(0, &[2, 0, 5, 0, 1, 0])])), None);
        assert_eq!(controllers(&structure(&[(0, &[2, 0, 5, 0, 5, 0])])), None);
        assert_eq!(controllers(&structure(&[])), None);
        assert_eq!(controllers(&structure(&[(0, &[0, 8])])), None, "2048 of them");
    }
}
