//! A controller's data structures (NVMe base 2.0, 5.17.2.1; NVM command set 1.0, 4.1.5.2), and
//! those about its secondary controllers.

use sidecore_spec_nvme::command::{COMMAND_BYTES_LOG2, COMPLETION_BYTES_LOG2};
use sidecore_spec_nvme::identify::{self, oacs};
use sidecore_spec_nvme::register::VERSION_2_0;

use crate::Status;
use crate::admin::abort::ABORT_LIMIT;
use crate::admin::data::STRUCTURE_BYTES;
use crate::admin::errors::ERROR_LOG_ENTRIES;
use crate::admin::events::REQUEST_LIMIT;
use crate::admin::features::{
    CRITICAL_TEMPERATURE, KEEP_ALIVE_UNITS, NAMESPACE_NOTICES, WARNING_TEMPERATURE,
};
use crate::admin::identify::namespace::compare_and_write_blocks;
use crate::bytes::{Bytes, text};
use crate::controller::{Controller, FIRMWARE};
use crate::manager::Resource;
use crate::pci::ids;
use crate::pointer::MAX_TRANSFER_PAGES_LOG2;

/// Optional NVM Command Support: Compare, Dataset Management, Write Zeroes, Save and Select in
/// features, Verify.
const NVM_COMMANDS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 7;

/// Fused Operation Support: Compare and Write.
const FUSED: u16 = 1;

/// Log Page Attributes: commands supported and effects, lengths and offsets of full size, and the
/// pages that say what is supported.
const LOG_PAGES: u8 = 1 << 1 | 1 << 2 | 1 << 5;

/// Volatile Write Cache, bits 2:1: Flush takes FFFFFFFFh for all namespaces.
const FLUSH_ALL: u8 = 0b11 << 1;

/// SGL Support, bits 1:0: at any alignment; bit 16: bit buckets; bit 18: lists that are longer than
/// the data.
const SGLS: u32 = 1 | 1 << 16 | 1 << 18;

/// Firmware Updates: one slot, which is read-only.
const FIRMWARE_UPDATES: u8 = 1 << 1 | 1;

/// Controller Multi-path I/O and Namespace Sharing Capabilities: more than one controller in the
/// subsystem.
const MULTIPLE_CONTROLLERS: u8 = 1 << 1;

/// Controller Resource Types (figure 281).
const FLEXIBLE_QUEUES: u8 = 1;
const FLEXIBLE_INTERRUPTS: u8 = 1 << 1;

/// Identify Controller for the NVM command set: no limits but those of a transfer.
pub(super) fn nvm_command_set() -> Vec<u8> {
    Vec::new()
}

impl Controller {
    /// Identify Controller (figure 275).
    pub(super) fn identify_controller(&self) -> Vec<u8> {
        let identity = &self.identity;
        let (tnvmcap, unvmcap) = self.manager.as_ref().map_or((0, 0), |manager| manager.capacity());
        let mut subnqn = [0; 256];
        // SUBNQN is at most 223 bytes long (4.5), and a zero ends it.
        for (to, from) in subnqn.iter_mut().zip(identity.subsystem_name.bytes().take(223)) {
            *to = from;
        }
        let structure = identify::Controller {
            vid: ids::VENDOR,
            ssvid: ids::VENDOR,
            sn: text(&identity.serial),
            mn: text(&identity.model),
            fr: text(FIRMWARE),
            cmic: if self.manager.is_some() { MULTIPLE_CONTROLLERS } else { 0 },
            mdts: MAX_TRANSFER_PAGES_LOG2,
            cntlid: identity.controller_id,
            ver: VERSION_2_0,
            oaes: NAMESPACE_NOTICES,
            cntrltype: identify::IO_CONTROLLER,
            oacs: self.optional_admin_commands(),
            acl: ABORT_LIMIT,
            aerl: REQUEST_LIMIT,
            frmw: FIRMWARE_UPDATES,
            lpa: LOG_PAGES,
            elpe: ERROR_LOG_ENTRIES,
            wctemp: WARNING_TEMPERATURE,
            cctemp: CRITICAL_TEMPERATURE,
            tnvmcap,
            unvmcap,
            kas: KEEP_ALIVE_UNITS,
            sqes: (COMMAND_BYTES_LOG2 << 4 | COMMAND_BYTES_LOG2) as u8,
            cqes: (COMPLETION_BYTES_LOG2 << 4 | COMPLETION_BYTES_LOG2) as u8,
            nn: self.max_namespaces(),
            oncs: NVM_COMMANDS,
            fuses: FUSED,
            vwc: FLUSH_ALL | u8::from(self.has_volatile_cache()),
            acwu: compare_and_write_blocks(4096),
            sgls: SGLS,
            mnan: self.max_namespaces(),
            subnqn,
        };
        structure.encode().to_vec()
    }

    fn optional_admin_commands(&self) -> u16 {
        let mut supported = 0;
        if self.manager.is_some() {
            supported |= oacs::NAMESPACE_MANAGEMENT | oacs::VIRTUALIZATION_MANAGEMENT;
        }
        if !self.doorbells_are_mapped {
            supported |= oacs::DOORBELL_BUFFER_CONFIG;
        }
        supported
    }

    /// Primary Controller Capabilities (figure 281).
    pub(super) fn primary_capabilities(&self) -> Result<Vec<u8>, Status> {
        let manager = self.manager.as_ref().ok_or(Status::INVALID_FIELD)?;
        let mut structure = Bytes::new(STRUCTURE_BYTES);
        structure.put(0, &self.identity.controller_id.to_le_bytes());
        let mut types = 0;
        for (resource, kind, offset) in
            [(Resource::Queue, FLEXIBLE_QUEUES, 32), (Resource::Interrupt, FLEXIBLE_INTERRUPTS, 64)]
        {
            let Some(flexible) = manager.flexible(resource) else { continue };
            types |= kind;
            let mut fields = Vec::with_capacity(16);
            fields.extend(flexible.total.to_le_bytes());
            fields.extend(flexible.assigned.to_le_bytes());
            for field in [
                flexible.primary_allocated,
                flexible.primary_private,
                flexible.secondary_max,
                flexible.granularity,
            ] {
                fields.extend(field.to_le_bytes());
            }
            structure.put(offset, &fields);
        }
        structure.put(4, &[types]);
        Ok(structure.into())
    }

    /// Secondary Controller List (figure 282), from the controller `first` on: at most 127 entries
    /// of 32 bytes.
    pub(super) fn secondary_controller_list(&self, first: u16) -> Result<Vec<u8>, Status> {
        let manager = self.manager.as_ref().ok_or(Status::INVALID_FIELD)?;
        let mut controllers = manager.secondary_controllers();
        controllers.retain(|controller| controller.id >= first);
        controllers.sort_unstable_by_key(|controller| controller.id);
        controllers.truncate(127);
        let mut list = Bytes::new(STRUCTURE_BYTES);
        list.put(0, &[u8::try_from(controllers.len()).unwrap_or(u8::MAX)]);
        for (index, controller) in controllers.iter().enumerate() {
            let at = index.saturating_add(1).saturating_mul(32);
            list.put(at, &controller.id.to_le_bytes());
            list.put(at.saturating_add(2), &self.identity.controller_id.to_le_bytes());
            list.put(at.saturating_add(4), &[controller.online.into()]);
            list.put(at.saturating_add(8), &controller.virtual_function.to_le_bytes());
            list.put(at.saturating_add(10), &controller.queues.to_le_bytes());
            list.put(at.saturating_add(12), &controller.interrupts.to_le_bytes());
        }
        Ok(list.into())
    }
}
