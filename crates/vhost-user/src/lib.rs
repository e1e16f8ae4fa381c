//! vhost-user: the protocol by which a VMM hands a guest's virtqueues to this process, over a Unix
//! socket (QEMU's docs/interop/vhost-user.rst, "the specification" below).
//!
//! * [`Message`] is the wire format, for both ends of the socket.
//! * [`Connection`] carries messages and their file descriptors over a stream.
//! * [`Session`] is the back end's state machine for one connection. The session has no socket, so
//!   tests and the fuzzer drive it directly.
//! * [`VirtioEndpoint`] is a [`VirtioDevice`](sidecore_virtio::VirtioDevice) that the [`Service`]
//!   of all protocols serves to one VMM after the other.
//!
//! The reasons against rust-vmm's `vhost` are in docs/decisions/0003-own-vhost-user-server.md.
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
mod codec;
mod endpoint;
mod message;
mod ring;
mod session;
#[cfg(test)]
mod testing;
mod write_log;

pub use codec::{Codec, Connection, ConnectionError, Received};
pub use endpoint::VirtioEndpoint;
pub use message::{
    Body, ConfigSpace, Flags, HEADER_BYTES, Header, Log, MAX_CONFIG_BYTES, MAX_FDS,
    MAX_PAYLOAD_BYTES, MemoryRegion, Message, MessageError, NO_FD, Request, VringAddress,
    VringState,
};
pub use session::{ProtocolError, Session};
pub use sidecore_peer::{Access, ServerError, Service, Socket, StreamError};
