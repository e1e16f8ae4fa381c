//! The queues of a block device of this host's kernel, `/dev/ublkbN`, on their sidecores.
//!
//! A [`UblkUnit`] takes requests from a [`Kernel`], gives them to a store, and completes them. The
//! one real `Kernel` is [`UblkQueue`](sidecore_linux::UblkQueue).
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

mod kernel;
mod request;
mod unit;

pub use kernel::Kernel;
pub use unit::{UblkUnit, UnitOptions};
