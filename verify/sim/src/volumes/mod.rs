//! Volumes on a disk whose power is cut, everywhere.
//!
//! # A history
//!
//! A seed gives a disk, a granularity, and a manner of use: how large writes are, how many volumes there are, how long freed
//! blocks wait. Guests write, read, discard and flush, the operator makes and deletes volumes, and what the controller does
//! for them is done here on `sidecore-volume` directly, a step at a time, also between the writes of a commit. The disk
//! records every write and flush.
//!
//! Then the power is cut: after every event of the recording, a disk is made of what is safe and of some of what is not
//! ([`cut`]), opened, checked, and read from one end to the other, and compared with what the [`model`] allows. One of these
//! disks is used for the next run, so that what is recovered is recovered from again.
//!
//! Between steps, and between the writes of a commit, the process dies instead: what is left is the disk as reads show it and
//! the memory of the log (`death.rs`). A copy of the two is opened, perhaps after a death in the middle of the replay, and
//! compared: everything that was answered is there.
//!
//! # Does it notice anything?
//!
//! With a [`Bug`], some duty is neglected on purpose; tests assert that each is found.

pub mod cut;
pub(crate) mod death;
pub mod disk;
pub(crate) mod find;
mod guest;
mod history;
mod manage;
pub mod model;
mod remap;
pub(crate) mod tuning;
pub(crate) mod world;

pub use history::{Options, Outcome, run};

/// A duty that is neglected, to see whether the simulation notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The disk says that it has flushed, and has not.
    LyingFlushes,
    /// Fresh blocks are linked first and filled afterwards.
    LinkBeforeData,
    /// The rest of a fresh block of which a guest writes a part is not zeroed.
    NoZeroes,
    /// Shared blocks are overwritten in place.
    OverwriteShared,
    /// A guest that flushes is answered without a commit.
    FlushWithoutCommit,
    /// Guests are answered before the log has the entry.
    AnswerBeforeLog,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::LyingFlushes,
        Self::LinkBeforeData,
        Self::NoZeroes,
        Self::OverwriteShared,
        Self::FlushWithoutCommit,
        Self::AnswerBeforeLog,
    ];
}
