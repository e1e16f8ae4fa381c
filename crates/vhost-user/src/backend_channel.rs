//! The back end's own requests to the front end ("Back-end message types").

use std::os::fd::OwnedFd;

use sidecore_socket::{Blocking, Descriptor, StreamError, send};

use crate::message::HEADER_BYTES;

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGE: u32 = 2;
/// The header's flags: version 1, and no acknowledgement asked for, so that
/// nothing ever comes back on this socket.
const FLAGS: u32 = 1;

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
        let mut message = [0; HEADER_BYTES];
        for (place, word) in message.chunks_exact_mut(size_of::<u32>()).zip([CONFIG_CHANGE, FLAGS, 0]) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        // A Unix socket takes so small a message whole or not at all.
        match send(&self.0, &message, &[], 0, Blocking::Never) {
            Ok(_) => Ok(true),
            Err(error) if error.would_block() => Ok(false),
            Err(error) => Err(error),
        }
    }
}
