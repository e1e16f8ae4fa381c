//! The errors that a driver can make with a ring.

use sidecore_memory::MemoryError;

/// A ring or a chain in it that makes no sense. The device that finds one
/// stops and needs a reset; this is the reason it gives.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The queue size is zero, too large, or not a power of two where it has to be one.
    #[error("queue size {size} is not valid for this ring format")]
    BadSize {
        /// The size asked for.
        size: u16,
    },
    /// The ring or a buffer is not in guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The available index moved on by more than the ring has entries.
    #[error(
        "available index jumped from {from} to {to}, with {in_flight} requests in flight in a ring \
         of {size}"
    )]
    IndexJump {
        /// Where the device stood.
        from: u16,
        /// The index that the driver wrote.
        to: u16,
        /// Requests taken and not yet completed.
        in_flight: u16,
        /// The queue size.
        size: u16,
    },
    /// A descriptor index outside of its table.
    #[error("descriptor {index} is outside its table of {size}")]
    DescriptorOutOfRange {
        /// The index.
        index: u32,
        /// Entries there are.
        size: u32,
    },
    /// More descriptors in a chain than there may be: a loop, or a request
    /// larger than the device said it takes.
    #[error("a chain of more than {limit} descriptors: looping or too long")]
    ChainTooLong {
        /// The limit.
        limit: usize,
    },
    /// An indirect table inside an indirect table.
    #[error("an indirect descriptor inside an indirect table")]
    NestedIndirect,
    /// An indirect descriptor that was not negotiated.
    #[error("an indirect descriptor, but indirect descriptors were not negotiated")]
    IndirectNotNegotiated,
    /// A descriptor with both the INDIRECT and the NEXT flag.
    #[error("an indirect descriptor with the NEXT flag")]
    IndirectWithNext,
    /// An indirect table whose size is not a whole number of descriptors.
    #[error("an indirect table of {len_bytes} bytes")]
    IndirectSize {
        /// The size.
        len_bytes: u32,
    },
    /// A buffer of no bytes.
    #[error("a buffer of zero length")]
    ZeroLength,
    /// A device-readable buffer behind a device-writable one.
    #[error("a readable buffer behind a writable one")]
    ReadableAfterWritable,
    /// More descriptors in flight than the ring has.
    #[error("more descriptors in flight than the ring's {size}")]
    Overcommitted {
        /// The queue size.
        size: u16,
    },
    /// The position to start from is outside of the ring.
    #[error("ring position {position} is outside a ring of {size}")]
    BadPosition {
        /// The position.
        position: u16,
        /// The queue size.
        size: u16,
    },
}
