//! The seam to a link and to the data of requests: heads pass through an engine, payloads do not.
//!
//! A payload lies in guest memory, or in the memory of a link that a peer may write to, so it is
//! never a Rust slice. A [`Port`] moves it once, from there to the frame or back. Only a cipher
//! needs a slice; a port then copies to or from memory of its own, and the cipher works in place.

use crate::wire::{BODY_BYTES, Kind, PART_HEADER_BYTES, PartHeader};

/// A link's name for where a frame goes or came from: a MAC address, a place in a table of sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Peer(pub u64);

/// The payload of a frame that is to be sent.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// A control message, and zeros behind it up to `len_bytes`, which is never less than the
    /// message has.
    Message {
        /// The message.
        message: &'a [u8],
        /// Size of the payload.
        len_bytes: usize,
    },
    /// The engine's own copy of a write.
    Kept(Kept<'a>),
    /// A part of the data of a request.
    Data {
        /// The caller's name for the request.
        request: u64,
        /// Offset of the part in the request's data.
        offset_bytes: u32,
        /// Size of the part.
        len_bytes: u32,
    },
}

impl Payload<'_> {
    /// No payload.
    pub const NONE: Self = Payload::Message { message: &[], len_bytes: 0 };

    /// Size of the payload.
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        match self {
            Self::Message { len_bytes, .. } => *len_bytes,
            Self::Kept(kept) => kept.len_bytes(),
            Self::Data { len_bytes, .. } => *len_bytes as usize,
        }
    }
}

/// A request or an answer that shares its frame with others: a part of a BUNDLE.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The part's header and body.
    pub head: [u8; PART_HEADER_BYTES],
    /// The part's payload.
    pub payload: Payload<'a>,
}

impl<'a> Part<'a> {
    /// A part of this kind.
    #[inline]
    pub(crate) fn new(kind: Kind, body: &[u8; BODY_BYTES], payload: Payload<'a>) -> Self {
        let payload_bytes = u16::try_from(payload.len_bytes()).unwrap_or(u16::MAX);
        let header = PartHeader { kind: kind.code(), payload_bytes }.encode();
        let mut head = [0; PART_HEADER_BYTES];
        let (first, second) = head.split_at_mut(PartHeader::BYTES);
        first.copy_from_slice(&header);
        second.copy_from_slice(body);
        Self { head, payload }
    }
}

/// The unit of memory that [`Kept`] data lie in.
pub(crate) const CHUNK_BYTES: usize = 4096;

/// Data that an engine keeps, in pieces that are in no order in its memory: an iterator over the
/// pieces, in the order of the data.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a> {
    /// Chunks of [`CHUNK_BYTES`].
    memory: &'a [u8],
    /// For each chunk the one with the following data; the next one if there is no entry.
    next: &'a [u32],
    chunk: u32,
    skip_bytes: usize,
    len_bytes: usize,
}

impl<'a> Kept<'a> {
    /// The part of a chain of chunks, which begins with `chunk`, from `offset_bytes` on.
    pub(crate) fn chained(
        (memory, next): (&'a [u8], &'a [u32]),
        mut chunk: u32,
        offset_bytes: usize,
        len_bytes: usize,
    ) -> Self {
        let mut skip_bytes = offset_bytes;
        while skip_bytes >= CHUNK_BYTES {
            skip_bytes = skip_bytes.saturating_sub(CHUNK_BYTES);
            chunk = following(next, chunk);
        }
        Self { memory, next, chunk, skip_bytes, len_bytes }
    }

    /// Bytes in all pieces that are left.
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

fn following(next: &[u32], chunk: u32) -> u32 {
    next.get(chunk as usize).copied().unwrap_or(chunk.saturating_add(1))
}

impl<'a> From<&'a [u8]> for Kept<'a> {
    /// Data in one piece of memory, for tests of ports.
    fn from(memory: &'a [u8]) -> Self {
        Self { memory, next: &[], chunk: 0, skip_bytes: 0, len_bytes: memory.len() }
    }
}

impl<'a> Iterator for Kept<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let len = self.len_bytes.min(CHUNK_BYTES.saturating_sub(self.skip_bytes));
        let start = (self.chunk as usize).saturating_mul(CHUNK_BYTES);
        let start = start.saturating_add(self.skip_bytes);
        let piece = self.memory.get(start..)?.get(..len).filter(|piece| !piece.is_empty())?;
        self.len_bytes = self.len_bytes.saturating_sub(len);
        self.chunk = following(self.next, self.chunk);
        self.skip_bytes = 0;
        Some(piece)
    }
}

/// Sends frames, opens those that arrived, and moves payloads, for the engine that it is lent to.
///
/// `request` is the caller's name for a request's data: a client's tag, an IOhost's
/// [`Execute::place`](crate::Execute::place).
pub trait Port {
    /// A payload as it arrived, which the caller hands to an engine's `receive`. It stays the
    /// caller's, which gives its frame back to the link afterwards, unless
    /// [`store_all`](Self::store_all) keeps it.
    type Received;

    /// Sends a frame: `head`, then `payload`, then the seal's tag, with the frame's counter and the
    /// session's seal in `sealed_by`. All bytes of the frame are written. False if the link has no
    /// room: the engine sends it in a later poll. A frame that was sent with a counter is never
    /// sent again with it.
    fn send<S: Seal>(
        &mut self,
        to: Peer,
        head: &[u8],
        payload: Payload<'_>,
        sealed_by: (u64, &mut S),
    ) -> bool;

    /// Sends a BUNDLE, as [`send`](Self::send) sends other frames: `head`, then `parts`, which have
    /// `payload_bytes` together, then the tag. Zeros stand in for parts that are missing.
    fn send_bundle<'a, S: Seal>(
        &mut self,
        to: Peer,
        head: &[u8],
        payload_bytes: usize,
        parts: impl Iterator<Item = Part<'a>>,
        sealed_by: (u64, &mut S),
    ) -> bool;

    /// The frames of another session follow: a host's engine says so before it sends those of each.
    #[inline]
    fn next_session(&mut self) {}

    /// Opens a payload of `payload_bytes`, which stands behind `head` in the frame, with the seal's
    /// tag behind it: the engine has compared this with the size of the frame. Until the next call
    /// for another frame, [`message`](Self::message) and [`store`](Self::store) read the opened
    /// payload. False if it is not what the peer sealed.
    fn open<S: Seal>(
        &mut self,
        received: &mut Self::Received,
        head: &[u8],
        payload_bytes: usize,
        counter: u64,
        seal: &mut S,
    ) -> bool;

    /// Makes `len_bytes` of an opened payload, from `skip_bytes` of the whole one on, the payload
    /// that [`message`](Self::message) and [`store`](Self::store) read: the engine has compared
    /// this with the size of the whole one.
    fn select(&mut self, received: &mut Self::Received, skip_bytes: usize, len_bytes: usize);

    /// Copies the first bytes of an opened payload. Returns their number: that of `to`, or that of
    /// the payload if it is shorter.
    fn message(&mut self, received: &Self::Received, to: &mut [u8]) -> usize;

    /// Moves the whole opened payload to the request's data, from `offset_bytes` on. It lies within
    /// them. Segments may come in any order; one of a read comes again if the read is repaired.
    fn store(&mut self, received: &mut Self::Received, request: u64, offset_bytes: u32);

    /// As [`store`](Self::store), for a payload that is all of the request's data. A port may keep
    /// the frame until the request has ended, in place of a copy.
    #[inline]
    fn store_all(&mut self, received: &mut Self::Received, request: u64) {
        self.store(received, request, 0);
    }

    /// Copies from a request's data, from `offset_bytes` on.
    fn load(&mut self, request: u64, offset_bytes: u32, to: &mut [u8]);

    /// Makes the first `len_bytes` of a request's data zeros. An IOhost's engine asks for it before
    /// a read is executed, so that an answer never has the bytes of a former frame in it.
    fn clear(&mut self, request: u64, len_bytes: u32);
}

/// Seals the payloads of one session's frames, and opens those of its peer. A session has a fresh
/// one, from its [handshake](crate::handshake); nothing of it is ever stored.
///
/// A frame's counter is from 1 on and never used twice in a session and a direction, so it can be a
/// nonce. The head is the associated data.
pub trait Seal {
    /// Bytes of the tag behind a payload, which never change; 0 for no encryption, where a port
    /// moves payloads without a private copy.
    fn tag_bytes(&self) -> usize;

    /// The phase of the key that the frame with this counter is to be sealed with: the byte
    /// [`PHASE_AT`](crate::wire::PHASE_AT) of its head. Called once for each frame, before
    /// [`seal`](Self::seal): this is where keys are ratcheted.
    fn phase(&mut self, counter: u64) -> u8 {
        let _ = counter;
        0
    }

    /// Seals in place: `sealed` is a payload in private memory, and room for the tag.
    fn seal(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]);

    /// Opens in place: `sealed` is a payload in private memory, and the tag. False if the frame is
    /// not what the peer sealed; a forged frame changes nothing else.
    fn open(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool;
}

/// No encryption: the frames of a dedicated cable, or between two daemons of one machine. Damage is
/// left to the link to notice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Seal for Plain {
    #[inline]
    fn tag_bytes(&self) -> usize {
        0
    }

    #[inline]
    fn seal(&mut self, _counter: u64, _head: &[u8], _sealed: &mut [u8]) {}

    #[inline]
    fn open(&mut self, _counter: u64, _head: &[u8], _sealed: &mut [u8]) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_data_come_in_the_order_of_their_chain() {
        let memory: Vec<u8> = (0..4_u8).flat_map(|chunk| [chunk; CHUNK_BYTES]).collect();
        let next = [u32::MAX, 0, 1, u32::MAX];
        let pieces = |offset, len| {
            Kept::chained((&memory, &next), 2, offset, len)
                .map(|piece| (piece[0], piece.len()))
                .collect::<Vec<_>>()
        };
        assert_eq!(pieces(0, 12_288), [(2, 4096), (1, 4096), (0, 4096)]);
        assert_eq!(pieces(3584, 7680), [(2, 512), (1, 4096), (0, 3072)]);
        assert_eq!(pieces(8192, 10), [(0, 10)]);
        assert_eq!(pieces(8192, 5000), [(0, 4096)], "the chain ends");
        assert!(pieces(0, 0).is_empty() && pieces(12_288, 1).is_empty());
        let whole: Vec<u8> = Kept::from(memory.as_slice()).flatten().copied().collect();
        assert_eq!(whole, memory);
    }
}
