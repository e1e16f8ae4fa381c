//! Captures of frames: a stage of a port copies the beginnings of frames into a ring, and a reader
//! on another thread writes them as pcapng.
//!
//! The ring has a fixed size. A frame that finds no room in it goes on as all others do, and is
//! counted as lost to the capture: a reader that does not read delays no frame.
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

pub mod pcapng;
mod reader;
pub mod ring;
mod stage;

pub use reader::CaptureReader;
pub use stage::{CaptureCounts, CaptureStage, CaptureStats, RING_WORDS, SNAPLEN_MAX};
