//! Stages on threads of their own.
//!
//! A stage runs on the sidecore of its disk, in whose turns all other disks of that sidecore wait.
//! [`offload`] opens a stage that runs elsewhere, and does not know it:
//!
//! ```text
//!              sidecore                 thread of the stage
//!   queue ──► OffloadChannel ──ring──► StageUnit ──► the stage's channel
//!                   │                                      │
//!   store's channel ◄───────────ring─────────────── BelowChannel
//! ```
//!
//! * **The stage alone moves.** The channels to the store behind it stay on the sidecore, which
//!   serves them: a store keeps its sidecore's rings, sessions and caches, and neither a panic nor
//!   an endless loop of the stage reaches it.
//! * **A queue has a channel of the stage on each thread**, and gives a request to the one that has
//!   the fewest. The contract of the seam is that of several channels of a device: a flush covers
//!   what any of them has completed before.
//! * **Requests are handed over** as the boxes that they are, with their hold on guest memory,
//!   through rings of a fixed size, one in each direction. The sidecore polls for them. A side that
//!   has polled in vain for a while sleeps, and is woken by a [bell](sidecore_reactor::Bell).
//! * **Panics** are contained as they are on a sidecore, by the layers around the stage, which run
//!   on its thread.
//! * **A thread that hangs** keeps the requests that it has, whose memory it may write to: they
//!   stay in flight. The sidecore never waits for it, but for a bounded time when a queue begins.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod below;
mod channel;
mod desk;
mod lane;
mod store;
mod store_end;
mod threads;
mod unit;

#[cfg(test)]
mod tests;

pub use store::{THREADS_MAX, offload};
