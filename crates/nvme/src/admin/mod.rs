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

use sidecore_units::Nanos;

use crate::controller::{Controller, Outcome};
use crate::{Command, Fuse, PointerKind, Status};

/// Opcodes of admin commands (figure 138).
pub(crate) mod opcode {
    pub const DELETE_SUBMISSION_QUEUE: u8 = 0x00;
    pub const CREATE_SUBMISSION_QUEUE: u8 = 0x01;
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const DELETE_COMPLETION_QUEUE: u8 = 0x04;
    pub const CREATE_COMPLETION_QUEUE: u8 = 0x05;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0A;
    pub const ASYNCHRONOUS_EVENT_REQUEST: u8 = 0x0C;
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0D;
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    pub const KEEP_ALIVE: u8 = 0x18;
    pub const VIRTUALIZATION_MANAGEMENT: u8 = 0x1C;
    pub const DOORBELL_BUFFER_CONFIG: u8 = 0x7C;

    /// Those that every controller here has.
    pub const MANDATORY: [u8; 11] = [
        DELETE_SUBMISSION_QUEUE,
        CREATE_SUBMISSION_QUEUE,
        GET_LOG_PAGE,
        DELETE_COMPLETION_QUEUE,
        CREATE_COMPLETION_QUEUE,
        IDENTIFY,
        ABORT,
        SET_FEATURES,
        GET_FEATURES,
        ASYNCHRONOUS_EVENT_REQUEST,
        KEEP_ALIVE,
    ];
}

impl Controller {
    /// Carries out an admin command. Firmware, Format NVM, Sanitize, Security and directives are not supported (OACS), and
    /// their opcodes are as invalid as unknown ones.
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
            opcode::ASYNCHRONOUS_EVENT_REQUEST => self.asynchronous_event_request(command.id()),
            opcode::NAMESPACE_MANAGEMENT => self.namespace_management(command),
            opcode::NAMESPACE_ATTACHMENT => self.namespace_attachment(command),
            opcode::KEEP_ALIVE => self.keep_alive(now),
            opcode::VIRTUALIZATION_MANAGEMENT => self.virtualization_management(command),
            opcode::DOORBELL_BUFFER_CONFIG => self.doorbell_buffer_config(command),
            _ => Err(Status::INVALID_OPCODE),
        }
    }
}
