//! The front end's half of the vhost-user protocol: messages out, answers in.
//!
//! It is written from the specification and shares no code with the back end of this project, so that one's mistakes
//! are found by the other.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::error::ClientError;
use crate::socket;

/// A request's number and name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request(u32, &'static str);

impl Request {
    pub(crate) const GET_FEATURES: Self = Self(1, "GET_FEATURES");
    pub(crate) const SET_FEATURES: Self = Self(2, "SET_FEATURES");
    pub(crate) const SET_OWNER: Self = Self(3, "SET_OWNER");
    pub(crate) const SET_MEM_TABLE: Self = Self(5, "SET_MEM_TABLE");
    pub(crate) const SET_VRING_NUM: Self = Self(8, "SET_VRING_NUM");
    pub(crate) const SET_VRING_ADDR: Self = Self(9, "SET_VRING_ADDR");
    pub(crate) const SET_VRING_BASE: Self = Self(10, "SET_VRING_BASE");
    pub(crate) const GET_VRING_BASE: Self = Self(11, "GET_VRING_BASE");
    pub(crate) const SET_VRING_KICK: Self = Self(12, "SET_VRING_KICK");
    pub(crate) const SET_VRING_CALL: Self = Self(13, "SET_VRING_CALL");
    pub(crate) const SET_VRING_ERR: Self = Self(14, "SET_VRING_ERR");
    pub(crate) const GET_PROTOCOL_FEATURES: Self = Self(15, "GET_PROTOCOL_FEATURES");
    pub(crate) const SET_PROTOCOL_FEATURES: Self = Self(16, "SET_PROTOCOL_FEATURES");
    pub(crate) const GET_QUEUE_NUM: Self = Self(17, "GET_QUEUE_NUM");
    pub(crate) const SET_VRING_ENABLE: Self = Self(18, "SET_VRING_ENABLE");
    pub(crate) const SET_BACKEND_REQ_FD: Self = Self(21, "SET_BACKEND_REQ_FD");
    pub(crate) const GET_CONFIG: Self = Self(24, "GET_CONFIG");
    pub(crate) const RESET_DEVICE: Self = Self(34, "RESET_DEVICE");
    pub(crate) const ADD_MEM_REG: Self = Self(37, "ADD_MEM_REG");
    pub(crate) const REM_MEM_REG: Self = Self(38, "REM_MEM_REG");
    pub(crate) const SET_STATUS: Self = Self(39, "SET_STATUS");
    pub(crate) const GET_STATUS: Self = Self(40, "GET_STATUS");
}

const HEADER_BYTES: usize = 12;
const VERSION: u32 = 1;
const IS_REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// No message of the protocol's is longer.
const MAX_BODY_BYTES: usize = 4096;

/// The socket.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: UnixStream,
    acknowledged: bool,
}

impl Wire {
    pub(crate) fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        Ok(Self { socket: socket::connect(path, timeout)?, acknowledged: false })
    }

    /// From now on the device answers every message (VHOST_USER_PROTOCOL_F_REPLY_ACK).
    pub(crate) fn acknowledge(&mut self) {
        self.acknowledged = true;
    }

    /// Sends a message that has no answer of its own, and waits until the device has done it, if the device can say so.
    pub(crate) fn tell(&mut self, request: Request, body: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let flags = if self.acknowledged { VERSION | NEED_REPLY } else { VERSION };
        self.send(request, flags, body, files)?;
        if !self.acknowledged {
            return Ok(());
        }
        match self.receive_u64(request)? {
            0 => Ok(()),
            code => Err(ClientError::Refused { request: request.1, code }),
        }
    }

    /// Sends a message of one number.
    pub(crate) fn tell_u64(&mut self, request: Request, value: u64) -> Result<(), ClientError> {
        self.tell(request, &value.to_le_bytes(), &[])
    }

    /// Sends a message of a queue's index and a number.
    pub(crate) fn tell_queue(&mut self, request: Request, index: u16, value: u32) -> Result<(), ClientError> {
        self.tell(request, &queue_state(index, value), &[])
    }

    /// Asks for a number.
    pub(crate) fn ask_u64(&mut self, request: Request) -> Result<u64, ClientError> {
        self.send(request, VERSION, &[], &[])?;
        self.receive_u64(request)
    }

    /// Asks, and returns the answer's body.
    pub(crate) fn ask(&mut self, request: Request, body: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.send(request, VERSION, body, &[])?;
        self.receive(request)
    }

    fn send(&mut self, request: Request, flags: u32, body: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let mut message = Vec::with_capacity(HEADER_BYTES + body.len());
        for word in [request.0, flags, u32::try_from(body.len()).unwrap_or(u32::MAX)] {
            message.extend_from_slice(&word.to_le_bytes());
        }
        message.extend_from_slice(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(ClientError::Options("more than 8 files in one message".to_owned()));
        }
        let sent = rustix::net::sendmsg(&self.socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL);
        match sent {
            Ok(count) if count == message.len() => Ok(()),
            // A message is far smaller than the socket's buffer.
            Ok(_) => Err(ClientError::HungUp { request: request.1 }),
            Err(errno) => Err(socket::failed(request.1, errno.into())),
        }
    }

    fn receive_u64(&mut self, request: Request) -> Result<u64, ClientError> {
        let body = self.receive(request)?;
        let word = <[u8; 8]>::try_from(&body[..]).map_err(|_| ClientError::Answer {
            request: request.1,
            why: format!("{} bytes where a number was due", body.len()),
        })?;
        Ok(u64::from_le_bytes(word))
    }

    fn receive(&mut self, request: Request) -> Result<Vec<u8>, ClientError> {
        let mut header = [0; HEADER_BYTES];
        self.fill(request, &mut header)?;
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (number, flags, len) = (word(0), word(4), word(8) as usize);
        let wrong = |why: String| ClientError::Answer { request: request.1, why };
        if number != request.0 {
            return Err(wrong(format!("it is an answer to request {number}")));
        }
        if flags & (IS_REPLY | 3) != IS_REPLY | VERSION {
            return Err(wrong(format!("flags {flags:#x}")));
        }
        if len > MAX_BODY_BYTES {
            return Err(wrong(format!("{len} bytes")));
        }
        let mut body = vec![0; len];
        self.fill(request, &mut body)?;
        Ok(body)
    }

    fn fill(&mut self, request: Request, to: &mut [u8]) -> Result<(), ClientError> {
        self.socket.read_exact(to).map_err(|source| socket::failed(request.1, source))
    }
}

/// The body of messages about one queue.
pub(crate) fn queue_state(index: u16, value: u32) -> [u8; 8] {
    (u64::from(index) | u64::from(value) << 32).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn pair() -> (Wire, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        (Wire { socket: here, acknowledged: false }, there)
    }

    fn answer(number: u32, flags: u32, body: &[u8]) -> Vec<u8> {
        let words = [number, flags, body.len() as u32].map(u32::to_le_bytes);
        [words.concat(), body.to_vec()].concat()
    }

    #[test]
    fn a_question_and_its_answer() {
        let (mut wire, mut device) = pair();
        device.write_all(&answer(1, 5, &77_u64.to_le_bytes())).unwrap();
        assert_eq!(wire.ask_u64(Request::GET_FEATURES).unwrap(), 77);
        let mut asked = [0; 12];
        device.read_exact(&mut asked).unwrap();
        assert_eq!(asked, [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_message_is_acknowledged_where_that_was_agreed() {
        let (mut wire, mut device) = pair();
        wire.tell_queue(Request::SET_VRING_NUM, 2, 256).unwrap();
        let mut told = [0; 20];
        device.read_exact(&mut told).unwrap();
        assert_eq!(told[12..], [2, 0, 0, 0, 0, 1, 0, 0]);
        wire.acknowledge();
        device.write_all(&answer(8, 5, &1_u64.to_le_bytes())).unwrap();
        let refused = wire.tell_queue(Request::SET_VRING_NUM, 2, 256);
        assert!(matches!(refused, Err(ClientError::Refused { request: "SET_VRING_NUM", code: 1 })));
        device.read_exact(&mut told).unwrap();
        assert_eq!(told[4], 9);
    }

    #[test]
    fn nonsense_and_silence_are_errors_with_the_messages_name() {
        for nonsense in [answer(2, 5, &[0; 8]), answer(1, 1, &[0; 8]), answer(1, 5, &[0; 7]), answer(1, 5, &[0; 5000])]
        {
            let (mut wire, mut device) = pair();
            device.write_all(&nonsense).unwrap();
            assert!(matches!(wire.ask_u64(Request::GET_FEATURES), Err(ClientError::Answer { .. })));
        }
        let (mut wire, device) = pair();
        assert!(matches!(wire.ask_u64(Request::GET_FEATURES), Err(ClientError::Timeout { .. })));
        drop(device);
        assert!(matches!(wire.ask_u64(Request::GET_FEATURES), Err(ClientError::HungUp { .. })));
    }
}
