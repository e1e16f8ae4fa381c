//! The IOhost's side of a session.

mod host;
mod slot;

pub use host::{Host, HostOptions, Member};

use std::collections::VecDeque;
use std::sync::Arc;

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use crate::channel::{Channel, Opened, padded};
use crate::segmentation::bits;
use crate::wire::{
    AnswerBody, Attach, DeviceEntry, Ending, Frame, Hello, Kind, List, MIN_FRAME_BYTES, Ping, Pong,
    RequestBody, answer_state, ending,
};
use crate::{Data, Neglected, Peer, Reason, Request, Rule, Seal, Transmit, VrioStats};
use slot::{Slot, State, Step, Terms};

/// Control messages that wait for room in the link. Further ones are dropped: the client asks
/// again.
const REPLIES: usize = 16;
/// An acknowledgement is due after the client's round trip, within these bounds.
const ACKNOWLEDGE_MIN: Nanos = Nanos::from_micros(20);
const ACKNOWLEDGE_MAX: Nanos = Nanos::from_millis(100);

/// The limits of a session.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Slots that a client may have.
    pub slots: u16,
    /// The largest frame of the link.
    pub frame_bytes: u32,
    /// When a request is acknowledged whose client has not told its round trip.
    pub acknowledge_after: Nanos,
    /// A rule to neglect, for simulations.
    pub neglected: Neglected,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            slots: 128,
            frame_bytes: crate::wire::DEFAULT_FRAME_BYTES,
            acknowledge_after: Nanos::from_millis(1),
            neglected: Neglected::default(),
        }
    }
}

/// A request that the store is to execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Execute {
    /// The session's name for it, for [`Server::complete`].
    pub ticket: u64,
    /// The name of its data, as [`Data`] gets it: the session's place in its host, and the slot.
    pub place: u64,
    /// The device's number.
    pub device: u16,
    /// The request.
    pub request: Request,
}

/// Something that is to be sent besides answers.
#[derive(Clone, Copy, Debug)]
enum Reply {
    Pong { sent_at: u64, arrived_at: Nanos, payload_bytes: usize },
    Entry { kind: Kind, entry: DeviceEntry },
    Ending { code: u16 },
}

/// A session of one client with one link queue of an IOhost.
#[derive(Debug)]
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
    slot_limit: u16,
    /// The limit that the client was told of last, where limits are increments.
    announced: u16,
    devices: Vec<DeviceEntry>,
    devices_version: u32,
    /// Numbers of devices that the client may use in this session.
    attached: Vec<u16>,
    /// Slots whose request the store is to execute.
    ready: VecDeque<u16>,
    /// Slots that owe the client something.
    sending: VecDeque<u16>,
    replies: VecDeque<Reply>,
    executing: usize,
    acknowledge_after: Nanos,
    /// No acknowledgement is due before.
    next_acknowledge: Nanos,
    heard_at: Nanos,
}

impl<S: Seal> Server<S> {
    pub(super) fn new(options: ServerOptions, seal: S, place: u16, stats: Arc<VrioStats>) -> Self {
        let slots = usize::from(options.slots);
        Self {
            options,
            channel: Channel::new(seal, Peer::default(), Arc::clone(&stats)),
            stats,
            terms: Terms::default(),
            place,
            generation: 0,
            slots: vec![Slot::default(); slots],
            granted: 0,
            slot_limit: options.slots,
            announced: 0,
            devices: Vec::new(),
            devices_version: 1,
            attached: Vec::new(),
            ready: VecDeque::with_capacity(slots),
            sending: VecDeque::with_capacity(slots),
            replies: VecDeque::with_capacity(REPLIES),
            executing: 0,
            acknowledge_after: options.acknowledge_after,
            next_acknowledge: Nanos::MAX,
            heard_at: Nanos::ZERO,
        }
    }

    /// Begins a session that `hello` asks for.
    fn start(&mut self, now: Nanos, session: u64, incarnation: u64, peer: Peer, hello: &Hello) {
        let options = &self.options;
        self.channel.peer = peer;
        self.channel.start(session, incarnation);
        self.terms = Terms {
            frame_bytes: hello
                .frame_bytes
                .clamp(MIN_FRAME_BYTES, options.frame_bytes.max(MIN_FRAME_BYTES)),
            tag_bytes: S::TAG_BYTES,
            neglected: options.neglected,
        };
        self.generation = self.generation.wrapping_add(1);
        self.slots.fill(Slot::default());
        self.granted = hello.slots.min(options.slots);
        self.announced = self.slot_limit.min(self.granted);
        self.attached.clear();
        self.ready.clear();
        self.sending.clear();
        self.replies.clear();
        self.executing = 0;
        self.acknowledge_after = options.acknowledge_after;
        self.next_acknowledge = Nanos::MAX;
        self.heard_at = now;
    }

    /// Ends the session: its frames are dropped from now on, and nothing of it is given to the
    /// store any more. Requests that the store has are waited for; see
    /// [`is_drained`](Self::is_drained).
    pub fn end(&mut self) {
        self.channel.end();
        // Nothing has begun with these.
        self.executing = self.executing.saturating_sub(self.ready.len());
        self.ready.clear();
        self.sending.clear();
        self.replies.clear();
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

    /// Says what devices the client has. A device whose epoch has changed ends the session, which
    /// the client is told: another owner may have served it meanwhile.
    pub fn set_devices(&mut self, devices: &[DeviceEntry]) {
        let changed = |old: &DeviceEntry| {
            let new = devices.iter().find(|new| new.device == old.device);
            self.attached.contains(&old.device) && new.is_some_and(|new| new.epoch != old.epoch)
        };
        let is_over = self.devices.iter().any(changed);
        self.devices.clear();
        self.devices.extend_from_slice(devices);
        self.devices_version = self.devices_version.wrapping_add(1);
        let devices = &self.devices;
        self.attached.retain(|number| devices.iter().any(|entry| entry.device == *number));
        if is_over && self.channel.session != 0 {
            self.reply(Reply::Ending { code: ending::EPOCH });
        }
    }

    /// Lets the client use this many slots from now on, of those that it has. It may have requests
    /// unanswered in the others.
    pub fn set_slot_limit(&mut self, slot_limit: u16) {
        self.slot_limit = slot_limit;
    }

    /// Takes a frame of this session.
    ///
    /// # Errors
    /// The frame was dropped; the reason is counted.
    pub(super) fn receive(
        &mut self,
        now: Nanos,
        from: Peer,
        frame: &Frame<'_>,
        data: &mut impl Data,
    ) -> Result<(), Reason> {
        let place = self.place_of(0);
        let Self { channel, slots, devices, attached, terms, .. } = self;
        let Opened { kind, body, payload, .. } = channel.open(frame)?;
        let message = match kind {
            Kind::Request => {
                let body = RequestBody::decode(&body);
                let entry = devices
                    .iter()
                    .find(|entry| entry.device == body.device && attached.contains(&body.device));
                let entry = entry.ok_or(Reason::Device)?;
                if body.epoch != entry.epoch {
                    return Err(Reason::Epoch);
                }
                let is_granted = body.slot < self.granted;
                let slot = slots
                    .get_mut(usize::from(body.slot))
                    .filter(|_| is_granted)
                    .ok_or(Reason::Slot)?;
                let place = place | u64::from(body.slot);
                let step = slot.take(now, (&body, payload), (entry, terms), (place, data));
                self.heard(now, from);
                return self.follow(now, body.slot, step?);
            }
            Kind::Ping => {
                let ping = Ping::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
                let round_trip = Nanos(ping.round_trip_ns.into());
                if round_trip > Nanos::ZERO {
                    self.acknowledge_after = round_trip.clamp(ACKNOWLEDGE_MIN, ACKNOWLEDGE_MAX);
                }
                Reply::Pong { sent_at: ping.sent_at, arrived_at: now, payload_bytes: payload.len() }
            }
            Kind::List => {
                let list = List::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
                Reply::Entry {
                    kind: Kind::Device,
                    entry: self.entry(|index, _| index == list.index),
                }
            }
            Kind::Attach => {
                let attach = Attach::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
                let entry = self.entry(|_, entry| entry.device == attach.device);
                let entry = DeviceEntry { device: attach.device, ..entry };
                if entry.is_sound() && !self.attached.contains(&attach.device) {
                    self.attached.push(attach.device);
                }
                Reply::Entry { kind: Kind::Attached, entry }
            }
            Kind::Ending => {
                self.end();
                return Ok(());
            }
            _ => return Err(Reason::Kind),
        };
        self.heard(now, from);
        self.reply(message);
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

    /// The entry of the list that `is_it` finds; one that says that there is none, otherwise.
    fn entry(&self, is_it: impl Fn(u16, &DeviceEntry) -> bool) -> DeviceEntry {
        let count = u16::try_from(self.devices.len()).unwrap_or(u16::MAX);
        let found = (0..count).zip(&self.devices).find(|(index, entry)| is_it(*index, entry));
        let none = DeviceEntry { count, version: self.devices_version, ..DeviceEntry::default() };
        found.map_or(none, |(index, entry)| DeviceEntry {
            index,
            count,
            version: self.devices_version,
            ..*entry
        })
    }

    fn follow(&mut self, now: Nanos, slot: u16, step: Step) -> Result<(), Reason> {
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
        Ok(())
    }

    fn list(&mut self, index: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(index)) else { return };
        if slot.owes() && !slot.is_listed {
            slot.is_listed = true;
            self.sending.push_back(index);
        }
    }

    fn place_of(&self, slot: u16) -> u64 {
        u64::from(self.place).wrapping_shl(16) | u64::from(slot)
    }

    /// The next request for the store.
    pub fn next_execute(&mut self) -> Option<Execute> {
        let index = self.ready.pop_front()?;
        let slot = self.slots.get(usize::from(index))?;
        self.stats.requests.add(1);
        let place = self.place_of(index);
        let ticket = u64::from(self.generation).wrapping_shl(32) | place;
        let fua = slot.request.fua && self.options.neglected.keeps(Rule::WriteThrough);
        let request = Request { fua, ..slot.request };
        Some(Execute { ticket, place, device: slot.body.device, request })
    }

    /// The store has ended a request.
    pub fn complete(&mut self, ticket: u64, result: Result<(), BlockError>) {
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
        if self.channel.session != 0 {
            self.list(index);
        }
    }

    /// Sends what is to be sent, as far as the link has room.
    pub fn poll(&mut self, now: Nanos, link: &mut impl Transmit, data: &mut impl Data) {
        if self.channel.session == 0 {
            return;
        }
        if self.next_acknowledge <= now {
            self.acknowledge(now);
        }
        while let Some(reply) = self.replies.front().copied() {
            if !self.send_reply(now, link, reply) {
                return;
            }
            self.replies.pop_front();
            if matches!(reply, Reply::Ending { .. }) {
                self.end();
                return;
            }
        }
        while let Some(index) = self.sending.front().copied() {
            if !self.send_slot(now, index, link, data) {
                return;
            }
            self.sending.pop_front();
            if let Some(slot) = self.slots.get_mut(usize::from(index)) {
                slot.is_listed = false;
            }
        }
    }

    /// When to poll next, if no frame arrives and nothing is completed; `None` for no such time.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        let has_work = !(self.sending.is_empty() && self.replies.is_empty());
        let next = if has_work { Nanos::ZERO } else { self.next_acknowledge };
        (self.channel.session != 0 && next < Nanos::MAX).then_some(next)
    }

    /// Acknowledges requests that the store has had for a round trip.
    fn acknowledge(&mut self, now: Nanos) {
        self.next_acknowledge = Nanos::MAX;
        if !self.options.neglected.keeps(Rule::Acknowledge) {
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
        let limit = self.slot_limit.min(self.granted);
        if self.options.neglected.keeps(Rule::AbsoluteLimits) {
            limit
        } else {
            limit.wrapping_sub(self.announced)
        }
    }

    fn send_reply(&mut self, now: Nanos, link: &mut impl Transmit, reply: Reply) -> bool {
        let slot_limit = self.limit();
        match reply {
            Reply::Pong { sent_at, arrived_at, payload_bytes } => {
                let held_ns = held(now, arrived_at);
                let devices_version = self.devices_version;
                let acknowledge_ns = u32::try_from(self.acknowledge_after.0).unwrap_or(u32::MAX);
                let pong =
                    Pong { sent_at, held_ns, devices_version, slot_limit, acknowledge_ns }.encode();
                let was_sent = self.channel.send(
                    link,
                    Kind::Pong,
                    None,
                    payload_bytes.max(pong.len()),
                    padded(&pong),
                );
                if was_sent {
                    self.announced = self.slot_limit.min(self.granted);
                }
                was_sent
            }
            Reply::Entry { kind, entry } => {
                let entry = entry.encode();
                self.channel.send(link, kind, None, entry.len(), padded(&entry))
            }
            Reply::Ending { code } => {
                let ending = Ending { code, ..Ending::default() }.encode();
                self.channel.send(link, Kind::Ending, None, ending.len(), padded(&ending))
            }
        }
    }

    /// Sends what a slot owes. False if the link has no room.
    fn send_slot(
        &mut self,
        now: Nanos,
        index: u16,
        link: &mut impl Transmit,
        data: &mut impl Data,
    ) -> bool {
        let (place, slot_limit, devices_version) =
            (self.place_of(index), self.limit(), self.devices_version);
        let Self { channel, slots, .. } = self;
        let Some(slot) = slots.get_mut(usize::from(index)) else { return true };
        let RequestBody { device, slot: number, epoch, sequence, attempt, .. } = slot.body;
        let named =
            AnswerBody { device, slot: number, epoch, sequence, attempt, ..AnswerBody::default() };
        let held_ns = held(now, slot.arrived_at);
        let answer = AnswerBody { held_ns, slot_limit, devices_version, ..named };
        if std::mem::take(&mut slot.owes_busy)
            && matches!(slot.state, State::Assembling | State::Executing)
        {
            let is_assembling = slot.state == State::Assembling;
            let state =
                if is_assembling { answer_state::ASSEMBLING } else { answer_state::EXECUTING };
            let segments = if is_assembling { slot.missing() } else { 0 };
            let body = AnswerBody { state, segments, ..answer }.encode();
            if !channel.send(link, Kind::Busy, Some(&body), 0, |_| ()) {
                slot.owes_busy = true;
                return false;
            }
        }
        if slot.owes_answer {
            let body = AnswerBody { status: slot.status, ..answer }.encode();
            if !channel.send(link, Kind::Answer, Some(&body), 0, |_| ()) {
                return false;
            }
            slot.owes_answer = false;
        }
        for segment in bits(slot.segments) {
            let Some((offset_bytes, len)) = slot.cut.range(segment) else { continue };
            let body =
                AnswerBody { offset_bytes, len_bytes: slot.cut.len_bytes(), ..answer }.encode();
            let len = usize::try_from(len).unwrap_or(0);
            let fill = |payload: &mut [u8]| data.fill(place, offset_bytes, payload);
            if !channel.send(link, Kind::Answer, Some(&body), len, fill) {
                return false;
            }
            slot.segments &= slot.segments.wrapping_sub(1);
        }
        self.announced = self.slot_limit.min(self.granted);
        true
    }
}

/// The time since `arrived_at`, for the wire.
fn held(now: Nanos, arrived_at: Nanos) -> u32 {
    u32::try_from(now.since(arrived_at).0).unwrap_or(u32::MAX)
}
