//! Status codes (NVMe base 2.0, 3.3.3.2.1), with what goes with them: More and Do Not Retry.

use std::fmt;

use sidecore_spec_nvme::status::{self, CODE_MASK, DO_NOT_RETRY, MORE};

/// How a command ended: a completion's status field without its phase tag.
///
/// The constants carry Do Not Retry where the same command would fail again; [`Status::retryable`]
/// and [`Status::no_retry`] change that.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

impl Status {
    /// 0h: it worked.
    pub const SUCCESS: Self = Self(status::SUCCESS);

    // Generic command status (figure 96 and NVM command set 1.0, figure 16).

    /// 01h.
    pub const INVALID_OPCODE: Self = Self::fail(status::INVALID_OPCODE);
    /// 02h.
    pub const INVALID_FIELD: Self = Self::fail(status::INVALID_FIELD);
    /// 03h: the command identifier is in use.
    pub const COMMAND_ID_CONFLICT: Self = Self::fail(status::COMMAND_ID_CONFLICT);
    /// 04h: data or metadata could not be transferred: it is not in the guest's memory.
    pub const DATA_TRANSFER_ERROR: Self = Self::fail(status::DATA_TRANSFER_ERROR);
    /// 06h; may be gone when it is tried again.
    pub const INTERNAL_ERROR: Self = Self::retry(status::INTERNAL_ERROR);
    /// 07h: by an Abort command.
    pub const ABORT_REQUESTED: Self = Self::retry(status::ABORT_REQUESTED);
    /// 08h: its submission queue was deleted.
    pub const ABORTED_SQ_DELETION: Self = Self::retry(status::ABORTED_SQ_DELETION);
    /// 09h: the other one of two fused commands failed.
    pub const FAILED_FUSED: Self = Self::retry(status::FAILED_FUSED);
    /// 0Ah: the other one of two fused commands is missing.
    pub const MISSING_FUSED: Self = Self::fail(status::MISSING_FUSED);
    /// 0Bh: also the format of the namespace is wrong.
    pub const INVALID_NAMESPACE: Self = Self::fail(status::INVALID_NAMESPACE);
    /// 0Ch.
    pub const COMMAND_SEQUENCE_ERROR: Self = Self::fail(status::COMMAND_SEQUENCE_ERROR);
    /// 0Dh.
    pub const INVALID_SGL_SEGMENT: Self = Self::fail(status::INVALID_SGL_SEGMENT);
    /// 0Eh.
    pub const INVALID_SGL_COUNT: Self = Self::fail(status::INVALID_SGL_COUNT);
    /// 0Fh: an SGL's length does not fit the transfer's.
    pub const INVALID_DATA_SGL_LENGTH: Self = Self::fail(status::INVALID_DATA_SGL_LENGTH);
    /// 10h.
    pub const INVALID_METADATA_SGL_LENGTH: Self = Self::fail(status::INVALID_METADATA_SGL_LENGTH);
    /// 11h.
    pub const INVALID_SGL_TYPE: Self = Self::fail(status::INVALID_SGL_TYPE);
    /// 13h: a PRP's offset is not zero where it has to be, or not a multiple of four.
    pub const INVALID_PRP_OFFSET: Self = Self::fail(status::INVALID_PRP_OFFSET);
    /// 14h.
    pub const ATOMIC_WRITE_UNIT_EXCEEDED: Self = Self::fail(status::ATOMIC_WRITE_UNIT_EXCEEDED);
    /// 15h.
    pub const OPERATION_DENIED: Self = Self::fail(status::OPERATION_DENIED);
    /// 16h.
    pub const INVALID_SGL_OFFSET: Self = Self::fail(status::INVALID_SGL_OFFSET);
    /// 18h.
    pub const INVALID_HOST_IDENTIFIER_FORMAT: Self =
        Self::fail(status::INVALID_HOST_IDENTIFIER_FORMAT);
    /// 19h.
    pub const KEEP_ALIVE_EXPIRED: Self = Self::fail(status::KEEP_ALIVE_EXPIRED);
    /// 1Ah.
    pub const INVALID_KEEP_ALIVE_TIMEOUT: Self = Self::fail(status::INVALID_KEEP_ALIVE_TIMEOUT);
    /// 20h.
    pub const NAMESPACE_WRITE_PROTECTED: Self = Self::fail(status::NAMESPACE_WRITE_PROTECTED);
    /// 80h: past the end of the namespace.
    pub const LBA_OUT_OF_RANGE: Self = Self::fail(status::LBA_OUT_OF_RANGE);
    /// 81h: the store has no room left.
    pub const CAPACITY_EXCEEDED: Self = Self::fail(status::CAPACITY_EXCEEDED);
    /// 82h.
    pub const NAMESPACE_NOT_READY: Self = Self::retry(status::NAMESPACE_NOT_READY);

    // Command specific status (figure 97).

    /// 00h: there is no such completion queue.
    pub const INVALID_COMPLETION_QUEUE: Self = Self::fail(status::INVALID_COMPLETION_QUEUE);
    /// 01h.
    pub const INVALID_QUEUE_ID: Self = Self::fail(status::INVALID_QUEUE_ID);
    /// 02h.
    pub const INVALID_QUEUE_SIZE: Self = Self::fail(status::INVALID_QUEUE_SIZE);
    /// 03h.
    pub const ABORT_LIMIT_EXCEEDED: Self = Self::fail(status::ABORT_LIMIT_EXCEEDED);
    /// 05h.
    pub const ASYNC_EVENT_LIMIT_EXCEEDED: Self = Self::fail(status::ASYNC_EVENT_LIMIT_EXCEEDED);
    /// 08h.
    pub const INVALID_INTERRUPT_VECTOR: Self = Self::fail(status::INVALID_INTERRUPT_VECTOR);
    /// 09h.
    pub const INVALID_LOG_PAGE: Self = Self::fail(status::INVALID_LOG_PAGE);
    /// 0Ah.
    pub const INVALID_FORMAT: Self = Self::fail(status::INVALID_FORMAT);
    /// 0Ch: a completion queue that submission queues still use cannot be deleted.
    pub const INVALID_QUEUE_DELETION: Self = Self::fail(status::INVALID_QUEUE_DELETION);
    /// 0Dh.
    pub const FEATURE_NOT_SAVEABLE: Self = Self::fail(status::FEATURE_NOT_SAVEABLE);
    /// 0Eh.
    pub const FEATURE_NOT_CHANGEABLE: Self = Self::fail(status::FEATURE_NOT_CHANGEABLE);
    /// 0Fh.
    pub const FEATURE_NOT_NAMESPACE_SPECIFIC: Self =
        Self::fail(status::FEATURE_NOT_NAMESPACE_SPECIFIC);
    /// 14h.
    pub const OVERLAPPING_RANGE: Self = Self::fail(status::OVERLAPPING_RANGE);
    /// 15h.
    pub const NAMESPACE_INSUFFICIENT_CAPACITY: Self =
        Self::fail(status::NAMESPACE_INSUFFICIENT_CAPACITY);
    /// 16h: no number is left for another namespace.
    pub const NAMESPACE_ID_UNAVAILABLE: Self = Self::fail(status::NAMESPACE_ID_UNAVAILABLE);
    /// 18h.
    pub const NAMESPACE_ALREADY_ATTACHED: Self = Self::fail(status::NAMESPACE_ALREADY_ATTACHED);
    /// 19h.
    pub const NAMESPACE_IS_PRIVATE: Self = Self::fail(status::NAMESPACE_IS_PRIVATE);
    /// 1Ah.
    pub const NAMESPACE_NOT_ATTACHED: Self = Self::fail(status::NAMESPACE_NOT_ATTACHED);
    /// 1Bh.
    pub const THIN_PROVISIONING_NOT_SUPPORTED: Self =
        Self::fail(status::THIN_PROVISIONING_NOT_SUPPORTED);
    /// 1Ch.
    pub const CONTROLLER_LIST_INVALID: Self = Self::fail(status::CONTROLLER_LIST_INVALID);
    /// 1Fh.
    pub const INVALID_CONTROLLER_ID: Self = Self::fail(status::INVALID_CONTROLLER_ID);
    /// 20h.
    pub const INVALID_SECONDARY_STATE: Self = Self::fail(status::INVALID_SECONDARY_STATE);
    /// 21h.
    pub const INVALID_RESOURCE_COUNT: Self = Self::fail(status::INVALID_RESOURCE_COUNT);
    /// 22h.
    pub const INVALID_RESOURCE_ID: Self = Self::fail(status::INVALID_RESOURCE_ID);
    /// 27h.
    pub const NAMESPACE_ATTACHMENT_LIMIT: Self = Self::fail(status::NAMESPACE_ATTACHMENT_LIMIT);
    /// 29h: an I/O command set that is not there.
    pub const COMMAND_SET_NOT_SUPPORTED: Self = Self::fail(status::COMMAND_SET_NOT_SUPPORTED);
    /// 80h (NVM command set): attributes that exclude each other.
    pub const CONFLICTING_ATTRIBUTES: Self = Self::fail(status::CONFLICTING_ATTRIBUTES);
    /// 81h (NVM command set).
    pub const INVALID_PROTECTION_INFORMATION: Self =
        Self::fail(status::INVALID_PROTECTION_INFORMATION);
    /// 82h (NVM command set): a write to a range that is read-only.
    pub const WRITE_TO_READ_ONLY_RANGE: Self = Self::fail(status::WRITE_TO_READ_ONLY_RANGE);
    /// 83h (NVM command set).
    pub const COMMAND_SIZE_LIMIT_EXCEEDED: Self = Self::fail(status::COMMAND_SIZE_LIMIT_EXCEEDED);

    // Media and data integrity errors (figure 98).

    /// 80h.
    pub const WRITE_FAULT: Self = Self::retry(status::WRITE_FAULT);
    /// 81h.
    pub const UNRECOVERED_READ_ERROR: Self = Self::retry(status::UNRECOVERED_READ_ERROR);
    /// 85h.
    pub const COMPARE_FAILURE: Self = Self::fail(status::COMPARE_FAILURE);
    /// 86h.
    pub const ACCESS_DENIED: Self = Self::fail(status::ACCESS_DENIED);
    /// 87h.
    pub const UNWRITTEN_BLOCK: Self = Self::fail(status::UNWRITTEN_BLOCK);

    // Path related status (figure 99).

    /// 60h: the controller itself failed on the way.
    pub const CONTROLLER_PATHING_ERROR: Self = Self::retry(status::CONTROLLER_PATHING_ERROR);

    const fn retry(code: u16) -> Self {
        Self(code)
    }

    const fn fail(code: u16) -> Self {
        Self(DO_NOT_RETRY | code)
    }

    /// The same, for a command that may work when it is tried again.
    #[must_use]
    pub const fn retryable(self) -> Self {
        Self(self.0 & !DO_NOT_RETRY)
    }

    /// The same, for a command that will fail again.
    #[must_use]
    pub const fn no_retry(self) -> Self {
        Self(self.0 | DO_NOT_RETRY)
    }

    /// The same, saying that the error log has an entry about it.
    #[must_use]
    pub const fn more(self) -> Self {
        Self(self.0 | MORE)
    }

    /// Whether it is success.
    #[must_use]
    #[inline]
    pub const fn is_success(self) -> bool {
        self.0 & CODE_MASK == 0
    }

    /// Whether it is the same code of the same type, whatever More and Do Not Retry say.
    #[must_use]
    pub const fn is_same_code(self, other: Self) -> bool {
        self.0 & CODE_MASK == other.0 & CODE_MASK
    }

    /// Status code type.
    #[must_use]
    pub const fn code_type(self) -> u8 {
        (self.0 >> 8 & 0b111) as u8
    }

    /// Status code.
    #[must_use]
    pub const fn code(self) -> u8 {
        (self.0 & 0xFF) as u8
    }

    /// Whether Do Not Retry is set.
    #[must_use]
    pub const fn is_do_not_retry(self) -> bool {
        self.0 & DO_NOT_RETRY != 0
    }

    /// Whether More is set.
    #[must_use]
    pub const fn has_more(self) -> bool {
        self.0 & MORE != 0
    }

    /// The upper half of a completion's dword 3, its phase tag (bit 0) left clear.
    #[must_use]
    #[inline]
    pub const fn field(self) -> u16 {
        self.0 << 1
    }

    /// The status in the upper half of a completion's dword 3.
    #[must_use]
    pub const fn from_field(field: u16) -> Self {
        Self(field >> 1)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.has_more() { ", more" } else { "" };
        let retry = if self.is_do_not_retry() { ", do not retry" } else { "" };
        write!(formatter, "Status({:x}h/{:02x}h{more}{retry})", self.code_type(), self.code())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "status code {:02x}h of type {:x}h", self.code(), self.code_type())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_is_as_a_completion_has_it() {
        // Figure 94: DNR is bit 31 of dword 3, M bit 30, SCT bits 27:25, SC bits 24:17.
        assert_eq!(Status::SUCCESS.field(), 0);
        assert_eq!(Status::INVALID_FIELD.field(), 1 << 15 | 0x02 << 1);
        assert_eq!(Status::INVALID_QUEUE_ID.more().field(), 1 << 15 | 1 << 14 | 1 << 9 | 0x01 << 1);
        assert_eq!(Status::WRITE_FAULT.field(), 2 << 9 | 0x80 << 1);
        assert_eq!(Status::from_field(Status::WRITE_FAULT.field() | 1), Status::WRITE_FAULT);
    }

    #[test]
    fn a_code_is_itself_whatever_its_flags() {
        let status = Status::INVALID_FIELD.more().retryable();
        assert!(status.is_same_code(Status::INVALID_FIELD) && status != Status::INVALID_FIELD);
        assert!(!status.is_do_not_retry() && status.has_more() && !status.is_success());
        assert_eq!(status.no_retry(), Status::INVALID_FIELD.more());
    }
}
