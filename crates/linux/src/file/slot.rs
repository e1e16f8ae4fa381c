//! One portion of a request in the kernel.
//!
//! A portion is carried out in *rounds*, one submission each: usually one, and more if the kernel
//! cuts a transfer short, if the request has more pieces of memory than one submission takes, or if
//! the filesystem lacks the first way of zeroing.

use std::ops::Range;

use sidecore_block::{BlockError, Operation};

use crate::reservation::act_on_conflict;

/// The largest number of consecutive rounds without progress ("try again").
const MAX_FRUITLESS_ROUNDS: u8 = 100;

/// The operation of a portion's rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// A transfer between the guest's memory and the file.
    Transfer,
    /// A transfer through the slot's bounce buffer, if direct I/O cannot take the guest's memory.
    Bounce,
    /// A write of cached data to the medium.
    Sync,
    /// A release of blocks, which then read as zeros.
    Punch,
    /// Blocks are kept, and marked as zeros.
    ZeroRange,
    /// Zeros are written, if the filesystem has no other way.
    WriteZeros,
}

impl Way {
    /// Whether the kernel returns a count of bytes moved.
    #[inline]
    pub const fn is_transfer(self) -> bool {
        matches!(self, Self::Transfer | Self::Bounce | Self::WriteZeros)
    }
}

/// A place for one portion in flight.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// The place of the portion's request.
    pub request: u32,
    pub way: Way,
    /// The end of the completed part, in bytes from the request's start.
    pub done_bytes: u64,
    /// The portion's end, in bytes from the request's start.
    pub end_bytes: u64,
    fruitless_rounds: u8,
}

/// The meaning of a completion for its portion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The portion has ended.
    Done(Result<(), BlockError>),
    /// The portion needs another round.
    Again,
}

impl Slot {
    pub fn empty() -> Self {
        Self::new(0, Way::Sync, 0..0)
    }

    /// Makes the portion `bytes` of a request.
    #[inline]
    pub fn new(request: u32, way: Way, bytes: Range<u64>) -> Self {
        Self { request, way, done_bytes: bytes.start, end_bytes: bytes.end, fruitless_rounds: 0 }
    }

    /// Evaluates the kernel's `result` for a round of an `operation`. Transfers continue only at
    /// multiples of `align_bytes`, because direct I/O takes no other offsets.
    #[inline]
    pub fn judge(&mut self, operation: Operation, result: i32, align_bytes: usize) -> Verdict {
        match u64::try_from(result) {
            Err(_) => self.judge_error(operation, -result),
            Ok(_) if !self.way.is_transfer() => Verdict::Done(Ok(())),
            Ok(moved) => {
                let reached = self.done_bytes + moved;
                if reached >= self.end_bytes {
                    return Verdict::Done(Ok(()));
                }
                let next = reached & !(align_bytes as u64 - 1);
                if next <= self.done_bytes {
                    let short =
                        BlockError::Short { done_bytes: reached, asked_bytes: self.end_bytes };
                    return Verdict::Done(Err(short));
                }
                self.done_bytes = next;
                self.fruitless_rounds = 0;
                Verdict::Again
            }
        }
    }

    #[cold]
    fn judge_error(&mut self, operation: Operation, errno: i32) -> Verdict {
        match errno {
            libc::EINTR | libc::EAGAIN if self.fruitless_rounds < MAX_FRUITLESS_ROUNDS => {
                self.fruitless_rounds += 1;
                Verdict::Again
            }
            libc::EOPNOTSUPP => {
                let zeroes = matches!(operation, Operation::WriteZeroes { .. });
                self.way = match self.way {
                    Way::Punch if zeroes => Way::ZeroRange,
                    Way::ZeroRange => Way::WriteZeros,
                    _ => return Verdict::Done(Err(BlockError::Unsupported)),
                };
                Verdict::Again
            }
            libc::ENOSPC | libc::EDQUOT => Verdict::Done(Err(BlockError::NoSpace)),
            libc::EROFS => Verdict::Done(Err(BlockError::ReadOnly)),
            errno => {
                if errno == libc::EBADE {
                    act_on_conflict();
                }
                Verdict::Done(Err(BlockError::Io { errno }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Operation = Operation::Read;
    const WRITE: Operation = Operation::Write;

    fn slot(way: Way, len_bytes: u64) -> Slot {
        Slot::new(0, way, 0..len_bytes)
    }

    #[test]
    fn a_short_transfer_continues_until_no_byte_moves() {
        let mut slot = slot(Way::Transfer, 4096);
        assert_eq!(slot.judge(READ, 1000, 1), Verdict::Again);
        assert_eq!(slot.done_bytes, 1000);
        assert_eq!(slot.judge(READ, 1000, 1), Verdict::Again);
        let short = BlockError::Short { done_bytes: 2000, asked_bytes: 4096 };
        assert_eq!(slot.judge(READ, 0, 1), Verdict::Done(Err(short)));
    }

    #[test]
    fn a_direct_transfer_goes_on_at_a_block() {
        let mut slot = slot(Way::Transfer, 4096);
        assert_eq!(slot.judge(WRITE, 1000, 512), Verdict::Again);
        assert_eq!(slot.done_bytes, 512);
        let short = BlockError::Short { done_bytes: 812, asked_bytes: 4096 };
        assert_eq!(slot.judge(WRITE, 300, 512), Verdict::Done(Err(short)));
    }

    #[test]
    fn a_later_portion_ends_where_it_should() {
        let mut slot = Slot::new(7, Way::Transfer, 4096..8192);
        assert_eq!(slot.judge(READ, 1024, 512), Verdict::Again);
        assert_eq!(slot.done_bytes, 5120);
        assert_eq!(slot.judge(READ, 3072, 512), Verdict::Done(Ok(())));
    }

    #[test]
    fn the_kernel_may_ask_to_try_again_but_not_for_ever() {
        let mut slot = slot(Way::Transfer, 512);
        for _ in 0..MAX_FRUITLESS_ROUNDS {
            assert_eq!(slot.judge(READ, -libc::EINTR, 1), Verdict::Again);
        }
        let stuck = BlockError::Io { errno: libc::EINTR };
        assert_eq!(slot.judge(READ, -libc::EINTR, 1), Verdict::Done(Err(stuck)));
    }

    #[test]
    fn zeroing_falls_back_to_writing_zeros() {
        const ZERO: Operation = Operation::WriteZeroes { may_unmap: true };
        let mut slot = slot(Way::Punch, 4096);
        assert_eq!(slot.judge(ZERO, -libc::EOPNOTSUPP, 1), Verdict::Again);
        assert_eq!(slot.way, Way::ZeroRange);
        assert_eq!(slot.judge(ZERO, -libc::EOPNOTSUPP, 1), Verdict::Again);
        assert_eq!(slot.way, Way::WriteZeros);
        assert_eq!(slot.judge(ZERO, 4096, 1), Verdict::Done(Ok(())));
    }

    #[test]
    fn a_discard_falls_back_to_nothing() {
        let mut slot = slot(Way::Punch, 4096);
        assert_eq!(
            slot.judge(Operation::Discard, -libc::EOPNOTSUPP, 1),
            Verdict::Done(Err(BlockError::Unsupported))
        );
    }

    #[test]
    fn errors_keep_their_meaning() {
        for (errno, error) in [
            (libc::EIO, BlockError::EIO),
            (libc::ENOSPC, BlockError::NoSpace),
            (libc::EDQUOT, BlockError::NoSpace),
            (libc::EROFS, BlockError::ReadOnly),
            (libc::EBADF, BlockError::Io { errno: libc::EBADF }),
        ] {
            let mut slot = slot(Way::Transfer, 512);
            assert_eq!(slot.judge(WRITE, -errno, 1), Verdict::Done(Err(error)));
        }
    }
}
