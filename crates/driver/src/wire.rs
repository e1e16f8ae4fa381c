//! The front end's half of the vhost-user protocol: messages out, answers in.
//!
//! The numbers and layouts are shared with this project's back end; what is done with them is not.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use sidecore_spec_virtio::vhost_user::{
    FLAGS_NEED_REPLY, FLAGS_REPLY, FLAGS_VERSION, FLAGS_VERSION_MASK, MAX_FDS, MessageHeader,
    Request, VringState,
};

use crate::error::ClientError;
use crate::socket;

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
        Ok(Self::over(socket::connect(path, timeout)?))
    }

    /// Speaks over a socket that is connected.
    pub(crate) fn over(socket: UnixStream) -> Self {
        Self { socket, acknowledged: false }
    }

    /// From now on the device answers every message (VHOST_USER_PROTOCOL_F_REPLY_ACK).
    pub(crate) fn acknowledge(&mut self) {
        self.acknowledged = true;
    }

    /// Sends a message that has no answer of its own, and waits until the device has done it, if
    /// the device can say so.
    pub(crate) fn tell(
        &mut self,
        request: Request,
        body: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let flags =
            if self.acknowledged { FLAGS_VERSION | FLAGS_NEED_REPLY } else { FLAGS_VERSION };
        self.send(request, flags, body, files)?;
        if !self.acknowledged {
            return Ok(());
        }
        match self.receive_u64(request)? {
            0 => Ok(()),
            code => Err(ClientError::Refused { request: request.name(), code }),
        }
    }

    /// Sends a message of one number.
    pub(crate) fn tell_u64(&mut self, request: Request, value: u64) -> Result<(), ClientError> {
        self.tell(request, &value.to_le_bytes(), &[])
    }

    /// Sends a message of a queue's index and a number.
    pub(crate) fn tell_queue(
        &mut self,
        request: Request,
        index: u16,
        value: u32,
    ) -> Result<(), ClientError> {
        self.tell(request, &queue_state(index, value), &[])
    }

    /// Asks for a number.
    pub(crate) fn ask_u64(&mut self, request: Request) -> Result<u64, ClientError> {
        self.send(request, FLAGS_VERSION, &[], &[])?;
        self.receive_u64(request)
    }

    /// Asks, and returns the answer's body.
    pub(crate) fn ask(&mut self, request: Request, body: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.send(request, FLAGS_VERSION, body, &[])?;
        self.receive(request)
    }

    fn send(
        &mut self,
        request: Request,
        flags: u32,
        body: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let payload_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let header = MessageHeader { request: request.code(), flags, payload_bytes }.encode();
        let message = [&header, body].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(ClientError::Options("more than 8 files in one message".to_owned()));
        }
        let sent = rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(&message)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        match sent {
            Ok(count) if count == message.len() => Ok(()),
            // A message is far smaller than the socket's buffer.
            Ok(_) => Err(ClientError::HungUp { request: request.name() }),
            Err(errno) => Err(socket::failed(request.name(), errno.into())),
        }
    }

    fn receive_u64(&mut self, request: Request) -> Result<u64, ClientError> {
        let body = self.receive(request)?;
        let word = <[u8; 8]>::try_from(&body[..]).map_err(|_| ClientError::Answer {
            request: request.name(),
            why: format!("{} bytes where a number was due", body.len()),
        })?;
        Ok(u64::from_le_bytes(word))
    }

    fn receive(&mut self, request: Request) -> Result<Vec<u8>, ClientError> {
        let mut header = [0; MessageHeader::BYTES];
        self.fill(request, &mut header)?;
        let MessageHeader { request: number, flags, payload_bytes } =
            MessageHeader::decode(&header);
        let len = payload_bytes as usize;
        let wrong = |why: String| ClientError::Answer { request: request.name(), why };
        if number != request.code() {
            return Err(wrong(format!("it is an answer to request {number}")));
        }
        if flags & (FLAGS_REPLY | FLAGS_VERSION_MASK) != FLAGS_REPLY | FLAGS_VERSION {
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
        self.socket.read_exact(to).map_err(|source| socket::failed(request.name(), source))
    }
}

/// The body of messages about one queue.
pub(crate) fn queue_state(index: u16, value: u32) -> [u8; 8] {
    VringState { index: index.into(), num: value }.encode()
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
        assert_eq!(wire.ask_u64(Request::GetFeatures).unwrap(), 77);
        let mut asked = [0; 12];
        device.read_exact(&mut asked).unwrap();
        assert_eq!(asked, [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_message_is_acknowledged_where_that_was_agreed() {
        let (mut wire, mut device) = pair();
        wire.tell_queue(Request::SetVringNum, 2, 256).unwrap();
        let mut told = [0; 20];
        device.read_exact(&mut told).unwrap();
        assert_eq!(told[12..], [2, 0, 0, 0, 0, 1, 0, 0]);
        wire.acknowledge();
        device.write_all(&answer(8, 5, &1_u64.to_le_bytes())).unwrap();
        let refused = wire.tell_queue(Request::SetVringNum, 2, 256);
        assert!(matches!(refused, Err(ClientError::Refused { request: "SET_VRING_NUM", code: 1 })));
        device.read_exact(&mut told).unwrap();
        assert_eq!(told[4], 9);
    }

    #[test]
    fn nonsense_and_silence_are_errors_with_the_messages_name() {
        for nonsense in [
            answer(2, 5, &[0; 8]),
            answer(1, 1, &[0; 8]),
            answer(1, 5, &[0; 7]),
            answer(1, 5, &[0; 5000]),
        ] {
            let (mut wire, mut device) = pair();
            device.write_all(&nonsense).unwrap();
            assert!(matches!(wire.ask_u64(Request::GetFeatures), Err(ClientError::Answer { .. })));
        }
        let (mut wire, device) = pair();
        assert!(matches!(wire.ask_u64(Request::GetFeatures), Err(ClientError::Timeout { .. })));
        drop(device);
        assert!(matches!(wire.ask_u64(Request::GetFeatures), Err(ClientError::HungUp { .. })));
    }
}
