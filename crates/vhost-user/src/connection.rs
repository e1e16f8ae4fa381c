//! Messages over a stream socket, each with its file descriptors.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use sidecore_socket::{Blocking, Descriptor, StreamError, receive, send};

use crate::message::{HEADER_BYTES, Header, MAX_FDS, Message, MessageError, Request};

const _: () = assert!(MAX_FDS <= sidecore_socket::MAX_FDS);

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The socket failed, or more file descriptors came with a message than any message has.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The peer went away in the middle of a message.
    #[error("the peer closed the connection in the middle of a message")]
    Truncated,
    /// What came is no message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A message came with a descriptor that no message has.
    #[error(
        "descriptor {number} of {request} is neither shared memory (a memfd, or a file on tmpfs or hugetlbfs) nor an eventfd, but {is}"
    )]
    Descriptor {
        /// What was asked.
        request: Request,
        /// Which of the message's descriptors, from 1.
        number: usize,
        /// What it is.
        is: String,
    },
}

/// One end of a vhost-user socket.
///
/// A message that it hands out has descriptors of memory files and eventfds
/// only, which anybody may close. It keeps all others that the peer has sent:
/// to drop a connection may take for ever if the peer likes it to.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// Descriptors that belong to no message.
    refused: Vec<OwnedFd>,
}

impl Connection {
    /// Speaks vhost-user over a connected, blocking stream.
    #[must_use]
    pub const fn new(stream: UnixStream) -> Self {
        Self { stream, refused: Vec::new() }
    }

    /// The socket, for its timeouts, or for shutting it down.
    #[must_use]
    pub const fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Waits for a message, request or reply; `None` when the peer closed the
    /// connection between two messages.
    ///
    /// Shutting the socket down ends the wait, wherever in a message it is.
    ///
    /// # Errors
    /// After any [`ConnectionError`] the stream is out of step and of no
    /// further use.
    pub fn receive(&mut self) -> Result<Option<Message>, ConnectionError> {
        let mut fds = Vec::new();
        let received = self.receive_with(&mut fds);
        self.refused.append(&mut fds);
        received
    }

    /// The same; descriptors that belong to no message are left in `fds`.
    fn receive_with(&self, fds: &mut Vec<OwnedFd>) -> Result<Option<Message>, ConnectionError> {
        let mut header = [0; HEADER_BYTES];
        if !self.fill(&mut header, fds)? {
            return Ok(None);
        }
        let header = Header::parse(&header)?;
        let mut payload = vec![0; header.payload_bytes];
        if !payload.is_empty() && !self.fill(&mut payload, fds)? {
            return Err(ConnectionError::Truncated);
        }
        for (number, fd) in (1..).zip(&*fds) {
            if let Descriptor::Other(is) = Descriptor::of(fd) {
                return Err(ConnectionError::Descriptor { request: header.request, number, is });
            }
        }
        Ok(Some(Message::parse(header, &payload, std::mem::take(fds))?))
    }

    /// Sends a message with its descriptors, which stay the caller's.
    ///
    /// # Errors
    /// [`ConnectionError::Stream`].
    pub fn send(&mut self, message: &Message) -> Result<(), ConnectionError> {
        let bytes = message.to_bytes();
        let (mut rest, mut fds) = (bytes.as_slice(), message.fds.as_slice());
        while !rest.is_empty() {
            let sent = send(&self.stream, rest, fds, MAX_FDS, Blocking::Wait)?;
            // The descriptors went with the first byte.
            fds = &[];
            rest = rest.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// Reads until `bytes` is full. False if the peer closed the connection
    /// before the first byte.
    fn fill(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<bool, ConnectionError> {
        let mut filled = 0_usize;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match receive(&self.stream, rest, fds, MAX_FDS, Blocking::Wait)? {
                0 if filled == 0 => return Ok(false),
                0 => return Err(ConnectionError::Truncated),
                count => filled = filled.saturating_add(count),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
