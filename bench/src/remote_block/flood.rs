//! A client's link by which the client can flood its IOhost.
//!
//! The flood has no session of its own, which would need a core: it repeats a read that the session
//! has sent, each time as a new request of one of the session's slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sidecore_link::{Buffer, Frame, Link, LinkAddress};
use sidecore_units::Nanos;
use sidecore_vrio::wire::{self, DATA_HEADER_BYTES, FrameHeader, Kind, RequestBody};

use super::through::pass_through;

/// The slots that a flood uses: as many as a session has.
const SLOTS: u16 = 128;
/// Frames that a flood sends in a turn of its client: few, because the client that is measured
/// works on the same core.
const TURN_FRAMES: usize = 8;

/// Turns a flood on and off, and counts its frames.
#[derive(Debug, Default)]
pub(super) struct Flood {
    is_on: AtomicBool,
    sent: AtomicU64,
    answers: AtomicU64,
}

impl Flood {
    pub(super) fn set(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// The frames so far that were sent, and that came back.
    pub(super) fn counts(&self) -> [u64; 2] {
        [&self.sent, &self.answers].map(|count| count.load(Ordering::Relaxed))
    }
}

/// A link whose session sends one read before the first flood, and none afterwards.
pub(super) struct FloodLink {
    link: Box<dyn Link>,
    /// The other end.
    peer: LinkAddress,
    flood: Arc<Flood>,
    /// The last read of the session.
    read: Option<(FrameHeader, RequestBody)>,
    /// The counters of all frames are moved on by the frames of floods.
    flooded: u64,
    frames: Vec<Frame>,
    buffers: Vec<Buffer>,
}

impl FloodLink {
    pub(super) fn new(link: Box<dyn Link>, peer: LinkAddress) -> Self {
        let (frames, buffers) = (Vec::with_capacity(TURN_FRAMES), Vec::with_capacity(TURN_FRAMES));
        Self { link, peer, flood: Arc::default(), read: None, flooded: 0, frames, buffers }
    }

    pub(super) fn flood(&self) -> Arc<Flood> {
        Arc::clone(&self.flood)
    }

    /// Takes note of reads, and gives the session's frames counters that the flood has not used.
    fn look_at(&mut self, buffer: &Buffer) {
        let mut head = [0; DATA_HEADER_BYTES];
        buffer.pieces().read(self.link.memory(), 0, &mut head);
        let Ok(frame) = wire::Frame::parse(&head) else { return };
        let header = frame.header;
        if header.counter == 0 {
            return;
        }
        let header = FrameHeader { counter: header.counter + self.flooded, ..header };
        if frame.kind == Kind::Request && header.payload_bytes == 0 {
            self.read = Some((header, RequestBody::decode(frame.body())));
        }
        if let Some((read, _)) = &mut self.read {
            read.counter = header.counter;
        }
        buffer.pieces().write(self.link.memory(), 0, &header.encode());
    }

    /// Drops the answers that have come, and sends the next requests.
    fn turn(&mut self, now: Nanos) {
        self.link.receive(now, usize::from(SLOTS), &mut self.frames);
        self.flood.answers.fetch_add(self.frames.len() as u64, Ordering::Relaxed);
        self.link.give_back(&mut self.frames);
        let Some((header, body)) = &mut self.read else { return };
        self.link.buffers(self.peer, TURN_FRAMES, &mut self.buffers);
        self.flood.sent.fetch_add(self.buffers.len() as u64, Ordering::Relaxed);
        for buffer in &mut self.buffers {
            self.flooded += 1;
            header.counter += 1;
            body.slot = (body.slot + 1) % SLOTS;
            // A new request of each slot in each round.
            body.sequence = body.sequence.wrapping_add(u32::from(body.slot == 0));
            let mut frame = [0; DATA_HEADER_BYTES];
            let (first, second) = frame.split_at_mut(FrameHeader::BYTES);
            first.copy_from_slice(&header.encode());
            second.copy_from_slice(&body.encode());
            buffer.pieces().write(self.link.memory(), 0, &frame);
            buffer.address(self.peer, DATA_HEADER_BYTES);
        }
        self.link.send(now, &mut self.buffers);
    }
}

impl Link for FloodLink {
    pass_through!();

    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>) {
        if self.flood.is_on() {
            self.turn(now);
        } else {
            self.link.receive(now, limit, frames);
        }
    }

    fn send(&mut self, now: Nanos, buffers: &mut Vec<Buffer>) {
        for buffer in &*buffers {
            self.look_at(buffer);
        }
        self.link.send(now, buffers);
    }
}

#[cfg(test)]
mod tests {
    use sidecore_link::{LinkOptions, MemoryLink};
    use sidecore_linux::peer_event;
    use sidecore_vrio::wire::VERSION;

    use super::*;

    const PEER: LinkAddress = LinkAddress::Peer(0);

    /// Sends a frame of the session with this counter.
    fn send(link: &mut dyn Link, kind: Kind, counter: u64) {
        let kind = kind.code();
        let header = FrameHeader { version: VERSION, kind, counter, ..FrameHeader::default() };
        let mut frame = header.encode().to_vec();
        frame.extend(RequestBody { slot: 5, sequence: 9, ..RequestBody::default() }.encode());
        let mut buffers = Vec::new();
        link.buffers(PEER, 1, &mut buffers);
        buffers[0].pieces().write(link.memory(), 0, &frame);
        buffers[0].address(PEER, frame.len());
        link.send(Nanos::ZERO, &mut buffers);
    }

    /// The counters, slots and sequences of the frames that have come.
    fn receive(link: &mut dyn Link) -> Vec<(u64, u16, u32)> {
        let mut frames = Vec::new();
        link.receive(Nanos::ZERO, 64, &mut frames);
        let read = |frame: &Frame| {
            let mut head = [0; DATA_HEADER_BYTES];
            frame.pieces().read(link.memory(), 0, &mut head);
            let frame = wire::Frame::parse(&head).unwrap();
            let body = RequestBody::decode(frame.body());
            (frame.header.counter, body.slot, body.sequence)
        };
        let all = frames.iter().map(read).collect();
        link.give_back(&mut frames);
        all
    }

    #[test]
    fn a_flood_sends_new_requests_and_the_session_goes_on_behind_it() {
        let options = LinkOptions::new(DATA_HEADER_BYTES);
        let (mut host, client) = MemoryLink::pair(&options, peer_event).unwrap();
        let mut client = FloodLink::new(Box::new(client), PEER);
        let flood = client.flood();
        flood.set(true);
        assert!(receive(&mut client).is_empty());
        assert_eq!(flood.counts(), [0, 0], "there is no read to repeat");
        flood.set(false);
        send(&mut client, Kind::Request, 3);
        assert_eq!(receive(&mut host), [(3, 5, 9)]);
        flood.set(true);
        send(&mut host, Kind::Answer, 1);
        let mut seen = Vec::new();
        for _ in 0..32 {
            assert!(receive(&mut client).is_empty(), "the session hears nothing");
            seen.append(&mut receive(&mut host));
        }
        assert_eq!(flood.counts(), [256, 1]);
        assert_eq!((seen[0], seen[122], seen[123]), ((4, 6, 9), (126, 0, 10), (127, 1, 10)));
        let counters: Vec<u64> = seen.iter().map(|(counter, ..)| *counter).collect();
        assert!(counters.iter().copied().eq(4..260));
        flood.set(false);
        send(&mut client, Kind::Request, 4);
        assert_eq!(receive(&mut host)[0].0, 260);
        flood.set(true);
        assert!(receive(&mut client).is_empty());
        assert_eq!(receive(&mut host)[0].0, 261);
    }
}
