//! The client's half of the vfio-user protocol: messages out, replies in.
//!
//! It is written from the specification and shares no code with the server of this project, so that one's mistakes are
//! found by the other.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use crate::error::ClientError;
use crate::socket;

/// A command's number and name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request(pub u16, pub &'static str);

impl Request {
    pub(crate) const VERSION: Self = Self(1, "VERSION");
    pub(crate) const DMA_MAP: Self = Self(2, "DMA_MAP");
    pub(crate) const DMA_UNMAP: Self = Self(3, "DMA_UNMAP");
    pub(crate) const DEVICE_GET_INFO: Self = Self(4, "DEVICE_GET_INFO");
    pub(crate) const DEVICE_GET_REGION_INFO: Self = Self(5, "DEVICE_GET_REGION_INFO");
    pub(crate) const DEVICE_GET_IRQ_INFO: Self = Self(7, "DEVICE_GET_IRQ_INFO");
    pub(crate) const DEVICE_SET_IRQS: Self = Self(8, "DEVICE_SET_IRQS");
    pub(crate) const REGION_READ: Self = Self(9, "REGION_READ");
    pub(crate) const REGION_WRITE: Self = Self(10, "REGION_WRITE");
    pub(crate) const DEVICE_RESET: Self = Self(13, "DEVICE_RESET");
    /// What is received raw belongs to no request of ours.
    const ANY: Self = Self(0, "a message");
}

pub(crate) const HEADER_BYTES: usize = 16;
/// Offset, region and count of a region access.
const ACCESS_BYTES: usize = 16;
/// The largest register, or pair of them.
pub(crate) const MAX_POKE_BYTES: usize = 8;

const TYPE_MASK: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// No reply that this client asks for is longer.
const MAX_BODY_BYTES: usize = (1 << 20) + 64;
/// Descriptors in one message.
pub(crate) const MAX_FILES: usize = 8;

/// A message's first 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    id: u16,
    command: u16,
    size: u32,
    flags: u32,
    error: u32,
}

impl Header {
    fn bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&self.id.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.flags.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.error.to_le_bytes());
        bytes
    }

    fn parse(bytes: [u8; HEADER_BYTES]) -> Self {
        let [a, b, c, d, ..] = bytes;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self {
            id: u16::from_le_bytes([a, b]),
            command: u16::from_le_bytes([c, d]),
            size: word(4),
            flags: word(8),
            error: word(12),
        }
    }
}

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
    /// What follows the header.
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
        request: Request,
        body: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<Reply, ClientError> {
        let header = self.header(request, body.len(), 0);
        self.send(request, &[&header.bytes(), body], files)?;
        let (reply, files) = self.reply(request, header.id)?;
        let mut body = vec![0; body_len(request, reply)?];
        self.fill(request, &mut body)?;
        Ok(Reply { body, files })
    }

    /// Writes at most eight bytes of a region, allocating nothing. One that is posted has no reply, and its failure is not
    /// told.
    pub(crate) fn poke(
        &mut self,
        region: u32,
        offset_bytes: u64,
        data: &[u8],
        posted: bool,
    ) -> Result<(), ClientError> {
        let request = Request::REGION_WRITE;
        let data = &data[..data.len().min(MAX_POKE_BYTES)];
        let header = self.header(request, ACCESS_BYTES + data.len(), if posted { NO_REPLY } else { 0 });
        let mut message = [0; HEADER_BYTES + ACCESS_BYTES + MAX_POKE_BYTES];
        message[..HEADER_BYTES].copy_from_slice(&header.bytes());
        message[HEADER_BYTES..][..ACCESS_BYTES].copy_from_slice(&access(offset_bytes, region, data.len()));
        let len = HEADER_BYTES + ACCESS_BYTES + data.len();
        message[HEADER_BYTES + ACCESS_BYTES..len].copy_from_slice(data);
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
    pub(crate) fn send_raw(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        self.send(Request::ANY, &[bytes], files)
    }

    /// Receives whatever message comes next.
    pub(crate) fn receive_raw(&mut self) -> Result<RawMessage, ClientError> {
        let (header, files) = self.receive_header(Request::ANY)?;
        let mut body = vec![0; body_len(Request::ANY, header)?];
        self.fill(Request::ANY, &mut body)?;
        let Header { id, command, flags, error, .. } = header;
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

    fn header(&mut self, request: Request, body_bytes: usize, flags: u32) -> Header {
        self.last_id = self.last_id.wrapping_add(1);
        let size = u32::try_from(HEADER_BYTES + body_bytes).unwrap_or(u32::MAX);
        Header { id: self.last_id, command: request.0, size, flags: TYPE_COMMAND | flags, error: 0 }
    }

    /// The header of the reply to message `id`. What the device asks meanwhile (it may want to reach memory by messages)
    /// is answered: this client does not do that.
    fn reply(&mut self, request: Request, id: u16) -> Result<(Header, Vec<OwnedFd>), ClientError> {
        let wrong = |why: String| ClientError::Answer { request: request.1, why };
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
            if header.id != id || header.command != request.0 {
                return Err(wrong(format!("it replies to message {} of command {}", header.id, header.command)));
            }
            if header.flags & ERROR != 0 {
                let mut rest = vec![0; body_len(request, header)?];
                self.fill(request, &mut rest)?;
                let source = io::Error::from_raw_os_error(i32::try_from(header.error).unwrap_or(0));
                return Err(ClientError::Denied { request: request.1, source });
            }
            return Ok((header, files));
        }
    }

    fn refuse(&mut self, request: Request, header: Header) -> Result<(), ClientError> {
        let mut body = vec![0; body_len(request, header)?];
        self.fill(request, &mut body)?;
        if header.flags & NO_REPLY != 0 {
            return Ok(());
        }
        let error = u32::try_from(rustix::io::Errno::NOTSUP.raw_os_error()).unwrap_or(0);
        let refusal = Header { size: HEADER_BYTES as u32, flags: TYPE_REPLY | ERROR, error, ..header };
        self.send(request, &[&refusal.bytes()], &[])
    }

    fn send(&mut self, request: Request, parts: &[&[u8]], files: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits =
            files.len() <= MAX_FILES && (files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
        if !fits {
            return Err(ClientError::Options(format!("more than {MAX_FILES} files in one message")));
        }
        let failed = |error| socket::failed(request.1, error);
        let [first, rest @ ..] = parts else { return Ok(()) };
        let second = rest.first().copied().unwrap_or(&[]);
        let slices = [IoSlice::new(first), IoSlice::new(second)];
        let sent = rustix::net::sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL)
            .map_err(|errno| failed(errno.into()))?;
        // The rest of a message that is larger than the socket's buffer.
        self.socket.write_all(&first[sent.min(first.len())..]).map_err(failed)?;
        self.socket.write_all(&second[sent.saturating_sub(first.len())..]).map_err(failed)
    }

    fn receive_header(&mut self, request: Request) -> Result<(Header, Vec<OwnedFd>), ClientError> {
        let mut bytes = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let to = &mut [IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.socket, to, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(message) => break message.bytes,
                Err(errno) => return Err(socket::failed(request.1, errno.into())),
            }
        };
        if received == 0 {
            return Err(ClientError::HungUp { request: request.1 });
        }
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
        self.fill(request, &mut bytes[received..])?;
        Ok((Header::parse(bytes), files))
    }

    fn fill(&mut self, request: Request, to: &mut [u8]) -> Result<(), ClientError> {
        self.socket.read_exact(to).map_err(|source| socket::failed(request.1, source))
    }
}

/// How much follows a header.
fn body_len(request: Request, header: Header) -> Result<usize, ClientError> {
    let len = (header.size as usize).checked_sub(HEADER_BYTES).filter(|len| *len <= MAX_BODY_BYTES);
    len.ok_or_else(|| ClientError::Answer { request: request.1, why: format!("a message of {} bytes", header.size) })
}

/// The body of a region access, before the data.
pub(crate) fn access(offset_bytes: u64, region: u32, count: usize) -> [u8; ACCESS_BYTES] {
    let mut bytes = [0; ACCESS_BYTES];
    bytes[0..8].copy_from_slice(&offset_bytes.to_le_bytes());
    bytes[8..12].copy_from_slice(&region.to_le_bytes());
    bytes[12..16].copy_from_slice(&u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
    bytes
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

    fn message(id: u16, command: u16, flags: u32, error: u32, body: &[u8]) -> Vec<u8> {
        let size = (HEADER_BYTES + body.len()) as u32;
        [&Header { id, command, size, flags, error }.bytes()[..], body].concat()
    }

    #[test]
    fn a_command_and_its_reply() {
        let (mut wire, mut device) = pair();
        device.write_all(&message(1, 4, TYPE_REPLY, 0, &[7; 16])).unwrap();
        let reply = wire.call(Request::DEVICE_GET_INFO, &[1, 2, 3, 4], &[]).unwrap();
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
        let expected = [&[0x34, 0x12, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0][..], &[5, 6, 7, 8]].concat();
        assert_eq!(told.to_vec(), message(1, 10, NO_REPLY, 0, &expected));
        device.write_all(&message(2, 10, TYPE_REPLY, 0, &[0; 16])).unwrap();
        wire.poke(2, 0x1234, &[5], false).unwrap();
        device.write_all(&message(3, 10, TYPE_REPLY | ERROR, 22, &[])).unwrap();
        let refused = wire.poke(2, 0x1234, &[5], false);
        assert!(matches!(refused, Err(ClientError::Denied { request: "REGION_WRITE", ref source })
            if source.raw_os_error() == Some(22)));
    }

    #[test]
    fn what_the_device_asks_meanwhile_is_refused() {
        let (mut wire, mut device) = pair();
        device.write_all(&message(77, 11, TYPE_COMMAND, 0, &[0; 16])).unwrap();
        device.write_all(&message(78, 12, TYPE_COMMAND | NO_REPLY, 0, &[0; 300])).unwrap();
        device.write_all(&message(1, 13, TYPE_REPLY, 0, &[])).unwrap();
        wire.call(Request::DEVICE_RESET, &[], &[]).unwrap();
        let mut seen = [0; 32];
        device.read_exact(&mut seen).unwrap();
        assert_eq!(seen[16..].to_vec(), message(77, 11, TYPE_REPLY | ERROR, 95, &[]));
    }

    #[test]
    fn descriptors_come_along() {
        let (mut wire, device) = pair();
        let file = tempfile::tempfile().unwrap();
        let mut device = Wire::over(device);
        let reply = message(1, 5, TYPE_REPLY, 0, &[1; 48]);
        device.send(Request::ANY, &[&reply[..]], &[file.as_fd(), file.as_fd()]).unwrap();
        let reply = wire.call(Request::DEVICE_GET_REGION_INFO, &[], &[]).unwrap();
        assert_eq!((reply.files.len(), reply.body.len()), (2, 48));
        let many = [file.as_fd(); MAX_FILES + 1];
        assert!(matches!(wire.send_raw(&[0], &many), Err(ClientError::Options(_))));
    }

    #[test]
    fn nonsense_and_silence_are_errors_with_the_commands_name() {
        let huge = Header { id: 1, command: 13, size: u32::MAX, flags: TYPE_REPLY, error: 0 }.bytes().to_vec();
        let tiny = Header { id: 1, command: 13, size: 15, flags: TYPE_REPLY, error: 0 }.bytes().to_vec();
        for nonsense in [
            message(2, 13, TYPE_REPLY, 0, &[]),
            message(1, 12, TYPE_REPLY, 0, &[]),
            message(1, 13, 2, 0, &[]),
            huge,
            tiny,
        ] {
            let (mut wire, mut device) = pair();
            device.write_all(&nonsense).unwrap();
            let result = wire.call(Request::DEVICE_RESET, &[], &[]);
            assert!(matches!(result, Err(ClientError::Answer { request: "DEVICE_RESET", .. })), "{nonsense:?}");
        }
        let (mut wire, mut device) = pair();
        device.write_all(&message(1, 13, TYPE_REPLY, 0, &[])[..7]).unwrap();
        let result = wire.call(Request::DEVICE_RESET, &[], &[]);
        assert!(matches!(result, Err(ClientError::Timeout { request: "DEVICE_RESET" })));
        assert!(wire.is_connected());
        drop(device);
        assert!(!wire.is_connected());
        let result = wire.call(Request::DEVICE_RESET, &[], &[]);
        assert!(matches!(result, Err(ClientError::HungUp { request: "DEVICE_RESET" })));
    }
}
