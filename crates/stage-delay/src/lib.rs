//! A store that is slow, by an exact amount.
//!
//! It stands for a medium with a latency where the device below has none, in
//! tests and in experiments on what latency does to a guest.
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

mod stage;
mod store;

pub use stage::DelayStage;
pub use store::DelayStore;
