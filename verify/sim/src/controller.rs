//! A controller whose power is cut after every write and flush.
//!
//! # A history
//!
//! This simulation extends [`volumes`](crate::volumes), which tests the volume format, to
//! everything above the format: a real [`Controller`](sidecore_controller::Controller) without
//! threads, guests on several queues of several virtual functions, and below a store that delays
//! and reorders requests and may fail them. Guests read, write, zero, discard and flush, in sectors
//! that fill no block; the operator makes, copies, resizes and deletes volumes that guests use,
//! deduplicates them, and prunes trees and caches. Every action is a step of one thread, in an
//! order that the seed gives; steps are also taken while the controller writes a commit or fills a
//! block.
//!
//! Each read is compared with the data that the guest may find there, and each request must end.
//!
//! Then the power is cut after every write and flush, as in `volumes`. The disk must hold what
//! guests and operators were promised: the data of a write that a flush covered, or newer data, and
//! never data that was not written to that place.
//!
//! Now and then, also in the middle of the controller's work, the process dies instead
//! (`death.rs`): the disk as reads show it and the log are opened, and all changes that guests got
//! an answer for must be there, flushed or not.

mod death;
mod dedup;
mod guest;
mod manage;
mod model;
mod register;
mod settle;
mod store;
mod world;

use crate::Violation;
use crate::history;
pub use crate::history::Outcome;
use world::World;

/// The length of a history.
pub type Options = history::Options<Bug>;

impl Default for Options {
    fn default() -> Self {
        Self { runs: 3, steps: 1200, bug: None }
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
    /// Guests' flushes are completed without a request to the function.
    FlushesAnswered,
    /// The store completes writes before it does them.
    EarlyCompletions,
    /// The unwritten rest of a fresh block is not filled.
    UnfilledBlocks,
    /// Operations are reported as done without a commit.
    NoCommit,
    /// Guests get answers although no log keeps their changes over the death of the process.
    NoLog,
}

impl Bug {
    /// All duties that can be neglected.
    pub const ALL: [Self; 6] = [
        Self::LyingFlushes,
        Self::FlushesAnswered,
        Self::EarlyCompletions,
        Self::UnfilledBlocks,
        Self::NoCommit,
        Self::NoLog,
    ];
}
