//! The IOhost's side of a session.

mod budget;
mod bundle;
mod devices;
mod doorway;
mod host;
mod nics;
mod slot;

pub use host::{Host, HostOptions, Member};

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use crate::channel::{Channel, message};
use crate::port::{Payload, Peer, Port, Seal};
use crate::round_trip::acknowledge_after;
use crate::segmentation::bits;
use crate::wire::{
    AnswerBody, Attach, DeviceEntry, Ending, FEATURES, Frame, Hello, Kind, List, MIN_FRAME_BYTES,
    PacketBody, Ping, Pong, RequestBody, Welcome, device_flag, feature,
};
use crate::{Neglected, Reason, Request, Rule, VrioStats};
use nics::Nics;
use slot::{Arrival, Slot, State, Step, Terms};

/// Control messages that wait for room in the link. Further ones are dropped: the client asks
/// again.
const REPLIES: usize = 16;

/// The limits of a session.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Slots that a client may have.
    pub slots: u16,
    /// The largest frame of the link.
    pub frame_bytes: u32,
    /// When a request is acknowledged whose client has not told its round trip.
    pub acknowledge_after: Nanos,
    /// The features that a session may have, of [`FEATURES`]: fewer for tests of older versions.
    pub features: u64,
    /// A rule to neglect, for simulations.
    pub neglected: Neglected,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            slots: 128,
            frame_bytes: crate::wire::DEFAULT_FRAME_BYTES,
            acknowledge_after: Nanos::from_millis(1),
            features: FEATURES,
            neglected: Neglected::default(),
        }
    }
}

/// A request that the store is to execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Execute {
    /// The host's name for it, for [`Host::complete`].
    pub ticket: u64,
    /// The name of its data, as a [`Port`] gets it: the client's place in its host, and the slot.
    pub place: u64,
    /// The device's number.
    pub device: u16,
    /// The number of the session's newest attachment of the device, in the order of all attachments
    /// in this process. If another session has attached the device later, that one is used, and
    /// this request is an old one.
    pub attachment: u64,
    /// The request.
    pub request: Request,
}

impl Execute {
    /// The [`place`](Self::place) of the request with this [`ticket`](Self::ticket).
    #[must_use]
    #[inline]
    pub const fn place_of(ticket: u64) -> u64 {
        ticket & 0xffff_ffff
    }
}

/// Something that is to be sent besides answers.
#[derive(Clone, Copy, Debug)]
enum Reply {
    /// With a `sent_at` of 0 it answers no PING.
    Pong {
        sent_at: u64,
        arrived_at: Nanos,
        payload_bytes: usize,
    },
    Entry {
        kind: Kind,
        entry: DeviceEntry,
    },
    /// The last frame of the session.
    Ending {
        code: u16,
    },
}

/// A session of one client with one link queue of an IOhost.
pub struct Server<S> {
    options: ServerOptions,
    channel: Channel<S>,
    stats: Arc<VrioStats>,
    terms: Terms,
    /// The session's place in its host.
    place: u16,
    /// Rises with each session, so that the store's answers to an older one are known.
    generation: u32,
    slots: Vec<Slot>,
    /// Slots of this session.
    granted: u16,
    /// Several answers may share a frame in this session.
    has_bundles: bool,
    /// There may be NICs in this session.
    has_packets: bool,
    slot_limit: u16,
    /// The limit that the client was told of last, where limits are increments.
    announced: u16,
    devices: Vec<DeviceEntry>,
    devices_version: u32,
    /// Numbers of devices that the client may use in this session, and when it has asked for them.
    attached: Vec<(u16, u64)>,
    /// Slots whose request the store is to execute.
    ready: VecDeque<u16>,
    /// Slots that owe the client something.
    sending: VecDeque<u16>,
    replies: VecDeque<Reply>,
    /// The session is over but for its last frame.
    is_over: bool,
    executing: usize,
    acknowledge_after: Nanos,
    /// No acknowledgement is due before.
    next_acknowledge: Nanos,
    heard_at: Nanos,
}

impl<S> fmt::Debug for Server<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without keys.
        let Self { place, terms, granted, executing, heard_at, .. } = self;
        f.debug_struct("Server")
            .field("place", place)
            .field("terms", terms)
            .field("granted", granted)
            .field("executing", executing)
            .field("heard_at", heard_at)
            .finish_non_exhaustive()
    }
}

impl<S: Seal> Server<S> {
    pub(super) fn new(options: ServerOptions, place: u16, stats: Arc<VrioStats>) -> Self {
        Self {
            options,
            channel: Channel::new(Peer::default(), Arc::clone(&stats)),
            stats,
            terms: Terms::default(),
            place,
            generation: 0,
            slots: Vec::new(),
            granted: 0,
            has_bundles: false,
            has_packets: false,
            slot_limit: options.slots,
            announced: 0,
            devices: Vec::new(),
            devices_version: 1,
            attached: Vec::new(),
            ready: VecDeque::new(),
            sending: VecDeque::new(),
            replies: VecDeque::new(),
            is_over: false,
            executing: 0,
            acknowledge_after: options.acknowledge_after,
            next_acknowledge: Nanos::MAX,
            heard_at: Nanos::ZERO,
        }
    }

    /// Another client has the place from now on.
    pub(super) fn hand_over(&mut self, stats: Arc<VrioStats>) {
        self.channel.stats = Arc::clone(&stats);
        self.stats = stats;
        self.slot_limit = self.options.slots;
        self.devices.clear();
    }

    /// Begins a session as `hello` asks for it. Its memory is allocated here: a client without a
    /// session has none.
    fn start(&mut self, now: Nanos, peer: Peer, hello: &Hello, welcome: &Welcome, seal: S) {
        let options = self.options;
        let slots = usize::from(welcome.slots);
        self.terms = Terms {
            frame_bytes: welcome.frame_bytes,
            tag_bytes: seal.tag_bytes(),
            neglected: options.neglected,
        };
        self.channel.peer = peer;
        self.channel.start(seal, welcome.session, welcome.incarnation, hello.queue);
        self.generation = self.generation.wrapping_add(1);
        self.slots.clear();
        self.slots.resize(slots, Slot::default());
        self.granted = welcome.slots;
        self.has_bundles = welcome.features & feature::BUNDLES != 0;
        self.has_packets = welcome.features & feature::PACKETS != 0;
        self.announced = welcome.slot_limit;
        self.attached.clear();
        self.clear();
        self.ready.reserve(slots);
        self.sending.reserve(slots);
        self.replies.reserve(REPLIES);
        self.is_over = false;
        self.executing = 0;
        self.acknowledge_after = options.acknowledge_after;
        self.next_acknowledge = Nanos::MAX;
        self.heard_at = now;
    }

    /// The session that a client with this HELLO can have.
    fn terms_for(&self, hello: &Hello) -> Welcome {
        let options = &self.options;
        let frame_bytes =
            hello.frame_bytes.clamp(MIN_FRAME_BYTES, options.frame_bytes.max(MIN_FRAME_BYTES));
        let slots = hello.slots.min(options.slots);
        let slot_limit = self.slot_limit.min(slots);
        let devices_version = self.devices_version;
        Welcome { frame_bytes, devices_version, slots, slot_limit, ..Welcome::default() }
    }

    /// Drops all that is to be sent or executed.
    fn clear(&mut self) {
        self.ready.clear();
        self.sending.clear();
        self.replies.clear();
    }

    /// Ends the session: its frames are dropped from now on, and nothing of it is given to the
    /// store any more. Requests that the store has are waited for; see
    /// [`is_drained`](Self::is_drained).
    pub(super) fn end(&mut self) {
        self.channel.end();
        // Nothing has begun with these.
        self.executing = self.executing.saturating_sub(self.ready.len());
        self.clear();
        self.next_acknowledge = Nanos::MAX;
    }

    /// Ends the session, and tells the client why in its last frame.
    pub(super) fn dismiss(&mut self, code: u16) {
        if self.channel.session == 0 {
            return;
        }
        self.executing = self.executing.saturating_sub(self.ready.len());
        self.clear();
        self.next_acknowledge = Nanos::MAX;
        self.is_over = true;
        self.replies.push_back(Reply::Ending { code });
    }

    /// Whether the store has no request of an ended session.
    #[must_use]
    pub const fn is_drained(&self) -> bool {
        self.executing == 0
    }

    /// The session's name; 0 if there is none.
    #[must_use]
    pub const fn session(&self) -> u64 {
        self.channel.session
    }

    /// When the newest frame arrived.
    #[must_use]
    pub const fn heard_at(&self) -> Nanos {
        self.heard_at
    }

    /// The sender of the newest frame.
    #[must_use]
    pub const fn peer(&self) -> Peer {
        self.channel.peer
    }

    /// The size of the session's frames.
    #[must_use]
    pub const fn frame_bytes(&self) -> u32 {
        self.terms.frame_bytes
    }

    /// Slots that the client may use now: its credit.
    #[must_use]
    pub fn credit(&self) -> u16 {
        self.slot_limit.min(self.granted)
    }

    /// Requests that the store has, or is to be given.
    #[must_use]
    pub const fn executing(&self) -> usize {
        self.executing
    }

    /// The time after which a request is acknowledged: the client's round trip, if it has told it.
    #[must_use]
    pub const fn acknowledge_after(&self) -> Nanos {
        self.acknowledge_after
    }

    /// See [`Host::set_slot_limit`].
    pub(super) fn set_slot_limit(&mut self, now: Nanos, slot_limit: u16) {
        if std::mem::replace(&mut self.slot_limit, slot_limit) != slot_limit {
            self.announce(now);
        }
    }

    /// Tells the client of a change before its next request or PING does.
    fn announce(&mut self, now: Nanos) {
        if self.channel.session != 0 {
            self.reply(Reply::Pong { sent_at: 0, arrived_at: now, payload_bytes: 0 });
        }
    }

    /// Takes a frame of this session.
    ///
    /// # Errors
    /// The frame was dropped; the reason is to be counted.
    pub(super) fn receive<P: Port>(
        &mut self,
        now: Nanos,
        from: Peer,
        (frame, frame_bytes): (&Frame<'_>, usize),
        received: &mut P::Received,
        (port, nics): (&mut P, &mut Nics),
    ) -> Result<(), Reason> {
        if self.is_over {
            return Err(Reason::Session);
        }
        self.channel.open(frame, frame_bytes, received, port)?;
        match frame.kind {
            Kind::Request => {
                let body = RequestBody::decode(frame.body());
                return self.request((now, from), (&body, frame.payload_bytes()), received, port);
            }
            Kind::Bundle => {
                return self.bundle((now, from), frame.payload_bytes(), received, port);
            }
            Kind::Packet => {
                let body = PacketBody::decode(frame.body());
                let packet = (&body, frame.payload_bytes());
                return self.packet((now, from), packet, (received, port), nics);
            }
            _ => {}
        }
        let message = match frame.kind {
            Kind::Ping => {
                let ping = Ping::decode(&message(port, received)?);
                let round_trip = Nanos(ping.round_trip_ns.into());
                if round_trip > Nanos::ZERO {
                    self.acknowledge_after = acknowledge_after(round_trip);
                }
                let payload_bytes = frame.payload_bytes();
                Reply::Pong { sent_at: ping.sent_at, arrived_at: now, payload_bytes }
            }
            Kind::List => {
                let list = List::decode(&message(port, received)?);
                Reply::Entry {
                    kind: Kind::Device,
                    entry: self.entry(|index, _| index == list.index),
                }
            }
            Kind::Attach => {
                let attach = Attach::decode(&message(port, received)?);
                let entry = self.entry(|_, entry| entry.name == attach.name);
                let entry = DeviceEntry { name: attach.name, ..entry };
                if entry.is_sound() {
                    self.attach(entry.device);
                } else if let Some(nic) = entry.nic() {
                    self.attach(entry.device);
                    nics.attach(self.place, &nic, &self.stats);
                }
                Reply::Entry { kind: Kind::Attached, entry }
            }
            Kind::Ending => {
                self.end();
                nics.leave(self.place, &self.stats);
                return Ok(());
            }
            _ => return Err(Reason::Kind),
        };
        self.heard(now, from);
        self.reply(message);
        Ok(())
    }

    /// Takes a REQUEST.
    fn request<P: Port>(
        &mut self,
        (now, from): (Nanos, Peer),
        (body, payload_bytes): (&RequestBody, usize),
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        let (place, is_drained) = (self.place_of(body.slot), self.slot_limit == 0);
        let Self { slots, devices, attached, terms, .. } = self;
        let is_it = |entry: &&DeviceEntry| entry.device == body.device;
        let is_attached = || attached.iter().any(|(number, _)| *number == body.device);
        let is_disk = |entry: &&DeviceEntry| !entry.has(device_flag::NIC) && is_attached();
        let entry = devices.iter().find(is_it).filter(is_disk);
        let entry = entry.ok_or(Reason::Device)?;
        if body.epoch != entry.epoch {
            return Err(Reason::Epoch);
        }
        let slot = slots.get_mut(usize::from(body.slot)).ok_or(Reason::Slot)?;
        if is_drained && !slot.needs_no_store(body) {
            return Err(Reason::Slot);
        }
        let arrival = Arrival { body, payload_bytes, received, place, port };
        let step = slot.take(now, arrival, (entry, terms));
        self.heard(now, from);
        self.follow(now, body.slot, step?);
        Ok(())
    }

    /// The client is there, and where the newest frame came from is where answers go.
    fn heard(&mut self, now: Nanos, from: Peer) {
        self.heard_at = now;
        self.channel.peer = from;
    }

    fn reply(&mut self, reply: Reply) {
        if self.replies.len() < REPLIES {
            self.replies.push_back(reply);
        }
    }

    fn follow(&mut self, now: Nanos, slot: u16, step: Step) {
        match step {
            Step::None => {}
            Step::Execute => {
                self.executing = self.executing.saturating_add(1);
                self.next_acknowledge =
                    self.next_acknowledge.min(now.after(self.acknowledge_after));
                self.ready.push_back(slot);
            }
            Step::Send => self.list(slot),
        }
    }

    fn list(&mut self, index: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(index)) else { return };
        if slot.owes() && !slot.is_listed {
            slot.is_listed = true;
            self.sending.push_back(index);
        }
    }

    fn place_of(&self, slot: u16) -> u64 {
        place_of(self.place, slot)
    }

    /// The next request for the store.
    pub(super) fn next_execute(&mut self) -> Option<Execute> {
        let index = self.ready.pop_front()?;
        let slot = self.slots.get(usize::from(index))?;
        self.stats.requests.add(1);
        let place = self.place_of(index);
        let ticket = u64::from(self.generation).wrapping_shl(32) | place;
        let fua = slot.request.fua && self.options.neglected.keeps(Rule::WriteThrough);
        let request = Request { fua, ..slot.request };
        let device = slot.body.device;
        // One that was taken from the client meanwhile is not executed either.
        let attachment = self.attachment(device).unwrap_or_default();
        Some(Execute { ticket, place, device, attachment, request })
    }

    /// The store has ended a request.
    pub(super) fn complete(&mut self, ticket: u64, result: Result<(), BlockError>) {
        if ticket.wrapping_shr(32) != u64::from(self.generation) {
            return;
        }
        let index = (ticket & 0xffff) as u16;
        let Some(slot) =
            self.slots.get_mut(usize::from(index)).filter(|slot| slot.state == State::Executing)
        else {
            return;
        };
        self.executing = self.executing.saturating_sub(1);
        slot.complete(result);
        if self.channel.session != 0 && !self.is_over {
            self.list(index);
        }
    }

    /// Sends what is to be sent. False if the link has no room for all of it.
    pub(super) fn poll(&mut self, now: Nanos, port: &mut impl Port) -> bool {
        if self.channel.session == 0 {
            return true;
        }
        while let Some(reply) = self.replies.front().copied() {
            if !self.send_reply(now, port, reply) {
                return false;
            }
            self.replies.pop_front();
            if matches!(reply, Reply::Ending { .. }) {
                self.end();
                return true;
            }
        }
        while let Some(index) = self.sending.front().copied() {
            let was_sent = self.send_bundle(now, port).unwrap_or_else(|| {
                let was_sent = self.send_slot(now, index, port);
                if was_sent {
                    self.unlist();
                }
                was_sent
            });
            if !was_sent {
                return false;
            }
        }
        true
    }

    /// Takes the first slot out of the list of those that have something to send.
    #[inline]
    fn unlist(&mut self) {
        let index = self.sending.pop_front();
        if let Some(slot) = index.and_then(|index| self.slots.get_mut(usize::from(index))) {
            slot.is_listed = false;
        }
    }

    /// Whether something is to be sent.
    pub(super) fn has_frames(&self) -> bool {
        !(self.sending.is_empty() && self.replies.is_empty())
    }

    /// Whether the store is to be given a request.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// When requests have to be acknowledged next.
    pub(super) const fn next_acknowledge(&self) -> Nanos {
        self.next_acknowledge
    }

    /// Acknowledges requests that the store has had for a round trip.
    pub(super) fn acknowledge(&mut self, now: Nanos) {
        if now < self.next_acknowledge {
            return;
        }
        self.next_acknowledge = Nanos::MAX;
        if self.executing == 0 || !self.options.neglected.keeps(Rule::Acknowledge) {
            return;
        }
        for index in 0..self.granted {
            let Some(slot) = self.slots.get_mut(usize::from(index)) else { return };
            if slot.state != State::Executing || slot.is_acknowledged {
                continue;
            }
            let due = slot.arrived_at.after(self.acknowledge_after);
            if due <= now {
                slot.is_acknowledged = true;
                slot.owes_busy = true;
                self.stats.acknowledged.add(1);
                self.list(index);
            } else {
                self.next_acknowledge = self.next_acknowledge.min(due);
            }
        }
    }

    fn limit(&self) -> u16 {
        let limit = self.credit();
        if self.options.neglected.keeps(Rule::AbsoluteLimits) {
            limit
        } else {
            limit.wrapping_sub(self.announced)
        }
    }

    fn send_reply(&mut self, now: Nanos, port: &mut impl Port, reply: Reply) -> bool {
        match reply {
            Reply::Pong { sent_at, arrived_at, payload_bytes } => {
                let pong = Pong {
                    sent_at,
                    held_ns: held(now, arrived_at),
                    devices_version: self.devices_version,
                    slot_limit: self.limit(),
                    acknowledge_ns: u32::try_from(self.acknowledge_after.0).unwrap_or(u32::MAX),
                };
                let pong = pong.encode();
                let was_sent = self.channel.send_message(port, Kind::Pong, &pong, payload_bytes);
                if was_sent {
                    self.announced = self.credit();
                }
                was_sent
            }
            Reply::Entry { kind, entry } => {
                self.channel.send_message(port, kind, &entry.encode(), 0)
            }
            Reply::Ending { code } => {
                let ending = Ending { code, ..Ending::default() }.encode();
                self.channel.send_message(port, Kind::Ending, &ending, 0)
            }
        }
    }

    /// Sends what a slot owes. False if the link has no room.
    fn send_slot(&mut self, now: Nanos, index: u16, port: &mut impl Port) -> bool {
        let (place, limits) = (self.place_of(index), (self.limit(), self.devices_version));
        let Self { channel, slots, .. } = self;
        let Some(slot) = slots.get_mut(usize::from(index)) else { return true };
        let answer = answer_to(slot, now, limits);
        if std::mem::take(&mut slot.owes_busy) && slot.is_unfinished() {
            let body = slot.busy(&answer).encode();
            if !channel.send(port, Kind::Busy, Some(&body), Payload::NONE) {
                slot.owes_busy = true;
                return false;
            }
        }
        if slot.owes_answer {
            let body = AnswerBody { status: slot.status, ..answer }.encode();
            if !channel.send(port, Kind::Answer, Some(&body), Payload::NONE) {
                return false;
            }
            slot.owes_answer = false;
        }
        for segment in bits(slot.segments) {
            let Some((offset_bytes, len_bytes)) = slot.cut.range(segment) else { continue };
            let body =
                AnswerBody { offset_bytes, len_bytes: slot.cut.len_bytes(), ..answer }.encode();
            let payload = Payload::Data { request: place, offset_bytes, len_bytes };
            if !channel.send(port, Kind::Answer, Some(&body), payload) {
                return false;
            }
            slot.segments &= slot.segments.wrapping_sub(1);
        }
        self.announced = self.credit();
        true
    }
}

/// The name of the data of a slot of the session at `place`.
#[inline]
fn place_of(place: u16, slot: u16) -> u64 {
    u64::from(place).wrapping_shl(16) | u64::from(slot)
}

/// The answer to a slot's request, but for the request's outcome.
#[inline]
fn answer_to(slot: &Slot, now: Nanos, (slot_limit, devices_version): (u16, u32)) -> AnswerBody {
    let RequestBody { device, slot: number, epoch, sequence, attempt, .. } = slot.body;
    let named =
        AnswerBody { device, slot: number, epoch, sequence, attempt, ..AnswerBody::default() };
    let held_ns = held(now, slot.arrived_at);
    AnswerBody { held_ns, slot_limit, devices_version, ..named }
}

/// The time since `arrived_at`, for the wire.
fn held(now: Nanos, arrived_at: Nanos) -> u32 {
    u32::try_from(now.since(arrived_at).0).unwrap_or(u32::MAX)
}
