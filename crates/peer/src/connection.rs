//! Messages and their file descriptors over a stream socket. No call here waits.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_socket::{Blocking, Descriptor, StreamError, receive, send};

use crate::snapshot::{ConnectionState, ExportFds, ResumeError, ResumeFds};

/// Buffers that have grown beyond this are freed after their message.
const KEPT_BYTES: usize = 8 << 10;

/// A protocol's messages: a header of a fixed size, a payload with the size in the header, and file
/// descriptors beside them.
pub trait Codec: Send + 'static {
    /// The bytes of a header, an array.
    type HeaderBytes: Default + AsRef<[u8]> + AsMut<[u8]> + Send;
    /// A header whose payload size is within the protocol's limit.
    type Header: Copy + Send;
    /// A complete message.
    type Message: Send + 'static;
    /// The subject of a message, for errors.
    type Kind: fmt::Debug + fmt::Display + Send;
    /// The reason why bytes are no message.
    type Error: Error + Send + 'static;

    /// The largest number of file descriptors of one message.
    const MAX_FDS: usize;
    /// The largest number of sockets that a peer may hand over on one connection.
    const MAX_SOCKETS: usize = 0;

    /// Parses a header.
    ///
    /// # Errors
    /// The connection has to be closed.
    fn parse_header(bytes: &Self::HeaderBytes) -> Result<Self::Header, Self::Error>;

    /// Returns the size of the payload behind a header.
    fn payload_bytes(header: Self::Header) -> usize;

    /// Returns the subject of the message behind a header.
    fn kind_of(header: Self::Header) -> Self::Kind;

    /// Returns the subject of the message.
    fn kind(message: &Self::Message) -> Self::Kind;

    /// Whether a connected Unix stream socket may come with this message.
    fn takes_socket(_: Self::Header) -> bool {
        false
    }

    /// Parses a message; `fds` are memory files, eventfds, and duplicates of sockets.
    ///
    /// # Errors
    /// The connection has to be closed.
    fn parse(
        header: Self::Header,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Self::Message, Self::Error>;

    /// Appends a message's bytes to `bytes`. Returns the message's descriptors.
    fn write(message: Self::Message, bytes: &mut Vec<u8>) -> Vec<OwnedFd>;
}

/// The reason why a connection ends.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError<E: Error + 'static, K: fmt::Debug + fmt::Display> {
    /// The socket failed, or a message came with more file descriptors than the protocol allows.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The peer closed the connection in the middle of a message.
    #[error("the peer closed the connection in the middle of a message")]
    Truncated,
    /// The bytes are no message.
    #[error(transparent)]
    Message(E),
    /// A message was to be sent while another one is in flight.
    #[error("the previous message has not been sent yet")]
    Busy,
    /// A message came with a descriptor of a kind that no message has.
    #[error(
        "descriptor {number} of {message} is neither shared memory (a memfd, or a file on tmpfs or \
         hugetlbfs) nor an eventfd, but {is}"
    )]
    Descriptor {
        /// The subject of the message.
        message: K,
        /// The descriptor's number in the message, from 1.
        number: usize,
        /// The kernel's name for the file.
        is: String,
    },
    /// The peer has handed over more sockets than the protocol uses.
    #[error("more than {max} sockets with {message} on one connection")]
    TooManySockets {
        /// The subject of the message.
        message: K,
        /// The protocol's limit for one connection.
        max: usize,
    },
    /// A descriptor cannot be duplicated.
    #[error("cannot duplicate a descriptor: {0}")]
    Duplicate(io::Error),
}

/// The error of a codec's connection.
pub type ErrorOf<C> = ConnectionError<<C as Codec>::Error, <C as Codec>::Kind>;

/// The result of a read.
#[derive(Debug)]
pub enum Received<M> {
    /// A complete message.
    Message(M),
    /// No message yet, or a part of one: read again when the socket is readable.
    Nothing,
    /// The peer has closed the connection between two messages.
    Closed,
}

/// One end of a socket.
///
/// One message is read at a time, and no byte of the next one, so that each message gets its own
/// descriptors. One message is sent at a time, with a call of its own, because QEMU's vfio-user
/// client expects a header in one piece.
///
/// A message has only descriptors of memory files and eventfds, which close at once, and duplicates
/// of sockets. The connection keeps the sockets, and all other descriptors that the peer has sent;
/// descriptors that were never received are in the socket. So the drop of a connection may take as
/// long as the peer likes: a thread that serves others must not do it.
pub struct Connection<C: Codec> {
    stream: UnixStream,
    incoming: Incoming<C>,
    outgoing: Outgoing,
    /// The sockets whose duplicates were given to messages.
    sockets: Vec<OwnedFd>,
}

/// The message that is being read.
struct Incoming<C: Codec> {
    header: C::HeaderBytes,
    /// The header, once it is complete.
    parsed: Option<C::Header>,
    payload: Vec<u8>,
    /// The number of bytes received of the header, or of the payload once the header is complete.
    filled: usize,
    fds: Vec<OwnedFd>,
}

/// The message that is being sent.
#[derive(Default)]
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

/// The progress of filling a buffer.
enum Filled {
    Whole,
    Partly,
    Ended,
}

impl<C: Codec> Connection<C> {
    /// Makes a connection from a connected stream, which need not be in non-blocking mode.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        let header = C::HeaderBytes::default();
        let incoming =
            Incoming { header, parsed: None, payload: Vec::new(), filled: 0, fds: Vec::new() };
        Self { stream, incoming, outgoing: Outgoing::default(), sockets: Vec::new() }
    }

    /// Reads the bytes that have come.
    ///
    /// # Errors
    /// After any error but [`ConnectionError::Busy`] the stream is out of step and cannot be used.
    pub fn receive(&mut self) -> Result<Received<C::Message>, ErrorOf<C>> {
        let Self { stream, incoming, .. } = self;
        let header = match incoming.parsed {
            Some(header) => header,
            None => {
                match fill(
                    stream,
                    incoming.header.as_mut(),
                    &mut incoming.filled,
                    &mut incoming.fds,
                    C::MAX_FDS,
                )? {
                    Filled::Whole => {}
                    Filled::Partly => return Ok(Received::Nothing),
                    Filled::Ended if incoming.filled == 0 => return Ok(Received::Closed),
                    Filled::Ended => return Err(ConnectionError::Truncated),
                }
                // The payload's size is checked here, before memory is allocated for it.
                let header = C::parse_header(&incoming.header).map_err(ConnectionError::Message)?;
                incoming.payload.clear();
                incoming.payload.resize(C::payload_bytes(header), 0);
                incoming.filled = 0;
                *incoming.parsed.insert(header)
            }
        };
        match fill(
            stream,
            &mut incoming.payload,
            &mut incoming.filled,
            &mut incoming.fds,
            C::MAX_FDS,
        )? {
            Filled::Whole => {}
            Filled::Partly => return Ok(Received::Nothing),
            Filled::Ended => return Err(ConnectionError::Truncated),
        }
        self.check(header)?;
        let incoming = &mut self.incoming;
        incoming.parsed = None;
        incoming.filled = 0;
        let message = C::parse(header, &incoming.payload, std::mem::take(&mut incoming.fds));
        shrink(&mut incoming.payload);
        Ok(Received::Message(message.map_err(ConnectionError::Message)?))
    }

    /// Checks that a message's descriptors are of permitted kinds. Replaces a socket by a
    /// duplicate; the connection keeps the socket itself.
    fn check(&mut self, header: C::Header) -> Result<(), ErrorOf<C>> {
        for (number, fd) in (1..).zip(&mut self.incoming.fds) {
            let is = match Descriptor::of(&*fd) {
                Descriptor::Memory | Descriptor::Event => continue,
                Descriptor::UnixStream if C::takes_socket(header) => {
                    let max = C::MAX_SOCKETS;
                    if self.sockets.len() >= max {
                        return Err(ConnectionError::TooManySockets {
                            message: C::kind_of(header),
                            max,
                        });
                    }
                    let duplicate = fd.try_clone().map_err(ConnectionError::Duplicate)?;
                    self.sockets.push(std::mem::replace(fd, duplicate));
                    continue;
                }
                Descriptor::UnixStream => "a Unix socket".to_owned(),
                Descriptor::Other(is) => is,
            };
            return Err(ConnectionError::Descriptor { message: C::kind_of(header), number, is });
        }
        Ok(())
    }

    /// Sends a message. False if a part of it is left for [`Connection::flush`], when the socket is
    /// writable again.
    ///
    /// # Errors
    /// [`ConnectionError::Busy`] and [`ConnectionError::Stream`].
    pub fn send(&mut self, message: C::Message) -> Result<bool, ErrorOf<C>> {
        let outgoing = &mut self.outgoing;
        if !outgoing.bytes.is_empty() {
            return Err(ConnectionError::Busy);
        }
        outgoing.fds = C::write(message, &mut outgoing.bytes);
        self.flush()
    }

    /// Sends the rest of a message. True when the whole message is sent.
    ///
    /// # Errors
    /// The socket's error.
    pub fn flush(&mut self) -> Result<bool, ErrorOf<C>> {
        let Self { stream, outgoing, .. } = self;
        while let Some(rest) = outgoing.bytes.get(outgoing.sent..).filter(|rest| !rest.is_empty()) {
            match send(&*stream, rest, &outgoing.fds, C::MAX_FDS, Blocking::Never) {
                Ok(sent) => {
                    outgoing.sent = outgoing.sent.saturating_add(sent);
                    // The descriptors were sent with the first byte.
                    outgoing.fds.clear();
                }
                Err(error) if error.would_block() => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        outgoing.bytes.clear();
        outgoing.sent = 0;
        shrink(&mut outgoing.bytes);
        Ok(true)
    }

    #[cfg(test)]
    pub(crate) fn kept_bytes(&self) -> usize {
        self.incoming.payload.capacity().max(self.outgoing.bytes.capacity())
    }

    /// Whether a part of a message has still to be sent.
    pub(crate) const fn is_sending(&self) -> bool {
        !self.outgoing.bytes.is_empty()
    }

    /// Ends the connection in both directions. The peer sees the end at once, although the socket
    /// is not closed.
    pub(crate) fn shut_down(&self) {
        // The only error is that the peer has closed the connection.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether the peer has closed its end, or has ended.
    pub(crate) fn is_hung_up(&self) -> bool {
        let events = PollFlags::RDHUP | PollFlags::HUP;
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let is_ready = poll(&mut polled, Some(&Timespec::default()));
        is_ready.is_ok() && polled.iter().any(|fd| fd.revents().intersects(events))
    }

    /// Whether the connection can be exported. A partly received message must have no descriptor
    /// whose close may wait, because the process that resumes the connection would close it.
    pub(crate) fn can_be_exported(&self) -> bool {
        self.incoming.fds.iter().all(|fd| Descriptor::of(fd).closes_at_once())
    }

    /// Exports the stream, and the messages that are partly read or sent.
    pub(crate) fn export(self, fds: &mut ExportFds) -> ConnectionState {
        let Self { stream, incoming, outgoing, sockets } = self;
        let mut bytes = incoming.header.as_ref().to_vec();
        match incoming.parsed {
            Some(_) => bytes.extend(incoming.payload.iter().take(incoming.filled)),
            None => bytes.truncate(incoming.filled),
        }
        ConnectionState {
            stream: fds.put(stream.into()),
            incoming: bytes,
            incoming_fds: fds.put_all(incoming.fds),
            outgoing: outgoing.bytes.get(outgoing.sent..).unwrap_or_default().to_vec(),
            outgoing_fds: fds.put_all(outgoing.fds),
            sockets: fds.put_all(sockets),
        }
    }

    /// Restores the messages that another process has partly read or sent, on a new connection.
    pub(crate) fn resume(
        &mut self,
        state: &ConnectionState,
        fds: &mut ResumeFds,
    ) -> Result<(), ResumeError> {
        let Self { incoming, outgoing, sockets, .. } = self;
        *sockets = fds.take_all(&state.sockets)?;
        incoming.fds = fds.take_all(&state.incoming_fds)?;
        let copy = |to: &mut [u8], from: &[u8]| {
            to.iter_mut().zip(from).map(|(to, from)| *to = *from).count()
        };
        incoming.filled = copy(incoming.header.as_mut(), &state.incoming);
        if let Some(payload) = state.incoming.get(incoming.header.as_ref().len()..) {
            let header = C::parse_header(&incoming.header)
                .map_err(|error| ResumeError::Connection(error.to_string()))?;
            incoming.payload.resize(C::payload_bytes(header), 0);
            incoming.filled = copy(&mut incoming.payload, payload);
            incoming.parsed = Some(header);
        }
        outgoing.bytes.clone_from(&state.outgoing);
        outgoing.fds = fds.take_all(&state.outgoing_fds)?;
        Ok(())
    }
}

impl<C: Codec> AsFd for Connection<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl<C: Codec> fmt::Debug for Connection<C> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Connection").field("stream", &self.stream).finish_non_exhaustive()
    }
}

fn shrink(buffer: &mut Vec<u8>) {
    if buffer.capacity() > KEPT_BYTES {
        *buffer = Vec::new();
    }
}

/// Reads until `bytes` is full or the socket is empty.
fn fill(
    stream: &UnixStream,
    bytes: &mut [u8],
    filled: &mut usize,
    fds: &mut Vec<OwnedFd>,
    max_fds: usize,
) -> Result<Filled, StreamError> {
    while let Some(rest) = bytes.get_mut(*filled..).filter(|rest| !rest.is_empty()) {
        match receive(stream, rest, fds, max_fds, Blocking::Never) {
            Ok(0) => return Ok(Filled::Ended),
            Ok(count) => *filled = filled.saturating_add(count),
            Err(error) if error.would_block() => return Ok(Filled::Partly),
            Err(error) => return Err(error),
        }
    }
    Ok(Filled::Whole)
}
