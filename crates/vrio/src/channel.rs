//! One end of a session: its name, its counters and its seal.

use std::sync::Arc;

use crate::port::{Payload, Peer, Plain, Port, Seal};
use crate::window::Window;
use crate::wire::{BODY_BYTES, DATA_HEADER_BYTES, Frame, FrameHeader, Kind, VERSION};
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
        let Some(seal) = &mut self.seal else { return false };
        let counter = self.counter.wrapping_add(1);
        let header = FrameHeader {
            version: VERSION,
            kind: kind.code(),
            session: self.session,
            counter,
            incarnation: self.incarnation,
            phase: seal.phase(counter),
            queue: self.queue,
            payload_bytes: u16::try_from(payload.len_bytes()).unwrap_or(u16::MAX),
        };
        let was_sent = send(seal, port, self.peer, &header, body, payload);
        if was_sent {
            self.counter = counter;
            self.stats.frames_sent.add(1);
        }
        was_sent
    }
}
