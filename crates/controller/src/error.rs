//! Why a controller refused.

use std::io;

use sidecore_volume::{FormatError, OpenError, VolumeError};

/// Why a controller, a function or a volume could not be had or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControllerError {
    /// The store does not suit.
    #[error("the store cannot hold a controller: {0}")]
    Store(&'static str),
    /// The store holds something else, or cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store could not be formatted.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The volumes refuse.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// No volume has this name.
    #[error("there is no volume called \"{0}\"")]
    NoSuchVolume(String),
    /// Some of the volume's metadata is damaged.
    #[error(
        "volume \"{volume}\" is damaged and not served ({what}); `sidecore volume repair` mends it while no daemon has \
         the store"
    )]
    Damaged {
        /// Its name.
        volume: String,
        /// The first damage of the store.
        what: String,
    },
    /// The volume is not durable yet.
    #[error("volume \"{0}\" is being made and not durable yet: try again")]
    NotMade(String),
    /// The volume is being served.
    #[error("volume \"{volume}\" is served by function {function}: {advice}")]
    InUse {
        /// Its name.
        volume: String,
        /// One of its functions.
        function: u32,
        /// What to do.
        advice: &'static str,
    },
    /// All functions are taken.
    #[error("all {} virtual functions are taken", crate::FUNCTIONS_MAX)]
    NoFunction,
    /// A weight of zero, or too large.
    #[error("a weight of {0}: it is 1 to {max}", max = crate::WEIGHT_MAX)]
    BadWeight(u32),
    /// A limit of zero.
    #[error("a limit of zero a second, or a burst of zero, lets nothing through: leave it out for no limit")]
    BadLimit,
    /// A size that is not a whole number of blocks.
    #[error("{size_bytes} bytes are not a multiple of the controller's block size of {block_bytes}")]
    PartialBlock {
        /// What was asked for.
        size_bytes: u64,
        /// The controller's granularity.
        block_bytes: u32,
    },
    /// The trees' memory is too small to work with.
    #[error("tree_memory of {bytes} bytes: at least {min_bytes} are needed")]
    TreeMemory {
        /// What was asked for.
        bytes: u64,
        /// The least.
        min_bytes: u64,
    },
    /// Blocks that were to be shared are not equal, or not there.
    #[error("the blocks differ: nothing was changed")]
    NotEqual,
    /// The metadata could not be made durable.
    #[error("the change could not be made durable: {0}")]
    Commit(String),
    /// The kernel refuses what the controller needs.
    #[error("the controller cannot run: {0}")]
    Io(#[from] io::Error),
    /// It was shut down.
    #[error("the controller has been shut down")]
    Down,
}
