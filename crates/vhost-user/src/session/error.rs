//! The reasons to refuse a front end's request.

use std::io;

use sidecore_memory::MemoryError;
use sidecore_virtio::{ConfigError, StartError};

use crate::message::{MessageError, Request};

/// The reason to refuse a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A reply came in place of a request.
    #[error("a reply to {request}, which this server has not sent")]
    UnexpectedReply {
        /// The request in the reply's header.
        request: Request,
    },
    /// The request belongs to a feature that was not offered.
    #[error("{request}, which was not offered")]
    NotOffered {
        /// The request in the message's header.
        request: Request,
    },
    /// The request belongs to a protocol feature that was not accepted.
    #[error("{request} without its protocol feature")]
    NotNegotiated {
        /// The request in the message's header.
        request: Request,
    },
    /// The payload or the descriptors do not belong to the request.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The payload has another request's structure.
    #[error("{request} with another request's payload")]
    UnexpectedBody {
        /// The request in the message's header.
        request: Request,
    },
    /// The front end accepts feature bits that were not offered.
    #[error("{request} with {bits:#x}, which were not offered")]
    FeaturesNotOffered {
        /// Either SET_FEATURES or SET_PROTOCOL_FEATURES.
        request: Request,
        /// The bits that were not offered.
        bits: u64,
    },
    /// The features change while rings run.
    #[error("SET_FEATURES while rings run")]
    FeaturesWhileRunning,
    /// The log begins without a place to write to.
    #[error(
        "SET_FEATURES with VHOST_F_LOG_ALL while rings run and there is no log: send \
             SET_LOG_BASE before"
    )]
    NoLog,
    /// The log does not have a bit for each page of the guest's memory.
    #[error(
        "{request}: the log of written pages has bits for {log_pages} pages, and guest memory ends \
         at {memory_end:#x}: send a larger log before more memory"
    )]
    LogTooSmall {
        /// SET_LOG_BASE, or the request that changes the memory.
        request: Request,
        /// The pages that have a bit in the log.
        log_pages: u64,
        /// The end of the guest's memory.
        memory_end: u64,
    },
    /// The device has no ring of this number.
    #[error("there is no ring {index}, the device has {queue_count}")]
    NoSuchRing {
        /// The ring in the request.
        index: u64,
        /// The number of the device's rings.
        queue_count: usize,
    },
    /// The request would change a running ring.
    #[error("{request} for ring {index}, which is running")]
    RingRuns {
        /// The request in the message's header.
        request: Request,
        /// The ring in the request.
        index: u32,
    },
    /// The value is not valid in this request.
    #[error("{request} with the invalid value {value:#x}")]
    BadValue {
        /// The request in the message's header.
        request: Request,
        /// The value in the payload.
        value: u64,
    },
    /// The memory regions cannot be mapped, overlap, or do not exist.
    #[error("{request}: {error}")]
    Memory {
        /// The request in the message's header.
        request: Request,
        /// The reason, from the guest's memory.
        error: MemoryError,
    },
    /// The device does not start a ring that has all its settings.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The device does not allow this write to its configuration space.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The descriptor for the back end's requests is not a connected Unix stream socket.
    #[error("SET_BACKEND_REQ_FD with a descriptor that is not a connected Unix stream socket")]
    NoBackendChannel,
    /// A file descriptor could not be duplicated.
    #[error("cannot duplicate a file descriptor: {0}")]
    Descriptor(io::Error),
}

impl ProtocolError {
    /// Whether a guest can cause the error without its VMM's knowledge. Then the error must cost
    /// the guest no more than a reset of its device.
    pub(super) const fn is_the_guests(&self) -> bool {
        matches!(
            self,
            Self::Start(StartError::Ring { .. } | StartError::Memory { .. }) | Self::Config(_)
        )
    }

    /// Whether the error closes the connection even if the front end asked for an acknowledgement:
    /// the guest must not continue without this ring.
    pub(super) const fn is_final(&self) -> bool {
        matches!(self, Self::Start(StartError::Loss { .. }))
    }
}
