//! Helpers of the tests: a protocol of one-byte commands, and a device that records its calls.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;

use crate::connection::Codec;
use crate::session::{Endpoint, Session};
use crate::snapshot::{ExportFds, ResumeError, ResumeFds, SessionState};

/// A command and its payload. A reply repeats both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Command(pub(crate) char, pub(crate) Vec<u8>);

/// A header is the command, a zero, and the size of the payload in two bytes.
pub(crate) struct Letters;

impl Codec for Letters {
    type HeaderBytes = [u8; 4];
    type Header = (char, usize);
    type Message = Command;
    type Kind = char;
    type Error = io::Error;

    const MAX_FDS: usize = 2;

    fn parse_header(bytes: &[u8; 4]) -> Result<(char, usize), io::Error> {
        match *bytes {
            [letter, 0, low, high] => Ok((letter.into(), u16::from_le_bytes([low, high]).into())),
            _ => Err(io::Error::other("no command")),
        }
    }

    fn payload_bytes(header: (char, usize)) -> usize {
        header.1
    }

    fn kind_of(header: (char, usize)) -> char {
        header.0
    }

    fn kind(message: &Command) -> char {
        message.0
    }

    fn parse(header: (char, usize), payload: &[u8], _: Vec<OwnedFd>) -> Result<Command, io::Error> {
        Ok(Command(header.0, payload.to_vec()))
    }

    fn write(Command(letter, payload): Command, bytes: &mut Vec<u8>) -> Vec<OwnedFd> {
        let [low, high] = (payload.len() as u16).to_le_bytes();
        bytes.extend([letter as u8, 0, low, high]);
        bytes.extend(payload);
        Vec::new()
    }
}

/// A device that records the calls of its sessions.
#[derive(Default)]
pub(crate) struct Device {
    pub(crate) asked: Mutex<String>,
    pub(crate) cannot_be_exported: AtomicBool,
    pub(crate) notified: AtomicUsize,
    /// Whether a session has an event of which to notify its client.
    pub(crate) has_event: AtomicBool,
}

impl Device {
    pub(crate) fn take_asked(&self) -> String {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    fn ask(&self, call: char) {
        self.asked.lock().unwrap().push(call);
    }
}

/// A session of the device. The worker serves it unless the letter is a capital one. `x` ends the
/// connection, `P` panics.
pub(crate) struct Recorder(Arc<Device>);

impl Session for Recorder {
    type Codec = Letters;
    type Error = io::Error;

    fn may_wait(&self, message: &Command) -> bool {
        message.0.is_ascii_uppercase()
    }

    fn handle(&mut self, message: Command) -> Result<Option<Command>, io::Error> {
        self.0.ask(message.0);
        match message.0 {
            'x' => Err(io::Error::other("an x")),
            'P' => panic!("on purpose"),
            _ => Ok(Some(message)),
        }
    }

    fn disconnect(&mut self) {
        self.0.ask('.');
    }

    fn notifies_after(&self) -> Option<Duration> {
        self.0.has_event.load(Ordering::SeqCst).then_some(Duration::from_millis(200))
    }

    fn notify(&mut self) {
        self.0.notified.fetch_add(1, Ordering::SeqCst);
    }

    fn prepare_export(&mut self) -> bool {
        self.0.ask('>');
        !self.0.cannot_be_exported.load(Ordering::SeqCst)
    }

    fn export(&mut self, _: &mut ExportFds) -> SessionState {
        [("asked".to_owned(), json!(self.0.take_asked()))].into_iter().collect()
    }

    fn resume_from(&mut self, state: SessionState, _: &mut ResumeFds) -> Result<(), ResumeError> {
        let asked =
            state.get("asked").and_then(|asked| asked.as_str()).ok_or(ResumeError::Descriptor)?;
        *self.0.asked.lock().unwrap() = asked.to_owned();
        Ok(())
    }
}

impl Endpoint for Arc<Device> {
    type Session = Recorder;

    fn span(&self) -> tracing::Span {
        tracing::info_span!("test")
    }

    fn session(&self) -> Recorder {
        Recorder(Arc::clone(self))
    }

    fn gone(&self) {
        self.ask('!');
    }
}
