//! Unix sockets as the servers of this project use them: vhost-user, vfio-user and the control API.
//!
//! * [`SocketFile`] is the file that a client connects to: for those whom [`Access`] names, and removed by no other.
//! * [`LastDisconnect`] is why the last client was disconnected, for reports; [`cause`] is the kind of such a reason.
//! * [`parcel`] is bytes and descriptors behind one descriptor, to be kept by somebody else.
//! * [`send`] and [`receive`] move bytes and the file descriptors beside them, and know no messages.
//! * [`Descriptor`] tells what such a descriptor is, and so whether somebody waits who closes it; [`close_aside`] is for
//!   whoever must not.
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

mod aside;
mod cause;
mod descriptor;
mod disconnect;
mod file;
pub mod parcel;
mod stream;

pub use aside::close_aside;
pub use cause::cause;
pub use descriptor::Descriptor;
pub use disconnect::{Disconnect, LastDisconnect};
pub use file::{Access, ServerError, SocketFile};
pub use stream::{Blocking, MAX_FDS, StreamError, receive, send};
