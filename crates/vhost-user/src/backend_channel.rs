//! The back end's requests to the front end ("Back-end message types").

use std::os::fd::OwnedFd;

use sidecore_socket::{Blocking, Descriptor, StreamError, send};
use sidecore_spec_virtio::vhost_user::{BACKEND_CONFIG_CHANGE, FLAGS_VERSION, MessageHeader};

/// The socket of SET_BACKEND_REQ_FD.
///
/// The front end may be slow to read from it: no call here waits.
#[derive(Debug)]
pub(crate) struct BackendChannel(OwnedFd);

impl BackendChannel {
    /// Takes the socket; `None` if the descriptor is not a connected Unix stream socket.
    pub(crate) fn new(socket: OwnedFd) -> Option<Self> {
        (Descriptor::of(&socket) == Descriptor::UnixStream).then_some(Self(socket))
    }

    /// Returns the socket, for the next process.
    pub(crate) fn into_inner(self) -> OwnedFd {
        self.0
    }

    /// Notifies the front end that the configuration space has changed. False if the socket has no
    /// space for the message now.
    ///
    /// # Errors
    /// The socket's error: the channel cannot be used any more.
    pub(crate) fn config_changed(&self) -> Result<bool, StreamError> {
        // The message wants no acknowledgement, so that this socket is never read from.
        let message = MessageHeader {
            request: BACKEND_CONFIG_CHANGE,
            flags: FLAGS_VERSION,
            payload_bytes: 0,
        }
        .encode();
        // A Unix socket accepts so small a message completely or not at all.
        match send(&self.0, &message, &[], 0, Blocking::Never) {
            Ok(_) => Ok(true),
            Err(error) if error.would_block() => Ok(false),
            Err(error) => Err(error),
        }
    }
}
