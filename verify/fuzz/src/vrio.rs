//! The parts that the targets of the remote channel share.

use sidecore_vrio::Peer;
use sidecore_vrio::handshake::code;
use sidecore_vrio::slices::{Data, Transmit};
use sidecore_vrio::wire::{
    BODY_BYTES, DEVICE_NAME_BYTES, DeviceEntry, FrameHeader, Greeting, Kind, MIN_FRAME_BYTES,
    VERSION, device_flag,
};

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
