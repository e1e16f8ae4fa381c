//! Admin commands (NVMe base 2.0, 5): a file for each family.

pub(crate) mod abort;
pub(crate) mod changed;
mod data;
mod doorbell_buffer;
mod effects;
pub(crate) mod errors;
pub(crate) mod events;
pub(crate) mod features;
mod identify;
mod log;
mod namespaces;
pub(crate) mod queue;
pub(crate) mod queues;
mod virtualization;

use sidecore_spec_nvme::opcode::admin as opcode;
use sidecore_units::Nanos;

use crate::controller::{Controller, Outcome};
use crate::{Command, Fuse, PointerKind, Status};

/// The opcodes that every controller here has.
pub(crate) const MANDATORY: [u8; 11] = [
    opcode::DELETE_SUBMISSION_QUEUE,
    opcode::CREATE_SUBMISSION_QUEUE,
    opcode::GET_LOG_PAGE,
    opcode::DELETE_COMPLETION_QUEUE,
    opcode::CREATE_COMPLETION_QUEUE,
    opcode::IDENTIFY,
    opcode::ABORT,
    opcode::SET_FEATURES,
    opcode::GET_FEATURES,
    opcode::ASYNC_EVENT_REQUEST,
    opcode::KEEP_ALIVE,
];

impl Controller {
    /// Carries out an admin command. Firmware, Format NVM, Sanitize, Security and directives are
    /// not supported (OACS), and their opcodes are as invalid as unknown ones.
    pub(crate) fn execute(&mut self, command: &Command, now: Nanos) -> Result<Outcome, Status> {
        // Admin commands are not fused, and over PCIe have PRPs (figure 91, PSDT).
        if command.fuse() != Fuse::Normal || command.pointer_kind() != PointerKind::Prp {
            return Err(Status::INVALID_FIELD);
        }
        match command.opcode() {
            opcode::DELETE_SUBMISSION_QUEUE => self.delete_submission_queue(command),
            opcode::CREATE_SUBMISSION_QUEUE => self.create_submission_queue(command),
            opcode::GET_LOG_PAGE => self.get_log_page(command, now),
            opcode::DELETE_COMPLETION_QUEUE => self.delete_completion_queue(command),
            opcode::CREATE_COMPLETION_QUEUE => self.create_completion_queue(command),
            opcode::IDENTIFY => self.identify(command),
            opcode::ABORT => self.abort(command),
            opcode::SET_FEATURES => self.set_features(command, now),
            opcode::GET_FEATURES => self.get_features(command),
            opcode::ASYNC_EVENT_REQUEST => self.asynchronous_event_request(command.id()),
            opcode::NAMESPACE_MANAGEMENT => self.namespace_management(command),
            opcode::NAMESPACE_ATTACHMENT => self.namespace_attachment(command),
            opcode::KEEP_ALIVE => self.keep_alive(now),
            opcode::VIRTUALIZATION_MANAGEMENT => self.virtualization_management(command),
            opcode::DOORBELL_BUFFER_CONFIG => self.doorbell_buffer_config(command),
            _ => Err(Status::INVALID_OPCODE),
        }
    }
}
