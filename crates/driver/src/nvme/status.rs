//! How a command ended (NVMe base 2.0, 3.3.3.2.1).

use std::fmt;

use sidecore_spec_nvme::status::{self, CODE_MASK, DO_NOT_RETRY, MORE};

/// A completion's status field, without the phase tag: code in bits 7:0, its type in 10:8, retry
/// delay in 12:11, more in 13, do not retry in 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NvmeStatus(pub u16);

impl NvmeStatus {
    /// Done.
    pub const OK: Self = Self(status::SUCCESS);
    /// Command Aborted By Host: the controller was reset, or the connection lost, while it had the
    /// command. It may have been carried out or not.
    pub const ABORTED_BY_HOST: Self = Self(status::ABORTED_BY_HOST);

    /// Whether it was done.
    #[must_use]
    #[inline]
    pub const fn is_ok(self) -> bool {
        self.0 & CODE_MASK == 0
    }

    /// The status code type: 0 generic, 1 specific to the command, 2 media and data integrity, 3
    /// path related, 7 vendor specific.
    #[must_use]
    pub const fn code_type(self) -> u8 {
        (self.0 >> status::TYPE_SHIFT & 7) as u8
    }

    /// The status code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0 as u8
    }

    /// Whether there is more to be read in the error log.
    #[must_use]
    pub const fn more(self) -> bool {
        self.0 & MORE != 0
    }

    /// Whether the same command would fail again.
    #[must_use]
    pub const fn do_not_retry(self) -> bool {
        self.0 & DO_NOT_RETRY != 0
    }

    /// The code's name in the standard, as far as this driver knows it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match status::name(self.0) {
            Some(name) => name,
            None => "a status that this driver has no name for",
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
