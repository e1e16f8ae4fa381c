//! The wire format: a header of sixteen bytes, a payload whose shape the command decides, and file descriptors beside
//! it. Everything is in the machine's own byte order (specification, "Protocol Specification").

use std::os::fd::OwnedFd;

use sidecore_spec_nvme::vfio_user::{
    AccessHeader, Command, FLAG_ERROR, FLAG_NO_REPLY, MessageHeader, TYPE_COMMAND, TYPE_MASK, TYPE_REPLY,
};

pub use crate::body::{
    Body, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, IrqSet, RegionAccess, RegionInfo, SparseArea, Version,
};

/// Bytes in a message's header.
pub const HEADER_BYTES: usize = MessageHeader::BYTES;
/// Most bytes that one REGION_READ or REGION_WRITE moves; we say so in the version data (`max_data_xfer_size`). QEMU
/// reads the configuration space at once, and registers otherwise.
pub const MAX_TRANSFER_BYTES: usize = 64 << 10;
/// Bytes of a REGION_READ or REGION_WRITE before the data.
pub const ACCESS_BYTES: usize = AccessHeader::BYTES;
/// The largest payload that is read at all, with a command or its reply. One of a command that is not served is read as
/// well, so that the stream stays in step when it is refused; and one that is larger than its structure, because clients
/// pad structures to the room that they have for the reply.
pub const MAX_PAYLOAD_BYTES: usize = ACCESS_BYTES + MAX_TRANSFER_BYTES;
/// Most file descriptors with one message (`max_msg_fds`). QEMU sends the eventfds of so many vectors at once, and takes
/// no larger number than this.
pub const MAX_FDS: usize = 16;
/// Most areas of a region that can be mapped.
pub const MAX_AREAS: usize = 8;

/// Why bytes are not a message. The stream is out of step after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Smaller than its header.
    #[error("{command} of {size_bytes} bytes, less than a header")]
    Undersized {
        /// What was asked.
        command: Command,
        /// The size in its header.
        size_bytes: u32,
    },
    /// Larger than any such message.
    #[error("{command} of {size_bytes} bytes, which none has")]
    Oversized {
        /// What was asked.
        command: Command,
        /// The size in its header.
        size_bytes: u32,
    },
    /// Neither a command nor a reply.
    #[error("{command} of message type {kind}")]
    UnknownType {
        /// What was asked.
        command: Command,
        /// The type in its header.
        kind: u32,
    },
}

/// The header's flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// The message answers a command.
    pub reply: bool,
    /// The sender waits for no answer.
    pub no_reply: bool,
    /// The command failed.
    pub error: bool,
}

/// A message's first sixteen bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sender's own; the reply repeats it.
    pub id: u16,
    /// What is asked, or answered.
    pub command: Command,
    /// Size of the payload that follows, at most [`MAX_PAYLOAD_BYTES`].
    pub payload_bytes: usize,
    /// Its flags.
    pub flags: Flags,
    /// An errno value, in an error reply.
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
        let payload_bytes = size.checked_sub(HEADER_BYTES).ok_or(MessageError::Undersized { command, size_bytes })?;
        if payload_bytes > MAX_PAYLOAD_BYTES {
            return Err(MessageError::Oversized { command, size_bytes });
        }
        Ok(Self {
            id,
            command,
            payload_bytes,
            flags: Flags { reply, no_reply: flags & FLAG_NO_REPLY != 0, error: flags & FLAG_ERROR != 0 },
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
        // A size that does not fit is none that a peer accepts.
        let size_bytes = u32::try_from(self.payload_bytes.saturating_add(HEADER_BYTES)).unwrap_or(u32::MAX);
        let header = MessageHeader { id: self.id, command: self.command.code(), size_bytes, flags, errno: self.errno };
        to.extend_from_slice(&header.encode());
    }
}

/// A command or a reply.
#[derive(Debug)]
pub struct Message {
    /// The sender's own; the reply repeats it.
    pub id: u16,
    /// What is asked, or answered.
    pub command: Command,
    /// The header's flags.
    pub flags: Flags,
    /// An errno value, in an error reply.
    pub errno: u32,
    /// The payload.
    pub body: Body,
    /// The file descriptors beside it.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// A command that is to be answered.
    #[must_use]
    pub const fn command(id: u16, command: Command, body: Body, fds: Vec<OwnedFd>) -> Self {
        let flags = Flags { reply: false, no_reply: false, error: false };
        Self { id, command, flags, errno: 0, body, fds }
    }

    /// The same, to be answered by nothing.
    #[must_use]
    pub const fn without_reply(mut self) -> Self {
        self.flags.no_reply = true;
        self
    }

    /// A reply.
    #[must_use]
    pub const fn reply(id: u16, command: Command, body: Body, fds: Vec<OwnedFd>) -> Self {
        let flags = Flags { reply: true, no_reply: false, error: false };
        Self { id, command, flags, errno: 0, body, fds }
    }

    /// A reply that says that the command failed: "the reply message must only include the reply header".
    #[must_use]
    pub const fn refusal(id: u16, command: Command, errno: u32) -> Self {
        let flags = Flags { reply: true, no_reply: false, error: true };
        Self { id, command, flags, errno, body: Body::Empty, fds: Vec::new() }
    }

    /// Puts a message together from what was read. A payload that is not of the command's shape is
    /// [`Body::Malformed`].
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
        Header { id: self.id, command: self.command, payload_bytes, flags: self.flags, errno: self.errno }.write(to);
        self.body.write(to);
    }
}

#[cfg(test)]
mod tests;
