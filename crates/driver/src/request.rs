//! Requests, as their submitter sees them.

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

/// What a request is to do, by virtio's number (virtio 1.2, 5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Disk to memory.
    Read = 0,
    /// Memory to disk.
    Write = 1,
    /// Make what was written durable.
    Flush = 4,
    /// The disk's name.
    GetId = 8,
    /// Forget a range.
    Discard = 11,
    /// Zero a range.
    WriteZeroes = 13,
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
            0 => Self::Ok,
            1 => Self::IoError,
            2 => Self::Unsupported,
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
