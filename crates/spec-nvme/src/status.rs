//! Status codes (3.3.3.2.1): the code in bits 7:0, its type in bits 10:8.

/// Bits of a status that are its code and the code's type.
pub const CODE_MASK: u16 = 0x7FF;
/// Where the code's type begins.
pub const TYPE_SHIFT: u32 = 8;
/// The Error Information log page has more (M). A status has no phase tag here, as in bits 31:17 of
/// dword 3 of a completion.
pub const MORE: u16 = 1 << 13;
/// The same command would fail again (DNR).
pub const DO_NOT_RETRY: u16 = 1 << 14;

/// Successful Completion.
pub const SUCCESS: u16 = 0;

macro_rules! statuses {
    ($($constant:ident = $value:literal $name:literal,)*) => {
        $(#[doc = concat!($name, ".")] pub const $constant: u16 = $value;)*

        /// The name that the specification gives to a status, without More and Do Not Retry.
        #[must_use]
        pub const fn name(status: u16) -> Option<&'static str> {
            match status & CODE_MASK {
                SUCCESS => Some("Successful Completion"),
                $($constant => Some($name),)*
                _ => None,
            }
        }
    };
}

statuses! {
    // Generic command status (figure 96 and NVM command set 1.0, figure 16).
    INVALID_OPCODE = 0x001 "Invalid Command Opcode",
    INVALID_FIELD = 0x002 "Invalid Field in Command",
    COMMAND_ID_CONFLICT = 0x003 "Command ID Conflict",
    DATA_TRANSFER_ERROR = 0x004 "Data Transfer Error",
    POWER_LOSS = 0x005 "Commands Aborted due to Power Loss Notification",
    INTERNAL_ERROR = 0x006 "Internal Error",
    ABORT_REQUESTED = 0x007 "Command Abort Requested",
    ABORTED_SQ_DELETION = 0x008 "Command Aborted due to SQ Deletion",
    FAILED_FUSED = 0x009 "Command Aborted due to Failed Fused Command",
    MISSING_FUSED = 0x00A "Command Aborted due to Missing Fused Command",
    INVALID_NAMESPACE = 0x00B "Invalid Namespace or Format",
    COMMAND_SEQUENCE_ERROR = 0x00C "Command Sequence Error",
    INVALID_SGL_SEGMENT = 0x00D "Invalid SGL Segment Descriptor",
    INVALID_SGL_COUNT = 0x00E "Invalid Number of SGL Descriptors",
    INVALID_DATA_SGL_LENGTH = 0x00F "Data SGL Length Invalid",
    INVALID_METADATA_SGL_LENGTH = 0x010 "Metadata SGL Length Invalid",
    INVALID_SGL_TYPE = 0x011 "SGL Descriptor Type Invalid",
    INVALID_PRP_OFFSET = 0x013 "PRP Offset Invalid",
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014 "Atomic Write Unit Exceeded",
    OPERATION_DENIED = 0x015 "Operation Denied",
    INVALID_SGL_OFFSET = 0x016 "SGL Offset Invalid",
    INVALID_HOST_IDENTIFIER_FORMAT = 0x018 "Host Identifier Inconsistent Format",
    KEEP_ALIVE_EXPIRED = 0x019 "Keep Alive Timer Expired",
    INVALID_KEEP_ALIVE_TIMEOUT = 0x01A "Keep Alive Timeout Invalid",
    NAMESPACE_WRITE_PROTECTED = 0x020 "Namespace is Write Protected",
    LBA_OUT_OF_RANGE = 0x080 "LBA Out of Range",
    CAPACITY_EXCEEDED = 0x081 "Capacity Exceeded",
    NAMESPACE_NOT_READY = 0x082 "Namespace Not Ready",

    // Command specific status (figure 97).
    INVALID_COMPLETION_QUEUE = 0x100 "Completion Queue Invalid",
    INVALID_QUEUE_ID = 0x101 "Invalid Queue Identifier",
    INVALID_QUEUE_SIZE = 0x102 "Invalid Queue Size",
    ABORT_LIMIT_EXCEEDED = 0x103 "Abort Command Limit Exceeded",
    ASYNC_EVENT_LIMIT_EXCEEDED = 0x105 "Asynchronous Event Request Limit Exceeded",
    INVALID_INTERRUPT_VECTOR = 0x108 "Invalid Interrupt Vector",
    INVALID_LOG_PAGE = 0x109 "Invalid Log Page",
    INVALID_FORMAT = 0x10A "Invalid Format",
    INVALID_QUEUE_DELETION = 0x10C "Invalid Queue Deletion",
    FEATURE_NOT_SAVEABLE = 0x10D "Feature Identifier Not Saveable",
    FEATURE_NOT_CHANGEABLE = 0x10E "Feature Not Changeable",
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10F "Feature Not Namespace Specific",
    OVERLAPPING_RANGE = 0x114 "Overlapping Range",
    NAMESPACE_INSUFFICIENT_CAPACITY = 0x115 "Namespace Insufficient Capacity",
    NAMESPACE_ID_UNAVAILABLE = 0x116 "Namespace Identifier Unavailable",
    NAMESPACE_ALREADY_ATTACHED = 0x118 "Namespace Already Attached",
    NAMESPACE_IS_PRIVATE = 0x119 "Namespace Is Private",
    NAMESPACE_NOT_ATTACHED = 0x11A "Namespace Not Attached",
    THIN_PROVISIONING_NOT_SUPPORTED = 0x11B "Thin Provisioning Not Supported",
    CONTROLLER_LIST_INVALID = 0x11C "Controller List Invalid",
    INVALID_CONTROLLER_ID = 0x11F "Invalid Controller Identifier",
    INVALID_SECONDARY_STATE = 0x120 "Invalid Secondary Controller State",
    INVALID_RESOURCE_COUNT = 0x121 "Invalid Number of Controller Resources",
    INVALID_RESOURCE_ID = 0x122 "Invalid Resource Identifier",
    NAMESPACE_ATTACHMENT_LIMIT = 0x127 "Namespace Attachment Limit Exceeded",
    COMMAND_SET_NOT_SUPPORTED = 0x129 "I/O Command Set Not Supported",
    CONFLICTING_ATTRIBUTES = 0x180 "Conflicting Attributes",
    INVALID_PROTECTION_INFORMATION = 0x181 "Invalid Protection Information",
    WRITE_TO_READ_ONLY_RANGE = 0x182 "Attempted Write to Read Only Range",
    COMMAND_SIZE_LIMIT_EXCEEDED = 0x183 "Command Size Limit Exceeded",

    // Media and data integrity errors (figure 98).
    WRITE_FAULT = 0x280 "Write Fault",
    UNRECOVERED_READ_ERROR = 0x281 "Unrecovered Read Error",
    COMPARE_FAILURE = 0x285 "Compare Failure",
    ACCESS_DENIED = 0x286 "Access Denied",
    UNWRITTEN_BLOCK = 0x287 "Deallocated or Unwritten Logical Block",

    // Path related status (figure 99).
    CONTROLLER_PATHING_ERROR = 0x360 "Controller Pathing Error",
    ABORTED_BY_HOST = 0x371 "Command Aborted By Host",
}
