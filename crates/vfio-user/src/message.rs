//! The wire format: a header of sixteen bytes, a payload with the command's structure, and file
//! descriptors beside the message. All numbers are in the machine's byte order (specification,
//! "Protocol Specification").

use std::os::fd::OwnedFd;

use sidecore_spec_nvme::vfio_user::{
    AccessHeader, Command, FLAG_ERROR, FLAG_NO_REPLY, MessageHeader, TYPE_COMMAND, TYPE_MASK,
    TYPE_REPLY,
};

pub use crate::body::{
    Body, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, IrqSet, RegionAccess, RegionInfo, SparseArea,
    Version,
};

/// The size of a message's header.
pub const HEADER_BYTES: usize = MessageHeader::BYTES;
/// The largest number of bytes that one REGION_READ or REGION_WRITE moves, announced in the version
/// data (`max_data_xfer_size`). QEMU reads the configuration space with one message, and registers
/// otherwise.
pub const MAX_TRANSFER_BYTES: usize = 64 << 10;
/// The size of a REGION_READ or REGION_WRITE before the data.
pub const ACCESS_BYTES: usize = AccessHeader::BYTES;
/// The largest payload that is read, of a command or a reply. The payload of a command that is not
/// served is read as well, so that the stream stays in step; a payload may also be larger than its
/// structure, because clients pad structures to the size of their reply buffer.
pub const MAX_PAYLOAD_BYTES: usize = ACCESS_BYTES + MAX_TRANSFER_BYTES;
/// The largest number of file descriptors with one message (`max_msg_fds`). QEMU sends the eventfds
/// of so many vectors at once, and accepts no larger limit.
pub const MAX_FDS: usize = 16;
/// The largest number of mappable areas of a region.
pub const MAX_AREAS: usize = 8;

/// The reason why bytes are no message. The stream is out of step afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The message is smaller than its header.
    #[error("{command} of {size_bytes} bytes, less than a header")]
    Undersized {
        /// The command in the message's header.
        command: Command,
        /// The size in the header.
        size_bytes: u32,
    },
    /// The message is larger than every valid message.
    #[error("{command} of {size_bytes} bytes, more than the largest message")]
    Oversized {
        /// The command in the message's header.
        command: Command,
        /// The size in the header.
        size_bytes: u32,
    },
    /// The message is neither a command nor a reply.
    #[error("{command} of message type {kind}")]
    UnknownType {
        /// The command in the message's header.
        command: Command,
        /// The type in the header.
        kind: u32,
    },
}

/// The header's flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// The message is the reply to a command.
    pub reply: bool,
    /// The sender expects no reply.
    pub no_reply: bool,
    /// The command of this reply failed.
    pub error: bool,
}

/// A message's first sixteen bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sender's number; the reply repeats it.
    pub id: u16,
    /// The command, also in its reply.
    pub command: Command,
    /// The size of the payload that follows, at most [`MAX_PAYLOAD_BYTES`].
    pub payload_bytes: usize,
    /// The message's type and options.
    pub flags: Flags,
    /// The errno value of an error reply.
    pub errno: u32,
}

impl Header {
    /// Reads a header. Flags without a meaning are ignored.
    ///
    /// # Errors
    /// See [`MessageError`].
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let MessageHeader { id, command, size_bytes, flags, errno } = MessageHeader::decode(bytes);
        let command = Command::from_code(command);
        let reply = match flags & TYPE_MASK {
            TYPE_COMMAND => false,
            TYPE_REPLY => true,
            kind => return Err(MessageError::UnknownType { command, kind }),
        };
        let size = usize::try_from(size_bytes).unwrap_or(usize::MAX);
        let payload_bytes = size
            .checked_sub(HEADER_BYTES)
            .ok_or(MessageError::Undersized { command, size_bytes })?;
        if payload_bytes > MAX_PAYLOAD_BYTES {
            return Err(MessageError::Oversized { command, size_bytes });
        }
        Ok(Self {
            id,
            command,
            payload_bytes,
            flags: Flags {
                reply,
                no_reply: flags & FLAG_NO_REPLY != 0,
                error: flags & FLAG_ERROR != 0,
            },
            errno,
        })
    }

    fn write(self, to: &mut Vec<u8>) {
        let mut flags = if self.flags.reply { TYPE_REPLY } else { TYPE_COMMAND };
        if self.flags.no_reply {
            flags |= FLAG_NO_REPLY;
        }
        if self.flags.error {
            flags |= FLAG_ERROR;
        }
        // A size above `u32::MAX` is one that every peer refuses.
        let size_bytes =
            u32::try_from(self.payload_bytes.saturating_add(HEADER_BYTES)).unwrap_or(u32::MAX);
        let header = MessageHeader {
            id: self.id,
            command: self.command.code(),
            size_bytes,
            flags,
            errno: self.errno,
        };
        to.extend_from_slice(&header.encode());
    }
}

/// A command or a reply.
#[derive(Debug)]
pub struct Message {
    /// The sender's number; the reply repeats it.
    pub id: u16,
    /// The command, also in its reply.
    pub command: Command,
    /// The message's type and options.
    pub flags: Flags,
    /// The errno value of an error reply.
    pub errno: u32,
    /// The structure and the data behind the header.
    pub body: Body,
    /// The file descriptors beside the message.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// Makes a command that expects a reply.
    #[must_use]
    pub const fn command(id: u16, command: Command, body: Body, fds: Vec<OwnedFd>) -> Self {
        let flags = Flags { reply: false, no_reply: false, error: false };
        Self { id, command, flags, errno: 0, body, fds }
    }

    /// Makes the command one that expects no reply.
    #[must_use]
    pub const fn without_reply(mut self) -> Self {
        self.flags.no_reply = true;
        self
    }

    /// Makes a reply to a successful command.
    #[must_use]
    pub const fn reply(id: u16, command: Command, body: Body, fds: Vec<OwnedFd>) -> Self {
        let flags = Flags { reply: true, no_reply: false, error: false };
        Self { id, command, flags, errno: 0, body, fds }
    }

    /// Makes an error reply: "the reply message must only include the reply header".
    #[must_use]
    pub const fn refusal(id: u16, command: Command, errno: u32) -> Self {
        let flags = Flags { reply: true, no_reply: false, error: true };
        Self { id, command, flags, errno, body: Body::Empty, fds: Vec::new() }
    }

    /// Makes a message from a received header, payload and descriptors. A payload without its
    /// command's structure is [`Body::Malformed`].
    #[must_use]
    pub fn parse(header: Header, payload: &[u8], fds: Vec<OwnedFd>) -> Self {
        let Header { id, command, flags, errno, .. } = header;
        let body = match (flags.reply && flags.error, payload.len()) {
            (false, _) => Body::parse(command, flags.reply, payload),
            (true, 0) => Body::Empty,
            (true, len_bytes) => Body::Malformed(len_bytes),
        };
        Self { id, command, flags, errno, body, fds }
    }

    /// Appends the header and the payload to `to`.
    pub fn write(&self, to: &mut Vec<u8>) {
        let payload_bytes = self.body.len_bytes();
        to.reserve(payload_bytes.saturating_add(HEADER_BYTES));
        Header {
            id: self.id,
            command: self.command,
            payload_bytes,
            flags: self.flags,
            errno: self.errno,
        }
        .write(to);
        self.body.write(to);
    }
}

#[cfg(test)]
mod tests;
