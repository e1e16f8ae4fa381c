//! Ownership of stores on a host: etcd, fences, records, and the thread that runs it.
//!
//! A [`Runner`] is the thread that drives a [`Daemon`](sidecore_ownership::Daemon). It talks to
//! etcd through a [`Gateway`], and carries out the tasks of each store through a [`Host`]. A
//! [`Fence`] and a [`RecordFile`] are what most hosts need for that.
//!
//! docs/decisions/0050-ownership.md has the reasons.
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

mod access;
mod connection;
mod endpoint;
mod fence;
mod gateway;
mod keys;
mod notes;
mod record;
mod reservation;
mod runner;

pub use access::{Access, Identity, User};
pub use endpoint::{Endpoint, EndpointError};
pub use fence::{Claim, CommandFence, Fence, HostLock, LockFence, Others};
pub use gateway::Gateway;
pub use notes::NotesFile;
pub use record::RecordFile;
pub use reservation::{LateAttempt, ProbedDisk, ReservationFence, Watch};
pub use runner::{Closed, Host, Report, Runner, Served, StoreReport, boot_time, this_host};
