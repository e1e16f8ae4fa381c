//! Why a mirror, or a leg of it, is not used.

use std::io;
use std::time::Duration;

use crate::header::VERSION;
use crate::legs::{LegSet, MAX_LEGS};

/// Why a store is not used as a leg. Nothing on it was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LegError {
    /// There is no header.
    #[error("it has no header of a mirror; name the right store, or make a mirror of it")]
    NoHeader,
    /// Both copies of the header are damaged.
    #[error(
        "its header is damaged in both copies; remove the leg, overwrite the first 8192 bytes of \
         the store with zeros, and add it again"
    )]
    Damaged,
    /// The header is of another format.
    #[error("its header has version {0}, and this program knows version {VERSION} only")]
    Version(u32),
    /// The header is of another mirror.
    #[error("it is a leg of another mirror; name the right store")]
    OtherMirror,
    /// Another store has the same number.
    #[error("it is leg {leg}, and so is another store: one is a copy; name only one of them")]
    Twice {
        /// The number.
        leg: usize,
    },
    /// The mirror goes on without it.
    #[error("leg {leg} was removed from the mirror; add the store again to copy all of it")]
    Removed {
        /// The number.
        leg: usize,
    },
    /// The leg has answered writes that the others do not have.
    #[error(
        "it went on by itself in epoch {epoch}, after it was last in sync with the others in epoch \
         {since}; decide which bytes to keep, and leave out the other legs"
    )]
    Diverged {
        /// Its epoch.
        epoch: u64,
        /// The last epoch that the others know it to be in sync.
        since: u64,
    },
    /// The leg is behind in an epoch in which legs have answered writes that the others do not
    /// have.
    #[error(
        "{legs} went on without the others in epoch {epoch}, which it holds; decide which bytes to \
         keep, and leave out the other legs"
    )]
    Rival {
        /// Its epoch.
        epoch: u64,
        /// The legs that were in sync in it.
        legs: LegSet,
    },
    /// Nothing tells whether the mirror has the writes of the leg's epoch.
    #[error(
        "in its epoch {epoch} {legs} had all writes, and other stores have these numbers now, so \
         nothing tells whether the mirror has them; if it was not in use elsewhere, remove the \
         leg, and add the store again to copy all of it"
    )]
    Replaced {
        /// Its epoch.
        epoch: u64,
        /// The legs that were in sync in it.
        legs: LegSet,
    },
    /// The map of dirty regions does not reach back far enough.
    #[error(
        "its epoch {epoch} is older than epoch {covered_from}, which the map of dirty regions \
         reaches back to; remove the leg, and add the store again to copy all of it"
    )]
    TooOld {
        /// Its epoch.
        epoch: u64,
        /// The oldest one that would do.
        covered_from: u64,
    },
    /// The header's numbers are far above those of the other legs.
    #[error(
        "its header has a number far above {highest}, the epoch that the other legs know, which no \
         mirror comes to; overwrite the first 8192 bytes of the store with zeros, and add it again"
    )]
    Numbers {
        /// The epoch.
        highest: u64,
    },
    /// The store is too small.
    #[error("it has {has_bytes} bytes, and the mirror needs {needs_bytes} of each leg")]
    TooSmall {
        /// The store's size.
        has_bytes: u64,
        /// The size that a leg needs.
        needs_bytes: u64,
    },
    /// The store cannot be written.
    #[error("it is read-only; a leg has to be written")]
    ReadOnly,
    /// The store's blocks are larger than the mirror's.
    #[error("its blocks of {has_bytes} bytes are larger than the mirror's of {needs_bytes} bytes")]
    Blocks {
        /// The store's.
        has_bytes: u32,
        /// The mirror's.
        needs_bytes: u32,
    },
    /// The store is in use by the mirror, or was before it was made.
    #[error("it has the header of a mirror already, which is not overwritten")]
    HasHeader,
    /// The store does not answer.
    #[error("it has not answered for {limit:?}; see why, and try again")]
    Silent {
        /// The time limit.
        limit: Duration,
    },
    /// A request of the store that the leg had before is in flight.
    #[error(
        "a request that leg {leg} was late with is still in flight; try again when it has ended"
    )]
    Late {
        /// The number.
        leg: usize,
    },
    /// The store cannot write zeros, and the mirror's users were told that they can.
    #[error(
        "it cannot write zeros, and the mirror was made of stores that can; name a store that can, \
         or make the mirror again with this one"
    )]
    Zeroes,
    /// It cannot be read or written.
    #[error("{0}")]
    Io(String),
}

impl LegError {
    /// Whether a mirror is opened without a store that has this error: the store then counts as a
    /// leg that is missing. Other errors do not say which stores are the right ones.
    #[must_use]
    pub const fn leaves_others(&self) -> bool {
        matches!(
            self,
            Self::NoHeader
                | Self::Damaged
                | Self::Removed { .. }
                | Self::Replaced { .. }
                | Self::TooOld { .. }
                | Self::Numbers { .. }
                | Self::Zeroes
                | Self::Io(_)
        )
    }

    /// Whether the store's header tells which epochs were in force, though it is no leg now.
    #[must_use]
    pub(crate) const fn is_of_former_leg(&self) -> bool {
        matches!(self, Self::Removed { .. } | Self::TooOld { .. })
    }

    /// How much an unreadable slot says.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Self::NoHeader => 0,
            Self::Damaged => 1,
            _ => 2,
        }
    }
}

impl From<io::Error> for LegError {
    fn from(error: io::Error) -> Self {
        Self::Io(error.to_string())
    }
}

/// Why a mirror is not made, opened or changed.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// A store of the list, counted from zero, cannot be a leg.
    #[error("store {store} of the mirror: {error}")]
    Leg {
        /// Its place in the list.
        store: usize,
        /// The reason.
        error: LegError,
    },
    /// There is no store, or there are too many.
    #[error("a mirror has 1 to {MAX_LEGS} legs, not {0}")]
    Count(usize),
    /// No layout fits.
    #[error(
        "stores of {leg_bytes} bytes have no room for the mirror's metadata, or too many regions; \
         name larger stores, or another size of regions, which is a power of two"
    )]
    Layout {
        /// The smallest store's size.
        leg_bytes: u64,
    },
    /// There is no such leg, or it is in another state than the operation needs.
    #[error("leg {leg}: {reason}")]
    State {
        /// The number.
        leg: usize,
        /// The state and the remedy.
        reason: &'static str,
    },
    /// The mirror waits.
    #[error("the mirror waits: {0}")]
    Waits(Waits),
    /// No operator decides about this mirror.
    #[error("the mirror asks no operator; set `witness = \"operator\"`")]
    NoOperator,
    /// There is nothing to permit. In advance, the next failure would use the permission up.
    #[error("the mirror waits for no permission")]
    NotWaiting,
    /// A permission is for other legs than those that are missing.
    #[error(
        "the mirror asks to go on without {missing}, not without {named}; make sure that these \
         are not in use elsewhere, and name them"
    )]
    Without {
        /// The legs that are not there.
        missing: LegSet,
        /// Those that the operator knows of.
        named: LegSet,
    },
    /// A thread, memory or a descriptor is missing.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The mirror was closed.
    #[error("the mirror is closed")]
    Closed,
}

/// Why requests wait.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Waits {
    /// No leg that is there has all bytes.
    #[error("{missing} missing, which alone had all writes; attach one of them")]
    Bytes {
        /// The legs in sync.
        missing: LegSet,
    },
    /// The last leg that has all bytes fails.
    #[error("leg {leg} fails, and no other one has all writes; it is tried again each second")]
    Write {
        /// The leg.
        leg: usize,
    },
    /// Fewer than half of the legs are there.
    #[error("{missing} missing: with fewer than half of the legs none goes on; attach one more")]
    Legs {
        /// The legs that are not there.
        missing: LegSet,
    },
    /// No epoch has a number that headers can hold.
    #[error("the numbers of its epochs are used up; make the mirror anew of one leg's bytes")]
    Numbers,
    /// Half of the legs are there, and no permission to go on without the others.
    #[error(
        "{missing} missing, and there is no permission to go on alone: {reason}; attach one of \
         them, or permit it"
    )]
    Permission {
        /// The legs that are not there.
        missing: LegSet,
        /// The witness's answer.
        reason: String,
    },
}
