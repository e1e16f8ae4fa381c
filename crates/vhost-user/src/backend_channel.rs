//! The back end's own requests to the front end ("Back-end message types").

use std::os::fd::OwnedFd;

use sidecore_socket::{Blocking, Descriptor, StreamError, send};
use sidecore_spec_virtio::vhost_user::{BACKEND_CONFIG_CHANGE, FLAGS_VERSION, MessageHeader};

/// The socket that SET_BACKEND_REQ_FD hands over.
///
/// The front end may be as slow as it likes in reading it: no call here waits.
#[derive(Debug)]
pub(crate) struct BackendChannel(OwnedFd);

impl BackendChannel {
    /// `None` if the descriptor is no connected Unix stream socket.
    pub(crate) fn new(socket: OwnedFd) -> Option<Self> {
        (Descriptor::of(&socket) == Descriptor::UnixStream).then_some(Self(socket))
    }

    /// The socket, for the next process.
    pub(crate) fn into_inner(self) -> OwnedFd {
        self.0
    }

    /// Tells the front end that the configuration space has changed. False if
    /// the socket has no room for the message now.
    ///
    /// # Errors
    /// The socket's: the channel is of no further use.
    pub(crate) fn config_changed(&self) -> Result<bool, StreamError> {
        // No acknowledgement is asked for, so that nothing ever comes back on this socket.
        let message = MessageHeader { request: BACKEND_CONFIG_CHANGE, flags: FLAGS_VERSION, payload_bytes: 0 }.encode();
        // A Unix socket takes so small a message whole or not at all.
        match send(&self.0, &message, &[], 0, Blocking::Never) {
            Ok(_) => Ok(true),
            Err(error) if error.would_block() => Ok(false),
            Err(error) => Err(error),
        }
    }
}
