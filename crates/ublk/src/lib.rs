//! The queues of a block device of this host's kernel, `/dev/ublkbN`, on their sidecores.
//!
//! A [`UblkUnit`] takes requests from a [`Kernel`], gives them to a store, and completes them. The
//! one real `Kernel` is [`UblkQueue`](sidecore_linux::UblkQueue). [`Life`] makes a device, takes it
//! over from a daemon that was killed, and removes it, by the commands of a [`Control`].
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

mod control;
mod kernel;
mod life;
mod request;
mod unit;

pub use control::Control;
pub use kernel::Kernel;
pub use life::{Life, Server, Step, Up, is_remnant, next_step, remove_remnants, server_word};
pub use unit::{UblkUnit, UnitOptions};
