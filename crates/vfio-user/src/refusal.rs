//! The reasons to refuse a command, and their errno.

use std::io;

use rustix::io::Errno;
use sidecore_memory::MemoryError;
use sidecore_nvme::AccessError;

/// The reason for an error reply. The connection stays open.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("a malformed payload of {len_bytes} bytes")]
    Malformed { len_bytes: usize },
    #[error("another command's payload")]
    UnexpectedBody,
    #[error("{count} file descriptors, not the number that the command takes")]
    FdCount { count: usize },
    #[error("a file in place of an eventfd")]
    NotEvent,
    #[error("the command or its option is not offered")]
    NotOffered,
    #[error("the version is negotiated already")]
    Settled,
    #[error("version data without a final NUL")]
    VersionData,
    #[error("argsz {argsz} is less than the {needed} bytes of the structure")]
    ShortArgsz { argsz: u32, needed: u32 },
    #[error("there is no index {index}")]
    NoSuchIndex { index: u32 },
    #[error("flags {flags:#x} are no valid combination")]
    BadFlags { flags: u32 },
    #[error("{count} from {start} is out of range")]
    BadRange { start: u64, count: u64 },
    #[error("{address:#x} or {len_bytes:#x} is not a whole number of pages")]
    Misaligned { address: u64, len_bytes: u64 },
    #[error("{len_bytes:#x} bytes at {address:#x} are mapped already, in part at least")]
    Mapped { address: u64, len_bytes: u64 },
    #[error("there is no map of {len_bytes:#x} bytes at {address:#x}")]
    NotMapped { address: u64, len_bytes: u64 },
    #[error("there are {max_maps} maps already")]
    TooManyMaps { max_maps: usize },
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("cannot duplicate a file descriptor: {0}")]
    Descriptor(io::Error),
    #[error("no memory for the doorbells of a new client: {0}")]
    Connect(io::Error),
}

impl Refusal {
    /// The errno in the reply, never 0: QEMU takes an error reply with errno 0 for success.
    pub(crate) fn errno(&self) -> u32 {
        let errno = match self {
            Self::NotOffered => Errno::OPNOTSUPP,
            Self::Mapped { .. } | Self::Memory(MemoryError::RegionOverlap { .. }) => Errno::EXIST,
            Self::NotMapped { .. } | Self::Memory(MemoryError::NoSuchRegion { .. }) => Errno::NOENT,
            Self::TooManyMaps { .. } | Self::Memory(MemoryError::TooManyRegions) => Errno::NOSPC,
            Self::Memory(MemoryError::Map(error))
            | Self::Descriptor(error)
            | Self::Connect(error) => Errno::from_io_error(error).unwrap_or(Errno::IO),
            _ => Errno::INVAL,
        };
        u32::try_from(errno.raw_os_error()).unwrap_or(1).max(1)
    }
}
