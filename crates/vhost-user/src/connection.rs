//! Messages over a stream socket, each with its file descriptors.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use sidecore_socket::{Blocking, Descriptor, StreamError, receive, send};

use crate::message::{HEADER_BYTES, Header, MAX_FDS, Message, MessageError, Request};

/// Times that a front end may replace the channel: QEMU sends one for each
/// connection, and each takes a descriptor until the connection ends.
const MAX_BACKEND_CHANNELS: usize = 8;

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
    /// The front end has replaced its channel for the back end's requests too often.
    #[error("more than {MAX_BACKEND_CHANNELS} channels for the back end's requests on one connection")]
    TooManyBackendChannels,
    /// A descriptor cannot be duplicated.
    #[error("cannot duplicate a descriptor: {0}")]
    Duplicate(io::Error),
}

/// One end of a vhost-user socket.
///
/// A message that it hands out has only descriptors that can be closed without
/// waiting: memory files, eventfds, and duplicates of sockets that the
/// connection keeps open itself. The connection keeps all other descriptors
/// that the peer has sent: dropping a connection may take as long as the peer
/// likes.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// Descriptors that belong to no message.
    refused: Vec<OwnedFd>,
    /// The sockets of SET_BACKEND_REQ_FD, of which messages have duplicates.
    backend_channels: Vec<OwnedFd>,
}

impl Connection {
    /// Speaks vhost-user over a connected, blocking stream.
    #[must_use]
    pub const fn new(stream: UnixStream) -> Self {
        Self { stream, refused: Vec::new(), backend_channels: Vec::new() }
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
    fn receive_with(&mut self, fds: &mut Vec<OwnedFd>) -> Result<Option<Message>, ConnectionError> {
        let mut header = [0; HEADER_BYTES];
        if !self.fill(&mut header, fds)? {
            return Ok(None);
        }
        let header = Header::parse(&header)?;
        let mut payload = vec![0; header.payload_bytes];
        if !payload.is_empty() && !self.fill(&mut payload, fds)? {
            return Err(ConnectionError::Truncated);
        }
        for (number, fd) in (1..).zip(&mut *fds) {
            let is = match Descriptor::of(&*fd) {
                Descriptor::Memory | Descriptor::Event => continue,
                Descriptor::UnixStream if header.request == Request::SetBackendReqFd => {
                    self.keep_backend_channel(fd)?;
                    continue;
                }
                Descriptor::UnixStream => "a Unix socket".to_owned(),
                Descriptor::Other(is) => is,
            };
            return Err(ConnectionError::Descriptor { request: header.request, number, is });
        }
        Ok(Some(Message::parse(header, &payload, std::mem::take(fds))?))
    }

    /// Puts a duplicate in the socket's place, and keeps the socket itself until
    /// the connection is dropped.
    fn keep_backend_channel(&mut self, socket: &mut OwnedFd) -> Result<(), ConnectionError> {
        if self.backend_channels.len() >= MAX_BACKEND_CHANNELS {
            return Err(ConnectionError::TooManyBackendChannels);
        }
        let duplicate = socket.try_clone().map_err(ConnectionError::Duplicate)?;
        self.backend_channels.push(std::mem::replace(socket, duplicate));
        Ok(())
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
