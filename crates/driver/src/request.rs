//! Requests, as their submitter sees them.

use sidecore_spec_virtio::blk::{request_type, status};

/// Where one request lives: a header line and a data buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(pub(crate) u16);

impl Slot {
    /// Its number, below the number of slots of its queue.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The kind of a request, by virtio's number (virtio 1.2, 5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Disk to memory.
    Read = request_type::IN,
    /// Memory to disk.
    Write = request_type::OUT,
    /// Make what was written durable.
    Flush = request_type::FLUSH,
    /// The disk's name.
    GetId = request_type::GET_ID,
    /// Forget a range.
    Discard = request_type::DISCARD,
    /// Zero a range.
    WriteZeroes = request_type::WRITE_ZEROES,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok,
    /// Failed.
    IoError,
    /// The device does not do that.
    Unsupported,
    /// The device wrote another number, or (0xff) none.
    Other(u8),
}

impl From<u8> for Status {
    #[inline]
    fn from(byte: u8) -> Self {
        match byte {
            status::OK => Self::Ok,
            status::IOERR => Self::IoError,
            status::UNSUPP => Self::Unsupported,
            other => Self::Other(other),
        }
    }
}

/// A request that the device is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Its slot, free for the next request.
    pub slot: Slot,
    /// How it ended.
    pub status: Status,
    /// How many bytes the device says it wrote, the status byte among them.
    pub written_bytes: u32,
}

/// A piece of a slot's data buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it starts in the slot's buffer, in bytes.
    pub offset_bytes: u32,
    /// Its size in bytes.
    pub len_bytes: u32,
}
