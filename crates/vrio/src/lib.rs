//! The remote channel of the vRIO paper (ASPLOS'16, section 4), made safe: a client uses the block
//! devices of an IOhost over a link that loses, doubles, reorders and damages frames.
//!
//! # Architecture
//!
//! Everything here is a state machine. Time and frames are arguments. An engine sees the heads of
//! frames and never a payload: a [`Port`](port::Port) sends frames and moves payloads, once,
//! between the data of requests and the link. So this crate knows neither a NIC nor guest memory
//! nor a store.
//!
//! * [`wire`] is the format; docs/vrio.md shows it byte by byte.
//! * [`Client`] is one session's engine at the client: slots, attempts, timers, requests that wait
//!   for an overlapping write, and the replay log.
//! * [`Server`] is the same session at the IOhost: what each slot's last request was and how it
//!   ended. A [`Host`] is the sessions of one link queue, and who may have one.
//! * [`Nic`] is a NIC at either end: packets, which are sent once, cut and put together.
//! * [`Seal`](port::Seal) is the seam to encryption, and [`handshake`] that to the agreement on its
//!   keys.
//!
//! # Promises
//!
//! Each request that [`Client::submit`] takes ends in one [`Event::Completed`]. Each write is
//! executed once with effect, whatever the link does, and an answered write is there after any
//! restart of the IOhost, whether it was flushed or not. docs/decisions/0040-remote-sessions.md has
//! the rules and their reasons; `verify/sim` turns each of them off and sees that it was needed.
//!
//! # Hostile peers
//!
//! A frame that makes no sense is dropped and counted by its [`Reason`]. Memory is allocated when a
//! session is set up, and bounded by the configuration.
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
mod client;
mod cookie;
mod greeting;
pub mod handshake;
mod nic;
pub mod port;
mod request;
mod round_trip;
mod rules;
mod segmentation;
mod server;
pub mod slices;
mod stats;
mod window;
pub mod wire;

pub use client::{Client, ClientOptions, Event, OnDisconnect, SubmitError, Timing};
pub use nic::{Nic, PACKET_PATIENCE, Packet, packet_segment_bytes};
pub use port::{Peer, Plain};
pub use request::Request;
pub use rules::{Neglected, Rule};
pub use segmentation::{MAX_SEGMENTS, Segmentation};
pub use server::{Execute, Host, HostOptions, Member, Server, ServerOptions};
pub use stats::{Reason, VrioCounts, VrioStats};
