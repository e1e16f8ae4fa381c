//! A store that fails on purpose, the same way each time.
//!
//! # The fault model
//!
//! * A [`Fault`] is an *error*, reported at the next poll: the medium says no (`EIO`), is full
//!   (`ENOSPC`), or moves fewer bytes than it was asked to (`Short`).
//! * A request that fails never reaches the device below: nothing was read,
//!   written, flushed or discarded. `Short` reports that zero bytes were moved.
//! * Which requests fail is decided when they are submitted, by rules, in the
//!   order of the rules; the first that applies wins. A rule counts and draws
//!   over the requests of its operations alone.
//! * Everything follows from the seed and from the order in which channels are
//!   opened and requests submitted to each: the same run fails the same way.
//!
//! Not modelled here: data that is silently wrong, torn or misdirected writes,
//! flushes that lie, requests that never come back. Those need a medium that
//! the test controls in whole, not a device that is wrapped.
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

pub use store::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};
