//! A stage that counts requests and bytes, and writes records of them for billing.
//!
//! Each channel counts what has ended in counters that its sidecore alone writes. Reports and
//! records read the sum over all channels. A request costs two additions, and a batch one more
//! call.
//!
//! # Records
//!
//! A record is a line of JSON about an interval: [`Recorder`] appends it to a file. A thread of the
//! stage's own does that, so that a file that does not answer delays no request. The next record
//! has the counts that a failed attempt could not write, and a line that was cut off is marked, so
//! that no reader takes it for a record.
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

mod file;
mod observer;
mod recorder;
mod stage;
mod thread;

pub use observer::MeterObserver;
pub use recorder::{Names, Recorder};
pub use stage::MeterStage;
