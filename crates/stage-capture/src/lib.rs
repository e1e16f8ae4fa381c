//! Captures of frames: a stage of a port copies the beginnings of frames into a ring, and a reader
//! on another thread writes them as pcapng. Traces of drops: a switch shows the frames that it
//! drops, they take the same way, and their reader counts them by flow.
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

mod flow;
pub mod pcapng;
mod reader;
mod record;
mod stage;
mod trace;

pub use flow::Flow;
pub use reader::CaptureReader;
pub use record::{CaptureCounts, CaptureStats};
pub use stage::{CaptureStage, RING_WORDS, SNAPLEN_MAX};
pub use trace::{
    DropCounts, DropPlace, FLOWS_MAX, Group, TRACE_RING_WORDS, TraceReader, TraceRecorder,
};
