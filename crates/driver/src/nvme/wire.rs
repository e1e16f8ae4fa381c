//! The client's half of the vfio-user protocol: messages out, replies in.
//!
//! The numbers and layouts are shared with this project's server; what is done with them is not.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use sidecore_spec_nvme::vfio_user::{
    AccessHeader, Command, FLAG_ERROR, FLAG_NO_REPLY, MessageHeader, TYPE_COMMAND, TYPE_MASK,
    TYPE_REPLY,
};

use crate::error::ClientError;
use crate::socket;

/// Messages received raw belong to no command of this driver.
const ANY: Command = Command::Unknown(0);
/// The largest register, or pair of them.
pub(crate) const MAX_POKE_BYTES: usize = 8;

/// No reply that this client asks for is longer.
const MAX_BODY_BYTES: usize = (1 << 20) + 64;
/// Descriptors in one message.
pub(crate) const MAX_FILES: usize = 8;

/// The payload of a reply, and the descriptors that came with it.
#[derive(Debug)]
pub(crate) struct Reply {
    pub body: Vec<u8>,
    pub files: Vec<OwnedFd>,
}

/// Any message, as it came: for tests that talk to a server by hand.
#[derive(Debug)]
pub struct RawMessage {
    /// The message's number.
    pub id: u16,
    /// The command that it is, or replies to.
    pub command: u16,
    /// Bits 3:0 type, 4 no reply, 5 error.
    pub flags: u32,
    /// An errno, if the error bit is set.
    pub error: u32,
    /// The bytes after the header.
    pub body: Vec<u8>,
    /// The descriptors that came with it.
    pub files: Vec<OwnedFd>,
}

/// The socket.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: UnixStream,
    last_id: u16,
}

impl Wire {
    pub(crate) fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        Ok(Self::over(socket::connect(path, timeout)?))
    }

    pub(crate) fn over(socket: UnixStream) -> Self {
        Self { socket, last_id: 0 }
    }

    /// Sends a command and waits for its reply.
    pub(crate) fn call(
        &mut self,
        request: Command,
        body: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<Reply, ClientError> {
        let header = self.header(request, body.len(), 0);
        self.send(request, &[&header.encode(), body], files)?;
        let (reply, files) = self.reply(request, header.id)?;
        let mut body = vec![0; body_len(request, reply)?];
        self.fill(request, &mut body)?;
        Ok(Reply { body, files })
    }

    /// Writes at most eight bytes of a region, allocating nothing. One that is posted has no reply,
    /// and its failure is not told.
    pub(crate) fn poke(
        &mut self,
        region: u32,
        offset_bytes: u64,
        data: &[u8],
        posted: bool,
    ) -> Result<(), ClientError> {
        let request = Command::RegionWrite;
        let data = &data[..data.len().min(MAX_POKE_BYTES)];
        let header = self.header(
            request,
            AccessHeader::BYTES + data.len(),
            if posted { FLAG_NO_REPLY } else { 0 },
        );
        let mut message = [0; MessageHeader::BYTES + AccessHeader::BYTES + MAX_POKE_BYTES];
        message[..MessageHeader::BYTES].copy_from_slice(&header.encode());
        message[MessageHeader::BYTES..][..AccessHeader::BYTES].copy_from_slice(&access(
            offset_bytes,
            region,
            data.len(),
        ));
        let len = MessageHeader::BYTES + AccessHeader::BYTES + data.len();
        message[MessageHeader::BYTES + AccessHeader::BYTES..len].copy_from_slice(data);
        self.send(request, &[&message[..len]], &[])?;
        if posted {
            return Ok(());
        }
        let (reply, _) = self.reply(request, header.id)?;
        let mut left = body_len(request, reply)?;
        let mut scratch = [0; 64];
        while left > 0 {
            let count = left.min(scratch.len());
            self.fill(request, &mut scratch[..count])?;
            left -= count;
        }
        Ok(())
    }

    /// Sends any bytes at all.
    pub(crate) fn send_raw(
        &mut self,
        bytes: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        self.send(ANY, &[bytes], files)
    }

    /// Receives whatever message comes next.
    pub(crate) fn receive_raw(&mut self) -> Result<RawMessage, ClientError> {
        let (header, files) = self.receive_header(ANY)?;
        let mut body = vec![0; body_len(ANY, header)?];
        self.fill(ANY, &mut body)?;
        let MessageHeader { id, command, flags, errno: error, .. } = header;
        Ok(RawMessage { id, command, flags, error, body, files })
    }

    /// Whether the other side has not hung up.
    pub(crate) fn is_connected(&self) -> bool {
        let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.socket, &mut [0_u8; 1][..], look) {
            Ok((count, _)) => count > 0,
            Err(errno) => matches!(errno, rustix::io::Errno::AGAIN | rustix::io::Errno::INTR),
        }
    }

    /// Closes the connection for both sides.
    pub(crate) fn hang_up(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    fn header(&mut self, request: Command, body_bytes: usize, flags: u32) -> MessageHeader {
        self.last_id = self.last_id.wrapping_add(1);
        let size_bytes = u32::try_from(MessageHeader::BYTES + body_bytes).unwrap_or(u32::MAX);
        MessageHeader {
            id: self.last_id,
            command: request.code(),
            size_bytes,
            flags: TYPE_COMMAND | flags,
            errno: 0,
        }
    }

    /// The header of the reply to message `id`. What the device asks meanwhile (it may want to
    /// reach memory by messages) is answered: this client does not do that.
    fn reply(
        &mut self,
        request: Command,
        id: u16,
    ) -> Result<(MessageHeader, Vec<OwnedFd>), ClientError> {
        let wrong = |why: String| ClientError::Answer { request: request.name(), why };
        loop {
            let (header, files) = self.receive_header(request)?;
            match header.flags & TYPE_MASK {
                TYPE_REPLY => {}
                TYPE_COMMAND => {
                    self.refuse(request, header)?;
                    continue;
                }
                other => return Err(wrong(format!("a message of type {other}"))),
            }
            if header.id != id || header.command != request.code() {
                return Err(wrong(format!(
                    "it replies to message {} of command {}",
                    header.id, header.command
                )));
            }
            if header.flags & FLAG_ERROR != 0 {
                let mut rest = vec![0; body_len(request, header)?];
                self.fill(request, &mut rest)?;
                let source = io::Error::from_raw_os_error(i32::try_from(header.errno).unwrap_or(0));
                return Err(ClientError::Denied { request: request.name(), source });
            }
            return Ok((header, files));
        }
    }

    fn refuse(&mut self, request: Command, header: MessageHeader) -> Result<(), ClientError> {
        let mut body = vec![0; body_len(request, header)?];
        self.fill(request, &mut body)?;
        if header.flags & FLAG_NO_REPLY != 0 {
            return Ok(());
        }
        let error = u32::try_from(rustix::io::Errno::NOTSUP.raw_os_error()).unwrap_or(0);
        let refusal = MessageHeader {
            size_bytes: MessageHeader::BYTES as u32,
            flags: TYPE_REPLY | FLAG_ERROR,
            errno: error,
            ..header
        };
        self.send(request, &[&refusal.encode()], &[])
    }

    fn send(
        &mut self,
        request: Command,
        parts: &[&[u8]],
        files: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = files.len() <= MAX_FILES
            && (files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
        if !fits {
            return Err(ClientError::Options(format!(
                "more than {MAX_FILES} files in one message"
            )));
        }
        let failed = |error| socket::failed(request.name(), error);
        let [first, rest @ ..] = parts else { return Ok(()) };
        let second = rest.first().copied().unwrap_or(&[]);
        let slices = [IoSlice::new(first), IoSlice::new(second)];
        let sent = rustix::net::sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL)
            .map_err(|errno| failed(errno.into()))?;
        // The rest of a message that is larger than the socket's buffer.
        self.socket.write_all(&first[sent.min(first.len())..]).map_err(failed)?;
        self.socket.write_all(&second[sent.saturating_sub(first.len())..]).map_err(failed)
    }

    fn receive_header(
        &mut self,
        request: Command,
    ) -> Result<(MessageHeader, Vec<OwnedFd>), ClientError> {
        let mut bytes = [0; MessageHeader::BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let to = &mut [IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.socket, to, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(message) => break message.bytes,
                Err(errno) => return Err(socket::failed(request.name(), errno.into())),
            }
        };
        if received == 0 {
            return Err(ClientError::HungUp { request: request.name() });
        }
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
        self.fill(request, &mut bytes[received..])?;
        Ok((MessageHeader::decode(&bytes), files))
    }

    fn fill(&mut self, request: Command, to: &mut [u8]) -> Result<(), ClientError> {
        self.socket.read_exact(to).map_err(|source| socket::failed(request.name(), source))
    }
}

/// How much follows a header.
fn body_len(request: Command, header: MessageHeader) -> Result<usize, ClientError> {
    let len = (header.size_bytes as usize)
        .checked_sub(MessageHeader::BYTES)
        .filter(|len| *len <= MAX_BODY_BYTES);
    len.ok_or_else(|| ClientError::Answer {
        request: request.name(),
        why: format!("a message of {} bytes", header.size_bytes),
    })
}

/// The body of a region access, before the data.
pub(crate) fn access(offset_bytes: u64, region: u32, count: usize) -> [u8; AccessHeader::BYTES] {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    AccessHeader { offset_bytes, region, count }.encode()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (Wire, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        (Wire::over(here), there)
    }

    fn message(id: u16, command: u16, flags: u32, errno: u32, body: &[u8]) -> Vec<u8> {
        let size_bytes = (MessageHeader::BYTES + body.len()) as u32;
        [&MessageHeader { id, command, size_bytes, flags, errno }.encode()[..], body].concat()
    }

    #[test]
    fn a_command_and_its_reply() {
        let (mut wire, mut device) = pair();
        device.write_all(&message(1, 4, TYPE_REPLY, 0, &[7; 16])).unwrap();
        let reply = wire.call(Command::DeviceGetInfo, &[1, 2, 3, 4], &[]).unwrap();
        assert_eq!((reply.body, reply.files.len()), (vec![7; 16], 0));
        let mut asked = [0; 20];
        device.read_exact(&mut asked).unwrap();
        assert_eq!(asked, [1, 0, 4, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_poke_is_a_region_write_and_a_posted_one_has_no_reply() {
        let (mut wire, mut device) = pair();
        wire.poke(2, 0x1234, &[5, 6, 7, 8], true).unwrap();
        let mut told = [0; 36];
        device.read_exact(&mut told).unwrap();
        let expected =
            [&[0x34, 0x12, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0][..], &[5, 6, 7, 8]].concat();
        assert_eq!(told.to_vec(), message(1, 10, FLAG_NO_REPLY, 0, &expected));
        device.write_all(&message(2, 10, TYPE_REPLY, 0, &[0; 16])).unwrap();
        wire.poke(2, 0x1234, &[5], false).unwrap();
        device.write_all(&message(3, 10, TYPE_REPLY | FLAG_ERROR, 22, &[])).unwrap();
        let refused = wire.poke(2, 0x1234, &[5], false);
        assert!(matches!(refused, Err(ClientError::Denied { request: "REGION_WRITE", ref source })
            if source.raw_os_error() == Some(22)));
    }

    #[test]
    fn what_the_device_asks_meanwhile_is_refused() {
        let (mut wire, mut device) = pair();
        device.write_all(&message(77, 11, TYPE_COMMAND, 0, &[0; 16])).unwrap();
        device.write_all(&message(78, 12, TYPE_COMMAND | FLAG_NO_REPLY, 0, &[0; 300])).unwrap();
        device.write_all(&message(1, 13, TYPE_REPLY, 0, &[])).unwrap();
        wire.call(Command::DeviceReset, &[], &[]).unwrap();
        let mut seen = [0; 32];
        device.read_exact(&mut seen).unwrap();
        assert_eq!(seen[16..].to_vec(), message(77, 11, TYPE_REPLY | FLAG_ERROR, 95, &[]));
    }

    #[test]
    fn descriptors_come_along() {
        let (mut wire, device) = pair();
        let file = tempfile::tempfile().unwrap();
        let mut device = Wire::over(device);
        let reply = message(1, 5, TYPE_REPLY, 0, &[1; 48]);
        device.send(ANY, &[&reply[..]], &[file.as_fd(), file.as_fd()]).unwrap();
        let reply = wire.call(Command::DeviceGetRegionInfo, &[], &[]).unwrap();
        assert_eq!((reply.files.len(), reply.body.len()), (2, 48));
        let many = [file.as_fd(); MAX_FILES + 1];
        assert!(matches!(wire.send_raw(&[0], &many), Err(ClientError::Options(_))));
    }

    #[test]
    fn nonsense_and_silence_are_errors_with_the_commands_name() {
        let huge =
            MessageHeader { id: 1, command: 13, size_bytes: u32::MAX, flags: TYPE_REPLY, errno: 0 }
                .encode()
                .to_vec();
        let tiny =
            MessageHeader { id: 1, command: 13, size_bytes: 15, flags: TYPE_REPLY, errno: 0 }
                .encode()
                .to_vec();
        for nonsense in [
            message(2, 13, TYPE_REPLY, 0, &[]),
            message(1, 12, TYPE_REPLY, 0, &[]),
            message(1, 13, 2, 0, &[]),
            huge,
            tiny,
        ] {
            let (mut wire, mut device) = pair();
            device.write_all(&nonsense).unwrap();
            let result = wire.call(Command::DeviceReset, &[], &[]);
            assert!(
                matches!(result, Err(ClientError::Answer { request: "DEVICE_RESET", .. })),
                "{nonsense:?}"
            );
        }
        let (mut wire, mut device) = pair();
        device.write_all(&message(1, 13, TYPE_REPLY, 0, &[])[..7]).unwrap();
        let result = wire.call(Command::DeviceReset, &[], &[]);
        assert!(matches!(result, Err(ClientError::Timeout { request: "DEVICE_RESET" })));
        assert!(wire.is_connected());
        drop(device);
        assert!(!wire.is_connected());
        let result = wire.call(Command::DeviceReset, &[], &[]);
        assert!(matches!(result, Err(ClientError::HungUp { request: "DEVICE_RESET" })));
    }
}
