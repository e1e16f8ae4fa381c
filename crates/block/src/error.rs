//! How a request can fail, in the store's words.

/// Why a store could not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The medium failed, with the kernel's error number where there is one.
    #[error("I/O error (errno {errno})")]
    Io {
        /// Linux' errno; `EIO` (5) where nothing better is known.
        errno: i32,
    },
    /// No space is left to store it.
    #[error("no space left in the store")]
    NoSpace,
    /// Fewer bytes were moved than asked for, and no more can be had.
    #[error("short transfer: {done_bytes} of {asked_bytes} bytes")]
    Short {
        /// Bytes moved.
        done_bytes: u64,
        /// Bytes asked for.
        asked_bytes: u64,
    },
    /// The store cannot do this kind of operation.
    #[error("the store does not support this operation")]
    Unsupported,
    /// The store is read-only.
    #[error("the store is read-only")]
    ReadOnly,
    /// The request lies outside the store or is not aligned to its blocks.
    #[error("outside the store, or not aligned to its blocks")]
    OutOfBounds,
}

impl BlockError {
    /// `EIO`, when the medium gives no reason.
    pub const EIO: Self = Self::Io { errno: 5 };
}

/// Why [`Geometry::check`](crate::Geometry::check) refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BoundsError {
    /// It ends behind the last byte of the store.
    #[error(
        "request of {len_bytes} bytes at {offset_bytes} ends past the capacity of {capacity_bytes} \
         bytes"
    )]
    PastEnd {
        /// First byte.
        offset_bytes: u64,
        /// Size.
        len_bytes: u64,
        /// The store's size.
        capacity_bytes: u64,
    },
    /// Its offset or size is not a multiple of the block size.
    #[error(
        "request of {len_bytes} bytes at {offset_bytes} is not aligned to blocks of {block_bytes} \
         bytes"
    )]
    Misaligned {
        /// First byte.
        offset_bytes: u64,
        /// Size.
        len_bytes: u64,
        /// The store's block size.
        block_bytes: u32,
    },
}
