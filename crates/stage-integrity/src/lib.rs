//! A stage that keeps a checksum and a write generation for each block, apart from the data.
//!
//! # Requests
//!
//! A read is checked when it comes back, and a block that is bad fails it. A write is durable as an
//! *intent*, the tag that its block may have from now on, before its data reaches the store. A
//! flush is a *checkpoint*: data and tags are durable when it is answered.
//!
//! # After a power cut
//!
//! A block with intents that are newer than its tag has the content of the tag or of one of them,
//! or it is torn, and its reads fail.
//!
//! # A store that has failed
//!
//! After a failed flush nothing is written. The first request of the next user opens the store
//! again, as after a power cut.
//!
//! # Rules
//!
//! [`Rule`] names them, and decision 83 has their reasons. The simulation of power cuts switches
//! each one off and must then fail.
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

mod bad;
mod channel;
mod disk;
mod error;
mod header;
mod intents;
mod journal;
mod layout;
mod opening;
mod parts;
mod rules;
mod shared;
mod stage;
mod store;
mod tag;
mod tags;
mod users;

pub use error::IntegrityError;
#[doc(hidden)]
pub use header::decodes;
pub use header::uuid_text;
pub use layout::Layout;
pub use rules::Rule;
pub use stage::IntegrityStage;
pub use store::{FormatOptions, IntegrityStore, OpenOptions, format};
