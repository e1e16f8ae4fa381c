//! Opcodes.

/// Opcodes of admin commands (figure 138).
pub mod admin {
    /// Delete I/O Submission Queue.
    pub const DELETE_SUBMISSION_QUEUE: u8 = 0x00;
    /// Create I/O Submission Queue.
    pub const CREATE_SUBMISSION_QUEUE: u8 = 0x01;
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Delete I/O Completion Queue.
    pub const DELETE_COMPLETION_QUEUE: u8 = 0x04;
    /// Create I/O Completion Queue.
    pub const CREATE_COMPLETION_QUEUE: u8 = 0x05;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0A;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
    /// Namespace Management.
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0D;
    /// Namespace Attachment.
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Virtualization Management.
    pub const VIRTUALIZATION_MANAGEMENT: u8 = 0x1C;
    /// Doorbell Buffer Config.
    pub const DOORBELL_BUFFER_CONFIG: u8 = 0x7C;
}

/// Opcodes of the NVM command set's commands (NVM command set 1.0, figure 22; Flush: figure 8).
pub mod nvm {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0C;
}
