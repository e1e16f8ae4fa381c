//! Schedules of snapshots: which one is due, and which ones have expired.
//!
//! A [`Keep`] is a list of rules, such as `24 hourly, 7 daily`. Each rule divides time into slots,
//! which begin on the calendar of UTC: at the full hour, at midnight, on Monday, on the first of a
//! month. A snapshot is due if the present slot of a rule has none, and a rule keeps the first
//! snapshot of each of the newest slots that have one. So one snapshot may serve several rules, and
//! a time that was missed is made up once.
//!
//! [`plan`] is pure: the time and the names of the snapshots are its arguments, and the snapshots
//! themselves are all of its memory. It counts slots that have snapshots, and never compares an
//! age with the clock: a clock that jumps ahead by a year makes one snapshot due, and expires at
//! most one for each rule. Snapshots from later than now are left alone and not counted.
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

mod calendar;
mod keep;
mod name;
mod plan;

pub use calendar::{LATEST_UNIX_S, Period};
pub use keep::{COUNT_MAX, Keep, Rule};
pub use name::{NAME_MAX_BYTES, name, time_of};
pub use plan::{Plan, Unchanged, plan};
