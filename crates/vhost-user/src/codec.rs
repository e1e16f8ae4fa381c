//! The messages of vhost-user for the socket service.

use std::os::fd::OwnedFd;

use crate::message::{HEADER_BYTES, Header, MAX_FDS, Message, MessageError, Request};

/// The codec of vhost-user's messages.
#[derive(Debug)]
pub struct Codec;

impl sidecore_peer::Codec for Codec {
    type HeaderBytes = [u8; HEADER_BYTES];
    type Header = Header;
    type Message = Message;
    type Kind = Request;
    type Error = MessageError;

    const MAX_FDS: usize = MAX_FDS;
    /// QEMU sends one socket per connection.
    const MAX_SOCKETS: usize = 8;

    fn parse_header(bytes: &[u8; HEADER_BYTES]) -> Result<Header, MessageError> {
        Header::parse(bytes)
    }

    fn payload_bytes(header: Header) -> usize {
        header.payload_bytes
    }

    fn kind_of(header: Header) -> Request {
        header.request
    }

    fn kind(message: &Message) -> Request {
        message.request
    }

    fn takes_socket(header: Header) -> bool {
        header.request == Request::SetBackendReqFd
    }

    fn parse(header: Header, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Message, MessageError> {
        Message::parse(header, payload, fds)
    }

    fn write(message: Message, bytes: &mut Vec<u8>) -> Vec<OwnedFd> {
        bytes.extend_from_slice(&message.to_bytes());
        message.fds
    }
}

/// One end of a vhost-user socket.
pub type Connection = sidecore_peer::Connection<Codec>;
/// The reason why a connection ends.
pub type ConnectionError = sidecore_peer::ErrorOf<Codec>;
/// The result of a read.
pub type Received = sidecore_peer::Received<Message>;

#[cfg(test)]
mod tests;
