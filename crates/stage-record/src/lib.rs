//! A stage that records the requests of a disk in a file: kinds, places, times and results, and if
//! asked checksums or the data that was written. `sidecore replay` replays the file.
//!
//! A request is recorded when it has ended, before the guest learns of that: its record is put into
//! a ring of fixed size, which a thread of the stage writes to the file. So a sidecore copies and
//! nothing else, and a slow file holds no guest back: a request that finds no room in the ring is
//! counted, and missing in the file.
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

mod entry;
mod file;
mod observer;
mod recorder;
mod stage;
mod writer;

pub use stage::RecordStage;
