//! The port of an engine to a link.

mod parts;
mod place;
mod scratch;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_link::{Buffer, Frame, Link, LinkAddress, LinkState, LinkStats, Properties};
use sidecore_memory::{GuestAddress, GuestMemory, Part, RegionHint, Segments};
use sidecore_reactor::Arm;
use sidecore_units::{Nanos, SECTOR_BYTES};
use sidecore_vrio::port::{Part as BundlePart, Payload, Peer, Port, Seal};
use sidecore_vrio::wire::DATA_HEADER_BYTES;

use crate::Peers;
use place::{Place, Target, copy};
use scratch::Scratch;

/// The most frames that are lent, or sent, together.
const BATCH: usize = 32;

/// The first bytes of a frame that are fetched ahead: a head and a sector, or a part of more that
/// is enough for the CPU to see the pattern.
const FETCH_BYTES: usize = DATA_HEADER_BYTES + 512;

/// Polls without a frame after which a buffer that was made ready goes back to the link, so that it
/// is not kept for a peer that has left.
const READY_POLLS: u32 = 1024;

/// Shorter payloads are copied: that costs less than to keep their frames.
const LENT_BYTES: usize = 2048;

/// The data of requests by their names: a client's tags, an IOhost's places.
pub trait RequestData {
    /// The memory of a request's data; `None` if there is no such request, whose data are then
    /// zeros that nothing can be stored in.
    fn segments(&self, request: u64) -> Option<&Segments>;

    /// Where the request's data begin in that memory: a long request is several to an engine.
    #[inline]
    fn first_byte(&self, request: u64) -> u64 {
        let _ = request;
        0
    }

    /// Makes the payload of a frame, at `payload` in the link's memory, the request's data, until
    /// the request has ended. False if the payload is to be copied.
    #[inline]
    fn lend(&mut self, request: u64, payload: GuestAddress) -> bool {
        let _ = (request, payload);
        false
    }

    /// Keeps the frame of a payload that was lent, because its batch goes back to the link. Returns
    /// it if the request has ended.
    fn keep(&mut self, request: u64, frame: Frame) -> Option<Frame> {
        let _ = request;
        Some(frame)
    }

    /// Moves the kept frames of requests that have ended to `frames`.
    #[inline]
    fn take_ended(&mut self, frames: &mut Vec<Frame>) {
        let _ = frames;
    }

    /// Moves all kept frames to `frames`, because the port ends.
    fn take_kept(&mut self, frames: &mut Vec<Frame>) {
        let _ = frames;
    }
}

/// A request's memory, and a place in it.
#[inline]
fn place<D: RequestData>(data: &D, request: u64, offset_bytes: u32) -> Option<(&Segments, u64)> {
    let segments = data.segments(request)?;
    Some((segments, data.first_byte(request).saturating_add(offset_bytes.into())))
}

/// A link as the [`Port`] of engines: heads are copied before they are parsed, and payloads move
/// once, between the memory of a frame and that of a request. A payload that is sealed takes the
/// way through a buffer of the port's own, because a cipher needs a slice that no peer can change.
///
/// A link has a limited number of frames, so the port gives those of a batch back before it takes
/// the next one.
pub struct LinkPort<D: RequestData> {
    /// The data of the engine's requests.
    pub data: D,
    link: Box<dyn Link>,
    /// The link's, as [`Properties`] says.
    frame_bytes: usize,
    memory: GuestMemory,
    hint: RegionHint,
    peers: Peers,
    now: Nanos,
    /// The batch of received frames, of which those from `next` on have not been handed out.
    received: Vec<Frame>,
    next: usize,
    /// The frames of the batch whose payloads were lent, in their order, and the requests.
    lent: Vec<(usize, u64)>,
    /// The link takes frames back in any order, so payloads may be lent.
    lends: bool,
    /// Empty buffers, the first one last: they are used in the order in which they were lent.
    empty: Vec<Buffer>,
    /// The station that they were asked for.
    empty_for: Option<(Peer, LinkAddress)>,
    /// Frames to be sent.
    outgoing: Vec<Buffer>,
    /// Frames that are sent together.
    batch: usize,
    /// Buffers to ask for at a time: as many as a session used between the last two flushes,
    /// because a buffer that rests here keeps another one, which no cache has, in use.
    wanted: usize,
    /// Frames of the session since the last flush.
    used: usize,
    /// The most that another one has used since then.
    most_used: usize,
    /// See [`share`](Self::share).
    share_bytes: usize,
    /// The rest of the session's share.
    left_bytes: usize,
    /// A session has used up its share, and has more to send.
    is_paused: bool,
    /// Polls without a frame since the last one was sent or received.
    idle_polls: u32,
    /// A part of a frame as a list.
    list: Segments,
    /// A payload that is being sealed, or was opened.
    scratch: Scratch,
    /// Frames that were not sent because their peer's name is invalid, or that are too long.
    unsendable: u64,
}

/// A frame that has arrived.
#[derive(Debug)]
pub struct Arrived {
    /// The sender. Nothing proves it.
    pub from: Peer,
    head: [u8; DATA_HEADER_BYTES],
    head_bytes: usize,
    /// Size of the frame, with what the medium has padded it with.
    pub frame_bytes: usize,
    /// The frame's payload.
    pub received: Received,
}

impl Arrived {
    /// A private copy of the frame's first bytes: as many as the longest head has, or fewer if the
    /// frame is shorter.
    #[must_use]
    #[inline]
    pub fn head(&self) -> &[u8] {
        self.head.split_at(self.head_bytes.min(DATA_HEADER_BYTES)).0
    }

    /// The frame's first bytes and its payload, as an engine takes them.
    #[inline]
    pub fn parts(&mut self) -> (&[u8], &mut Received) {
        let (head, _) = self.head.split_at(self.head_bytes.min(DATA_HEADER_BYTES));
        (head, &mut self.received)
    }
}

/// A payload in a received frame, until the port receives the next batch.
#[derive(Debug)]
pub struct Received {
    /// The index of the frame in the port's batch.
    frame: usize,
    /// Where the whole payload begins.
    whole_at: usize,
    /// The payload that the engine reads begins so far into the whole one.
    skip_bytes: usize,
    payload_bytes: usize,
    /// The port's scratch buffer has the opened payload.
    is_in_scratch: bool,
}

impl<D: RequestData> LinkPort<D> {
    /// A port of `link`.
    #[must_use]
    pub fn new(link: Box<dyn Link>, data: D) -> Self {
        let properties = link.properties();
        let scratch = Scratch::new(properties.frame_bytes);
        let frames = properties.receive_frames;
        let batch = properties.batch_frames.clamp(1, BATCH);
        let lends = !properties.fills_in_order;
        Self {
            data,
            frame_bytes: properties.frame_bytes,
            memory: link.memory().clone(),
            hint: RegionHint::default(),
            link,
            peers: Peers::default(),
            now: Nanos::ZERO,
            received: Vec::with_capacity(frames),
            next: 0,
            lent: Vec::with_capacity(frames),
            lends,
            empty: Vec::with_capacity(BATCH),
            empty_for: None,
            outgoing: Vec::with_capacity(BATCH),
            batch,
            wanted: 1,
            used: 0,
            most_used: 0,
            share_bytes: usize::MAX,
            left_bytes: usize::MAX,
            is_paused: false,
            idle_polls: READY_POLLS,
            list: Segments::with_capacity(sidecore_link::PIECES_MAX.saturating_mul(2)),
            scratch,
            unsendable: 0,
        }
    }

    /// Takes another link in the place of this one, which gets its frames and buffers back.
    pub(crate) fn replace(&mut self, link: Box<dyn Link>) -> Box<dyn Link> {
        self.leave();
        let properties = link.properties();
        self.frame_bytes = properties.frame_bytes;
        self.batch = properties.batch_frames.clamp(1, BATCH);
        self.lends = !properties.fills_in_order;
        self.received = Vec::with_capacity(properties.receive_frames);
        self.scratch = Scratch::new(properties.frame_bytes);
        self.memory = link.memory().clone();
        (self.hint, self.empty_for) = (RegionHint::default(), None);
        (self.wanted, self.used, self.idle_polls) = (1, 0, READY_POLLS);
        std::mem::replace(&mut self.link, link)
    }

    fn leave(&mut self) {
        self.next = 0;
        self.lent.clear();
        self.data.take_kept(&mut self.received);
        self.link.give_back(&mut self.received);
        self.link.cancel(&mut self.empty);
        self.link.cancel(&mut self.outgoing);
    }

    /// The link's properties.
    #[must_use]
    pub fn properties(&self) -> &Properties {
        self.link.properties()
    }

    /// The counters of the link.
    #[must_use]
    pub fn link_stats(&self) -> &Arc<LinkStats> {
        self.link.stats()
    }

    /// Whether the link carries frames.
    #[must_use]
    pub fn state(&self) -> LinkState {
        self.link.state()
    }

    /// Frames that were not sent because their peer's name had become invalid, or because they were
    /// too long.
    #[must_use]
    pub const fn unsendable(&self) -> u64 {
        self.unsendable
    }

    /// The station of a name.
    #[must_use]
    pub fn address(&self, peer: Peer) -> Option<LinkAddress> {
        self.peers.address(peer)
    }

    /// The stations that frames came from and go to.
    pub const fn peers(&mut self) -> &mut Peers {
        &mut self.peers
    }

    /// Takes up to `limit` frames that have arrived by `now`; [`next_frame`](Self::next_frame)
    /// hands them out. Those of the last batch go back to the link. Returns their number.
    #[inline(always)]
    pub fn receive(&mut self, now: Nanos, limit: usize) -> usize {
        self.now = now;
        self.give_back();
        let limit = limit.min(self.received.capacity());
        self.link.receive(now, limit, &mut self.received);
        if self.received.is_empty() {
            // Memory of a peer that has left is given back once the link is idle.
            if self.idle_polls > READY_POLLS {
                self.renew_memory();
            } else {
                self.use_idle_time();
            }
        } else {
            self.renew_memory();
            self.fetch_received(0);
        }
        self.received.len()
    }

    /// Takes the link's memory over, if a peer has come or gone: frames and buffers that are lent
    /// from now on may lie in it.
    #[inline]
    fn renew_memory(&mut self) {
        if !self.memory.is_same(self.link.memory()) {
            self.memory = self.link.memory().clone();
        }
    }

    /// Makes a buffer for the next frame ready when the first poll finds nothing: the lines that
    /// the peer has read are fetched before they are needed.
    #[inline]
    fn use_idle_time(&mut self) {
        self.idle_polls = self.idle_polls.wrapping_add(1);
        if self.idle_polls == 1
            && let Some((_, to @ LinkAddress::Peer(_))) = self.empty_for
        {
            if self.empty.is_empty() {
                self.link.buffers(to, 1, &mut self.empty);
                self.renew_memory();
            }
            self.fetch_empty(self.empty.len().wrapping_sub(1), FETCH_BYTES);
        } else if self.idle_polls > READY_POLLS {
            self.link.cancel(&mut self.empty);
        }
    }

    /// Fetches the first bytes of a frame of the batch. The lines are in the cache of another core,
    /// and a head is parsed before the payload is copied.
    #[inline]
    fn fetch_received(&mut self, index: usize) {
        if let Some(frame) = self.received.get(index)
            && let Some(span) = frame.pieces().span(&self.memory, &mut self.hint)
        {
            span.prefetch_for_read(FETCH_BYTES);
        }
    }

    /// The next frame of the batch.
    #[inline(always)] // a frame that is returned through memory is copied twice
    pub fn next_frame(&mut self) -> Option<Arrived> {
        let index = self.next;
        let next = index.wrapping_add(1);
        self.fetch_received(next);
        let frame = self.received.get(index)?;
        self.next = next;
        let from = self.peers.name(frame.from);
        let mut head = [0; DATA_HEADER_BYTES];
        let place = Place::of(frame.pieces(), &self.memory, &mut self.hint);
        let head_bytes = place.read(0, &mut head);
        let received = Received {
            frame: index,
            whole_at: 0,
            skip_bytes: 0,
            payload_bytes: 0,
            is_in_scratch: false,
        };
        Some(Arrived { from, head, head_bytes, frame_bytes: frame.len_bytes(), received })
    }

    /// Gives the frames of the batch back to the link.
    #[inline]
    pub fn give_back(&mut self) {
        self.next = 0;
        // From the last one on, so that no frame that follows moves.
        while let Some((index, request)) = self.lent.pop() {
            if index < self.received.len() {
                let frame = self.received.swap_remove(index);
                self.received.extend(self.data.keep(request, frame));
            }
        }
        self.data.take_ended(&mut self.received);
        if !self.received.is_empty() {
            self.link.give_back(&mut self.received);
        }
    }

    /// Where a payload is in the link's memory that may be lent: a long one in one piece, and
    /// aligned.
    #[inline]
    fn lendable(&self, received: &Received) -> Option<GuestAddress> {
        let Received { frame, whole_at, skip_bytes, payload_bytes, is_in_scratch } = received;
        if *payload_bytes < LENT_BYTES || *is_in_scratch || !self.lends {
            return None;
        }
        let pieces = self.received.get(*frame)?.pieces();
        let piece = pieces.part(whole_at.saturating_add(*skip_bytes), *payload_bytes).next()?;
        let is_whole = piece.len_bytes() == *payload_bytes;
        let payload = piece.address();
        (is_whole && payload.0.is_multiple_of(SECTOR_BYTES)).then_some(payload)
    }

    /// The memory that lent payloads lie in.
    #[inline]
    pub(crate) const fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Lets each session send frames of `share_bytes`, but for its last one's, from now on until
    /// the next call. After those the engine finds no room, until a later poll.
    #[inline]
    pub const fn share(&mut self, share_bytes: usize) {
        (self.share_bytes, self.left_bytes) = (share_bytes, share_bytes);
        self.is_paused = false;
    }

    /// Whether a session has more to send than its [`share`](Self::share) since the last call.
    #[inline]
    pub const fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Sends the frames that an engine has made. The caller's last act in a poll.
    #[inline]
    pub fn flush(&mut self, now: Nanos) {
        self.now = now;
        if !self.outgoing.is_empty() {
            self.link.send(now, &mut self.outgoing);
        }
        let used = self.used.max(self.most_used);
        if used > 0 {
            self.wanted = used.min(BATCH);
            (self.used, self.most_used) = (0, 0);
            self.idle_polls = 0;
        }
    }

    /// See [`Link::arm`].
    pub fn arm(&mut self) -> Arm {
        self.idle_polls = READY_POLLS;
        self.use_idle_time();
        self.renew_memory();
        self.link.arm()
    }

    /// See [`Link::disarm`].
    pub fn disarm(&mut self) {
        self.link.disarm();
    }

    /// See [`Link::wake_fd`].
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.link.wake_fd()
    }

    /// See [`Link::on_wake`].
    pub fn on_wake(&mut self) {
        self.link.on_wake();
    }

    /// See [`Link::deadline`].
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        self.link.deadline()
    }

    /// The address of a station; `None` if its name has become invalid. The buffers of a link
    /// through memory are each for one peer, those of others for any.
    #[inline(always)]
    fn turn_to(&mut self, to: Peer) -> Option<LinkAddress> {
        if let Some((peer, address)) = self.empty_for
            && peer == to
            && Peers::is_lasting(to)
        {
            return Some(address);
        }
        let address = self.peers.address(to)?;
        if self.empty_for.is_none_or(|(_, before)| before != address) {
            if matches!(address, LinkAddress::Peer(_)) {
                self.link.cancel(&mut self.empty);
            }
            self.empty_for = Some((to, address));
        }
        Some(address)
    }

    /// Asks for empty buffers for the address that the port has turned to. False if there is none.
    fn ask_for_buffers(&mut self, to: LinkAddress) -> bool {
        self.link.buffers(to, self.wanted, &mut self.empty);
        self.renew_memory();
        self.empty.reverse();
        !self.empty.is_empty()
    }

    /// Fetches the first bytes of an empty buffer: the peer's core has the lines that it has read.
    #[inline]
    fn fetch_empty(&mut self, index: usize, len_bytes: usize) {
        if let Some(buffer) = self.empty.get(index)
            && let Some(span) = buffer.pieces().span(&self.memory, &mut self.hint)
        {
            span.prefetch_for_write(len_bytes);
        }
    }

    /// Sends a frame whose payload `put` writes.
    #[inline]
    fn send_frame<S: Seal>(
        &mut self,
        to: Peer,
        (head, payload_bytes): (&[u8], usize),
        (counter, seal): (u64, &mut S),
        put: impl FnOnce(Target<'_>, &D, &mut Segments),
    ) -> bool {
        let (head_bytes, tag_bytes) = (head.len(), seal.tag_bytes());
        let sealed_bytes = payload_bytes.saturating_add(tag_bytes);
        let frame_bytes = head_bytes.saturating_add(sealed_bytes);
        let is_short = frame_bytes <= self.frame_bytes;
        let Some(address) = self.turn_to(to).filter(|_| is_short) else {
            // As if the link had lost it: it cannot be sent later either.
            self.unsendable = self.unsendable.wrapping_add(1);
            return true;
        };
        if self.left_bytes == 0 {
            self.is_paused = true;
            return false;
        }
        if self.empty.is_empty() && !self.ask_for_buffers(address) {
            return false;
        }
        self.left_bytes = self.left_bytes.saturating_sub(frame_bytes);
        // While this one is filled.
        self.fetch_empty(self.empty.len().wrapping_sub(2), frame_bytes.min(FETCH_BYTES));
        let Some(buffer) = self.empty.last_mut() else { return false };
        buffer.address(address, frame_bytes);
        let frame = Place::of(buffer.pieces(), &self.memory, &mut self.hint);
        frame.write(0, head);
        if tag_bytes == 0 {
            if payload_bytes > 0 {
                put(Target::Frame(frame, head_bytes), &self.data, &mut self.list);
            }
        } else if let Some(sealed) = self.scratch.bytes_mut().get_mut(..sealed_bytes) {
            let payload = sealed.get_mut(..payload_bytes).unwrap_or_default();
            put(Target::Scratch(payload), &self.data, &mut self.list);
            seal.seal(counter, head, sealed);
            frame.write(head_bytes, sealed);
        }
        if let Some(buffer) = self.empty.pop() {
            self.outgoing.push(buffer);
        }
        self.used = self.used.wrapping_add(1);
        if self.outgoing.len() >= self.batch {
            self.link.send(self.now, &mut self.outgoing);
        }
        true
    }
}

impl<D: RequestData> Port for LinkPort<D> {
    type Received = Received;

    #[inline]
    fn send<S: Seal>(
        &mut self,
        to: Peer,
        head: &[u8],
        payload: Payload<'_>,
        sealed_by: (u64, &mut S),
    ) -> bool {
        let payload_bytes = payload.len_bytes();
        self.send_frame(to, (head, payload_bytes), sealed_by, |mut target, data, list| {
            target.put_at(0, payload, data, list);
        })
    }

    #[inline]
    fn send_bundle<'a, S: Seal>(
        &mut self,
        to: Peer,
        head: &[u8],
        payload_bytes: usize,
        parts: impl Iterator<Item = BundlePart<'a>>,
        sealed_by: (u64, &mut S),
    ) -> bool {
        self.send_frame(to, (head, payload_bytes), sealed_by, |target, data, list| {
            target.put_parts(payload_bytes, parts, data, list);
        })
    }

    #[inline]
    fn next_session(&mut self) {
        self.left_bytes = self.share_bytes;
        self.most_used = self.most_used.max(std::mem::take(&mut self.used));
        // A client does not wait for the frames of the next one, where that costs no system call.
        if self.share_bytes < usize::MAX && self.batch < BATCH && !self.outgoing.is_empty() {
            self.link.send(self.now, &mut self.outgoing);
        }
    }

    #[inline]
    fn open<S: Seal>(
        &mut self,
        received: &mut Received,
        head: &[u8],
        payload_bytes: usize,
        counter: u64,
        seal: &mut S,
    ) -> bool {
        received.whole_at = head.len();
        received.skip_bytes = 0;
        received.payload_bytes = payload_bytes;
        let tag_bytes = seal.tag_bytes();
        if tag_bytes == 0 {
            return seal.open(counter, head, &mut []);
        }
        let sealed_bytes = payload_bytes.saturating_add(tag_bytes);
        let Some(sealed) = self.scratch.bytes_mut().get_mut(..sealed_bytes) else { return false };
        received.is_in_scratch = true;
        let Some(frame) = self.received.get(received.frame) else { return false };
        let frame = Place::of(frame.pieces(), &self.memory, &mut self.hint);
        frame.read(head.len(), sealed) == sealed_bytes && seal.open(counter, head, sealed)
    }

    #[inline]
    fn select(&mut self, received: &mut Received, skip_bytes: usize, len_bytes: usize) {
        received.skip_bytes = skip_bytes;
        received.payload_bytes = len_bytes;
    }

    #[inline]
    fn message(&mut self, received: &Received, to: &mut [u8]) -> usize {
        let len = to.len().min(received.payload_bytes);
        let to = to.get_mut(..len).unwrap_or_default();
        if received.is_in_scratch {
            copy(to, self.scratch.bytes().get(received.skip_bytes..).unwrap_or_default())
        } else if let Some(frame) = self.received.get(received.frame) {
            let frame = Place::of(frame.pieces(), &self.memory, &mut self.hint);
            frame.read(received.whole_at.wrapping_add(received.skip_bytes), to)
        } else {
            0
        }
    }

    #[inline]
    fn store(&mut self, received: &mut Received, request: u64, offset_bytes: u32) {
        let Some((segments, at)) = place(&self.data, request, offset_bytes) else { return };
        let len_bytes = received.payload_bytes;
        if received.is_in_scratch {
            let opened = self.scratch.bytes().get(received.skip_bytes..);
            if let Some(opened) = opened.and_then(|opened| opened.get(..len_bytes)) {
                segments.copy_from_slice(at, opened);
            }
            return;
        }
        let Some(frame) = self.received.get(received.frame) else { return };
        let from = received.whole_at.wrapping_add(received.skip_bytes);
        match Place::of(frame.pieces(), &self.memory, &mut self.hint) {
            Place::Span(span) => {
                span.copy_to((from, len_bytes), segments, at);
            }
            Place::Pieces(pieces, memory) => {
                self.list.bind(memory);
                if pieces.push_to(&mut self.list, from, len_bytes).is_ok() {
                    self.list.copy_to(Part { skip_bytes: 0, len_bytes }, segments, at);
                }
            }
        }
    }

    #[inline]
    fn store_all(&mut self, received: &mut Received, request: u64) {
        match self.lendable(received) {
            Some(payload) if self.data.lend(request, payload) => {
                self.lent.push((received.frame, request));
            }
            _ => self.store(received, request, 0),
        }
    }

    fn load(&mut self, request: u64, offset_bytes: u32, to: &mut [u8]) {
        let place = place(&self.data, request, offset_bytes);
        let done = place.map_or(0, |(segments, at)| segments.copy_to_slice(at, to));
        to.get_mut(done..).unwrap_or_default().fill(0);
    }

    #[inline]
    fn clear(&mut self, request: u64, len_bytes: u32) {
        if let Some(segments) = self.data.segments(request) {
            segments.zero(self.data.first_byte(request), len_bytes.into());
        }
    }
}

impl<D: RequestData> Drop for LinkPort<D> {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests;
