//! A client of a history, with the guests of its devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use sidecore_telemetry::{CounterSet as _, Counts as _};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{
    AnswerBody, BODY_BYTES, DEVICE_NAME_BYTES, FEATURES, FrameHeader, Kind, MIN_FRAME_BYTES,
    PartHeader, RequestBody,
};
use sidecore_vrio::{
    Client, ClientOptions, Event, Neglected, OnDisconnect, Peer, Request, Timing, VrioCounts,
    VrioStats,
};

use super::guest::{DEPTH, Guest, Memories, device_of};
use super::network::Network;
use super::seal::Checksum;
use super::world::{Manner, Step};
use crate::Random;

/// Where the IOhost is, for each client.
const HOST: Peer = Peer(0);
/// The time that a client looks for its IOhost on one of two links, at first and at most.
const STAY: [Nanos; 2] = [Nanos::from_millis(5), Nanos::from_millis(80)];
/// Stamps of a guest: more than it writes.
const STAMPS: u64 = 1 << 32;

/// Frames that the client has asked for and not got, as the network sees it.
#[derive(Debug, Default)]
pub(super) struct RingWatch {
    session: u64,
    /// For each slot: the request, how many frames it asks for, and the offsets of those that came.
    asked: BTreeMap<u16, (u32, u32, Vec<u32>)>,
}

impl RingWatch {
    /// A request that the client sends. Returns how many frames all requests ask for, if this is a
    /// new one.
    fn sent(&mut self, session: u64, body: &RequestBody) -> Option<u32> {
        if session != self.session {
            self.session = session;
            self.asked.clear();
        }
        if self.asked.get(&body.slot).is_some_and(|(sequence, ..)| *sequence == body.sequence) {
            return None;
        }
        let frames = body.wanted.count_ones().max(1);
        self.asked.insert(body.slot, (body.sequence, frames, Vec::new()));
        let unanswered = self.asked.values().filter(|(_, frames, _)| *frames > 0).count();
        (unanswered > 1).then(|| self.asked.values().map(|(_, frames, _)| frames).sum())
    }

    /// A frame arrives at the client.
    fn arrives(&mut self, frame: &[u8]) {
        for (session, kind, body) in parts(frame) {
            if session == self.session && kind == Kind::Answer {
                self.answered(&AnswerBody::decode(&body));
            }
        }
    }

    fn answered(&mut self, body: &AnswerBody) {
        let Some((sequence, frames, came)) = self.asked.get_mut(&body.slot) else { return };
        if *sequence == body.sequence {
            if !came.contains(&body.offset_bytes) {
                came.push(body.offset_bytes);
            }
            if body.len_bytes == 0 || came.len() as u32 >= *frames {
                *frames = 0;
            }
        }
    }
}

/// The requests or answers of a frame, which damage may have cut short: session, kind and body.
pub(super) fn parts(frame: &[u8]) -> Vec<(u64, Kind, [u8; BODY_BYTES])> {
    let Some((first, mut rest)) = frame.split_first_chunk() else { return Vec::new() };
    let header = FrameHeader::decode(first);
    let (session, kind) = (header.session, Kind::from_code(header.kind));
    let body = |rest: &[u8]| rest.first_chunk().copied();
    if kind != Kind::Bundle {
        return body(rest).map(|body| (session, kind, body)).into_iter().collect();
    }
    let mut parts = Vec::new();
    rest = rest.get(..header.payload_bytes.into()).unwrap_or_default();
    while let Some((first, behind)) = rest.split_first_chunk()
        && let Some(body) = body(behind)
    {
        let part = PartHeader::decode(first);
        parts.push((session, Kind::from_code(part.kind), body));
        rest = behind.get(BODY_BYTES + usize::from(part.payload_bytes)..).unwrap_or_default();
    }
    parts
}

/// The link that a client uses, and when it looks on the other one.
#[derive(Debug, Default)]
struct Seeking {
    link: usize,
    /// The link of the last session.
    of_session: usize,
    changes_at: Option<Nanos>,
    stay: Nanos,
}

/// A client, with the guests of its devices.
pub(super) struct Member {
    number: usize,
    client: Client<Checksum>,
    stats: Arc<VrioStats>,
    neglected: Neglected,
    life: u64,
    /// By the numbers of the devices at the client.
    pub(super) guests: Vec<Guest>,
    pub(super) guest_at: Nanos,
    pub(super) slot_limit: u16,
    /// Frames of requests, or parts of some, that the client has sent.
    pub(super) requests_sent: usize,
    ring: RingWatch,
    seeking: Seeking,
    /// Sessions on another link than the one before.
    pub(super) link_changes: u64,
    /// Of the clients that have died.
    former: VrioCounts,
    buffer: Vec<u8>,
    copies: Vec<Vec<u8>>,
    /// Requests that were submitted so far.
    submitted: u64,
    /// Those that the next poll sends at once.
    at_once: Vec<(u64, Request)>,
}

impl Member {
    pub(super) fn new(number: usize, manner: &Manner, neglected: Neglected) -> Self {
        let stats = Arc::new(VrioStats::default());
        let guest = |device: usize| {
            let first_stamp = (number * manner.devices + device) as u64 * STAMPS + 1;
            Guest::new((manner.block_bytes, manner.blocks), manner.times_out, (device, first_stamp))
        };
        Self {
            number,
            client: client(number, manner, neglected, 1, &stats),
            stats,
            neglected,
            life: 1,
            guests: (0..manner.devices).map(guest).collect(),
            guest_at: Nanos::from_millis(1),
            slot_limit: manner.slots,
            requests_sent: 0,
            ring: RingWatch::default(),
            seeking: Seeking::default(),
            link_changes: 0,
            former: VrioCounts::default(),
            buffer: Vec::new(),
            copies: Vec::new(),
            submitted: 0,
            at_once: Vec::new(),
        }
    }

    /// The client's name at the IOhost.
    pub(super) fn name(number: usize) -> [u8; 16] {
        let mut name = *b"client number  .";
        name[14] = b'0' + number as u8;
        name
    }

    pub(super) const fn client(&self) -> &Client<Checksum> {
        &self.client
    }

    pub(super) fn in_flight(&self) -> usize {
        self.guests.iter().map(Guest::in_flight).sum()
    }

    pub(super) fn is_settled(&self) -> bool {
        self.guests.iter().all(Guest::is_settled)
    }

    /// Whether answered writes are sent again to a device other than this one.
    pub(super) fn replays_beside(&self, device: usize) -> bool {
        let replays = |number| self.client.is_attached(number) && !self.client.is_ready(number);
        let mut numbers = 0..self.guests.len() as u16;
        numbers.any(|number| usize::from(number) != device && replays(number))
    }

    /// The link of two that it uses.
    pub(super) const fn link(&self) -> usize {
        self.seeking.link
    }

    /// When the client has to be polled.
    pub(super) fn next(&self) -> Nanos {
        self.client.deadline().min(self.seeking.changes_at.unwrap_or(Nanos::MAX))
    }

    /// Looks for the IOhost on the other link, in time.
    pub(super) fn seek(&mut self, now: Nanos, network: &mut Network, manner: &Manner) {
        let seeking = &mut self.seeking;
        if self.client.is_connected() {
            (seeking.changes_at, seeking.stay) = (None, STAY[0]);
            return;
        }
        let at = *seeking.changes_at.get_or_insert(now.after(seeking.stay.max(STAY[0])));
        if at > now {
            return;
        }
        seeking.link = 1 - seeking.link;
        network.change_link(self.number, seeking.link);
        // One of the links has small frames.
        let other = if manner.frame_bytes == MIN_FRAME_BYTES { 8_100 } else { MIN_FRAME_BYTES };
        let frame_bytes = [manner.frame_bytes, other][seeking.link];
        self.client.look_at(now, HOST, (frame_bytes, manner.receive_frames));
        seeking.stay = Nanos(2 * seeking.stay.0).clamp(STAY[0], STAY[1]);
        seeking.changes_at = Some(now.after(seeking.stay.max(self.client.patience())));
    }

    pub(super) fn submit(&mut self, (tag, request): (u64, Request)) -> Step {
        self.submitted += 1;
        // One in two takes the other way into the engine, which needs a port.
        if self.submitted.is_multiple_of(2) {
            self.at_once.push((tag, request));
            return Ok(());
        }
        let device = device_of(tag) as u16;
        self.client.submit(tag, device, request).map_err(|error| error.to_string())
    }

    /// The next request of one of the guests, if it has one.
    pub(super) fn draw(&mut self, random: &mut Random) -> Option<(u64, Request)> {
        let device = random.below(self.guests.len() as u64) as usize;
        self.guests[device].next(random)
    }

    pub(super) fn receive(&mut self, now: Nanos, network: &mut Network, frame: Vec<u8>) {
        self.ring.arrives(&frame);
        let Self { client, guests, buffer, .. } = self;
        let mut link = network.client(self.number, now, buffer);
        let mut port = SlicePort { wire: &mut link, data: &mut Memories(guests) };
        port.to_client(client, (now, HOST), &mut Arrived::new(frame));
    }

    pub(super) fn poll(&mut self, now: Nanos, network: &mut Network, receive_frames: u32) -> Step {
        let Self { client, guests, buffer, copies, ring, at_once, .. } = self;
        let mut link = network.client(self.number, now, buffer);
        link.copies = Some(copies);
        let mut port = SlicePort { wire: &mut link, data: &mut Memories(guests) };
        for (tag, request) in at_once.drain(..) {
            let request = (tag, device_of(tag) as u16, request);
            client.start(request, &mut port).map_err(|error| error.to_string())?;
        }
        client.transmit(now, &mut port);
        if client.is_due(now) {
            client.poll(now, &mut port);
        }
        for frame in copies.drain(..) {
            for (session, kind, body) in parts(&frame) {
                if kind != Kind::Request {
                    continue;
                }
                self.requests_sent += 1;
                let asked = ring.sent(session, &RequestBody::decode(&body)).unwrap_or(0);
                if asked > receive_frames {
                    return Err(format!(
                        "the client asks for {asked} frames: more than its ring holds"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Tells the guests of the requests that have ended. Returns them.
    pub(super) fn complete(&mut self) -> Result<Vec<(u64, bool)>, String> {
        let mut ended = Vec::new();
        while let Some(event) = self.client.next_event() {
            match event {
                Event::Completed { tag, result } => {
                    self.guests[device_of(tag)].complete(tag, result)?;
                    ended.push((tag, result.is_ok()));
                }
                Event::Connected => {
                    let seeking = &mut self.seeking;
                    self.link_changes += u64::from(seeking.link != seeking.of_session);
                    seeking.of_session = seeking.link;
                }
                _ => {}
            }
        }
        Ok(ended)
    }

    /// The client's machine dies, and another one starts.
    pub(super) fn die(&mut self, manner: &Manner) {
        self.former.add(&self.stats.counts());
        self.guests.iter_mut().for_each(Guest::die);
        self.life += 1;
        self.stats = Arc::new(VrioStats::default());
        self.client = client(self.number, manner, self.neglected, self.life, &self.stats);
        self.ring = RingWatch::default();
        self.at_once.clear();
    }

    /// The VMM of its guest is killed. Returns the guest, for another start.
    pub(super) fn kill_guest(&mut self) -> Guest {
        self.client.leave(0);
        self.at_once.clear();
        self.guests[0].kill()
    }

    /// Whether a guest can start: all requests of the last one have ended.
    pub(super) fn is_free(&self) -> bool {
        self.client.unanswered() == 0 && !self.client.has_events()
    }

    /// A guest starts here.
    pub(super) fn start_guest(&mut self, guest: Guest) {
        self.guests[0] = guest;
        self.client.claim(0);
    }

    /// The counters of this client, and of those that have died.
    pub(super) fn counts(&self) -> VrioCounts {
        let mut counts = self.stats.counts();
        counts.add(&self.former);
        counts
    }
}

/// The name of a client's device.
pub(super) const fn device_text(device: usize) -> &'static str {
    ["a", "b"][device]
}

/// The same, as messages have it.
pub(super) fn device_name(device: usize) -> [u8; DEVICE_NAME_BYTES] {
    let text = device_text(device).as_bytes();
    std::array::from_fn(|at| text.get(at).copied().unwrap_or(0))
}

fn client(
    number: usize,
    manner: &Manner,
    neglected: Neglected,
    life: u64,
    stats: &Arc<VrioStats>,
) -> Client<Checksum> {
    let timing = Timing {
        max_timeout: Nanos::from_millis(100),
        ask_after: Nanos::from_millis(20),
        hello: Nanos::from_millis(20),
        keepalive: Nanos::from_millis(20),
        dead_after: Nanos::from_millis(80),
        ..Timing::default()
    };
    let on_disconnect = if manner.times_out {
        OnDisconnect::Fail(Nanos::from_millis(120))
    } else {
        OnDisconnect::Stall
    };
    let options = ClientOptions {
        client: Member::name(number),
        life,
        queue: 0,
        host_queue: 0,
        slots: manner.slots,
        depth: (DEPTH * manner.devices) as u16,
        receive_frames: manner.receive_frames,
        frame_bytes: manner.frame_bytes,
        replay_bytes: manner.replay_bytes,
        on_disconnect,
        timing,
        features: FEATURES,
        neglected,
    };
    let mut client = Client::new(options, HOST, Checksum::default(), Arc::clone(stats));
    for device in 0..manner.devices {
        client.open(&device_name(device));
    }
    client
}
