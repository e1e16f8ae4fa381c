//! A client of NBD servers: one TCP connection, with many requests in flight (the NBD protocol,
//! doc/proto.md of NetworkBlockDevice/nbd).
//!
//! The client polls its socket, sends all requests of a turn by one system call, and leaves the
//! data of answers in the buffer into which the kernel copied them: the server gets the cheapest
//! client there is. A hole in an answer is an error, because it carries no data.

mod server;

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use quanta::Clock;

pub(super) use server::{NBDKIT, NbdServer, Peer, Programs};

use super::client::Silence;
use super::exchange::RoundTrips;
use crate::load::{Places, Sample, Work};

const HELLO: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED_REPLY: u32 = 8;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// The fixed newstyle handshake, without the padding of an older one.
const CLIENT_FLAGS: u32 = 3;

const REQUEST: u32 = 0x2560_9513;
const READ: u16 = 0;
const WRITE: u16 = 1;
const REQUEST_BYTES: usize = 28;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const SIMPLE_REPLY_BYTES: usize = 16;
const STRUCTURED_REPLY: u32 = 0x668e_33ef;
const STRUCTURED_REPLY_BYTES: usize = 20;
const CHUNK_DONE: u16 = 1;
const CHUNK_NONE: u16 = 0;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
/// The offset in front of a chunk's data.
const OFFSET_BYTES: usize = 8;

/// The most bytes that one system call receives.
const BUFFER_BYTES: usize = 256 << 10;
/// The most requests that one system call sends.
const SENT_AT_ONCE: usize = 64;
/// A server that is silent for longer in the handshake is not there.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to an export.
pub(super) struct NbdClient {
    stream: TcpStream,
    disk_bytes: u64,
    is_structured: bool,
    slots: Vec<Slot>,
    /// Slots whose requests are to be sent.
    queued: VecDeque<usize>,
    /// Bytes of the first queued request that are sent.
    sent_bytes: usize,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are received.
    filled: usize,
    /// Bytes of the present answer's data that are still to come.
    left: usize,
    /// The slot whose answer ends with those bytes.
    ending: Option<usize>,
    /// Slots whose answers are complete.
    ended: Vec<usize>,
}

/// A request that is sent again and again.
#[derive(Default)]
struct Slot {
    /// The header, and the data of a write.
    message: Vec<u8>,
    is_in_flight: bool,
    /// Bytes of data that have been announced in the answer.
    data_bytes: usize,
}

impl NbdClient {
    /// Opens the export of this name, with structured replies or simple ones.
    ///
    /// # Errors
    /// The server does not follow the protocol, has no such export, or does not answer.
    pub(super) fn open(mut stream: TcpStream, export: &str, is_structured: bool) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let disk_bytes =
            negotiate(&mut stream, export, is_structured).context("NBD's handshake fails")?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            disk_bytes,
            is_structured,
            slots: Vec::new(),
            queued: VecDeque::new(),
            sent_bytes: 0,
            buffer: vec![0; BUFFER_BYTES],
            filled: 0,
            left: 0,
            ending: None,
            ended: Vec::new(),
        })
    }

    /// The size of the export.
    pub(super) fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Keeps `work.depth` requests in flight, and waits for the last one. The connection is of no
    /// more use after an error.
    ///
    /// # Errors
    /// The server fails a request, answers with a hole, or does not answer; an interrupt.
    pub(super) fn run(&mut self, work: &Work, clock: &Clock) -> Result<Sample> {
        ensure!(work.blocks * u64::from(work.bytes) <= self.disk_bytes, "the export is too small");
        self.slots = (0..work.depth).map(|slot| Slot::new(slot, work)).collect();
        let (mut places, mut silence) = (Places::new(work.blocks), Silence::default());
        let mut round_trips = RoundTrips::new(work, clock);
        for slot in 0..self.slots.len() {
            self.submit(slot, places.next_block() * u64::from(work.bytes));
        }
        let mut in_flight = self.slots.len();
        while in_flight > 0 {
            self.send()?;
            self.receive(work)?;
            let ended = std::mem::take(&mut self.ended);
            silence.look(!ended.is_empty())?;
            if round_trips.is_over() {
                in_flight -= ended.len();
            } else {
                round_trips.add(ended.len());
                for slot in &ended {
                    self.submit(*slot, places.next_block() * u64::from(work.bytes));
                }
            }
            self.ended = ended;
            self.ended.clear();
        }
        Ok(round_trips.sample())
    }

    #[inline]
    fn submit(&mut self, slot: usize, offset_bytes: u64) {
        self.slots[slot].prepare(offset_bytes);
        self.queued.push_back(slot);
    }

    /// Sends as many queued requests as the socket takes.
    fn send(&mut self) -> Result<()> {
        while !self.queued.is_empty() {
            let mut pieces = [IoSlice::new(&[]); SENT_AT_ONCE];
            let mut skip = self.sent_bytes;
            for (piece, slot) in pieces.iter_mut().zip(&self.queued) {
                *piece = IoSlice::new(&self.slots[*slot].message[skip..]);
                skip = 0;
            }
            let count = self.queued.len().min(SENT_AT_ONCE);
            let sent = match self.stream.write_vectored(&pieces[..count]) {
                Ok(sent) => sent,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("cannot send to the NBD server"),
            };
            self.sent_bytes += sent;
            while let Some(slot) = self.queued.front() {
                let whole = self.slots[*slot].message.len();
                if self.sent_bytes < whole {
                    break;
                }
                self.sent_bytes -= whole;
                self.queued.pop_front();
            }
        }
        Ok(())
    }

    /// Receives the answers that have come, and notes the requests that they end.
    fn receive(&mut self, work: &Work) -> Result<()> {
        let received = match self.stream.read(&mut self.buffer[self.filled..]) {
            Ok(0) => bail!("the NBD server closes the connection"),
            Ok(received) => received,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error).context("cannot receive from the NBD server"),
        };
        self.filled += received;
        let mut at = 0;
        loop {
            let passed = self.left.min(self.filled - at);
            at += passed;
            self.left -= passed;
            if self.left > 0 {
                break;
            }
            if let Some(slot) = self.ending.take() {
                self.end(slot, work)?;
            }
            let Some((reply, len_bytes)) = Reply::parse(&self.buffer[at..self.filled])? else {
                break;
            };
            at += len_bytes;
            self.take(&reply, work)?;
        }
        self.buffer.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(())
    }

    /// Takes the header of an answer, or of a chunk of one.
    fn take(&mut self, reply: &Reply, work: &Work) -> Result<()> {
        let index = usize::try_from(reply.cookie)?;
        let slot = self.slots.get_mut(index).filter(|slot| slot.is_in_flight);
        let slot = slot.context("the NBD server answers a request that was not sent")?;
        let (data_bytes, is_last) = match reply.kind {
            Kind::Simple { error } => {
                ensure!(error == 0, "the NBD server fails a request with error {error}");
                ensure!(!self.is_structured || work.write, "a simple reply to a read");
                self.left = if work.write { 0 } else { work.bytes as usize };
                (self.left, true)
            }
            Kind::Chunk { flags, of: CHUNK_NONE, len_bytes: 0 } => (0, flags & CHUNK_DONE != 0),
            Kind::Chunk { flags, of: CHUNK_DATA, len_bytes } if len_bytes >= OFFSET_BYTES => {
                self.left = len_bytes;
                (len_bytes - OFFSET_BYTES, flags & CHUNK_DONE != 0)
            }
            Kind::Chunk { of: CHUNK_HOLE, .. } => {
                bail!("the NBD server answers a read with a hole, which carries no data")
            }
            Kind::Chunk { of, .. } => bail!("the NBD server fails a request: chunk {of:#x}"),
        };
        slot.data_bytes += data_bytes;
        self.ending = is_last.then_some(index);
        Ok(())
    }

    fn end(&mut self, index: usize, work: &Work) -> Result<()> {
        let slot = &mut self.slots[index];
        let expected = if work.write { 0 } else { work.bytes as usize };
        ensure!(
            slot.data_bytes == expected,
            "the NBD server answers with {} bytes instead of {expected}",
            slot.data_bytes
        );
        slot.is_in_flight = false;
        self.ended.push(index);
        Ok(())
    }
}

impl Slot {
    fn new(number: u16, work: &Work) -> Self {
        let data_bytes = if work.write { work.bytes as usize } else { 0 };
        let mut message = Vec::with_capacity(REQUEST_BYTES + data_bytes);
        message.extend(REQUEST.to_be_bytes());
        message.extend([0; 2]);
        message.extend((if work.write { WRITE } else { READ }).to_be_bytes());
        message.extend(u64::from(number).to_be_bytes());
        message.extend([0; 8]);
        message.extend(work.bytes.to_be_bytes());
        message.resize(REQUEST_BYTES + data_bytes, 0x5a);
        Self { message, ..Self::default() }
    }

    #[inline]
    fn prepare(&mut self, offset_bytes: u64) {
        self.message[16..24].copy_from_slice(&offset_bytes.to_be_bytes());
        (self.is_in_flight, self.data_bytes) = (true, 0);
    }
}

/// The header of an answer.
struct Reply {
    cookie: u64,
    kind: Kind,
}

enum Kind {
    Simple { error: u32 },
    Chunk { flags: u16, of: u16, len_bytes: usize },
}

impl Reply {
    /// Parses a header and returns it with its length; `None` if more bytes are needed.
    #[inline]
    fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>> {
        let Some(magic) = bytes.first_chunk() else { return Ok(None) };
        match u32::from_be_bytes(*magic) {
            SIMPLE_REPLY => {
                let Some(head) = bytes.first_chunk::<SIMPLE_REPLY_BYTES>() else { return Ok(None) };
                let kind = Kind::Simple { error: u32_at(head, 4) };
                Ok(Some((Self { cookie: u64_at(head, 8), kind }, head.len())))
            }
            STRUCTURED_REPLY => {
                let Some(head) = bytes.first_chunk::<STRUCTURED_REPLY_BYTES>() else {
                    return Ok(None);
                };
                let (flags, of) = (u16_at(head, 4), u16_at(head, 6));
                let kind = Kind::Chunk { flags, of, len_bytes: u32_at(head, 16) as usize };
                Ok(Some((Self { cookie: u64_at(head, 8), kind }, head.len())))
            }
            other => bail!("{other:#x} is no reply of NBD"),
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) << 16 | u32::from(u16_at(bytes, at + 2))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

/// Carries out the handshake, up to the phase of transmission. Returns the size of the export.
fn negotiate(stream: &mut TcpStream, export: &str, is_structured: bool) -> Result<u64> {
    let mut hello = [0; 18];
    stream.read_exact(&mut hello)?;
    ensure!(u64_at(&hello, 0) == HELLO && u64_at(&hello, 8) == OPTION, "no newstyle server");
    ensure!(u32::from(u16_at(&hello, 16)) & CLIENT_FLAGS == CLIENT_FLAGS, "too old a server");
    stream.write_all(&CLIENT_FLAGS.to_be_bytes())?;
    if is_structured {
        ask(stream, OPTION_STRUCTURED_REPLY, &[])?;
        let (reply, _) = answer(stream, OPTION_STRUCTURED_REPLY)?;
        ensure!(reply == REPLY_ACK, "no structured replies: reply {reply:#x}");
    }
    let mut go = u32::try_from(export.len())?.to_be_bytes().to_vec();
    go.extend(export.as_bytes());
    go.extend([0; 2]);
    ask(stream, OPTION_GO, &go)?;
    let mut disk_bytes = None;
    loop {
        match answer(stream, OPTION_GO)? {
            (REPLY_ACK, _) => return disk_bytes.context("an export without a size"),
            (REPLY_INFO, data) if data.len() >= 12 && u16_at(&data, 0) == INFO_EXPORT => {
                disk_bytes = Some(u64_at(&data, 2));
            }
            (REPLY_INFO, _) => {}
            (reply, data) => {
                bail!("no export `{export}`: {reply:#x} {}", String::from_utf8_lossy(&data))
            }
        }
    }
}

fn ask(stream: &mut TcpStream, option: u32, data: &[u8]) -> Result<()> {
    let mut message = OPTION.to_be_bytes().to_vec();
    message.extend(option.to_be_bytes());
    message.extend(u32::try_from(data.len())?.to_be_bytes());
    message.extend(data);
    Ok(stream.write_all(&message)?)
}

/// Receives the reply to an option: its type and its data.
fn answer(stream: &mut TcpStream, option: u32) -> Result<(u32, Vec<u8>)> {
    const MAX_BYTES: u32 = 4096;
    let mut head = [0; 20];
    stream.read_exact(&mut head)?;
    ensure!(u64_at(&head, 0) == OPTION_REPLY && u32_at(&head, 8) == option, "no reply to it");
    let len_bytes = u32_at(&head, 16);
    ensure!(len_bytes <= MAX_BYTES, "a reply of {len_bytes} bytes");
    let mut data = vec![0; len_bytes as usize];
    stream.read_exact(&mut data)?;
    Ok((u32_at(&head, 12), data))
}

#[cfg(test)]
mod tests;
