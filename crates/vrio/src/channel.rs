//! One end of a session: its name, its counters and its seal.

use std::sync::Arc;

use crate::window::Window;
use crate::wire::{BODY_BYTES, Frame, FrameHeader, Kind, VERSION};
use crate::{Peer, Reason, Seal, Transmit, VrioStats};

/// Seals a frame and sends it. `fill` writes the payload, all of it. False if the link has no room.
pub(crate) fn send<S: Seal>(
    seal: &mut S,
    link: &mut impl Transmit,
    to: Peer,
    header: &FrameHeader,
    body: Option<&[u8; BODY_BYTES]>,
    fill: impl FnOnce(&mut [u8]),
) -> bool {
    let body = body.map_or(&[] as &[u8], |body| body.as_slice());
    let payload_bytes = usize::from(header.payload_bytes);
    let head_bytes = FrameHeader::BYTES.saturating_add(body.len());
    let frame_bytes = head_bytes.saturating_add(payload_bytes).saturating_add(S::TAG_BYTES);
    let Some(frame) = link.buffer(frame_bytes) else { return false };
    let Some((associated, sealed)) = frame.split_at_mut_checked(head_bytes) else { return false };
    let (Some((first, second)), Some(payload)) =
        (associated.split_at_mut_checked(FrameHeader::BYTES), sealed.get_mut(..payload_bytes))
    else {
        return false;
    };
    if first.len() != FrameHeader::BYTES || second.len() != body.len() {
        return false;
    }
    first.copy_from_slice(&header.encode());
    second.copy_from_slice(body);
    fill(payload);
    seal.seal(header.counter, associated, sealed);
    link.commit(to);
    true
}

/// Fills a payload with a message and zeros behind it.
pub(crate) fn padded(message: &[u8]) -> impl FnOnce(&mut [u8]) {
    move |payload: &mut [u8]| {
        payload.fill(0);
        for (to, from) in payload.iter_mut().zip(message) {
            *to = *from;
        }
    }
}

/// One end of a session.
#[derive(Debug)]
pub(crate) struct Channel<S> {
    pub(crate) seal: S,
    /// Where frames go.
    pub(crate) peer: Peer,
    /// Zero while there is no session.
    pub(crate) session: u64,
    pub(crate) incarnation: u64,
    counter: u64,
    window: Window,
    pub(crate) stats: Arc<VrioStats>,
}

impl<S: Seal> Channel<S> {
    pub(crate) fn new(seal: S, peer: Peer, stats: Arc<VrioStats>) -> Self {
        Self {
            seal,
            peer,
            session: 0,
            incarnation: 0,
            counter: 0,
            window: Window::default(),
            stats,
        }
    }

    /// Begins a session.
    pub(crate) fn start(&mut self, session: u64, incarnation: u64) {
        self.seal.start(session);
        self.session = session;
        self.incarnation = incarnation;
        self.counter = 0;
        self.window = Window::default();
        self.stats.sessions.add(1);
    }

    /// Ends the session: no frame belongs to it any more.
    pub(crate) fn end(&mut self) {
        self.session = 0;
    }

    /// The largest counter that has arrived.
    pub(crate) const fn newest(&self) -> u64 {
        self.window.newest()
    }

    /// Takes a frame apart that must be of this session, opens it, and marks it as seen. Returns
    /// its kind, its counter, its body, and its payload.
    #[inline]
    pub(crate) fn open<'a>(&'a mut self, frame: &Frame<'a>) -> Result<Opened<'a>, Reason> {
        let header = &frame.header;
        if self.session == 0 || header.session != self.session {
            return Err(Reason::Session);
        }
        if header.incarnation != self.incarnation {
            return Err(Reason::Incarnation);
        }
        if !self.window.is_new(header.counter) {
            return Err(Reason::Replayed);
        }
        let payload =
            self.seal.open(header.counter, frame.associated, frame.sealed).ok_or(Reason::Seal)?;
        self.window.take(header.counter);
        Ok(Opened { kind: frame.kind, counter: header.counter, body: frame.body(), payload })
    }

    /// Sends a frame of this session. False if the link has no room.
    #[inline]
    pub(crate) fn send(
        &mut self,
        link: &mut impl Transmit,
        kind: Kind,
        body: Option<&[u8; BODY_BYTES]>,
        payload_bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        let counter = self.counter.wrapping_add(1);
        let header = FrameHeader {
            version: VERSION,
            kind: kind.code(),
            session: self.session,
            counter,
            incarnation: self.incarnation,
            phase: 0,
            queue: 0,
            payload_bytes: u16::try_from(payload_bytes).unwrap_or(u16::MAX),
        };
        let was_sent = send(&mut self.seal, link, self.peer, &header, body, fill);
        if was_sent {
            self.counter = counter;
            self.stats.frames_sent.add(1);
        }
        was_sent
    }
}

/// A frame of a session, opened.
pub(crate) struct Opened<'a> {
    pub(crate) kind: Kind,
    pub(crate) counter: u64,
    pub(crate) body: [u8; BODY_BYTES],
    pub(crate) payload: &'a [u8],
}
