//! Identify (NVMe base 2.0, 5.17).

mod controller;
mod namespace;

use sidecore_spec_nvme::command::BROADCAST_NSID;
use sidecore_spec_nvme::identify::cns;

use crate::bytes::Bytes;
use crate::controller::{Controller, Outcome};
use crate::manager::AllocatedNamespace;
use crate::{Command, Status};

use namespace::NamespaceView;
pub(crate) use namespace::block_bytes_of;

/// The meaning of a namespace identifier.
enum Named {
    /// A namespace that is attached to this controller.
    Active(NamespaceView),
    /// A valid identifier with no namespace attached.
    Inactive,
    /// FFFFFFFFh: the fields that all namespaces to be created have in common.
    All,
}

impl Controller {
    /// Identify.
    pub(crate) fn identify(&mut self, command: &Command) -> Result<Outcome, Status> {
        let selected = (command.dword10() & 0xFF) as u8;
        // CSI: the NVM command set is all there is.
        let command_set = command.dword11() >> 24;
        let is_command_set_specific = matches!(
            selected,
            cns::COMMAND_SET_NAMESPACE
                | cns::COMMAND_SET_CONTROLLER
                | cns::COMMAND_SET_ACTIVE_NAMESPACES
                | cns::COMMAND_SET_ALLOCATED_NAMESPACES
                | cns::COMMAND_SET_ALLOCATED_NAMESPACE
        );
        if is_command_set_specific && command_set != 0 {
            return Err(Status::INVALID_FIELD);
        }
        let nsid = command.nsid();
        let data: Vec<u8> = match selected {
            cns::NAMESPACE => match self.named(nsid)? {
                Named::Active(namespace) => namespace.identify(),
                Named::Inactive => Vec::new(),
                Named::All => namespace::common(),
            },
            cns::CONTROLLER => self.identify_controller(),
            cns::ACTIVE_NAMESPACES | cns::COMMAND_SET_ACTIVE_NAMESPACES => {
                namespace_list(nsid, self.namespace.iter().map(|namespace| namespace.id))?
            }
            cns::NAMESPACE_DESCRIPTORS => match self.named(nsid)? {
                Named::Active(namespace) => namespace.descriptors(),
                _ => return Err(Status::INVALID_NAMESPACE),
            },
            // No storage tags, no protection information: all zero for the NVM command set.
            cns::COMMAND_SET_NAMESPACE | cns::COMMAND_SET_ALLOCATED_NAMESPACE => {
                self.named(nsid).map(|_| Vec::new())?
            }
            cns::COMMAND_SET_CONTROLLER => controller::nvm_command_set(),
            cns::INDEPENDENT_NAMESPACE => match self.named(nsid)? {
                Named::Active(namespace) => namespace.independent(),
                _ => Vec::new(),
            },
            cns::ALLOCATED_NAMESPACES | cns::COMMAND_SET_ALLOCATED_NAMESPACES => {
                let own = self.namespace.iter().map(|namespace| namespace.id);
                namespace_list(
                    nsid,
                    own.chain(self.allocated()?.iter().map(|namespace| namespace.id)),
                )?
            }
            cns::ALLOCATED_NAMESPACE => self.identify_allocated(nsid)?,
            cns::ATTACHED_CONTROLLERS => {
                controller_list(first_controller(command), self.attached(nsid)?)
            }
            cns::CONTROLLERS => controller_list(first_controller(command), self.controllers()),
            cns::PRIMARY_CAPABILITIES => self.primary_capabilities()?,
            cns::SECONDARY_CONTROLLERS => {
                self.secondary_controller_list(first_controller(command))?
            }
            _ => return Err(Status::INVALID_FIELD),
        };
        self.send_structure(command, &data)
    }

    /// How many namespaces there can be (NN).
    pub(crate) fn max_namespaces(&self) -> u32 {
        self.manager.as_ref().map_or(1, |manager| manager.max_namespaces())
    }

    fn named(&self, nsid: u32) -> Result<Named, Status> {
        if let Some(namespace) = self.reported_namespace().filter(|namespace| namespace.id == nsid)
        {
            return Ok(Named::Active(NamespaceView::from(&namespace)));
        }
        match nsid {
            BROADCAST_NSID if self.manager.is_some() => Ok(Named::All),
            0 => Err(Status::INVALID_NAMESPACE),
            _ if nsid <= self.max_namespaces() => Ok(Named::Inactive),
            _ => Err(Status::INVALID_NAMESPACE),
        }
    }

    /// The subsystem's namespaces except the controller's own.
    fn allocated(&self) -> Result<Vec<AllocatedNamespace>, Status> {
        Ok(self.manager.as_ref().ok_or(Status::INVALID_FIELD)?.allocated())
    }

    fn identify_allocated(&self, nsid: u32) -> Result<Vec<u8>, Status> {
        let allocated = self.allocated()?;
        if let Some(namespace) = allocated.iter().find(|namespace| namespace.id == nsid) {
            return Ok(NamespaceView::from(namespace).identify());
        }
        Ok(match self.named(nsid)? {
            Named::Active(namespace) => namespace.identify(),
            Named::Inactive => Vec::new(),
            Named::All => return Err(Status::INVALID_NAMESPACE),
        })
    }

    /// The controllers that a namespace is attached to.
    fn attached(&self, nsid: u32) -> Result<Vec<u16>, Status> {
        if self.namespace.as_ref().is_some_and(|namespace| namespace.id == nsid) {
            return Ok(vec![self.identity.controller_id]);
        }
        match &self.manager {
            Some(manager) => {
                let namespace =
                    manager.allocated().into_iter().find(|namespace| namespace.id == nsid);
                // Valid, but allocated to nothing: attached to nothing either.
                namespace.map_or_else(
                    || self.named(nsid).map(|_| Vec::new()),
                    |namespace| Ok(namespace.controllers),
                )
            }
            None => self.named(nsid).map(|_| Vec::new()),
        }
    }

    /// The controllers in the subsystem.
    fn controllers(&self) -> Vec<u16> {
        let secondary = self.manager.iter().flat_map(|manager| manager.secondary_controllers());
        std::iter::once(self.identity.controller_id)
            .chain(secondary.map(|controller| controller.id))
            .collect()
    }
}

/// CNTID, dword 10 bits 31:16: lists begin with this controller.
fn first_controller(command: &Command) -> u16 {
    (command.dword10() >> 16) as u16
}

/// Up to 1024 numbers greater than `after`, in ascending order (4.5.1, Namespace List).
fn namespace_list(after: u32, ids: impl Iterator<Item = u32>) -> Result<Vec<u8>, Status> {
    if after >= 0xFFFF_FFFE {
        return Err(Status::INVALID_NAMESPACE);
    }
    let mut ids: Vec<u32> = ids.filter(|id| *id > after).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids.iter().take(1024).flat_map(|id| id.to_le_bytes()).collect())
}

/// A count and up to 2047 identifiers not less than `first`, in ascending order (4.4.1, Controller
/// List).
fn controller_list(first: u16, mut ids: Vec<u16>) -> Vec<u8> {
    ids.retain(|id| *id >= first);
    ids.sort_unstable();
    ids.dedup();
    ids.truncate(2047);
    let mut list = Bytes::new(4096);
    list.put(0, &u16::try_from(ids.len()).unwrap_or(u16::MAX).to_le_bytes());
    for (index, id) in ids.iter().enumerate() {
        list.put(index.saturating_add(1).saturating_mul(2), &id.to_le_bytes());
    }
    list.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_list_begins_after_the_number_given() {
        let ids = [9, 2, 5, 2];
        assert_eq!(
            namespace_list(0, ids.into_iter()).unwrap(),
            [2, 0, 0, 0, 5, 0, 0, 0, 9, 0, 0, 0]
        );
        assert_eq!(namespace_list(5, ids.into_iter()).unwrap(), [9, 0, 0, 0]);
        assert_eq!(namespace_list(0xFFFF_FFFE, ids.into_iter()), Err(Status::INVALID_NAMESPACE));
        assert_eq!(namespace_list(0, 1..5000).unwrap().len(), 4096);
    }

    #[test]
    fn a_controller_list_begins_with_the_identifier_given() {
        assert_eq!(&controller_list(2, vec![3, 1, 2])[..8], &[2, 0, 2, 0, 3, 0, 0, 0]);
        assert_eq!(&controller_list(0, (0..5000).collect())[..4], &[0xFF, 0x07, 0, 0]);
    }
}
