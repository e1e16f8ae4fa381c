//! One end of a session: its name, its counters and its seal.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::port::{Part, Payload, Peer, Plain, Port, Seal};
use crate::window::Window;
use crate::wire::{
    BODY_BYTES, DATA_HEADER_BYTES, Frame, FrameHeader, Kind, PART_HEADER_BYTES, PartHeader, VERSION,
};
use crate::{Reason, VrioStats};

/// Sends a frame with this header. False if the link has no room.
fn send<P: Port, S: Seal>(
    seal: &mut S,
    port: &mut P,
    to: Peer,
    header: &FrameHeader,
    body: Option<&[u8; BODY_BYTES]>,
    payload: Payload<'_>,
) -> bool {
    let mut head = [0; DATA_HEADER_BYTES];
    let (first, second) = head.split_at_mut(FrameHeader::BYTES);
    first.copy_from_slice(&header.encode());
    let mut head_bytes = FrameHeader::BYTES;
    if let Some(body) = body {
        second.copy_from_slice(body);
        head_bytes = DATA_HEADER_BYTES;
    }
    let Some(head) = head.get(..head_bytes) else { return false };
    port.send(to, head, payload, (header.counter, seal))
}

/// Sends a control frame outside of any session.
pub(crate) fn send_clear<P: Port>(
    port: &mut P,
    to: Peer,
    header: &FrameHeader,
    message: &[u8],
) -> bool {
    let len_bytes = message.len().max(header.payload_bytes.into());
    let payload_bytes = u16::try_from(len_bytes).unwrap_or(u16::MAX);
    let header = FrameHeader { version: VERSION, payload_bytes, ..*header };
    send(&mut Plain, port, to, &header, None, Payload::Message { message, len_bytes })
}

/// Copies a control message, all of it.
pub(crate) fn message<P: Port, const BYTES: usize>(
    port: &mut P,
    received: &P::Received,
) -> Result<[u8; BYTES], Reason> {
    let mut message = [0; BYTES];
    let len = port.message(received, &mut message);
    if len == BYTES { Ok(message) } else { Err(Reason::Malformed) }
}

/// Payloads of parts are at most as long: longer ones have frames of their own, in which they are
/// aligned.
pub(crate) const PART_DATA_MAX: u32 = 1024;

/// Most parts that this end puts into a BUNDLE. The peer works on one while this end makes the
/// next: with 14 parts of 512 bytes the two ends waited for each other, and did less than without
/// bundles (docs/decisions/0048).
const PARTS_MAX: usize = 4;

/// A part of a BUNDLE that has arrived.
pub(crate) struct ArrivedPart {
    pub(crate) kind: Kind,
    pub(crate) body: [u8; BODY_BYTES],
    pub(crate) payload_bytes: usize,
}

impl ArrivedPart {
    /// Takes the part at `at` out of an opened BUNDLE of `all_bytes`, selects its payload, and
    /// moves `at` behind it; `None` at the end.
    #[inline]
    fn next<P: Port>(
        (at, all_bytes): (&mut usize, usize),
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<Option<Self>, Reason> {
        let left = all_bytes.saturating_sub(*at);
        if left == 0 {
            return Ok(None);
        }
        port.select(received, *at, left);
        let head: [u8; PART_HEADER_BYTES] = message(port, received)?;
        let (header, body) = head.split_first_chunk().ok_or(Reason::Malformed)?;
        let PartHeader { kind, payload_bytes } = PartHeader::decode(header);
        let body = *body.first_chunk().ok_or(Reason::Malformed)?;
        let (skip_bytes, payload_bytes) =
            (at.saturating_add(PART_HEADER_BYTES), usize::from(payload_bytes));
        *at = skip_bytes.saturating_add(payload_bytes);
        if *at > all_bytes {
            return Err(Reason::Malformed);
        }
        port.select(received, skip_bytes, payload_bytes);
        Ok(Some(Self { kind: Kind::from_code(kind), body, payload_bytes }))
    }
}

/// Takes the parts of an opened BUNDLE of `all_bytes`, in their order.
///
/// # Errors
/// A part makes no sense, or `take` found that nothing of what follows does.
#[inline]
pub(crate) fn take_parts<P: Port>(
    all_bytes: usize,
    received: &mut P::Received,
    port: &mut P,
    mut take: impl FnMut(ArrivedPart, &mut P::Received, &mut P) -> Result<(), Reason>,
) -> Result<(), Reason> {
    let mut at = 0;
    while let Some(part) = ArrivedPart::next((&mut at, all_bytes), received, port)? {
        take(part, received, port)?;
    }
    Ok(())
}

/// The first slots of a list that share a frame, and the size of their parts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bundle {
    slots: [u16; PARTS_MAX],
    count: usize,
    pub(crate) payload_bytes: usize,
}

impl Bundle {
    /// As many as have room in `room_bytes`; `None` if those are fewer than two. `part_bytes` is
    /// the size of a slot's part; `None` if the slot needs frames of its own.
    #[inline]
    pub(crate) fn of(
        room_bytes: usize,
        slots: &VecDeque<u16>,
        part_bytes: impl Fn(u16) -> Option<usize>,
    ) -> Option<Self> {
        let mut bundle = Self::default();
        while let Some(place) = bundle.slots.get_mut(bundle.count)
            && let Some(slot) = slots.get(bundle.count)
            && let Some(bytes) = part_bytes(*slot)
        {
            let longer = bundle.payload_bytes.saturating_add(bytes);
            if longer > room_bytes {
                break;
            }
            *place = *slot;
            bundle.count = bundle.count.saturating_add(1);
            bundle.payload_bytes = longer;
        }
        (bundle.count > 1).then_some(bundle)
    }

    /// The slots.
    #[inline]
    pub(crate) fn slots(&self) -> &[u16] {
        self.slots.get(..self.count).unwrap_or_default()
    }
}

/// One end of a session.
pub(crate) struct Channel<S> {
    seal: Option<S>,
    /// The receiver of this end's frames.
    pub(crate) peer: Peer,
    /// Zero while there is no session.
    pub(crate) session: u64,
    pub(crate) incarnation: u64,
    /// The link queue of the peer that the session belongs to.
    queue: u8,
    counter: u64,
    window: Window,
    pub(crate) stats: Arc<VrioStats>,
}

impl<S: Seal> Channel<S> {
    pub(crate) fn new(peer: Peer, stats: Arc<VrioStats>) -> Self {
        Self {
            seal: None,
            peer,
            session: 0,
            incarnation: 0,
            queue: 0,
            counter: 0,
            window: Window::default(),
            stats,
        }
    }

    /// Begins a session with a fresh seal.
    pub(crate) fn start(&mut self, seal: S, session: u64, incarnation: u64, queue: u8) {
        self.seal = Some(seal);
        self.session = session;
        self.incarnation = incarnation;
        self.queue = queue;
        self.counter = 0;
        self.window = Window::default();
        self.stats.sessions.add(1);
    }

    /// Ends the session: no frame belongs to it any more, and its keys are gone.
    pub(crate) fn end(&mut self) {
        self.session = 0;
        self.seal = None;
    }

    /// Size of the tag of a frame; 0 without a session.
    pub(crate) fn tag_bytes(&self) -> usize {
        self.seal.as_ref().map_or(0, Seal::tag_bytes)
    }

    /// The largest counter that has arrived.
    pub(crate) const fn newest(&self) -> u64 {
        self.window.newest()
    }

    /// Opens a frame of `frame_bytes` that must be of this session, and marks it as seen.
    #[inline]
    pub(crate) fn open<P: Port>(
        &mut self,
        frame: &Frame<'_>,
        frame_bytes: usize,
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        let header = &frame.header;
        let Some(seal) = self.seal.as_mut().filter(|_| header.session == self.session) else {
            return Err(Reason::Session);
        };
        if header.incarnation != self.incarnation {
            return Err(Reason::Incarnation);
        }
        frame.check_size(frame_bytes, seal.tag_bytes())?;
        if !self.window.is_new(header.counter) {
            return Err(Reason::Replayed);
        }
        if !port.open(received, frame.head, frame.payload_bytes(), header.counter, seal) {
            return Err(Reason::Seal);
        }
        self.window.take(header.counter);
        Ok(())
    }

    /// Sends a control frame of this session, padded to `len_bytes`. False if the link has no room.
    pub(crate) fn send_message<P: Port>(
        &mut self,
        port: &mut P,
        kind: Kind,
        message: &[u8],
        len_bytes: usize,
    ) -> bool {
        let len_bytes = len_bytes.max(message.len());
        self.send(port, kind, None, Payload::Message { message, len_bytes })
    }

    /// Sends a frame of this session. False if the link has no room.
    #[inline]
    pub(crate) fn send<P: Port>(
        &mut self,
        port: &mut P,
        kind: Kind,
        body: Option<&[u8; BODY_BYTES]>,
        payload: Payload<'_>,
    ) -> bool {
        let to = self.peer;
        let Some((header, seal)) = self.next_frame(kind, payload.len_bytes()) else { return false };
        let counter = header.counter;
        let was_sent = send(seal, port, to, &header, body, payload);
        self.sent(counter, was_sent)
    }

    /// Sends a BUNDLE of this session, of parts that have `payload_bytes` together. False if the
    /// link has no room.
    #[inline]
    pub(crate) fn send_bundle<'a, P: Port>(
        &mut self,
        port: &mut P,
        payload_bytes: usize,
        parts: impl Iterator<Item = Part<'a>>,
    ) -> bool {
        let to = self.peer;
        let Some((header, seal)) = self.next_frame(Kind::Bundle, payload_bytes) else {
            return false;
        };
        let counter = header.counter;
        let was_sent =
            port.send_bundle(to, &header.encode(), payload_bytes, parts, (counter, seal));
        self.sent(counter, was_sent)
    }

    /// The header of this end's next frame; `None` without a session.
    #[inline]
    fn next_frame(&mut self, kind: Kind, payload_bytes: usize) -> Option<(FrameHeader, &mut S)> {
        let seal = self.seal.as_mut()?;
        let counter = self.counter.wrapping_add(1);
        let header = FrameHeader {
            version: VERSION,
            kind: kind.code(),
            session: self.session,
            counter,
            incarnation: self.incarnation,
            phase: seal.phase(counter),
            queue: self.queue,
            payload_bytes: u16::try_from(payload_bytes).unwrap_or(u16::MAX),
        };
        Some((header, seal))
    }

    #[inline]
    fn sent(&mut self, counter: u64, was_sent: bool) -> bool {
        if was_sent {
            self.counter = counter;
            self.stats.frames_sent.add(1);
        }
        was_sent
    }

    /// Most bytes of parts in a frame of `frame_bytes`.
    pub(crate) fn bundle_bytes(&self, frame_bytes: u32) -> usize {
        let overhead = FrameHeader::BYTES.saturating_add(self.tag_bytes());
        usize::try_from(frame_bytes).unwrap_or(0).saturating_sub(overhead)
    }
}
