//! The two sides, and what happens to them.

use std::collections::BTreeMap;
use std::sync::Arc;

use sidecore_telemetry::{CounterSet as _, Counts as _};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{
    AnswerBody, DEVICE_NAME_BYTES, DeviceEntry, FrameHeader, Kind, MIN_FRAME_BYTES, RequestBody,
    device_flag,
};
use sidecore_vrio::{
    Client, ClientOptions, Event, Host, HostOptions, Member, Neglected, OnDisconnect, Peer, Rule,
    ServerOptions, Timing, VrioCounts, VrioStats,
};

use super::guest::{DEPTH, Guest};
use super::history::Outcome;
use super::network::{Network, Way, Weather};
use super::seal::Checksum;
use super::store::{Buffers, Store};
use crate::Random;

/// Where the IOhost is, for the client.
const HOST: Peer = Peer(0);
const CLIENT: [u8; 16] = *b"the only client.";

/// The manner of a history.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub(super) block_bytes: u64,
    pub(super) blocks: usize,
    frame_bytes: u32,
    weather: Weather,
    /// How often something breaks, in nanoseconds; 0 for never.
    fault_every_ns: u64,
    /// How many things break at most.
    faults: u64,
    replay_bytes: usize,
    is_volatile: bool,
    times_out: bool,
    slots: u16,
    receive_frames: u32,
    slow: u64,
}

impl Manner {
    pub(super) fn draw(random: &mut Random) -> Self {
        let is_calm = random.once_in(8);
        let late_by = [30_000, 300_000, 3_000_000, 30_000_000][random.below(4) as usize];
        let bad = Weather {
            loss: [0, 10, 100, 300][random.below(4) as usize],
            doubles: random.below(3) * 50,
            damage: random.below(3) * 10,
            late: random.below(4) * 60,
            late_by: Nanos(late_by),
        };
        Self {
            block_bytes: if random.once_in(3) { 512 } else { 4096 },
            blocks: 12 + random.below(12) as usize,
            frame_bytes: if random.once_in(2) { MIN_FRAME_BYTES } else { 8_100 },
            weather: if is_calm { Weather::default() } else { bad },
            fault_every_ns: if is_calm { 0 } else { 1_000_000 << random.below(7) },
            faults: random.below(16),
            replay_bytes: 65_536 << random.below(4),
            is_volatile: !random.once_in(10),
            times_out: random.once_in(5),
            slots: 2 + random.below(15) as u16,
            receive_frames: 34 + random.below(60) as u32,
            slow: [0, 8, 40][random.below(3) as usize],
        }
    }

    pub(super) fn is_calm(&self) -> bool {
        self.fault_every_ns == 0
    }
}

/// Frames that the client has asked for and not got, as the network sees it.
#[derive(Debug, Default)]
struct RingWatch {
    session: u64,
    /// For each slot: the request, how many frames it asks for, and the offsets of those that came.
    asked: BTreeMap<u16, (u32, u32, Vec<u32>)>,
}

impl RingWatch {
    /// A frame of the client. Returns how many frames all requests ask for, if this is a new one.
    fn sent(&mut self, frame: &[u8]) -> Option<u32> {
        let (header, body) = parts(frame)?;
        if Kind::from_code(header.kind) != Kind::Request {
            return None;
        }
        if header.session != self.session {
            self.session = header.session;
            self.asked.clear();
        }
        let body = RequestBody::decode(&body);
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
        let Some((header, body)) = parts(frame) else { return };
        if header.session != self.session || Kind::from_code(header.kind) != Kind::Answer {
            return;
        }
        let body = AnswerBody::decode(&body);
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

fn parts(frame: &[u8]) -> Option<(FrameHeader, [u8; 52])> {
    let header = FrameHeader::decode(frame.first_chunk()?);
    Some((header, *frame.get(FrameHeader::BYTES..)?.first_chunk()?))
}

/// A client, an IOhost, and all between and around them.
pub(super) struct World {
    random: Random,
    pub(super) manner: Manner,
    neglected: Neglected,
    pub(super) now: Nanos,
    network: Network,
    client: Client<Checksum>,
    client_stats: Arc<VrioStats>,
    life: u64,
    /// `None` while it is down.
    host: Option<Host<Checksum>>,
    host_stats: Arc<VrioStats>,
    host_up_at: Nanos,
    incarnation: u64,
    device: DeviceEntry,
    slot_limit: u16,
    store: Store,
    buffers: Buffers,
    pub(super) guest: Guest,
    guest_at: Nanos,
    fault_at: Nanos,
    faults_left: u64,
    /// Nothing breaks any more.
    is_healed: bool,
    link_buffers: [Vec<u8>; 2],
    copies: Vec<Vec<u8>>,
    /// Frames of requests that the client has sent.
    requests_sent: usize,
    ring: RingWatch,
    /// Of the clients that have died.
    former: VrioCounts,
    pub(super) outcome: Outcome,
    /// Whether steps are written to the trace, which takes longer than the steps.
    tells: bool,
    pub(super) trace: Vec<(usize, String)>,
}

/// How a step ends: with what is wrong, if something is.
pub(super) type Step = Result<(), String>;

impl World {
    pub(super) fn new(seed: u64, rule: Option<Rule>, tells: bool) -> Self {
        let mut random = Random::new(seed);
        let manner = Manner::draw(&mut random);
        let mut fork = || Random::new(random.below(u64::MAX));
        let network = Network::new(fork(), manner.weather);
        let shape = (manner.block_bytes, manner.blocks);
        let store = Store::new(fork(), shape, manner.slow, !manner.is_volatile);
        let neglected = rule.map_or(Neglected::default(), Neglected::only);
        let cache = if manner.is_volatile { device_flag::VOLATILE_CACHE } else { 0 };
        let device = DeviceEntry {
            flags: device_flag::PRESENT | device_flag::DISCARD | device_flag::WRITE_ZEROES | cache,
            epoch: 1,
            capacity_bytes: manner.block_bytes * manner.blocks as u64,
            block_bytes: manner.block_bytes as u32,
            physical_block_bytes: 4096,
            ..DeviceEntry::default()
        };
        let client_stats = Arc::new(VrioStats::default());
        let client = client(&manner, neglected, 1, &client_stats);
        let mut world = Self {
            random,
            manner,
            neglected,
            now: Nanos::from_millis(1),
            network,
            client,
            client_stats,
            life: 1,
            host: None,
            host_stats: Arc::new(VrioStats::default()),
            host_up_at: Nanos::ZERO,
            incarnation: 1,
            device,
            slot_limit: manner.slots,
            store,
            buffers: Buffers::default(),
            guest: Guest::new(manner.block_bytes, manner.blocks, manner.times_out),
            guest_at: Nanos::from_millis(1),
            fault_at: Nanos::MAX,
            faults_left: manner.faults,
            is_healed: manner.is_calm(),
            link_buffers: Default::default(),
            copies: Vec::new(),
            requests_sent: 0,
            ring: RingWatch::default(),
            former: VrioCounts::default(),
            outcome: Outcome::default(),
            tells,
            trace: Vec::new(),
        };
        if !world.manner.is_calm() {
            world.slot_limit = world.random.below(u64::from(manner.slots) + 1) as u16;
            world.plan_fault();
        }
        world
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        if self.tells {
            let what = format!("at {} us: {}", self.now.0 / 1_000, what());
            self.trace.push((self.trace.len(), what));
        }
    }

    fn plan_fault(&mut self) {
        let after = 1 + self.random.below(2 * self.manner.fault_every_ns);
        self.fault_at =
            if self.faults_left == 0 { Nanos::MAX } else { self.now.after(Nanos(after)) };
        self.faults_left = self.faults_left.saturating_sub(1);
    }

    /// Has the guest submit so many requests.
    pub(super) fn run(&mut self, requests: u64) -> Step {
        let end = self.now.after(Nanos::from_millis(60_000));
        while self.guest.requests < requests && self.now < end {
            self.step(true)?;
        }
        Ok(())
    }

    /// From now on nothing breaks; all requests have to end, and the device is read.
    pub(super) fn heal(&mut self) -> Step {
        self.network.heal();
        self.is_healed = true;
        self.fault_at = Nanos::MAX;
        self.host_up_at = self.host_up_at.min(self.now);
        self.set_slot_limit(self.manner.slots);
        self.tell(|| "heal".to_owned());
        self.settle(|world| world.guest.in_flight() == 0 && world.guest.is_settled())?;
        let capacity_bytes = self.device.capacity_bytes;
        self.settle(|world| {
            world.client.device(0).is_some_and(|entry| entry.capacity_bytes == capacity_bytes)
        })
        .map_err(|error| format!("{error}; the client does not know the device's capacity"))?;
        // A replay to a slow store may still be going on.
        self.settle(|world| world.client.is_ready(0))
            .map_err(|error| format!("{error}; the device is not ready"))?;
        self.use_all_slots()?;
        self.read_all()
    }

    /// No credit is lost: the client uses all slots at once.
    fn use_all_slots(&mut self) -> Step {
        // The engine's own flushes end, if need be by asking, and the client is told of the slots.
        let end = self.now.after(Nanos::from_millis(300));
        while self.now < end || self.store.executing() > 0 {
            self.step(false)?;
        }
        self.requests_sent = 0;
        while let Some((tag, request)) = self.guest.flush() {
            self.client.submit(tag, 0, request).map_err(|error| error.to_string())?;
        }
        self.poll()?;
        let (sent, all) = (self.requests_sent, DEPTH.min(self.manner.slots.into()));
        if sent < all {
            return Err(format!("the client uses {sent} of {all} slots: a credit was lost"));
        }
        self.settle(|world| world.guest.in_flight() == 0)
    }

    /// The IOhost loses its power once more, and the device is read again.
    pub(super) fn cut_and_read(&mut self) -> Step {
        self.kill_host(true);
        self.host_up_at = self.now;
        self.read_all()
    }

    fn read_all(&mut self) -> Step {
        let mut first = 0;
        while let Some((tag, request)) = self.guest.read_all(first) {
            first += (request.len_bytes / self.manner.block_bytes) as usize;
            self.client.submit(tag, 0, request).map_err(|error| error.to_string())?;
            self.settle(|world| world.guest.in_flight() == 0)?;
        }
        Ok(())
    }

    fn settle(&mut self, is_settled: impl Fn(&Self) -> bool) -> Step {
        let end = self.now.after(Nanos::from_millis(10_000));
        while !is_settled(self) {
            if self.now >= end {
                return Err(format!(
                    "{} requests do not end on a perfect path",
                    self.guest.in_flight()
                ));
            }
            self.step(!self.guest.is_settled())?;
        }
        Ok(())
    }

    /// Lets the next thing happen.
    fn step(&mut self, submits: bool) -> Step {
        let soon = self.now.after(Nanos::from_micros(1));
        let mut next =
            self.network.next().min(self.store.next()).min(self.client.deadline().max(soon));
        next = match &self.host {
            Some(host) => next.min(host.deadline().unwrap_or(Nanos::MAX).max(soon)),
            None => next.min(self.host_up_at.max(soon)),
        };
        if submits {
            next = next.min(self.guest_at.max(soon));
        }
        self.now = next.min(self.fault_at).max(self.now);
        if self.host.is_none() && self.host_up_at <= self.now {
            self.start_host();
        }
        self.deliver();
        while let Some(execute) = self.store.finish(self.now, &mut self.buffers)? {
            if let Some(host) = &mut self.host {
                host.complete(execute.ticket, Ok(()));
            }
        }
        if submits && self.guest_at <= self.now {
            self.submit()?;
        }
        if self.fault_at <= self.now {
            self.fault();
            self.plan_fault();
        }
        self.poll()?;
        while let Some(event) = self.client.next_event() {
            if let Event::Completed { tag, result } = event {
                self.tell(|| format!("request {tag} ended: {result:?}"));
                self.guest.complete(tag, result)?;
            }
        }
        Ok(())
    }

    fn deliver(&mut self) {
        while let Some((way, frame)) = self.network.take(self.now) {
            match (way, &mut self.host) {
                (Way::ToClient, _) => {
                    self.ring.arrives(&frame);
                    let mut link = self.network.end(Way::ToHost, self.now, &mut self.link_buffers);
                    let mut port = SlicePort { wire: &mut link, data: &mut self.guest.memory };
                    let arrived = &mut Arrived::new(frame);
                    port.to_client(&mut self.client, (self.now, HOST), arrived);
                }
                (Way::ToHost, Some(host)) => {
                    let mut link =
                        self.network.end(Way::ToClient, self.now, &mut self.link_buffers);
                    let mut port = SlicePort { wire: &mut link, data: &mut self.buffers };
                    port.to_host(host, (self.now, Peer(1)), &mut Arrived::new(frame));
                    while let Some(execute) = host.next_execute() {
                        self.store.submit(self.now, execute);
                    }
                }
                (Way::ToHost, None) => {}
            }
        }
    }

    fn submit(&mut self) -> Step {
        let pause_ns = if self.random.once_in(10) {
            self.random.below(2_000_000)
        } else {
            self.random.below(60_000)
        };
        self.guest_at = self.now.after(Nanos(pause_ns));
        if !self.is_healed && self.random.once_in(16) {
            self.change_slot_limit();
        }
        if let Some((tag, request)) = self.guest.next(&mut self.random) {
            self.tell(|| format!("request {tag}: {request:?}"));
            self.client.submit(tag, 0, request).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Step {
        let Self { network, client, host, buffers, guest, link_buffers, copies, ring, now, .. } =
            self;
        let now = *now;
        let mut link = network.end(Way::ToHost, now, link_buffers);
        link.copies = Some(copies);
        client.poll(now, &mut SlicePort { wire: &mut link, data: &mut guest.memory });
        for frame in copies.drain(..) {
            self.requests_sent += usize::from(frame.get(1) == Some(&Kind::Request.code()));
            let asked = ring.sent(&frame).unwrap_or(0);
            if asked > self.manner.receive_frames {
                return Err(format!(
                    "the client asks for {asked} frames: more than its ring holds"
                ));
            }
        }
        if let Some(host) = host {
            let mut link = network.end(Way::ToClient, now, link_buffers);
            host.poll(now, &mut SlicePort { wire: &mut link, data: buffers });
        }
        Ok(())
    }

    fn start_host(&mut self) {
        self.incarnation += 1;
        let incarnation = self.random.below(u64::MAX - 1) + 1;
        let server = ServerOptions {
            slots: self.manner.slots,
            neglected: self.neglected,
            ..ServerOptions::default()
        };
        let secret = [self.random.below(u64::MAX), 1];
        let options = HostOptions { incarnation, secret, server, ..HostOptions::default() };
        let stats = &self.host_stats;
        let mut host = Host::new(options, Checksum::default(), Arc::clone(stats));
        host.add(Member { client: CLIENT, queue: 0 }, Arc::clone(stats));
        // Another start may give the device another number.
        self.device.device = self.random.below(1000) as u16;
        host.set_devices(self.now, 0, &[self.device]);
        self.host = Some(host);
        self.set_slot_limit(self.slot_limit);
        self.tell(|| "the IOhost starts".to_owned());
    }

    fn change_slot_limit(&mut self) {
        let slot_limit = self.random.below(u64::from(self.manner.slots) + 1) as u16;
        self.tell(|| format!("{slot_limit} slots may be used"));
        self.set_slot_limit(slot_limit);
    }

    fn set_slot_limit(&mut self, slot_limit: u16) {
        self.slot_limit = slot_limit;
        if let Some(host) = &mut self.host {
            host.set_slot_limit(self.now, 0, slot_limit);
        }
    }

    /// The IOhost's process ends; with `power`, its machine does.
    fn kill_host(&mut self, power: bool) {
        if self.host.take().is_none() {
            return;
        }
        self.tell(|| format!("the IOhost {}", if power { "loses its power" } else { "dies" }));
        self.outcome.restarts += 1;
        self.outcome.power_cuts += u64::from(power);
        if self.manner.is_volatile && self.guest.has_unflushed() {
            self.outcome.restarts_with_resend += 1;
            self.outcome.restarts_with_overlap += u64::from(self.guest.has_overlapping_unflushed());
        }
        self.outcome.restarts_with_unanswered += u64::from(self.guest.in_flight() > 0);
        if power {
            self.store.cut_power(&mut self.buffers);
        } else {
            self.store.kill(&mut self.buffers);
        }
        self.host_up_at = self.now.after(Nanos(self.random.below(30_000_000)));
    }

    /// The client's machine dies, and another one starts.
    fn kill_client(&mut self) {
        self.tell(|| "the client dies".to_owned());
        self.outcome.client_deaths += 1;
        self.former.add(&self.client_stats.counts());
        self.guest.die();
        self.life += 1;
        self.client_stats = Arc::new(VrioStats::default());
        self.client = client(&self.manner, self.neglected, self.life, &self.client_stats);
        self.ring = RingWatch::default();
    }

    fn fault(&mut self) {
        let long = Nanos(self.random.below(150_000_000));
        match self.random.below(16) {
            0..3 => self.kill_host(false),
            3..6 => self.kill_host(true),
            6 => self.kill_client(),
            7 => {
                // The rack loses its power.
                self.kill_client();
                self.kill_host(true);
            }
            8..10 => {
                self.tell(|| format!("the path is cut for {long:?}"));
                self.network.cut(Way::ToHost, self.now.after(long));
                self.network.cut(Way::ToClient, self.now.after(long));
            }
            10 => self.network.cut(Way::ToHost, self.now.after(long)),
            11 => self.network.cut(Way::ToClient, self.now.after(long)),
            12 => self.network.narrow(self.now.after(long)),
            13 => {
                self.device.capacity_bytes += self.manner.block_bytes;
                let devices = [self.device];
                if let Some(host) = &mut self.host {
                    host.set_devices(self.now, 0, &devices);
                }
            }
            _ => self.change_slot_limit(),
        }
    }

    /// The counters of all clients, and of all IOhosts.
    pub(super) fn counts(&self) -> (VrioCounts, VrioCounts) {
        let mut clients = self.client_stats.counts();
        clients.add(&self.former);
        (clients, self.host_stats.counts())
    }
}

fn client(
    manner: &Manner,
    neglected: Neglected,
    life: u64,
    stats: &Arc<VrioStats>,
) -> Client<Checksum> {
    let timing = Timing {
        max_timeout: Nanos::from_millis(100),
        ask_after: Nanos::from_millis(20),
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
        client: CLIENT,
        life,
        queue: 0,
        host_queue: 0,
        slots: manner.slots,
        depth: DEPTH as u16,
        receive_frames: manner.receive_frames,
        frame_bytes: manner.frame_bytes,
        replay_bytes: manner.replay_bytes,
        on_disconnect,
        timing,
        neglected,
    };
    let mut client = Client::new(options, HOST, Checksum::default(), Arc::clone(stats));
    client.open(&[0; DEVICE_NAME_BYTES]);
    client
}
