//! Virtio device models: what a guest's drivers see, whatever transport carries it.
//!
//! [`VirtioDevice`] is the seam to the transport; [`blk`] is the block device. A device's queues
//! run on sidecores, each a [`Pollable`](sidecore_reactor::Pollable) of its own; what they share
//! with each other and with the control path is atomics.
//!
//! The guest is hostile. Whatever it writes is read once and checked; what
//! makes no sense breaks its own device, with a reason, and nothing else.
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

pub mod blk;
mod device;
mod health;
pub mod net;
mod notices;

pub use device::{ConfigError, QueueLog, QueueResources, StartError, VirtioDevice};
pub use health::Health;
