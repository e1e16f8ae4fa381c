//! How a command ended (NVMe base 2.0, 3.3.3.2.1).

use std::fmt;

/// A completion's status field, without the phase tag: code in bits 7:0, its type in 10:8, retry delay in 12:11, more in
/// 13, do not retry in 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NvmeStatus(pub u16);

impl NvmeStatus {
    /// Done.
    pub const OK: Self = Self(0);
    /// Command Aborted By Host: the controller was reset, or the connection lost, while it had the command. It may have
    /// been carried out or not.
    pub const ABORTED_BY_HOST: Self = Self(0x371);

    /// Whether it was done.
    #[must_use]
    #[inline]
    pub const fn is_ok(self) -> bool {
        self.0 & 0x7ff == 0
    }

    /// The status code type: 0 generic, 1 specific to the command, 2 media and data integrity, 3 path related, 7 vendor
    /// specific.
    #[must_use]
    pub const fn code_type(self) -> u8 {
        (self.0 >> 8 & 7) as u8
    }

    /// The status code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0 as u8
    }

    /// Whether there is more to be read in the error log.
    #[must_use]
    pub const fn more(self) -> bool {
        self.0 & 1 << 13 != 0
    }

    /// Whether the same command would fail again.
    #[must_use]
    pub const fn do_not_retry(self) -> bool {
        self.0 & 1 << 14 != 0
    }

    /// The code's name in the standard, as far as this driver knows it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 & 0x7ff {
            0x000 => "Successful Completion",
            0x001 => "Invalid Command Opcode",
            0x002 => "Invalid Field in Command",
            0x003 => "Command ID Conflict",
            0x004 => "Data Transfer Error",
            0x005 => "Commands Aborted due to Power Loss Notification",
            0x006 => "Internal Error",
            0x007 => "Command Abort Requested",
            0x008 => "Command Aborted due to SQ Deletion",
            0x009 => "Command Aborted due to Failed Fused Command",
            0x00A => "Command Aborted due to Missing Fused Command",
            0x00B => "Invalid Namespace or Format",
            0x00C => "Command Sequence Error",
            0x00D => "Invalid SGL Segment Descriptor",
            0x00E => "Invalid Number of SGL Descriptors",
            0x00F => "Data SGL Length Invalid",
            0x011 => "SGL Descriptor Type Invalid",
            0x013 => "PRP Offset Invalid",
            0x014 => "Atomic Write Unit Exceeded",
            0x020 => "Namespace is Write Protected",
            0x080 => "LBA Out of Range",
            0x081 => "Capacity Exceeded",
            0x082 => "Namespace Not Ready",
            0x100 => "Completion Queue Invalid",
            0x101 => "Invalid Queue Identifier",
            0x102 => "Invalid Queue Size",
            0x103 => "Abort Command Limit Exceeded",
            0x105 => "Asynchronous Event Request Limit Exceeded",
            0x108 => "Invalid Interrupt Vector",
            0x109 => "Invalid Log Page",
            0x10A => "Invalid Format",
            0x10C => "Invalid Queue Deletion",
            0x10D => "Feature Identifier Not Saveable",
            0x10E => "Feature Not Changeable",
            0x180 => "Conflicting Attributes",
            0x182 => "Attempted Write to Read Only Range",
            0x280 => "Write Fault",
            0x281 => "Unrecovered Read Error",
            0x285 => "Compare Failure",
            0x287 => "Deallocated or Unwritten Logical Block",
            0x371 => "Command Aborted By Host",
            _ => "a status that this driver has no name for",
        }
    }
}

impl fmt::Display for NvmeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:x}h/{:02x}h", self.name(), self.code_type(), self.code())?;
        f.write_str(if self.do_not_retry() { ", do not retry)" } else { ")" })
    }
}

impl fmt::Debug for NvmeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_taken_apart_and_named() {
        let status = NvmeStatus(0x6285);
        assert_eq!((status.code_type(), status.code()), (2, 0x85));
        assert!(status.more() && status.do_not_retry() && !status.is_ok());
        assert_eq!(status.to_string(), "Compare Failure (2h/85h, do not retry)");
        assert!(NvmeStatus(0x6000).is_ok());
        assert_eq!(NvmeStatus::ABORTED_BY_HOST.to_string(), "Command Aborted By Host (3h/71h)");
    }
}
