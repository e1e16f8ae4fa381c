//! The parts that the targets of the remote channel share.

use std::collections::HashSet;
use std::sync::Arc;

use sidecore_units::Nanos;
use sidecore_vrio::handshake::{HostHandshake, code};
use sidecore_vrio::slices::{Arrived, Data, SlicePort, Transmit};
use sidecore_vrio::wire::{
    BODY_BYTES, DEVICE_NAME_BYTES, DeviceEntry, FEATURES, FrameHeader, Greeting, Hello, Kind,
    MIN_FRAME_BYTES, VERSION, device_flag,
};
use sidecore_vrio::{
    Client, ClientOptions, Event, Host, HostOptions, Member, Peer, Plain, Request, VrioStats,
};

/// The client's name.
pub const CLIENT: [u8; 16] = *b"the fuzzed one..";
/// The incarnation of the IOhost.
pub const INCARNATION: u64 = 77;
/// The session of a hostile IOhost.
pub const SESSION: u64 = 0x1234_5678_0000;
/// The IOhost's address, for the client.
pub const HOST: Peer = Peer(1);
/// The honest client's address, for the IOhost.
const HONEST: Peer = Peer(8);

/// The client of this life, which has opened the first device.
#[must_use]
pub fn client(life: u64) -> Client<Plain> {
    let options = ClientOptions {
        client: CLIENT,
        life,
        slots: 4,
        depth: 8,
        receive_frames: 64,
        frame_bytes: MIN_FRAME_BYTES,
        replay_bytes: 128 << 10,
        ..ClientOptions::default()
    };
    let mut client = Client::new(options, HOST, Plain, Arc::new(VrioStats::default()));
    client.open(&device(0).name);
    client
}

/// An IOhost that knows the client, and has these devices for it.
#[must_use]
pub fn host<H: HostHandshake>(
    options: HostOptions,
    handshake: H,
    now: Nanos,
    devices: &[DeviceEntry],
) -> Host<H> {
    let stats = Arc::new(VrioStats::default());
    let mut host = Host::new(options, handshake, Arc::clone(&stats));
    host.add(Member { client: CLIENT, queue: 0 }, stats);
    host.set_devices(now, 0, devices);
    host
}

/// The structure that a frame has at this offset of its payload.
///
/// # Panics
/// The frame is shorter.
#[must_use]
pub fn part<const BYTES: usize>(frame: &[u8], offset: usize) -> &[u8; BYTES] {
    frame[FrameHeader::BYTES + offset..].first_chunk().expect("as long as it is")
}

/// Requests of a client, each of which ends once at most.
#[derive(Debug, Default)]
pub struct Requests {
    submitted: u64,
    unanswered: HashSet<u64>,
}

impl Requests {
    /// The number of requests that were submitted.
    #[must_use]
    pub const fn submitted(&self) -> u64 {
        self.submitted
    }

    /// Submits a request, if the client takes it.
    pub fn submit(&mut self, client: &mut Client<Plain>, request: Request) {
        if client.submit(self.submitted, 0, request).is_ok() {
            self.unanswered.insert(self.submitted);
            self.submitted += 1;
        }
    }

    /// Takes the client's events.
    ///
    /// # Panics
    /// A request has ended that was not in flight.
    pub fn complete(&mut self, client: &mut Client<Plain>) {
        while let Some(event) = client.next_event() {
            if let Event::Completed { tag, .. } = event {
                assert!(self.unanswered.remove(&tag), "request {tag} ends twice");
            }
        }
    }
}

/// One round of frames on a perfect path: from the client to the IOhost, and back.
pub fn converse<H: HostHandshake>(
    client: &mut Client<Plain>,
    host: &mut Host<H>,
    now: Nanos,
    port: &mut SlicePort<'_, Wire, Buffers>,
) {
    port.wire.room = 64;
    client.poll(now, port);
    for frame in port.wire.take() {
        port.to_host(host, (now, HONEST), &mut Arrived::new(frame));
    }
    host.poll(now, port);
    for frame in port.wire.take() {
        port.to_client(client, (now, HOST), &mut Arrived::new(frame));
    }
}

/// Frames that were sent.
#[derive(Debug)]
pub struct Wire {
    frames: Vec<Vec<u8>>,
    buffer: Vec<u8>,
    /// How many more frames the link takes.
    pub room: usize,
}

impl Default for Wire {
    fn default() -> Self {
        Self { frames: Vec::new(), buffer: Vec::new(), room: 64 }
    }
}

impl Wire {
    /// Takes what was sent.
    pub fn take(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.frames)
    }
}

impl Transmit for Wire {
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        self.room = self.room.checked_sub(1)?;
        self.buffer.clear();
        self.buffer.resize(len_bytes, 0xee);
        Some(&mut self.buffer)
    }

    fn commit(&mut self, _to: Peer) {
        self.frames.push(self.buffer.clone());
    }
}

/// A buffer for all requests: what lies outside of the largest request panics.
#[derive(Debug)]
pub struct Buffers(Vec<u8>);

impl Default for Buffers {
    fn default() -> Self {
        Self(vec![0; 64 << 10])
    }
}

impl Data for Buffers {
    fn fill(&mut self, _request: u64, offset_bytes: u32, payload: &mut [u8]) {
        payload.copy_from_slice(&self.0[offset_bytes as usize..][..payload.len()]);
    }

    fn store(&mut self, _request: u64, offset_bytes: u32, payload: &[u8]) {
        self.0[offset_bytes as usize..][..payload.len()].copy_from_slice(payload);
    }

    fn clear(&mut self, _request: u64, len_bytes: u32) {
        self.0[..len_bytes as usize].fill(0);
    }
}

/// A device with a volatile cache; those with odd numbers have large blocks.
#[must_use]
pub fn device(number: u16) -> DeviceEntry {
    let mut name = [0; DEVICE_NAME_BYTES];
    name[0] = b'a' + number as u8;
    let block_bytes = if number.is_multiple_of(2) { 512 } else { 4096 };
    DeviceEntry {
        device: number,
        flags: device_flag::PRESENT
            | device_flag::VOLATILE_CACHE
            | device_flag::DISCARD
            | device_flag::WRITE_ZEROES,
        epoch: 1,
        capacity_bytes: 1 << 20,
        block_bytes,
        physical_block_bytes: block_bytes,
        name,
        ..DeviceEntry::default()
    }
}

/// The payload of a HELLO or WELCOME with this message, in a frame of the smallest size.
#[must_use]
pub fn greeting(greeting: Greeting, message: &[u8]) -> Vec<u8> {
    let greeting =
        Greeting { handshake: code::PLAIN, message_bytes: message.len() as u16, ..greeting };
    let mut payload = [greeting.encode().as_slice(), message].concat();
    payload.resize(MIN_FRAME_BYTES as usize - FrameHeader::BYTES, 0);
    payload
}

/// The HELLO of the hostile client, with the cookie of this challenge.
#[must_use]
pub fn hello(challenge: Greeting, slots: u16) -> Arrived {
    let hello = Hello {
        client: CLIENT,
        life: 1,
        number: 1,
        version_min: VERSION,
        version_max: VERSION,
        frame_bytes: MIN_FRAME_BYTES,
        features: FEATURES,
        slots,
        cookie: challenge.cookie,
        ..Hello::default()
    };
    let payload = greeting(Greeting { life: 1, number: 1, ..challenge }, &hello.encode());
    Arrived::new(write_frame(Kind::Hello, (0, 0, 0), 0, &payload))
}

/// The next frame of an input: its kind, what to leave wrong, and the content; and what is left.
#[must_use]
pub fn next_frame(input: &[u8]) -> Option<(Kind, u8, &[u8], &[u8])> {
    let ([kind, flags, size], rest) = input.split_first_chunk::<3>()?;
    let (content, rest) = rest.split_at(usize::from(*size).min(rest.len()));
    Some((Kind::from_code(*kind), *flags, content, rest))
}

/// A frame of a session, named by its session, counter and incarnation. `flags` leave something
/// wrong: 16 another session, 32 an old counter, 64 one payload byte more than there is. 8 makes
/// the payload a whole segment, 128 whole sectors, so that short inputs have data.
#[must_use]
pub fn write_frame(
    kind: Kind,
    (session, counter, incarnation): (u64, u64, u64),
    flags: u8,
    content: &[u8],
) -> Vec<u8> {
    let (body, payload) = if kind.has_body() {
        let (body, payload) = content.split_at(BODY_BYTES.min(content.len()));
        let mut whole = body.to_vec();
        whole.resize(BODY_BYTES, 0);
        (whole, payload)
    } else {
        (Vec::new(), content)
    };
    let mut payload = payload.to_vec();
    if flags & 8 != 0 {
        payload.resize(1024, 0xab);
    } else if flags & 128 != 0 {
        payload.resize(payload.len().next_multiple_of(512).max(512), 0xab);
    }
    let claimed = payload.len() + usize::from(flags & 64 != 0);
    let header = FrameHeader {
        version: VERSION,
        kind: kind.code(),
        session: if flags & 16 == 0 { session } else { session ^ 1 << 20 },
        counter: if flags & 32 == 0 { counter } else { counter / 2 },
        incarnation,
        phase: 0,
        queue: 0,
        payload_bytes: claimed as u16,
    };
    [header.encode().as_slice(), &body, &payload].concat()
}
