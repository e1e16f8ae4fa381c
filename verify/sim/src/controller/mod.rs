//! A controller whose power is cut, everywhere.
//!
//! # A history
//!
//! What [`volumes`](crate::volumes) does with the volume format, this does with everything above it: a real
//! [`Controller`](sidecore_controller::Controller) without threads, guests on several queues of several virtual functions,
//! and below a store that takes its time, does things in another order, and may fail. Guests read, write, zero, discard and
//! flush, in sectors that fill no block; the operator makes, copies, resizes and deletes volumes under them, and prunes
//! trees and caches. Everything is a step of one thread, in an order that the seed gives; steps are also taken while the
//! controller is in the middle of a commit or of filling a block.
//!
//! Each read is compared with what the guest may find there, and each request must end.
//!
//! Then the power is cut after every write and flush, as there. What is found must be what guests and operators were told:
//! what a flush covered is there, unless something newer is, and nothing else ever was in that place.
//!
//! Now and then, also in the middle of the controller's work, the process dies instead (`death.rs`): the disk as reads show it
//! and the log are opened, and everything that guests were answered is there, flushed or not.

mod death;
mod guest;
mod history;
mod manage;
mod model;
mod register;
mod settle;
mod store;
mod world;

pub use history::{Options, Outcome, run};

/// A duty that is neglected, to see whether the simulation notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The disk says that it has flushed, and has not.
    LyingFlushes,
    /// Guests' flushes are answered without asking the function.
    FlushesAnswered,
    /// The store completes writes before it has done them.
    EarlyCompletions,
    /// The rest of a fresh block of which a guest writes a part is not filled.
    UnfilledBlocks,
    /// Operations are called done without a commit.
    NoCommit,
    /// Guests are answered though nothing keeps their changes over the death of the process.
    NoLog,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::LyingFlushes,
        Self::FlushesAnswered,
        Self::EarlyCompletions,
        Self::UnfilledBlocks,
        Self::NoCommit,
        Self::NoLog,
    ];
}
