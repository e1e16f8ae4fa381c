//! Which daemon of a cluster may serve a store.
//!
//! # The parts
//!
//! A *lease* in etcd decides which daemon should serve a store: each daemon holds one, and the
//! store's *owner key* is bound to the lease of the daemon that created it. The key's create
//! revision is the *epoch*. A *fence* decides which daemon can write: before it opens the store,
//! the new owner fences every *suspect*, which is every daemon that held the key and was not fenced
//! since. The suspects are in the store's *ledger*, a key that outlives leases, and change in the
//! same transaction as the owner key.
//!
//! A [`Daemon`] is the state machine of all this for one daemon. It has no threads and no clock:
//! the time, the answers of etcd, and the results of fences are arguments. It returns the next
//! [`Call`] of etcd and the next [`Task`] on the host. An [`Acquisition`] is the fence by a disk's
//! reservation.
//!
//! # Rules
//!
//! * Lease time is counted from before the request that renewed the lease was sent, on the boot
//!   time clock, and is shortened by the clocks' drift. After its end the owner answers nothing.
//! * A renewal counts when a linearizable read through the same member of etcd, sent after it, has
//!   the same Raft term: a leader that was deposed while it was paused still renews leases
//!   (etcd issue 15247).
//! * The [`Record`] beside the store has the newest epoch. An epoch that is not above it is
//!   refused: etcd was restored from a backup.
//! * Answers of another cluster than the first one are not taken.
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

mod call;
mod daemon;
mod lease;
mod member;
mod reservation;
mod rules;
mod status;
mod store;
mod task;
#[cfg(test)]
mod tests;

pub use call::{Answer, Call, Held, Numbered, Origin, Seen};
pub use daemon::{Daemon, Options};
pub use member::{Ledger, Member, Record, Settled};
pub use reservation::{Acquisition, Ended, Found, Notes, Order, Reply, Rivals};
pub use rules::Rule;
pub use status::{State, Status};
pub use task::{Outcome, Task};
