//! The client's side of a session.

mod device;
mod entry;
mod overlap;
mod replay;
mod requests;
mod session;
mod slots;

use std::collections::VecDeque;
use std::sync::Arc;

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use crate::channel::{Channel, Opened, padded};
use crate::round_trip::RoundTrip;
use crate::wire::{AnswerBody, DEFAULT_FRAME_BYTES, DeviceEntry, Ending, Frame, Kind, ending};
use crate::{Data, Neglected, Peer, Reason, Request, Seal, Transmit, VrioStats};
use device::Device;
use entry::{Entry, Origin};
use overlap::UnansweredWrites;
use session::{Listing, Phase};
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
    /// How often the client shows that it is there, with a short frame and a full one.
    pub keepalive: Nanos,
    /// The IOhost is away when nothing of it has arrived for this time.
    pub dead_after: Nanos,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            first_timeout: Nanos::from_millis(10),
            min_timeout: Nanos::from_micros(50),
            max_timeout: Nanos::from_millis(1_000),
            ask_after: Nanos::from_millis(100),
            keepalive: Nanos::from_millis(200),
            dead_after: Nanos::from_millis(800),
        }
    }
}

/// The fate of requests while the IOhost is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisconnect {
    /// They wait, as long as it takes.
    Stall,
    /// They fail when the IOhost has been away for this time, and new ones at once until it is
    /// back.
    Fail(Nanos),
}

/// How a client is set up.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// The client's name.
    pub client: [u8; 16],
    /// A random number of this start of the client.
    pub life: u64,
    /// The client's sidecore and link queue that the session is for.
    pub queue: u16,
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
    /// A rule to neglect, for simulations.
    pub neglected: Neglected,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            client: [0; 16],
            life: 1,
            queue: 0,
            slots: 128,
            depth: 256,
            receive_frames: 1024,
            frame_bytes: DEFAULT_FRAME_BYTES,
            replay_bytes: 16 << 20,
            on_disconnect: OnDisconnect::Fail(Nanos::from_millis(30_000)),
            timing: Timing::default(),
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
    /// [`Client::device`].
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
#[derive(Debug, Default)]
struct Untold {
    connected: bool,
    disconnected: bool,
    listed: bool,
}

/// The engine of one session.
#[derive(Debug)]
pub struct Client<S> {
    channel: Channel<S>,
    core: Core,
}

/// All of a client but its end of the session, so that a frame's payload can be looked at in place.
#[derive(Debug)]
struct Core {
    options: ClientOptions,
    stats: Arc<VrioStats>,
    tag_bytes: usize,
    round_trip: RoundTrip,
    phase: Phase,
    /// The incarnation of the IOhost that the session is with.
    incarnation: u64,
    /// The size of this session's frames.
    frame_bytes: u32,
    /// The number of the session, or of the one that is looked for.
    number: u64,
    /// When a frame of the IOhost arrived last; at first when the client was polled first.
    heard_at: Option<Nanos>,
    /// When one of full size did.
    full_heard_at: Nanos,
    next_ping: Nanos,
    /// The version of the list of devices that the newest frame has named.
    devices_version: u32,
    /// The list as far as it is known.
    list: Vec<DeviceEntry>,
    listing: Listing,
    devices: Vec<Device>,

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
    /// No timer of a slot ends before.
    next_due: Nanos,

    completed: VecDeque<(u64, Result<(), BlockError>)>,
    untold: Untold,
}

impl Core {
    fn new(options: ClientOptions, tag_bytes: usize, stats: Arc<VrioStats>) -> Self {
        let entries = usize::from(options.depth).saturating_add(OWN_REQUESTS.into());
        let slots = usize::from(options.slots.max(1));
        Self {
            options,
            stats,
            tag_bytes,
            round_trip: RoundTrip::default(),
            phase: Phase::default(),
            incarnation: 0,
            frame_bytes: 0,
            number: 1,
            heard_at: None,
            full_heard_at: Nanos::ZERO,
            next_ping: Nanos::ZERO,
            devices_version: 0,
            list: Vec::new(),
            listing: Listing::default(),
            devices: Vec::new(),
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
            next_due: Nanos::MAX,
            completed: VecDeque::with_capacity(entries),
            untold: Untold::default(),
        }
    }

    fn index_of(&self, device: u16) -> Option<usize> {
        self.devices.iter().position(|opened| opened.number == device)
    }
}

impl<S: Seal> Client<S> {
    /// A client of the IOhost at `host`. It looks for a session from its first poll on.
    #[must_use]
    pub fn new(options: ClientOptions, host: Peer, seal: S, stats: Arc<VrioStats>) -> Self {
        let channel = Channel::new(seal, host, Arc::clone(&stats));
        Self { channel, core: Core::new(options, S::TAG_BYTES, stats) }
    }

    /// Begins to use a device, by its number. Requests may be submitted at once, and wait until the
    /// IOhost has such a device.
    pub fn open(&mut self, device: u16) {
        let core = &mut self.core;
        if core.index_of(device).is_none() {
            core.devices.push(Device::new(device, core.options.replay_bytes));
        }
    }

    /// The entry of an opened device, once it was attached.
    #[must_use]
    pub fn device(&self, device: u16) -> Option<&DeviceEntry> {
        let device = self.core.devices.get(self.core.index_of(device)?)?;
        device.is_known().then_some(&device.entry)
    }

    /// Whether an opened device takes requests now: it is attached, and nothing is to be replayed.
    #[must_use]
    pub fn is_ready(&self, device: u16) -> bool {
        let found = self.core.index_of(device).and_then(|index| self.core.devices.get(index));
        self.is_connected() && found.is_some_and(Device::is_ready)
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

    /// Takes a request, whose data are `tag`'s. Its end is an [`Event::Completed`].
    ///
    /// # Errors
    /// Too many requests are unanswered, or the device was not opened.
    pub fn submit(&mut self, tag: u64, device: u16, request: Request) -> Result<(), SubmitError> {
        let core = &mut self.core;
        let index = core.index_of(device).ok_or(SubmitError::UnknownDevice { device })?;
        if core.guest_requests >= core.options.depth {
            return Err(SubmitError::Full);
        }
        let entry = core.accept(Origin::Guest { tag }, index, request).ok_or(SubmitError::Full)?;
        core.guest_requests = core.guest_requests.saturating_add(1);
        core.waiting.push_back(entry);
        core.looks_again = true;
        Ok(())
    }

    /// The next thing that the caller has not been told.
    pub fn next_event(&mut self) -> Option<Event> {
        let core = &mut self.core;
        let untold = &mut core.untold;
        if std::mem::take(&mut untold.disconnected) {
            return Some(Event::Disconnected);
        }
        if std::mem::take(&mut untold.connected) {
            return Some(Event::Connected);
        }
        if std::mem::take(&mut untold.listed) {
            return Some(Event::Listed);
        }
        if let Some(device) = core.devices.iter_mut().find(|device| device.is_untold) {
            device.is_untold = false;
            return Some(Event::Device(device.number));
        }
        core.completed.pop_front().map(|(tag, result)| Event::Completed { tag, result })
    }

    /// Takes a frame. A frame that makes no sense is dropped and counted.
    pub fn receive(&mut self, now: Nanos, bytes: &[u8], data: &mut impl Data) {
        self.core.stats.frames_received.add(1);
        if let Err(reason) = self.take(now, bytes, data) {
            self.core.stats.count_drop(reason);
        }
    }

    fn take(&mut self, now: Nanos, bytes: &[u8], data: &mut impl Data) -> Result<(), Reason> {
        let Self { channel, core } = self;
        let frame = Frame::parse(bytes, S::TAG_BYTES)?;
        if frame.kind.is_handshake() || frame.header.counter == 0 {
            let payload = channel
                .seal
                .open(frame.header.counter, frame.associated, frame.sealed)
                .ok_or(Reason::Seal)?;
            let Some(session) = core.handshake(now, &frame, payload, bytes.len())? else {
                return Ok(());
            };
            channel.start(session, core.incarnation);
            return Ok(());
        }
        if !core.phase.is_connected() {
            return Err(Reason::Session);
        }
        let before = channel.newest();
        let Opened { kind, counter, body, payload } = channel.open(&frame)?;
        let is_newest = counter > before;
        core.heard_at = Some(now);
        match kind {
            Kind::Answer => core.answer(now, is_newest, &AnswerBody::decode(&body), payload, data),
            Kind::Busy => core.busy(now, is_newest, &AnswerBody::decode(&body), payload),
            Kind::Pong => core.pong(now, is_newest, payload),
            Kind::Device => core.listed(is_newest, payload),
            Kind::Attached => core.attached(now, is_newest, payload),
            Kind::Ending => {
                core.lose(now, 0);
                Ok(())
            }
            _ => Err(Reason::Kind),
        }
    }

    /// Does what is due at `now`, and sends what is to be sent as far as the link has room.
    pub fn poll(&mut self, now: Nanos, link: &mut impl Transmit, data: &mut impl Data) {
        let Self { channel, core } = self;
        core.heard_at.get_or_insert(now);
        core.keep_session(now, channel, link);
        if !core.phase.is_connected() {
            core.fail_late(now);
            return;
        }
        if core.next_due <= now {
            core.expire(now);
        }
        if core.looks_again {
            core.looks_again = false;
            core.replay(data);
            core.start_waiting(data);
        }
        core.send_slots(now, channel, link, data);
    }

    /// When to poll next, if no frame arrives and nothing is submitted.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        let core = &self.core;
        let next = core.session_deadline();
        if !core.phase.is_connected() {
            return next.min(core.failure_deadline());
        }
        let has_work = core.looks_again || !core.sending.is_empty();
        next.min(if has_work { Nanos::ZERO } else { core.next_due })
    }

    /// Ends the session in order, at the end of the client: the IOhost forgets it. A client that is
    /// polled afterwards looks for a new one.
    pub fn end(&mut self, now: Nanos, link: &mut impl Transmit) {
        if self.is_connected() {
            let ending = Ending { code: ending::CLOSED, ..Ending::default() }.encode();
            self.channel.send(link, Kind::Ending, None, ending.len(), padded(&ending));
            self.core.lose(now, 0);
        }
    }
}
