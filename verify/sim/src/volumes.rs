//! Volumes on a disk whose power is cut after every write and flush.
//!
//! # A history
//!
//! A seed gives a disk, a block size, and a workload: how large writes are, how many volumes there
//! are, how long freed blocks wait. Guests write, read, discard and flush, the operator makes and
//! deletes volumes, and equal blocks become one. The controller's part is done here on
//! `sidecore-volume` directly, a step at a time, also between the writes of a commit. The disk
//! records every write and flush.
//!
//! Then the power is cut: after every event of the recording, a disk is made of all data that is
//! safe and some that is not ([`cut`]), opened, checked, read completely, and compared with what
//! the [`model`] allows. One of these disks is the start of the next run, so that recovery also
//! starts from recovered disks.
//!
//! Between steps, and between the writes of a commit, the process dies instead and leaves the disk
//! as reads show it and the memory of the log (`death.rs`). A copy of the two is opened, perhaps
//! after a death in the middle of the replay, and compared: every answered change must be there.
//!
//! # Tests of the checks
//!
//! A [`Bug`] is a duty that the simulation neglects on purpose; tests assert that each one is
//! found.

pub mod cut;
pub(crate) mod death;
mod dedup;
pub mod disk;
pub(crate) mod find;
mod format;
mod guest;
mod manage;
pub mod model;
mod remap;
pub(crate) mod tuning;
mod world;

use crate::Violation;
use crate::history;
pub use crate::history::Outcome;
use world::World;

/// The length of a history.
pub type Options = history::Options<Bug>;

impl Default for Options {
    fn default() -> Self {
        Self { runs: 4, steps: 300, bug: None }
    }
}

/// Runs the history of `seed`, with a power cut after every write and flush.
///
/// # Errors
/// A check that failed.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Violation>> {
    history::run::<World>(seed, options)
}

/// A duty that the simulation neglects on purpose, to test that the checks notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The disk reports flushes as done without doing them.
    LyingFlushes,
    /// Fresh blocks are linked first and filled afterwards.
    LinkBeforeData,
    /// The unwritten rest of a fresh block is not zeroed.
    NoZeroes,
    /// Shared blocks are overwritten in place.
    OverwriteShared,
    /// A guest's flush is completed without a commit.
    FlushWithoutCommit,
    /// Guests get answers before the log has the entry.
    AnswerBeforeLog,
    /// Blocks that were equal are remapped although a guest may have written to one since.
    RemapWithoutGuard,
}

impl Bug {
    /// All duties that can be neglected.
    pub const ALL: [Self; 7] = [
        Self::LyingFlushes,
        Self::LinkBeforeData,
        Self::NoZeroes,
        Self::OverwriteShared,
        Self::FlushWithoutCommit,
        Self::AnswerBeforeLog,
        Self::RemapWithoutGuard,
    ];
}
