//! One service for the sockets of all protocols: the shared half of vhost-user and vfio-user.
//!
//! * [`Service`] is a few epoll threads (workers) and a bounded pool; [`Socket`] is one of its
//!   sockets, and [`Listening`] one whose device does not exist yet.
//! * [`Session`] is implemented by a protocol: commands in, replies out, and the end of a client.
//!   [`Endpoint`] makes a session for each client of a device.
//! * [`Connection`] carries messages and their descriptors over a stream, as a [`Codec`] describes
//!   them.
//! * [`Snapshot`] is a client that one process exports and the next one resumes.
//!
//! A worker reads, parses and replies, and never waits. A command that may wait (to map memory, to
//! start or stop a queue), the end of a session and the close of a connection are calls of the
//! pool: one at a time for each socket, in the order of its messages. If a command takes longer
//! than half a minute, its client is disconnected (docs/decisions/0027-one-socket-service.md).
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
mod connection;
mod pool;
mod service;
mod session;
mod slot;
mod snapshot;
#[cfg(test)]
mod testing;
mod worker;

pub use connection::{Codec, Connection, ConnectionError, ErrorOf, Received};
pub use service::{Listening, Service, Socket};
pub use session::{Endpoint, Session};
pub use sidecore_socket::{Access, Disconnect, ServerError, StreamError, close_aside};
pub use snapshot::{
    ExportFds, FdPlace, ResumeError, ResumeFds, SessionState, Snapshot, SocketState, session_state,
};
