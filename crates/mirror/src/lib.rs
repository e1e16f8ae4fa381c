//! A store of several legs that hold the same bytes, so that it outlives some of them.
//!
//! # Roles
//!
//! [`Mirror`] is the device. Its channels carry requests out, each on its queue's sidecore: writes
//! to all legs in sync from one private copy, reads from one leg. The [`Keeper`] is a thread that
//! writes metadata, decides about legs that fail or come back, and copies what a leg has missed.
//! Channels and the keeper share a few words, and no lock on the way of a request.
//!
//! # Rules
//!
//! [`Rule`] names them, and decision 77 has their reasons. The simulation of power cuts switches
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

mod channel;
mod disk;
mod epoch;
mod error;
mod former;
mod header;
mod keeper;
mod layout;
mod legs;
mod mail;
mod map;
mod mirror;
mod parts;
mod plan;
mod rules;
mod shared;
mod status;
mod stripes;
mod table;
mod view;
mod witness;

pub use disk::{Sleep, Wait};
pub use epoch::StoreId;
pub use error::{LegError, MirrorError, Waits};
pub use former::Former;
#[doc(hidden)]
pub use header::decodes;
pub use keeper::Keeper;
pub use layout::Layout;
pub use legs::{LegSet, MAX_LEGS};
pub use mirror::{CreateOptions, End, Mirror, OpenOptions, create};
pub use rules::Rule;
pub use status::{LegState, Status};
pub use witness::{Claim, Granted, Operator, Witness};
