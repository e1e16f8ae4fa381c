//! The errors of controllers, functions and volumes.

use std::io;

use sidecore_volume::{FormatError, OpenError, VolumeError};

/// Why a controller, a function or a volume could not be opened or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControllerError {
    /// The store's properties do not permit a controller on it.
    #[error("the store cannot hold a controller: {0}")]
    Store(&'static str),
    /// The store has other contents, or cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store could not be formatted.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The volumes' metadata does not permit the operation.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// No volume has this name.
    #[error("there is no volume called \"{0}\"")]
    NoSuchVolume(String),
    /// Some of the volume's metadata is damaged.
    #[error(
        "volume \"{volume}\" is damaged and not served ({what}); `sidecore volume repair` mends it \
         while no daemon has the store"
    )]
    Damaged {
        /// The volume's name.
        volume: String,
        /// The first damage of the store.
        what: String,
    },
    /// The volume is not durable yet.
    #[error("volume \"{0}\" is being created and not durable yet: try again")]
    NotMade(String),
    /// The volume is being served.
    #[error("volume \"{volume}\" is served by function {function}: {advice}")]
    InUse {
        /// The volume's name.
        volume: String,
        /// One of the functions that serve the volume.
        function: u32,
        /// The remedy, for the message.
        advice: &'static str,
    },
    /// All functions are in use.
    #[error(
        "all {} virtual functions of the controller are in use: remove a device first",
        crate::FUNCTIONS_MAX
    )]
    NoFunction,
    /// A weight outside of 1 to [`WEIGHT_MAX`](crate::WEIGHT_MAX).
    #[error("a weight of {0} is out of range: set 1 to {max}", max = crate::WEIGHT_MAX)]
    BadWeight(u32),
    /// A rate limit of zero.
    #[error(
        "a limit of zero a second, or a burst of zero, lets no request pass: omit the limit, or \
         set at least 1"
    )]
    BadLimit,
    /// A size that is not a whole number of blocks.
    #[error(
        "{size_bytes} bytes are not a multiple of the controller's block size of {block_bytes}"
    )]
    PartialBlock {
        /// The size that was asked for.
        size_bytes: u64,
        /// The controller's block size.
        block_bytes: u32,
    },
    /// The memory for extent trees is too small.
    #[error("tree_memory of {bytes} bytes is too small: set at least {min_bytes}")]
    TreeMemory {
        /// The memory that was configured.
        bytes: u64,
        /// The least that works.
        min_bytes: u64,
    },
    /// Blocks that were to be shared differ, or some are not mapped.
    #[error("the blocks differ or are not mapped, so none was shared")]
    NotEqual,
    /// A deduplication is in progress.
    #[error("a deduplication is in progress: wait for its end, or stop it")]
    DedupRuns,
    /// The store is too full for the metadata of a remap.
    #[error("the store has no room for the metadata of a remap: free some space, then start again")]
    NoRoomToRemap,
    /// The metadata could not be made durable.
    #[error("the change could not be made durable: {0}")]
    Commit(String),
    /// The kernel denies a resource that the controller needs.
    #[error("the controller cannot run: {0}")]
    Io(#[from] io::Error),
    /// The controller was shut down.
    #[error("the controller has been shut down")]
    Down,
}
