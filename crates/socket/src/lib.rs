//! Unix sockets for the servers of this project: vhost-user, vfio-user and the control API.
//!
//! * [`SocketFile`] is the file that a client connects to, with the rights that [`Access`] names.
//!   It is removed only by its maker.
//! * [`LastDisconnect`] keeps the reason of the last disconnect, for reports; [`cause`] is the kind
//!   of such a reason.
//! * [`parcel`] packs bytes and descriptors behind one descriptor, for a service manager to keep.
//! * [`send`] and [`receive`] move bytes and file descriptors, without knowledge of messages.
//! * [`Descriptor`] is the kind of a received descriptor, and says whether its close may wait;
//!   [`close_aside`] closes without making its caller wait.
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
