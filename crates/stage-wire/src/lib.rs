//! A bad wire between a station and the switch, for tests: frames are lost, doubled, overtaken,
//! damaged, cut short, and late.
//!
//! The faults are a text in the words of tc-netem ([`Wire::parse`]), and what happens follows from
//! its seed. Each direction is a wire of its own. A frame is judged by the private copy of its
//! head, and held in private memory.
//!
//! A frame that was to have its checksum computed later is given to the receiver as if it had one
//! if it is damaged: the receiver finds the fault. One that was to be cut is too long for the
//! receiver then, and is dropped and counted as `mtu`.
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

pub use parse::{WIRE_BYTES_MAX, Wire};
pub use stage::{HELD_MAX, WireCounts, WireStage, WireStats};
