//! The messages of vfio-user for the socket service.

use std::os::fd::OwnedFd;

use crate::message::{HEADER_BYTES, Header, MAX_FDS, Message, MessageError};
use sidecore_spec_nvme::vfio_user::Command;

/// The codec of vfio-user's messages.
#[derive(Debug)]
pub struct Codec;

impl sidecore_peer::Codec for Codec {
    type HeaderBytes = [u8; HEADER_BYTES];
    type Header = Header;
    type Message = Message;
    type Kind = Command;
    type Error = MessageError;

    const MAX_FDS: usize = MAX_FDS;

    fn parse_header(bytes: &[u8; HEADER_BYTES]) -> Result<Header, MessageError> {
        Header::parse(bytes)
    }

    fn payload_bytes(header: Header) -> usize {
        header.payload_bytes
    }

    fn kind_of(header: Header) -> Command {
        header.command
    }

    fn kind(message: &Message) -> Command {
        message.command
    }

    fn parse(header: Header, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Message, MessageError> {
        Ok(Message::parse(header, payload, fds))
    }

    fn write(message: Message, bytes: &mut Vec<u8>) -> Vec<OwnedFd> {
        message.write(bytes);
        message.fds
    }
}

/// One end of a vfio-user socket.
pub type Connection = sidecore_peer::Connection<Codec>;
/// The reason why a connection ends.
pub type ConnectionError = sidecore_peer::ErrorOf<Codec>;
/// The result of a read.
pub type Received = sidecore_peer::Received<Message>;

#[cfg(test)]
mod tests;
