//! Records on their way from a sidecore to the writer, as words.

use sidecore_block::{BlockError, BlockRequest, Operation};
use sidecore_recording::{Outcome, Request, RequestKind};

/// The words of a record without its data.
pub(crate) const WORDS: usize = 7;

const WRITE_THROUGH: u8 = 1;
const HAS_CHECKSUM: u8 = 2;

/// A request, and the number of requests of its queue before it that are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) request: Request,
    pub(crate) lost: u64,
}

impl Entry {
    pub(crate) fn encode(&self) -> [u64; WORDS] {
        let request = &self.request;
        let mut flags = 0;
        if request.write_through {
            flags |= WRITE_THROUGH;
        }
        if request.checksum.is_some() {
            flags |= HAS_CHECKSUM;
        }
        let first = request.kind as u64
            | (request.outcome as u64) << 8
            | u64::from(flags) << 16
            | u64::from(request.errno.cast_unsigned()) << 32;
        [
            first,
            request.checksum.unwrap_or(0),
            request.arrival_ns,
            request.latency_ns,
            request.offset_bytes,
            request.len_bytes,
            self.lost,
        ]
    }

    /// The entry of a queue. `None` of words that are none.
    pub(crate) fn decode(words: [u64; WORDS], queue: u16) -> Option<Self> {
        let [first, checksum, arrival_ns, latency_ns, offset_bytes, len_bytes, lost] = words;
        let [kind, outcome, flags, ..] = first.to_le_bytes();
        let request = Request {
            kind: *RequestKind::ALL.get(usize::from(kind))?,
            queue,
            write_through: flags & WRITE_THROUGH != 0,
            outcome: *Outcome::ALL.get(usize::from(outcome))?,
            errno: ((first >> 32) as u32).cast_signed(),
            checksum: (flags & HAS_CHECKSUM != 0).then_some(checksum),
            arrival_ns,
            latency_ns,
            offset_bytes,
            len_bytes,
        };
        Some(Self { request, lost })
    }
}

pub(crate) fn kind(request: &BlockRequest) -> RequestKind {
    match request.operation {
        Operation::Read => RequestKind::Read,
        Operation::Write => RequestKind::Write,
        Operation::Flush => RequestKind::Flush,
        Operation::Discard => RequestKind::Discard,
        Operation::WriteZeroes { may_unmap: false } => RequestKind::WriteZeroes,
        Operation::WriteZeroes { may_unmap: true } => RequestKind::WriteZeroesUnmap,
    }
}

/// How a request ended, and the error number if there is one.
pub(crate) fn outcome(request: &BlockRequest) -> (Outcome, i32) {
    let outcome = match request.result {
        Ok(()) => Outcome::Ok,
        Err(BlockError::Io { errno }) => return (Outcome::Io, errno),
        Err(BlockError::NoSpace) => Outcome::NoSpace,
        Err(BlockError::Short { .. }) => Outcome::Short,
        Err(BlockError::Unsupported) => Outcome::Unsupported,
        Err(BlockError::ReadOnly) => Outcome::ReadOnly,
        Err(BlockError::OutOfBounds) => Outcome::OutOfBounds,
        Err(_) => Outcome::Other,
    };
    (outcome, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_the_ring() {
        for kind in RequestKind::ALL {
            for outcome in Outcome::ALL {
                for (write_through, checksum) in [(false, None), (true, Some(0)), (true, Some(9))] {
                    let errno = if outcome == Outcome::Io { -5 } else { 0 };
                    let (arrival_ns, latency_ns) = (1 << 60, 3);
                    let (offset_bytes, len_bytes) = (4096, 512);
                    let request = Request {
                        kind,
                        queue: 7,
                        write_through,
                        outcome,
                        errno,
                        checksum,
                        arrival_ns,
                        latency_ns,
                        offset_bytes,
                        len_bytes,
                    };
                    let entry = Entry { request, lost: 11 };
                    assert_eq!(Entry::decode(entry.encode(), 7), Some(entry));
                }
            }
        }
        assert_eq!(Entry::decode([0xff, 0, 0, 0, 0, 0, 0], 7), None);
    }
}
