//! Remote devices on sidecores (vRIO, ASPLOS'16, section 4): the engines of the remote channel,
//! between the links that carry their frames and the block seam.
//!
//! # Architecture
//!
//! ```text
//! VMhost   front end ─► RemoteStore's channel ─► vrio::Client ─► LinkPort ─► link
//! IOhost   link ─► LinkPort ─► vrio::Host ─► InFlight ─► the store's channel
//! ```
//!
//! * [`LinkPort`] is the port of both engines: frames of a link in, frames out, and a payload's one
//!   copy between a frame and the data of its request.
//! * [`RemoteNic`] is a NIC as a port of a switch, at either end.
//! * [`client`] is the VMhost: a unit for a session with an IOhost, and stores of its devices.
//!
//! # Hostile peers
//!
//! The engines of [`sidecore_vrio`] check frames; this crate copies the head of a frame before it
//! is parsed, never makes a slice of a frame's memory, and opens sealed payloads in a buffer of its
//! own. All memory is allocated when a unit starts or when its configuration changes, and never for
//! a frame.
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

pub mod client;
mod crossing;
pub mod export;
mod nic;
mod peers;
mod port;

pub use nic::{NicEnd, NicMonitor, NicState, RemoteNic, remote_nic};
pub use peers::Peers;
pub use port::{Arrived, LinkPort, Received, RequestData};
