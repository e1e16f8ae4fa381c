//! One request in the kernel's hands.
//!
//! A request is carried out in *rounds*, one submission each: usually one, and
//! more when the kernel cuts a transfer short, when there are more pieces of
//! memory than one submission takes, or when the first way of zeroing turns
//! out not to exist.

use sidecore_block::{BlockError, BlockRequest, Operation};

/// Rounds in a row that may bring nothing but "try again".
const MAX_FRUITLESS_ROUNDS: u8 = 100;

/// How the rounds of a request are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Between the guest's memory and the file.
    Transfer,
    /// Through the slot's bounce buffer, where direct I/O cannot take the
    /// guest's memory.
    Bounce,
    /// Data to the medium.
    Sync,
    /// Blocks given back, which then read as zeros.
    Punch,
    /// Blocks kept, but marked as zeros.
    ZeroRange,
    /// Zeros written, where the filesystem has no other way.
    WriteZeros,
}

/// A place for one request in flight.
#[derive(Debug)]
pub(super) struct Slot {
    pub request: Option<Box<BlockRequest>>,
    pub way: Way,
    /// Bytes done in earlier rounds.
    pub done_bytes: u64,
    fruitless_rounds: u8,
}

/// What a completion means for its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is over.
    Done(Result<(), BlockError>),
    /// There is another round.
    Again,
}

impl Slot {
    pub fn empty() -> Self {
        Self { request: None, way: Way::Sync, done_bytes: 0, fruitless_rounds: 0 }
    }

    #[inline]
    pub fn start(&mut self, request: Box<BlockRequest>, way: Way) {
        *self = Self { request: Some(request), way, done_bytes: 0, fruitless_rounds: 0 };
    }

    /// Judges a round by the kernel's `result`. Transfers continue at multiples
    /// of `align_bytes` only, because direct I/O takes no others.
    #[inline]
    pub fn judge(&mut self, result: i32, align_bytes: usize) -> Verdict {
        let Some(request) = &self.request else {
            return Verdict::Done(Err(BlockError::EIO));
        };
        let moves_bytes = matches!(self.way, Way::Transfer | Way::Bounce | Way::WriteZeros);
        match u64::try_from(result) {
            Err(_) => self.judge_error(-result),
            Ok(_) if !moves_bytes => Verdict::Done(Ok(())),
            Ok(moved) => {
                let asked_bytes = request.len_bytes;
                let reached = self.done_bytes + moved;
                if reached >= asked_bytes {
                    return Verdict::Done(Ok(()));
                }
                let next = reached & !(align_bytes as u64 - 1);
                if next <= self.done_bytes {
                    return Verdict::Done(Err(BlockError::Short { done_bytes: reached, asked_bytes }));
                }
                self.done_bytes = next;
                self.fruitless_rounds = 0;
                Verdict::Again
            }
        }
    }

    #[cold]
    fn judge_error(&mut self, errno: i32) -> Verdict {
        match errno {
            libc::EINTR | libc::EAGAIN if self.fruitless_rounds < MAX_FRUITLESS_ROUNDS => {
                self.fruitless_rounds += 1;
                Verdict::Again
            }
            libc::EOPNOTSUPP => {
                let zeroes = self
                    .request
                    .as_ref()
                    .is_some_and(|request| matches!(request.operation, Operation::WriteZeroes { .. }));
                self.way = match self.way {
                    Way::Punch if zeroes => Way::ZeroRange,
                    Way::ZeroRange => Way::WriteZeros,
                    _ => return Verdict::Done(Err(BlockError::Unsupported)),
                };
                Verdict::Again
            }
            libc::ENOSPC | libc::EDQUOT => Verdict::Done(Err(BlockError::NoSpace)),
            libc::EROFS => Verdict::Done(Err(BlockError::ReadOnly)),
            errno => Verdict::Done(Err(BlockError::Io { errno })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(operation: Operation, way: Way, len_bytes: u64) -> Slot {
        let mut request = BlockRequest::blank(0);
        request.operation = operation;
        request.len_bytes = len_bytes;
        let mut slot = Slot::empty();
        slot.start(request, way);
        slot
    }

    #[test]
    fn a_short_transfer_goes_on_until_nothing_moves() {
        let mut slot = slot(Operation::Read, Way::Transfer, 4096);
        assert_eq!(slot.judge(1000, 1), Verdict::Again);
        assert_eq!(slot.done_bytes, 1000);
        assert_eq!(slot.judge(1000, 1), Verdict::Again);
        let short = BlockError::Short { done_bytes: 2000, asked_bytes: 4096 };
        assert_eq!(slot.judge(0, 1), Verdict::Done(Err(short)));
    }

    #[test]
    fn a_direct_transfer_goes_on_at_a_block() {
        let mut slot = slot(Operation::Write, Way::Transfer, 4096);
        assert_eq!(slot.judge(1000, 512), Verdict::Again);
        assert_eq!(slot.done_bytes, 512);
        let short = BlockError::Short { done_bytes: 812, asked_bytes: 4096 };
        assert_eq!(slot.judge(300, 512), Verdict::Done(Err(short)));
    }

    #[test]
    fn the_kernel_may_ask_to_try_again_but_not_for_ever() {
        let mut slot = slot(Operation::Read, Way::Transfer, 512);
        for _ in 0..MAX_FRUITLESS_ROUNDS {
            assert_eq!(slot.judge(-libc::EINTR, 1), Verdict::Again);
        }
        let stuck = BlockError::Io { errno: libc::EINTR };
        assert_eq!(slot.judge(-libc::EINTR, 1), Verdict::Done(Err(stuck)));
    }

    #[test]
    fn zeroing_falls_back_to_what_every_filesystem_can() {
        let mut slot = slot(Operation::WriteZeroes { may_unmap: true }, Way::Punch, 4096);
        assert_eq!(slot.judge(-libc::EOPNOTSUPP, 1), Verdict::Again);
        assert_eq!(slot.way, Way::ZeroRange);
        assert_eq!(slot.judge(-libc::EOPNOTSUPP, 1), Verdict::Again);
        assert_eq!(slot.way, Way::WriteZeros);
        assert_eq!(slot.judge(4096, 1), Verdict::Done(Ok(())));
    }

    #[test]
    fn a_discard_falls_back_to_nothing() {
        let mut slot = slot(Operation::Discard, Way::Punch, 4096);
        assert_eq!(slot.judge(-libc::EOPNOTSUPP, 1), Verdict::Done(Err(BlockError::Unsupported)));
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
            let mut slot = slot(Operation::Write, Way::Transfer, 512);
            assert_eq!(slot.judge(-errno, 1), Verdict::Done(Err(error)));
        }
    }
}
