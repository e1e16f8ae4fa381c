//! Messages over a stream socket, each with its file descriptors, without ever waiting.

use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use sidecore_socket::{Blocking, Descriptor, StreamError, receive, send};

use crate::command::Command;
use crate::handover::{ConnectionState, Leaving, Left, ResumeError};
use crate::message::{HEADER_BYTES, Header, MAX_FDS, Message, MessageError};

/// Buffers that have grown beyond this are given back after their message.
const KEPT_BYTES: usize = 8 << 10;

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
    /// A message is to be sent while another one is still under way.
    #[error("the message before has not been sent yet")]
    Busy,
    /// A message came with a descriptor that no message has.
    #[error(
        "descriptor {number} of {command} is neither shared memory (a memfd, or a file on tmpfs or hugetlbfs) nor an eventfd, but {is}"
    )]
    Descriptor {
        /// What was asked.
        command: Command,
        /// Which of the message's descriptors, from 1.
        number: usize,
        /// What it is.
        is: String,
    },
}

/// What there is to receive.
#[derive(Debug)]
pub enum Received {
    /// A whole message.
    Message(Message),
    /// Nothing, or a part of a message: look again when the socket is readable.
    Nothing,
    /// The peer has closed the connection, between two messages.
    Closed,
}

/// One end of a vfio-user socket.
///
/// One message is read at a time, and no byte of the next one: so its descriptors are known to be its own. One message
/// is sent at a time, with a call of its own, because QEMU's client expects a header in one piece.
///
/// A message that it hands out has descriptors of memory files and eventfds only, which anybody may close. It keeps all others
/// that the peer has sent, and the socket has those that were never received: to drop a connection may take for ever if the
/// peer likes it to, so whoever serves others drops it on a thread of its own.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    incoming: Incoming,
    outgoing: Outgoing,
}

/// The message that is being read.
#[derive(Debug, Default)]
struct Incoming {
    header: [u8; HEADER_BYTES],
    /// The header, once it is whole.
    parsed: Option<Header>,
    payload: Vec<u8>,
    /// Bytes there are of the header, or of the payload once the header is whole.
    filled: usize,
    fds: Vec<OwnedFd>,
}

/// The message that is being sent.
#[derive(Debug, Default)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

/// How far a buffer got.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Filled {
    Whole,
    Partly,
    Ended,
}

impl Connection {
    /// Speaks vfio-user over a connected stream, which need not be in non-blocking mode.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, incoming: Incoming::default(), outgoing: Outgoing::default() }
    }

    /// Takes what has come.
    ///
    /// # Errors
    /// After any [`ConnectionError`] the stream is out of step and of no further use.
    pub fn receive(&mut self) -> Result<Received, ConnectionError> {
        let Self { stream, incoming, .. } = self;
        let header = match incoming.parsed {
            Some(header) => header,
            None => {
                match fill(stream, &mut incoming.header, &mut incoming.filled, &mut incoming.fds)? {
                    Filled::Whole => {}
                    Filled::Partly => return Ok(Received::Nothing),
                    Filled::Ended if incoming.filled == 0 => return Ok(Received::Closed),
                    Filled::Ended => return Err(ConnectionError::Truncated),
                }
                // The payload's size is checked here, before there is room for it.
                let header = Header::parse(&incoming.header)?;
                incoming.payload.clear();
                incoming.payload.resize(header.payload_bytes, 0);
                incoming.filled = 0;
                *incoming.parsed.insert(header)
            }
        };
        match fill(stream, &mut incoming.payload, &mut incoming.filled, &mut incoming.fds)? {
            Filled::Whole => {}
            Filled::Partly => return Ok(Received::Nothing),
            Filled::Ended => return Err(ConnectionError::Truncated),
        }
        check(header.command, &incoming.fds)?;
        incoming.parsed = None;
        incoming.filled = 0;
        let message = Message::parse(header, &incoming.payload, std::mem::take(&mut incoming.fds));
        give_back(&mut incoming.payload);
        Ok(Received::Message(message))
    }

    /// Sends a message. False if some of it is left for [`Connection::flush`], when the socket is writable again.
    ///
    /// # Errors
    /// [`ConnectionError::Busy`] if one is under way already, and [`ConnectionError::Stream`].
    pub fn send(&mut self, message: Message) -> Result<bool, ConnectionError> {
        let outgoing = &mut self.outgoing;
        if !outgoing.bytes.is_empty() {
            return Err(ConnectionError::Busy);
        }
        if message.fds.len() > MAX_FDS {
            return Err(StreamError::TooManyFds { max: MAX_FDS }.into());
        }
        message.write(&mut outgoing.bytes);
        outgoing.fds = message.fds;
        self.flush()
    }

    /// Goes on sending. True when nothing is left.
    ///
    /// # Errors
    /// The socket's.
    pub fn flush(&mut self) -> Result<bool, ConnectionError> {
        let Self { stream, outgoing, .. } = self;
        while let Some(rest) = outgoing.bytes.get(outgoing.sent..).filter(|rest| !rest.is_empty()) {
            match send(&*stream, rest, &outgoing.fds, MAX_FDS, Blocking::Never) {
                Ok(sent) => {
                    outgoing.sent = outgoing.sent.saturating_add(sent);
                    // The descriptors went with the first byte.
                    outgoing.fds.clear();
                }
                Err(error) if error.would_block() => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        outgoing.bytes.clear();
        outgoing.sent = 0;
        give_back(&mut outgoing.bytes);
        Ok(true)
    }

    /// Ends the conversation, both ways; the peer sees that at once, though the socket is not closed.
    pub(crate) fn shut_down(&self) {
        // It fails if the peer has closed it, which is as good.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Whether a message's descriptors are such as messages have.
fn check(command: Command, fds: &[OwnedFd]) -> Result<(), ConnectionError> {
    for (number, fd) in (1..).zip(fds) {
        if let Descriptor::Other(is) = Descriptor::of(fd) {
            return Err(ConnectionError::Descriptor { command, number, is });
        }
    }
    Ok(())
}

impl Connection {
    /// Whether it can be left to another process: not with descriptors of a message's that no message has, which are to be
    /// closed where nobody waits.
    pub(crate) fn can_be_left(&self) -> bool {
        self.incoming.fds.iter().all(|fd| Descriptor::of(fd).closes_at_once())
    }

    /// Leaves the stream to another process, with what is under way.
    pub(crate) fn leave(self, fds: &mut Leaving) -> ConnectionState {
        let Self { stream, incoming, outgoing } = self;
        let Incoming { header, parsed, payload, filled, fds: incoming_fds } = incoming;
        let parts: [&[u8]; 2] = if parsed.is_some() { [&header, &payload] } else { [&header, &[]] };
        let filled = if parsed.is_some() { filled.saturating_add(HEADER_BYTES) } else { filled };
        let unsent = outgoing.bytes.get(outgoing.sent..).unwrap_or_default();
        ConnectionState {
            stream: fds.put(stream.into()),
            incoming: parts.concat().into_iter().take(filled).collect(),
            incoming_fds: fds.put_all(incoming_fds),
            outgoing: unsent.to_vec(),
            outgoing_fds: fds.put_all(outgoing.fds),
        }
    }

    /// Goes on with what was under way on the stream of another process; nothing else has been done with it.
    pub(crate) fn resume(&mut self, state: &ConnectionState, fds: &mut Left) -> Result<(), ResumeError> {
        let Self { incoming, outgoing, .. } = self;
        incoming.fds = fds.take_all(&state.incoming_fds)?;
        let copy = |to: &mut [u8], from: &[u8]| to.iter_mut().zip(from).map(|(to, from)| *to = *from).count();
        incoming.filled = copy(&mut incoming.header, &state.incoming);
        if incoming.filled == HEADER_BYTES {
            let header = Header::parse(&incoming.header).map_err(ConnectionError::from)?;
            incoming.payload.resize(header.payload_bytes, 0);
            incoming.filled = copy(&mut incoming.payload, state.incoming.get(HEADER_BYTES..).unwrap_or_default());
            incoming.parsed = Some(header);
        }
        outgoing.bytes.clone_from(&state.outgoing);
        outgoing.fds = fds.take_all(&state.outgoing_fds)?;
        Ok(())
    }

    /// Whether an answer is still to be sent.
    pub(crate) const fn is_sending(&self) -> bool {
        !self.outgoing.bytes.is_empty()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn give_back(buffer: &mut Vec<u8>) {
    if buffer.capacity() > KEPT_BYTES {
        *buffer = Vec::new();
    }
}

/// Reads until `bytes` is full or there is nothing more.
fn fill(
    stream: &UnixStream,
    bytes: &mut [u8],
    filled: &mut usize,
    fds: &mut Vec<OwnedFd>,
) -> Result<Filled, StreamError> {
    while let Some(rest) = bytes.get_mut(*filled..).filter(|rest| !rest.is_empty()) {
        match receive(stream, rest, fds, MAX_FDS, Blocking::Never) {
            Ok(0) => return Ok(Filled::Ended),
            Ok(count) => *filled = filled.saturating_add(count),
            Err(error) if error.would_block() => return Ok(Filled::Partly),
            Err(error) => return Err(error),
        }
    }
    Ok(Filled::Whole)
}

#[cfg(test)]
mod tests;
