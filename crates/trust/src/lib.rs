//! Trust between a client and an IOhost: a handshake proves each to the other, and seals keep the
//! frames of their sessions secret and unchanged.
//!
//! # Architecture
//!
//! * [`ClientTrust`] and [`HostTrust`] are the two sides of the handshake, behind the seams of
//!   [`sidecore_vrio::handshake`]: Noise IK, by the crate `snow` on the primitives of `ring` and
//!   `curve25519-dalek`.
//! * [`SessionSeal`] seals the frames of one session: AES-256-GCM, with keys that a ratchet
//!   replaces.
//! * [`KeyDirectory`] is an IOhost's keys on disk: its own, and those of the clients that it has
//!   invited. An [`Invitation`] is the file that a client needs.
//!
//! ```text
//! IOhost                                              VMhost
//! KeyDirectory::invite ── Invitation, by the operator ──► Invitation::read
//! KeyDirectory::host_key, clients                     ClientTrust::invited
//!         └► HostTrust ◄──── HELLO, WELCOME ────────────► ┘
//!              └► SessionSeal ◄──── frames ───► SessionSeal
//! ```
//!
//! docs/decisions/0042-trust-of-remote-peers.md has the reasons, docs/vrio.md the bytes.
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

mod client;
mod crypto;
mod error;
mod files;
mod handshake;
mod host;
mod keys;
mod name;
mod schedule;
mod seal;

pub use client::ClientTrust;
pub use error::KeyError;
pub use files::{Clients, Invitation, Invited, KeyDirectory};
pub use host::{Admission, HostTrust, Pending};
pub use keys::{PrivateKey, PublicKey};
pub use name::ClientName;
pub use seal::{FRAMES_PER_KEY, SessionSeal};
