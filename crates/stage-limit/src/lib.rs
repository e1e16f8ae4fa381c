//! Rate limits of a port: token buckets for frames and for bytes, in each direction.
//!
//! A frame that finds too few tokens is dropped. A segment that is to be cut later is one frame,
//! with all its bytes.
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

mod parse;
mod stage;

pub use parse::{LIMITS_MAX, PortLimits};
pub use stage::LimitStage;
