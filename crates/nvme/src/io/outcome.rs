//! The NVMe status of a store's error.

use sidecore_block::{BlockError, Operation};

use crate::Status;

/// Linux' error numbers that mean something else than that the medium has failed.
mod errno {
    pub(super) const EAGAIN: i32 = 11;
    pub(super) const ENOMEM: i32 = 12;
    pub(super) const EBUSY: i32 = 16;
    pub(super) const ENOSPC: i32 = 28;
    pub(super) const EROFS: i32 = 30;
    pub(super) const EOPNOTSUPP: i32 = 95;
    pub(super) const EDQUOT: i32 = 122;
}

/// The status of a command whose request the store has failed. A command that can only fail again
/// the same way has Do Not Retry set; a medium that has failed once may do better the next time.
pub(super) fn status_of(operation: Operation, error: BlockError) -> Status {
    match error {
        BlockError::NoSpace => Status::CAPACITY_EXCEEDED,
        BlockError::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED,
        BlockError::OutOfBounds => Status::LBA_OUT_OF_RANGE,
        BlockError::Unsupported => Status::INVALID_OPCODE,
        BlockError::Io { errno } => match errno {
            errno::ENOSPC | errno::EDQUOT => Status::CAPACITY_EXCEEDED,
            errno::EROFS => Status::NAMESPACE_WRITE_PROTECTED,
            errno::EOPNOTSUPP => Status::INVALID_OPCODE,
            errno::EAGAIN | errno::ENOMEM | errno::EBUSY => Status::INTERNAL_ERROR,
            _ => media_error(operation),
        },
        _ => media_error(operation),
    }
}

/// Figure 98: a flush that fails is a write that has failed.
const fn media_error(operation: Operation) -> Status {
    match operation {
        Operation::Read => Status::UNRECOVERED_READ_ERROR,
        _ => Status::WRITE_FAULT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_medium_may_be_asked_again_and_a_full_store_may_not() {
        let read = status_of(Operation::Read, BlockError::EIO);
        assert_eq!(read, Status::UNRECOVERED_READ_ERROR);
        assert!(!read.is_do_not_retry());
        let short = BlockError::Short { done_bytes: 0, asked_bytes: 512 };
        for operation in [Operation::Write, Operation::Flush, Operation::Discard] {
            assert_eq!(status_of(operation, BlockError::EIO), Status::WRITE_FAULT);
            assert_eq!(status_of(operation, short), Status::WRITE_FAULT);
        }
        assert_eq!(status_of(Operation::Write, BlockError::NoSpace), Status::CAPACITY_EXCEEDED);
        assert_eq!(
            status_of(Operation::Write, BlockError::Io { errno: 28 }),
            Status::CAPACITY_EXCEEDED
        );
        assert!(status_of(Operation::Write, BlockError::ReadOnly).is_do_not_retry());
        assert!(!status_of(Operation::Read, BlockError::Io { errno: 12 }).is_do_not_retry());
    }
}
