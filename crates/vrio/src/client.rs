//! The client's side of a session.

mod bundle;
mod device;
mod entry;
mod events;
mod flush;
mod given_up;
mod hellos;
mod nics;
mod overlap;
mod pings;
mod replay;
mod requests;
mod session;
mod slots;
mod users;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use crate::channel::Channel;
use crate::handshake::ClientHandshake;
use crate::nic::Turns;
use crate::port::{Peer, Plain, Port};
use crate::round_trip::RoundTrip;
use crate::wire::{
    AnswerBody, DEFAULT_FRAME_BYTES, DEVICE_NAME_BYTES, DeviceEntry, Ending, FEATURES, Frame, Kind,
    PacketBody, ending,
};
use crate::{Neglected, Reason, Request, VrioStats};
use device::Device;
use entry::Entry;
use hellos::Hellos;
use overlap::UnansweredWrites;
use pings::{Keepalive, Telling, Widening};
use requests::Start;
use session::{Listing, Opened, Phase};
use slots::{FreeSlots, Slot};

/// Requests of the engine itself that may be unanswered: replayed writes, and flushes of a full
/// log.
const OWN_REQUESTS: u16 = 32;

/// The timers of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The timeout of an attempt while no round trip has been measured (10 ms in the paper, 4.5).
    pub first_timeout: Nanos,
    /// No attempt has a shorter timeout, however short the round trip is.
    pub min_timeout: Nanos,
    /// Doubling ends here.
    pub max_timeout: Nanos,
    /// When an acknowledged request is asked for first. It doubles with each time, too.
    pub ask_after: Nanos,
    /// The longest interval of HELLOs, and of questions for a device that the IOhost does not have.
    pub hello: Nanos,
    /// The interval of full frames that show that both sides are there. One that is not answered is
    /// repeated sooner.
    pub keepalive: Nanos,
    /// The IOhost is away when nothing of it has arrived for this time.
    pub dead_after: Nanos,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            first_timeout: Nanos::from_millis(10),
            min_timeout: Nanos::from_micros(30),
            max_timeout: Nanos::from_millis(1_000),
            ask_after: Nanos::from_millis(100),
            // A restarted IOhost is found within a second though one frame in ten is lost: a HELLO
            // and its answer may be lost several times.
            hello: Nanos::from_millis(100),
            // Each one wakes an idle client and its IOhost. There is time for five tries between it
            // and `dead_after`.
            keepalive: Nanos::from_millis(700),
            dead_after: Nanos::from_millis(900),
        }
    }
}

/// The fate of requests while the IOhost is away, or does not have their device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisconnect {
    /// They wait, as long as it takes.
    Stall,
    /// They fail when the IOhost has been away for this time, or has not had their device, and new
    /// ones at once until it is back.
    Fail(Nanos),
}

/// The setup of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// The client's name.
    pub client: [u8; 16],
    /// A random number of this start of the client.
    pub life: u64,
    /// The client's link queue that the session belongs to.
    pub queue: u8,
    /// The IOhost's link queue that is asked for the session; it may name another one.
    pub host_queue: u8,
    /// Requests that may be with the IOhost at a time.
    pub slots: u16,
    /// Requests that the engine takes at a time.
    pub depth: u16,
    /// Frames that the link's receive ring holds for this session.
    pub receive_frames: u32,
    /// The largest frame that the path is configured for.
    pub frame_bytes: u32,
    /// Size of each device's replay log.
    pub replay_bytes: usize,
    /// The fate of requests while the IOhost is away.
    pub on_disconnect: OnDisconnect,
    /// The timers.
    pub timing: Timing,
    /// The features that a session may have, of [`FEATURES`]: fewer for tests of older versions.
    pub features: u64,
    /// A rule to neglect, for simulations.
    pub neglected: Neglected,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            client: [0; 16],
            life: 1,
            queue: 0,
            host_queue: 0,
            slots: 128,
            depth: 256,
            receive_frames: 1024,
            frame_bytes: DEFAULT_FRAME_BYTES,
            replay_bytes: 16 << 20,
            on_disconnect: OnDisconnect::Fail(Nanos::from_millis(30_000)),
            timing: Timing::default(),
            features: FEATURES,
            neglected: Neglected::default(),
        }
    }
}

/// Something that the caller learns from [`Client::next_event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A session has begun.
    Connected,
    /// The session is over, and the client looks for the next one.
    Disconnected,
    /// The list of devices has changed: see [`Client::listed`].
    Listed,
    /// A device that was [opened](Client::open) was attached, or its entry has changed: see
    /// [`Client::device`]. Or writes of it were [abandoned](Client::take_abandoned).
    Device(u16),
    /// A request ended.
    Completed {
        /// The caller's name for it.
        tag: u64,
        /// How it ended.
        result: Result<(), BlockError>,
    },
}

/// Why [`Client::submit`] took no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests are unanswered as the engine takes: submit again after one has ended.
    #[error("as many requests are unanswered as the client takes")]
    Full,
    /// The device was not [opened](Client::open).
    #[error("device {device} was not opened")]
    UnknownDevice {
        /// Its number.
        device: u16,
    },
}

/// Flags that say what the caller has not been told yet.
#[derive(Clone, Copy, Debug, Default)]
struct Untold {
    connected: bool,
    disconnected: bool,
    listed: bool,
    /// Some of the devices.
    devices: bool,
}

/// The engine of one session. `H` makes the session's seal: [`Plain`] without encryption.
pub struct Client<H: ClientHandshake> {
    handshake: H,
    /// The newest WELCOME whose frame was damaged.
    opened: Option<Opened<H::Seal>>,
    channel: Channel<H::Seal>,
    core: Core,
}

/// All of a client but its end of the session.
#[derive(Debug)]
struct Core {
    options: ClientOptions,
    stats: Arc<VrioStats>,
    tag_bytes: usize,
    round_trip: RoundTrip,
    phase: Phase,
    /// The incarnation of the IOhost that the session is with.
    incarnation: u64,
    frame_bytes: u32,
    /// Several requests may share a frame in this session.
    has_bundles: bool,
    /// There may be NICs in this session.
    has_packets: bool,
    /// The number of the session, or of the one that is looked for.
    number: u64,
    /// Its HELLOs.
    hellos: Hellos,
    /// The code of the last ENDING that refused a session.
    refusal: Option<u16>,
    /// When a frame of the IOhost arrived last; at first when the client was polled first.
    heard_at: Option<Nanos>,
    /// When one of full size did.
    full_heard_at: Nanos,
    keepalive: Keepalive,
    widening: Widening,
    telling: Telling,
    /// The version of the list of devices that the newest frame has named.
    devices_version: u32,
    /// The list as far as it is known.
    list: Vec<DeviceEntry>,
    listing: Listing,
    /// Something has to be asked for: an entry of the list, or a device.
    is_asking: bool,
    devices: Vec<Device>,
    /// Devices that are NICs.
    nics: usize,
    nic_turns: Turns,
    /// No incomplete packet is given up before.
    nics_due: Nanos,
    /// The names of devices of which requests in slots were given up in this session: the IOhost
    /// may have them still, and the network may.
    given_up: Vec<[u8; DEVICE_NAME_BYTES]>,
    entries: Vec<Entry>,
    blank: Vec<u16>,
    /// Requests taken from the caller and not ended.
    guest_requests: u16,
    /// Requests of the engine itself that have not ended.
    own_requests: u16,
    writes: UnansweredWrites,
    /// Entries without a slot, in the order in which they were accepted.
    waiting: VecDeque<u16>,
    /// Something has happened that a waiting entry may have waited for.
    looks_again: bool,
    next_order: u64,
    slots: Vec<Slot>,
    free_slots: FreeSlots,
    /// Slots below this one may be used.
    slot_limit: u16,
    /// Frames that the unanswered requests ask the IOhost for.
    asked_frames: u32,
    /// Slots that have something to send.
    sending: VecDeque<u16>,
    /// The link had room for all frames so far.
    has_room: bool,
    /// No timer of a slot ends before.
    next_due: Nanos,

    completed: VecDeque<(u64, Result<(), BlockError>)>,
    untold: Untold,
}

impl Core {
    fn new(options: ClientOptions, stats: Arc<VrioStats>) -> Self {
        let entries = usize::from(options.depth).saturating_add(OWN_REQUESTS.into());
        let slots = usize::from(options.slots.max(1));
        Self {
            options,
            stats,
            tag_bytes: 0,
            round_trip: RoundTrip::default(),
            phase: Phase::default(),
            incarnation: 0,
            frame_bytes: 0,
            has_bundles: false,
            has_packets: false,
            number: 1,
            hellos: Hellos::default(),
            refusal: None,
            heard_at: None,
            full_heard_at: Nanos::ZERO,
            keepalive: Keepalive::default(),
            widening: Widening::default(),
            telling: Telling::default(),
            devices_version: 0,
            list: Vec::new(),
            listing: Listing::default(),
            is_asking: false,
            devices: Vec::new(),
            nics: 0,
            nic_turns: Turns::default(),
            nics_due: Nanos::MAX,
            given_up: Vec::new(),
            entries: vec![Entry::default(); entries],
            blank: (0..u16::try_from(entries).unwrap_or(u16::MAX)).rev().collect(),
            guest_requests: 0,
            own_requests: 0,
            writes: UnansweredWrites::new(entries),
            waiting: VecDeque::with_capacity(entries),
            looks_again: false,
            next_order: 0,
            slots: vec![Slot::default(); slots],
            free_slots: FreeSlots::new(slots),
            slot_limit: 0,
            asked_frames: 0,
            sending: VecDeque::with_capacity(slots),
            has_room: true,
            next_due: Nanos::MAX,
            completed: VecDeque::with_capacity(entries),
            untold: Untold::default(),
        }
    }

    /// Begins to use a device, and returns its number.
    fn open(&mut self, device: Device) -> Option<u16> {
        if self.devices.iter().any(|other| other.is_open && other.name == device.name) {
            return None;
        }
        let free = self.devices.iter().position(|device| !device.is_open);
        let index = free.unwrap_or(self.devices.len());
        let number = u16::try_from(index).ok()?;
        self.nics = self.nics.saturating_add(usize::from(device.nic.is_some()));
        match self.devices.get_mut(index) {
            Some(place) => *place = device,
            None => self.devices.push(device),
        }
        self.is_asking = true;
        Some(number)
    }

    fn device_mut(&mut self, device: u16) -> Option<&mut Device> {
        self.devices.get_mut(usize::from(device)).filter(|device| device.is_open)
    }
}

impl<H: ClientHandshake> fmt::Debug for Client<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without keys.
        f.debug_struct("Client").field("core", &self.core).finish_non_exhaustive()
    }
}

impl<H: ClientHandshake> Client<H> {
    /// A client of the IOhost at `host`. It looks for a session from its first poll on.
    #[must_use]
    pub fn new(options: ClientOptions, host: Peer, handshake: H, stats: Arc<VrioStats>) -> Self {
        let channel = Channel::new(host, Arc::clone(&stats));
        Self { handshake, opened: None, channel, core: Core::new(options, stats) }
    }

    /// Begins to use the device with this name, padded with zeros, and returns the client's number
    /// for it; `None` if it is in use already, or there are too many. Requests may be submitted at
    /// once, and wait until the IOhost has such a device.
    pub fn open(&mut self, name: &[u8; DEVICE_NAME_BYTES]) -> Option<u16> {
        let replay_bytes = self.core.options.replay_bytes;
        self.core.open(Device::new(*name, replay_bytes))
    }

    /// Ends the use of a device. Its unanswered requests fail, and its answered writes are no
    /// longer kept: flush before.
    pub fn close(&mut self, device: u16) {
        let index = usize::from(device);
        if self.core.device_mut(device).is_none() {
            return;
        }
        self.core.fail(|entry| entry.device == index, BlockError::EIO);
        if let Some(device) = self.core.devices.get_mut(index) {
            self.core.nics = self.core.nics.saturating_sub(usize::from(device.nic.is_some()));
            *device = Device::closed();
        }
    }

    /// The entry of an opened device, once it was attached or promised.
    #[must_use]
    pub fn device(&self, device: u16) -> Option<&DeviceEntry> {
        let device = self.core.devices.get(usize::from(device))?;
        device.is_known().then_some(&device.entry)
    }

    /// Whether an opened device takes requests now: it is attached, and nothing is to be replayed.
    #[must_use]
    pub fn is_ready(&self, device: u16) -> bool {
        let found = self.core.devices.get(usize::from(device));
        self.is_connected() && found.is_some_and(Device::is_ready)
    }

    /// Whether an opened device is attached in this session. If it is not
    /// [ready](Self::is_ready), answered writes are sent again.
    #[must_use]
    pub fn is_attached(&self, device: u16) -> bool {
        let found = self.core.devices.get(usize::from(device));
        self.is_connected() && found.is_some_and(|device| device.is_attached)
    }

    /// Answered writes of an opened device that no answered flush covers. They are kept here, for
    /// an IOhost that restarts.
    #[must_use]
    pub fn kept_writes(&self, device: u16) -> u64 {
        let found = self.core.devices.get(usize::from(device));
        found.map_or(0, |device| device.log.end().saturating_sub(device.log.base()))
    }

    /// Flushes the [kept writes](Self::kept_writes) of an opened device, unless such a flush is
    /// unanswered.
    ///
    /// # Errors
    /// A flush or a replay has failed before; so does the caller's next flush.
    pub fn flush_kept(&mut self, device: u16) -> Result<(), BlockError> {
        self.core.flush_kept(device.into())
    }

    /// The difference for which a device is not attached that the IOhost has: it is another one
    /// than the device that was attached first, and its user could not tell.
    #[must_use]
    pub fn change(&self, device: u16) -> Option<&'static str> {
        self.core.devices.get(usize::from(device))?.refused
    }

    /// The IOhost's list of devices for this client, as far as it is known.
    #[must_use]
    pub fn listed(&self) -> &[DeviceEntry] {
        &self.core.list
    }

    /// Whether there is a session.
    #[must_use]
    pub const fn is_connected(&self) -> bool {
        self.core.phase.is_connected()
    }

    /// The reason that the IOhost gave last for not having a session with this client, of those in
    /// [`ending`]; nothing proves it. `None` since the last session began.
    #[must_use]
    pub const fn refusal(&self) -> Option<u16> {
        self.core.refusal
    }

    /// The incarnation of the IOhost that the session, or the last one, is with.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.core.incarnation
    }

    /// The smoothed round trip of the path; zero before it was measured.
    #[must_use]
    pub const fn round_trip(&self) -> Nanos {
        self.core.round_trip.smoothed()
    }

    /// When a frame of the IOhost arrived last, or the client was polled first.
    #[must_use]
    pub const fn heard_at(&self) -> Option<Nanos> {
        self.core.heard_at
    }

    /// The size of this session's frames; 0 before the first session.
    #[must_use]
    pub const fn frame_bytes(&self) -> u32 {
        self.core.frame_bytes
    }

    /// Slots that may be used now: the client's credit.
    #[must_use]
    pub const fn slot_limit(&self) -> u16 {
        self.core.slot_limit
    }

    /// Requests taken from the caller that have not ended.
    #[must_use]
    pub const fn unanswered(&self) -> u16 {
        self.core.guest_requests
    }

    /// Takes a request, whose data are `tag`'s, for a device by the number that
    /// [`open`](Self::open) returned. Its end is an [`Event::Completed`].
    ///
    /// # Errors
    /// Too many requests are unanswered, or the device was not opened.
    pub fn submit(&mut self, tag: u64, device: u16, request: Request) -> Result<(), SubmitError> {
        let core = &mut self.core;
        if let Some(entry) = core.take_over(tag, device, request)? {
            core.waiting.push_back(entry);
            core.looks_again = true;
        }
        Ok(())
    }

    /// As [`submit`](Self::submit), and gives the request a slot at once if nothing is in its way:
    /// [`transmit`](Self::transmit) sends it, together with others. Otherwise a
    /// [`poll`](Self::poll) does both.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit).
    #[inline]
    pub fn start(
        &mut self,
        (tag, device, request): (u64, u16, Request),
        port: &mut impl Port,
    ) -> Result<(), SubmitError> {
        let core = &mut self.core;
        let Some(entry) = core.take_over(tag, device, request)? else { return Ok(()) };
        // A request that was accepted earlier goes first.
        let is_first = core.waiting.is_empty() && core.phase.is_connected();
        if !is_first || core.start(entry, port) == Start::Waits {
            core.waiting.push_back(entry);
            core.looks_again = true;
        }
        Ok(())
    }

    /// Sends the requests that have slots, as far as the link has room.
    #[inline]
    pub fn transmit(&mut self, now: Nanos, port: &mut impl Port) {
        let Self { channel, core, .. } = self;
        core.send_slots(now, channel, port);
        if core.nics > 0 && core.phase.is_connected() {
            core.send_packets(channel, port);
        }
    }

    /// Takes a frame of `frame_bytes`, padding included, that came from `from`. `first` are its
    /// first [`DATA_HEADER_BYTES`](crate::wire::DATA_HEADER_BYTES), or all if there are fewer;
    /// `received` is the port's name for it. A frame that makes no sense is dropped and counted.
    pub fn receive<P: Port>(
        &mut self,
        now: Nanos,
        (from, first, frame_bytes): (Peer, &[u8], usize),
        received: &mut P::Received,
        port: &mut P,
    ) {
        self.core.stats.frames_received.add(1);
        let taken = if from == self.channel.peer {
            self.take(now, (first, frame_bytes), received, port)
        } else {
            Err(Reason::Peer)
        };
        if let Err(reason) = taken {
            self.core.stats.count_drop(reason);
        }
    }

    fn take<P: Port>(
        &mut self,
        now: Nanos,
        (first, frame_bytes): (&[u8], usize),
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        let Self { handshake, opened, channel, core } = self;
        let frame = Frame::parse(first)?;
        let payload_bytes = frame.payload_bytes();
        if frame.kind.is_handshake() || frame.header.counter == 0 {
            frame.check_size(frame_bytes, 0)?;
            if !port.open(received, frame.head, payload_bytes, 0, &mut Plain) {
                return Err(Reason::Seal);
            }
            // Nothing proves an ENDING but the name of the session, which a stranger cannot guess.
            if frame.kind == Kind::Ending
                && core.phase.is_connected()
                && frame.header.session != channel.session
            {
                return Err(Reason::Session);
            }
            let frame = (&frame, frame_bytes);
            let handshake = (handshake, opened);
            let Some((welcome, seal)) = core.greeted(now, frame, received, port, handshake)? else {
                return Ok(());
            };
            channel.start(seal, welcome.session, core.incarnation, welcome.queue);
            core.tag_bytes = channel.tag_bytes();
            return Ok(());
        }
        if !core.phase.is_connected() {
            return Err(Reason::Session);
        }
        let before = channel.newest();
        channel.open(&frame, frame_bytes, received, port)?;
        let is_newest = frame.header.counter > before;
        core.heard_at = Some(now);
        match frame.kind {
            Kind::Answer => {
                let body = AnswerBody::decode(frame.body());
                core.answer(now, is_newest, &body, payload_bytes, received, port)
            }
            Kind::Busy => {
                core.busy(now, is_newest, &AnswerBody::decode(frame.body()), payload_bytes)
            }
            Kind::Bundle => core.bundle(now, is_newest, payload_bytes, received, port),
            Kind::Packet => {
                let body = PacketBody::decode(frame.body());
                core.packet(now, (&body, payload_bytes), received, port)
            }
            Kind::Pong => core.pong(now, is_newest, payload_bytes, received, port),
            Kind::Device => core.listed(is_newest, received, port),
            Kind::Attached => core.attached(now, is_newest, received, port),
            Kind::Ending => {
                core.lose(now, 0);
                Ok(())
            }
            _ => Err(Reason::Kind),
        }
    }

    /// Does what is due at `now`, and sends what is to be sent as far as the link has room.
    pub fn poll(&mut self, now: Nanos, port: &mut impl Port) {
        let Self { handshake, channel, core, .. } = self;
        core.heard_at.get_or_insert(now);
        core.keep_session(now, channel, handshake, port);
        if !core.has_all_devices() {
            core.fail_late(now);
        }
        if !core.phase.is_connected() {
            return;
        }
        if core.next_due <= now {
            core.expire(now);
        }
        if core.looks_again {
            core.looks_again = false;
            core.flush_for_users();
            core.replay(port);
            core.start_waiting(port);
        }
        core.send_slots(now, channel, port);
        if core.nics > 0 {
            if core.nics_due <= now {
                core.expire_packets(now);
            }
            core.send_packets(channel, port);
        }
    }

    /// Whether a [`poll`](Self::poll) at `now` has anything to do.
    #[must_use]
    #[inline]
    pub fn is_due(&self, now: Nanos) -> bool {
        let core = &self.core;
        !core.phase.is_connected()
            || !core.sending.is_empty()
            || core.may_start()
            || core.next_due <= now
            || core.nics_due <= now
            || core.has_packets_queued()
            || core.needs_care(now)
    }

    /// When to poll next, if no frame arrives and nothing is submitted.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        let core = &self.core;
        let next = core.session_deadline();
        let fails_at = if core.has_all_devices() { Nanos::MAX } else { core.failure_deadline() };
        let next = next.min(fails_at);
        if !core.phase.is_connected() {
            return next;
        }
        // A link without room wakes its sidecore when there is some.
        let sends = || !core.sending.is_empty() || core.has_packets_queued();
        let has_work = core.may_start() || (core.has_room && sends());
        next.min(if has_work { Nanos::ZERO } else { core.next_due.min(core.nics_due) })
    }

    /// Ends the session in order, at the end of the client: the IOhost forgets it. A client that is
    /// polled afterwards looks for a new one.
    pub fn end(&mut self, now: Nanos, port: &mut impl Port) {
        if self.is_connected() {
            let ending = Ending { code: ending::CLOSED, ..Ending::default() }.encode();
            self.channel.send_message(port, Kind::Ending, &ending, 0);
            self.core.lose(now, 0);
        }
    }
}
