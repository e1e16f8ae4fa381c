//! A port whose frames and data are slices, for tests, simulations and fuzzing: there no peer can
//! write to a frame after it was sent.

use std::collections::BTreeMap;

use sidecore_units::Nanos;

use crate::handshake::{ClientHandshake, HostHandshake};
use crate::port::{Part, Payload, Peer, Port, Seal};
use crate::wire::DATA_HEADER_BYTES;
use crate::{Client, Host};

/// Sends frames.
pub trait Transmit {
    /// A buffer for a frame of `len_bytes`, or `None` while there is no room. Its contents are
    /// overwritten. A buffer that is not committed is not sent.
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]>;

    /// Sends the buffer that was handed out last.
    fn commit(&mut self, to: Peer);
}

/// The data of requests.
pub trait Data {
    /// Copies the data from `offset_bytes` on into `payload`.
    fn fill(&mut self, request: u64, offset_bytes: u32, payload: &mut [u8]);

    /// Copies `payload` to the data from `offset_bytes` on.
    fn store(&mut self, request: u64, offset_bytes: u32, payload: &[u8]);

    /// Makes the first `len_bytes` of the data zeros.
    fn clear(&mut self, request: u64, len_bytes: u32);
}

/// The data of requests by their names: 64 KiB each, which are 0xdd at first.
#[derive(Debug, Default)]
pub struct Buffers(pub BTreeMap<u64, Vec<u8>>);

impl Buffers {
    /// The data of a request.
    pub fn bytes(&mut self, request: u64) -> &mut Vec<u8> {
        self.0.entry(request).or_insert_with(|| vec![0xdd; 64 << 10])
    }

    fn from(&mut self, request: u64, offset_bytes: u32) -> &mut [u8] {
        self.bytes(request).get_mut(offset_bytes as usize..).unwrap_or_default()
    }
}

impl Data for Buffers {
    fn fill(&mut self, request: u64, offset_bytes: u32, payload: &mut [u8]) {
        payload.iter_mut().zip(self.from(request, offset_bytes)).for_each(|(to, from)| *to = *from);
    }

    fn store(&mut self, request: u64, offset_bytes: u32, payload: &[u8]) {
        self.from(request, offset_bytes).iter_mut().zip(payload).for_each(|(to, from)| *to = *from);
    }

    fn clear(&mut self, request: u64, len_bytes: u32) {
        self.from(request, 0).iter_mut().take(len_bytes as usize).for_each(|byte| *byte = 0);
    }
}

/// A frame that arrived.
#[derive(Debug, Default)]
pub struct Arrived {
    frame: Vec<u8>,
    /// Where the whole payload begins.
    whole_at: usize,
    /// Offset and size of the payload, or of the part that the engine has selected.
    payload: (usize, usize),
}

impl Arrived {
    /// This frame has arrived.
    #[must_use]
    pub const fn new(frame: Vec<u8>) -> Self {
        Self { frame, whole_at: 0, payload: (0, 0) }
    }

    /// The frame's memory.
    #[must_use]
    pub fn into_frame(self) -> Vec<u8> {
        self.frame
    }

    /// Its first bytes, as an engine takes them.
    fn first(&self) -> ([u8; DATA_HEADER_BYTES], usize) {
        let mut first = [0; DATA_HEADER_BYTES];
        for (to, from) in first.iter_mut().zip(&self.frame) {
            *to = *from;
        }
        (first, self.frame.len().min(DATA_HEADER_BYTES))
    }

    fn payload(&self) -> &[u8] {
        let (start, len) = self.payload;
        self.frame.get(start..).and_then(|rest| rest.get(..len)).unwrap_or_default()
    }
}

/// A port over a wire and the data of requests.
#[derive(Debug)]
pub struct SlicePort<'a, W, D> {
    /// The wire.
    pub wire: &'a mut W,
    /// The data.
    pub data: &'a mut D,
}

/// Writes a payload to a frame.
fn put(data: &mut impl Data, payload: Payload<'_>, to: &mut [u8]) {
    match payload {
        Payload::Message { message, .. } => {
            to.fill(0);
            for (to, from) in to.iter_mut().zip(message) {
                *to = *from;
            }
        }
        Payload::Kept(kept) => {
            let mut rest = to;
            for piece in kept {
                let Some((to, behind)) = rest.split_at_mut_checked(piece.len()) else { return };
                to.copy_from_slice(piece);
                rest = behind;
            }
        }
        Payload::Data { request, offset_bytes, .. } => data.fill(request, offset_bytes, to),
    }
}

impl<W: Transmit, D: Data> Port for SlicePort<'_, W, D> {
    type Received = Arrived;

    fn send<S: Seal>(
        &mut self,
        to: Peer,
        head: &[u8],
        payload: Payload<'_>,
        (counter, seal): (u64, &mut S),
    ) -> bool {
        let payload_bytes = payload.len_bytes();
        let all = head.len().saturating_add(payload_bytes).saturating_add(seal.tag_bytes());
        let Some(frame) = self.wire.buffer(all) else { return false };
        let Some((first, sealed)) = frame.split_at_mut_checked(head.len()) else { return false };
        first.copy_from_slice(head);
        let Some(to_payload) = sealed.get_mut(..payload_bytes) else { return false };
        put(self.data, payload, to_payload);
        seal.seal(counter, head, sealed);
        self.wire.commit(to);
        true
    }

    fn send_bundle<'b, S: Seal>(
        &mut self,
        to: Peer,
        head: &[u8],
        payload_bytes: usize,
        parts: impl Iterator<Item = Part<'b>>,
        (counter, seal): (u64, &mut S),
    ) -> bool {
        let all = head.len().saturating_add(payload_bytes).saturating_add(seal.tag_bytes());
        let Some(frame) = self.wire.buffer(all) else { return false };
        let Some((first, sealed)) = frame.split_at_mut_checked(head.len()) else { return false };
        first.copy_from_slice(head);
        let Some(mut rest) = sealed.get_mut(..payload_bytes) else { return false };
        for part in parts {
            let Some((to_head, behind)) = rest.split_at_mut_checked(part.head.len()) else {
                return false;
            };
            let len_bytes = part.payload.len_bytes();
            let Some((to_payload, behind)) = behind.split_at_mut_checked(len_bytes) else {
                return false;
            };
            to_head.copy_from_slice(&part.head);
            put(self.data, part.payload, to_payload);
            rest = behind;
        }
        rest.fill(0);
        seal.seal(counter, head, sealed);
        self.wire.commit(to);
        true
    }

    fn open<S: Seal>(
        &mut self,
        received: &mut Arrived,
        head: &[u8],
        payload_bytes: usize,
        counter: u64,
        seal: &mut S,
    ) -> bool {
        let sealed_bytes = payload_bytes.saturating_add(seal.tag_bytes());
        received.whole_at = head.len();
        received.payload = (head.len(), payload_bytes);
        let sealed = received.frame.get_mut(head.len()..);
        let sealed = sealed.and_then(|rest| rest.get_mut(..sealed_bytes));
        sealed.is_some_and(|sealed| seal.open(counter, head, sealed))
    }

    fn select(&mut self, received: &mut Arrived, skip_bytes: usize, len_bytes: usize) {
        received.payload = (received.whole_at.saturating_add(skip_bytes), len_bytes);
    }

    fn message(&mut self, received: &Arrived, to: &mut [u8]) -> usize {
        let payload = received.payload();
        for (to, from) in to.iter_mut().zip(payload) {
            *to = *from;
        }
        to.len().min(payload.len())
    }

    fn store(&mut self, received: &mut Arrived, request: u64, offset_bytes: u32) {
        self.data.store(request, offset_bytes, received.payload());
    }

    fn load(&mut self, request: u64, offset_bytes: u32, to: &mut [u8]) {
        self.data.fill(request, offset_bytes, to);
    }

    fn clear(&mut self, request: u64, len_bytes: u32) {
        self.data.clear(request, len_bytes);
    }
}

impl<W: Transmit, D: Data> SlicePort<'_, W, D> {
    /// Gives a client a frame.
    pub fn to_client<H: ClientHandshake>(
        &mut self,
        client: &mut Client<H>,
        (now, from): (Nanos, Peer),
        arrived: &mut Arrived,
    ) {
        let ((first, first_bytes), len) = (arrived.first(), arrived.frame.len());
        let first = first.get(..first_bytes).unwrap_or_default();
        client.receive(now, (from, first, len), arrived, self);
    }

    /// Gives an IOhost a frame.
    pub fn to_host<H: HostHandshake>(
        &mut self,
        host: &mut Host<H>,
        (now, from): (Nanos, Peer),
        arrived: &mut Arrived,
    ) {
        let ((first, first_bytes), len) = (arrived.first(), arrived.frame.len());
        let first = first.get(..first_bytes).unwrap_or_default();
        host.receive(now, (from, first, len), arrived, self);
    }
}
