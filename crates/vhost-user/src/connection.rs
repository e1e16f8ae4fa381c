//! Messages over a stream socket, each with its file descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::message::{HEADER_BYTES, Header, MAX_FDS, Message, MessageError};

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The socket failed.
    #[error("socket: {0}")]
    Io(#[from] io::Error),
    /// The peer went away in the middle of a message.
    #[error("the peer closed the connection in the middle of a message")]
    Truncated,
    /// More file descriptors came with a message than any message has.
    #[error("more than {MAX_FDS} file descriptors with one message")]
    TooManyFds,
    /// What came is no message.
    #[error(transparent)]
    Message(#[from] MessageError),
}

/// One end of a vhost-user socket.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Speaks vhost-user over a connected, blocking stream.
    #[must_use]
    pub const fn new(stream: UnixStream) -> Self {
        Self { stream }
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
        let mut header = [0; HEADER_BYTES];
        if !self.fill(&mut header, &mut fds)? {
            return Ok(None);
        }
        let header = Header::parse(&header)?;
        let mut payload = vec![0; header.payload_bytes];
        if !payload.is_empty() && !self.fill(&mut payload, &mut fds)? {
            return Err(ConnectionError::Truncated);
        }
        Ok(Some(Message::parse(header, &payload, fds)?))
    }

    /// Sends a message with its descriptors, which stay the caller's.
    ///
    /// # Errors
    /// [`ConnectionError::Io`], [`ConnectionError::TooManyFds`].
    pub fn send(&mut self, message: &Message) -> Result<(), ConnectionError> {
        let bytes = message.to_bytes();
        let fds: Vec<_> = message.fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        // The space may have room for more, by its alignment.
        let fits = fds.len() <= MAX_FDS && (fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
        if !fits {
            return Err(ConnectionError::TooManyFds);
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let sent = match sendmsg(&self.stream, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => continue,
                sent => sent.map_err(io::Error::from)?,
            };
            // The descriptors went with the first byte.
            control.clear();
            rest = rest.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// Reads until `bytes` is full. False if the peer closed the connection
    /// before the first byte.
    fn fill(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<bool, ConnectionError> {
        let mut filled = 0_usize;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.read(rest, fds)? {
                0 if filled == 0 => return Ok(false),
                0 => return Err(ConnectionError::Truncated),
                count => filled = filled.saturating_add(count),
            }
        }
        Ok(true)
    }

    fn read(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, ConnectionError> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match recvmsg(&self.stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                received => break received.map_err(io::Error::from)?,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        // What did not fit the kernel has closed already; what did is closed
        // with `fds`.
        if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
            return Err(ConnectionError::TooManyFds);
        }
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests;
