//! The format of recordings: the requests of a disk, with their times and, if asked, their data.
//!
//! docs/recording-format.md describes the file. [`Header::encode`] and [`Record::append_to`] write
//! it; a [`Reader`] reads it, and is ready for a file that is damaged, cut off, or made by an
//! attacker: it yields all records in front of the fault, and then the fault.
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

mod check;
mod format;
mod read;

pub use check::{Checksum, checksum};
pub use format::{
    DATA_MAX, DataMode, EndReason, FRAME_BYTES, HEADER_BYTES, Header, NAME_MAX, Outcome,
    REQUEST_BYTES, Record, Request, RequestKind, VERSION,
};
pub use read::{Fault, Reader, RecordingError};
