//! NeSC's controller: physical and virtual functions over extent trees (thesis 5, 6).
//!
//! # Architecture
//!
//! A [`Controller`] owns one physical store and keeps its volumes there. Each [`VirtualFunction`]
//! exposes one volume as a whole disk: a [`BlockDevice`](sidecore_block::BlockDevice) like any
//! other, whose channels translate every access through the volume's extent tree. The physical
//! function is the store itself.
//!
//! ```text
//!   front end     front end            front end
//!      |             |                     |
//!   VF channel    VF channel  ...       PF channel        on the sidecores
//!      \_____________/                      |
//!       multiplexer: shares, BTLB, walk     |
//!             |  hit             \ miss     |
//!          the store's channels  |          |
//!             |                  v          |
//!             |            hypervisor side: volumes, trees, commits   (threads of its own)
//!             v                  v          v
//!   =============== the physical store ================
//! ```
//!
//! # I/O model
//!
//! A sidecore translates and submits on its own, without locks. For a translation that it cannot
//! do, it sends a message to the hypervisor side, and only that request waits (thesis 5.3). Trees
//! are read while they are changed: each change is published with one store, and the replaced nodes
//! are freed by epoch-based reclamation.
//!
//! # Isolation
//!
//! A channel reaches the store only at places that its volume's tree maps, and the tree maps only
//! blocks that the volume's metadata does. A block moves from one volume to another only after the
//! transaction that freed it is durable, and after all I/O to it has ended; and no guest can read a
//! fresh block before the new owner has written all of it.
//!
//! # Errors
//!
//! Requests fail as the [block seam](sidecore_block) says; operations fail with a
//! [`ControllerError`] that names the remedy.
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

mod channel;
mod controller;
mod dedup;
mod epochs;
mod error;
mod events;
mod function;
mod host;
mod hypervisor;
mod mail;
mod multiplexer;
mod options;
mod physical;
mod report;
mod shares;
mod stats;
mod threads;
mod usage;
mod volumes;

pub use controller::{Controller, PinNodes};
pub use dedup::{
    DEFAULT_DEDUP_BYTES_PER_S, DedupCounts, DedupOptions, DedupReport, DedupRun, DedupState,
    DedupStep,
};
pub use error::ControllerError;
pub use events::Event;
pub use function::VirtualFunction;
pub use host::{HostFunction, HostMap};
pub use options::{
    Answered, ControllerOptions, DEFAULT_WARN_USED_PERCENT, DEFAULT_WEIGHT, FUNCTIONS_MAX,
    FunctionOptions, Ownership, WEIGHT_MAX,
};
pub use physical::PhysicalDisk;
pub use report::{ControllerReport, FunctionReport, Health};
pub use sidecore_block::{Limit, Limits};
pub use stats::{FunctionStats, HypervisorCounts};
pub use volumes::Change;
