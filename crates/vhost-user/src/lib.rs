//! vhost-user: how a VMM hands a guest's virtqueues to this process over a
//! Unix socket (QEMU's docs/interop/vhost-user.rst, "the specification" below).
//!
//! * [`Message`] is the wire format, for both ends of the socket.
//! * [`Connection`] carries messages and their file descriptors over a stream.
//! * [`Session`] is the back end's state machine for one connection. It knows
//!   no socket, so tests and the fuzzer drive it directly.
//! * [`Server`] listens on a socket file and serves a device to one VMM after
//!   the other.
//!
//! Why not rust-vmm's `vhost`: docs/decisions/0003-own-vhost-user-server.md.
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

mod backend_channel;
mod connection;
pub mod features;
mod message;
mod ring;
mod server;
mod session;
#[cfg(test)]
mod testing;

pub use connection::{Connection, ConnectionError};
pub use message::{
    Body, ConfigSpace, Flags, HEADER_BYTES, Header, MAX_CONFIG_BYTES, MAX_FDS, MAX_PAYLOAD_BYTES, MemoryRegion,
    Message, MessageError, NO_FD, Request, VringAddress, VringState,
};
pub use server::Server;
pub use session::{ProtocolError, Session};
pub use sidecore_socket::{Access, Disconnect, ServerError, StreamError};
