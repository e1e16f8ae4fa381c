//! The handshake, what keeps a session alive, and the devices in it.

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use super::device::Executor;
use super::pings::{Keepalive, WIDEN_MIN, Widening};
use super::{Core, Timing};
use crate::channel::{Channel, message};
use crate::greeting::{padded_bytes, send_greeting, split_greeting};
use crate::handshake::{ClientHandshake, MESSAGE_MAX};
use crate::port::{Peer, Port, Seal};
use crate::wire::{
    Attach, DeviceEntry, Ending, FEATURES, Frame, FrameHeader, Greeting, Hello, Kind, List,
    MAX_FRAME_BYTES, MIN_FRAME_BYTES, VERSION, Welcome, feature,
};
use crate::{Reason, Rule};

/// A HELLO of one size is sent so often before the next size is tried, or more often while an
/// answer may be late.
const TRIES_PER_SIZE: u32 = 3;
/// Entries of the IOhost's list that a client keeps.
const LIST_MAX: u16 = 256;

/// The time of these tries at intervals that double. Shorter intervals are no reason to try another
/// size earlier.
fn time_per_size(Timing { first_timeout, hello, .. }: &Timing) -> Nanos {
    let timeout = |factor: u64| Nanos(first_timeout.0.saturating_mul(factor)).min(*hello);
    timeout(1).after(timeout(2)).after(timeout(4))
}

/// Whether there is a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The client looks for one.
    Hello {
        /// The index of the frame size that is tried.
        size: usize,
        /// The IOhost is there and larger frames do not pass. Before that is known, frames without
        /// an answer only say that it is not there yet.
        is_certain: bool,
        /// HELLOs of this size that were sent.
        tries: u32,
        /// From the CHALLENGE: when it was sent, and its cookie.
        challenge: (u64, u64),
        /// The beginning of the wait for an answer: for a CHALLENGE, and then for a WELCOME.
        since: Nanos,
        next_at: Nanos,
        timeout: Nanos,
    },
    /// There is one.
    Connected,
}

impl Default for Phase {
    fn default() -> Self {
        Self::looking(Nanos::ZERO, 0)
    }
}

impl Phase {
    pub(super) const fn looking(now: Nanos, size: usize) -> Self {
        let (is_certain, timeout) = (size > 0, Nanos::ZERO);
        let challenge = (0, 0);
        Self::Hello { size, is_certain, tries: 0, challenge, since: now, next_at: now, timeout }
    }

    pub(super) const fn is_connected(&self) -> bool {
        matches!(self, Self::Connected)
    }
}

/// How far the IOhost's list of devices was read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Listing {
    /// The version of the list that was read, or is.
    version: u32,
    /// The next entry; `None` if all were read.
    index: Option<u16>,
    ask_at: Nanos,
}

/// A WELCOME's message that was opened. The handshake opens it once, and a frame that carried it
/// damaged must not use it up: the next one carries it again.
pub(super) struct Opened<S> {
    message: Vec<u8>,
    welcome: Welcome,
    seal: S,
}

impl<S: Seal> Opened<S> {
    /// Takes the message out of `opened` if it is there, and has the handshake open it otherwise.
    fn open(
        message: &[u8],
        handshake: &mut impl ClientHandshake<Seal = S>,
        opened: &mut Option<Self>,
    ) -> Option<Self> {
        if let Some(found) = opened.take_if(|opened| opened.message == message) {
            return Some(found);
        }
        let (welcome, seal) = handshake.welcome(message)?;
        Some(Self { message: message.to_vec(), welcome, seal })
    }
}

impl Core {
    /// The sizes of frames that are tried, from the largest on.
    pub(super) fn sizes(&self) -> [u32; 2] {
        [self.options.frame_bytes.clamp(MIN_FRAME_BYTES, MAX_FRAME_BYTES), MIN_FRAME_BYTES]
    }

    /// Looks for a session, or shows the IOhost that the client is there.
    pub(super) fn keep_session<H: ClientHandshake>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<H::Seal>,
        handshake: &mut H,
        port: &mut impl Port,
    ) {
        if self.phase.is_connected() {
            if self.is_dead(now) {
                self.lose(now, 0);
            } else if self.is_narrow(now) {
                // Short frames arrive and full ones do not.
                self.lose(now, 1);
            }
        }
        if !self.phase.is_connected() {
            channel.end();
            self.say_hello(now, channel.peer, handshake, port);
            return;
        }
        if self.keepalive.next_at <= now {
            self.ping(now, channel, port);
        }
        if self.telling.at <= now {
            self.tell(now, channel, port);
        }
        if self.widening.next_at.is_some_and(|at| at <= now) {
            self.widen(now, channel, port);
        }
        if self.is_asking {
            self.ask_for_devices(now, channel, port);
        }
    }

    /// Whether the IOhost has been silent for too long.
    #[inline]
    fn is_dead(&self, now: Nanos) -> bool {
        let dead_after = self.options.timing.dead_after;
        self.heard_at.is_none_or(|heard_at| now.since(heard_at) >= dead_after)
    }

    /// Whether no full frame has come for too long.
    #[inline]
    fn is_narrow(&self, now: Nanos) -> bool {
        let dead_after = self.options.timing.dead_after;
        self.frame_bytes > MIN_FRAME_BYTES && now.since(self.full_heard_at) >= dead_after
    }

    /// Whether [`keep_session`](Self::keep_session) has anything to do in a session.
    #[inline]
    pub(super) fn needs_care(&self, now: Nanos) -> bool {
        self.is_asking
            || self.keepalive.next_at <= now
            || self.telling.at <= now
            || self.widening.next_at.is_some_and(|at| at <= now)
            || self.is_dead(now)
            || self.is_narrow(now)
    }

    /// When the session needs the next poll.
    pub(super) fn session_deadline(&self) -> Nanos {
        let Phase::Hello { next_at, .. } = self.phase else {
            let widens_at = self.widening.next_at.unwrap_or(Nanos::MAX);
            let next = self.keepalive.next_at.min(widens_at).min(self.telling.at);
            return if self.is_asking { next.min(self.ask_deadline()) } else { next };
        };
        next_at
    }

    fn ask_deadline(&self) -> Nanos {
        let is_stale = |device: &&super::Device| device.is_stale(self.devices_version);
        let devices = self.devices.iter().filter(is_stale);
        let asks = devices.map(|device| device.ask_at).min().unwrap_or(Nanos::MAX);
        let listing = &self.listing;
        let is_listing = listing.index.is_some() || listing.version != self.devices_version;
        asks.min(if is_listing { listing.ask_at } else { Nanos::MAX })
    }

    fn say_hello<H: ClientHandshake>(
        &mut self,
        now: Nanos,
        to: Peer,
        handshake: &mut H,
        port: &mut impl Port,
    ) {
        let sizes = self.sizes();
        if self.session_deadline() > now {
            return;
        }
        self.try_another(now);
        let Phase::Hello { size, challenge, .. } = self.phase else { return };
        self.plan_hello(now);
        let frame_bytes = sizes.get(size).copied().unwrap_or(MIN_FRAME_BYTES);
        let (challenged_ns, cookie) = challenge;
        if self.hellos.message.is_empty() && !self.make_hello(frame_bytes, cookie, handshake) {
            return;
        }
        let greeting = Greeting {
            life: self.options.life,
            number: self.number,
            challenged_ns,
            cookie,
            handshake: handshake.code(),
            queue: self.options.queue,
            message_bytes: u16::try_from(self.hellos.message.len()).unwrap_or(u16::MAX),
        };
        let header = FrameHeader {
            kind: Kind::Hello.code(),
            queue: self.options.host_queue,
            payload_bytes: padded_bytes(frame_bytes),
            ..FrameHeader::default()
        };
        if send_greeting(port, to, &header, &greeting, &self.hellos.message) {
            self.stats.frames_sent.add(1);
            self.hellos.sent(now, self.number);
            if let Phase::Hello { tries, .. } = &mut self.phase {
                *tries = tries.saturating_add(1);
            }
        }
    }

    /// Has the handshake make the message of the HELLO for the wanted session.
    fn make_hello<H: ClientHandshake>(
        &mut self,
        frame_bytes: u32,
        cookie: u64,
        handshake: &mut H,
    ) -> bool {
        let hello = Hello {
            client: self.options.client,
            life: self.options.life,
            number: self.number,
            features: self.options.features & FEATURES,
            frame_bytes,
            receive_frames: self.options.receive_frames,
            slots: self.options.slots.max(1),
            queue: self.options.queue,
            version_min: VERSION,
            version_max: VERSION,
            cookie,
        };
        let mut room = [0; MESSAGE_MAX];
        let message = handshake.hello(&hello, &mut room).and_then(|len| room.get(..len));
        self.hellos.message.extend_from_slice(message.unwrap_or_default());
        !self.hellos.message.is_empty()
    }

    /// Plans the next HELLO. One that found no room, or that could not be made, is tried again as
    /// if it had been lost: the link may be down for long.
    fn plan_hello(&mut self, now: Nanos) {
        let timing = self.options.timing;
        let longest = self.hellos.longest(now, &timing);
        let Phase::Hello { next_at, timeout, .. } = &mut self.phase else { return };
        let longer = Nanos(timeout.0.saturating_mul(2)).min(longest);
        *timeout = longer.max(timing.first_timeout);
        *next_at = now.after(*timeout);
    }

    /// Chooses another size for the next HELLO if this one has had its tries, and an answer cannot
    /// be on its way any more.
    fn try_another(&mut self, now: Nanos) {
        let patience = self.hellos.patience.max(time_per_size(&self.options.timing));
        let Phase::Hello { size, is_certain, tries, challenge, since, .. } = &mut self.phase else {
            return;
        };
        if *tries >= TRIES_PER_SIZE && now.since(*since) >= patience {
            // A HELLO of another size is for another session: the IOhost may have begun one whose
            // WELCOME does not get through.
            (*tries, *challenge, *since) = (0, (0, 0), now);
            // The smallest ones have no answer either: the IOhost is away.
            *is_certain &= *size == 0;
            *size = if *size == 0 { 1 } else { 0 };
            self.number = self.number.wrapping_add(1);
            self.hellos.renew();
        }
    }

    /// The IOhost is there, as an answer to a small HELLO shows: now the largest ones get their
    /// chance.
    fn try_largest_again(&mut self, now: Nanos) {
        self.phase = Phase::looking(now, 0);
        if let Phase::Hello { is_certain, .. } = &mut self.phase {
            *is_certain = true;
        }
        self.number = self.number.wrapping_add(1);
        self.hellos.renew();
    }

    /// Takes a frame that is outside of a session. Returns the session that begins, if one does.
    pub(super) fn greeted<P: Port, H: ClientHandshake>(
        &mut self,
        now: Nanos,
        (frame, frame_bytes): (&Frame<'_>, usize),
        received: &P::Received,
        port: &mut P,
        (handshake, opened): (&mut H, &mut Option<Opened<H::Seal>>),
    ) -> Result<Option<(Welcome, H::Seal)>, Reason> {
        match frame.kind {
            Kind::Challenge => {
                let Greeting { life, number, challenged_ns, cookie, .. } =
                    Greeting::decode(&message(port, received)?);
                self.check_answer(now, life, number)?;
                if matches!(self.phase, Phase::Hello { size: 1.., is_certain: false, .. }) {
                    self.try_largest_again(now);
                    return Ok(None);
                }
                self.challenged(now, (challenged_ns, cookie))?;
                Ok(None)
            }
            Kind::Welcome => {
                let mut room = [0; Greeting::BYTES.saturating_add(MESSAGE_MAX)];
                let len = port.message(received, &mut room);
                let (greeting, message) =
                    room.get(..len).and_then(split_greeting).ok_or(Reason::Malformed)?;
                self.check_answer(now, greeting.life, greeting.number)?;
                if self.phase.is_connected() {
                    return Err(Reason::Duplicate);
                }
                let Some(found) = Opened::open(message, handshake, opened) else {
                    self.hellos.is_not_taken(now);
                    return Err(Reason::Seal);
                };
                match self.welcomed(now, &found.welcome, (frame, frame_bytes)) {
                    Ok(()) => Ok(Some((found.welcome, found.seal))),
                    Err(reason) => {
                        *opened = Some(found);
                        Err(reason)
                    }
                }
            }
            Kind::Ending => {
                self.refused(now, &Ending::decode(&message(port, received)?));
                Ok(None)
            }
            _ => Err(Reason::Kind),
        }
    }

    /// The IOhost asks for a HELLO with its cookie.
    fn challenged(&mut self, now: Nanos, newest: (u64, u64)) -> Result<(), Reason> {
        let (patience, Timing { first_timeout, .. }) = (self.hellos.patience, self.options.timing);
        let Phase::Hello { challenge, since, next_at, tries, timeout, .. } = &mut self.phase else {
            return Ok(());
        };
        // The path carries frames of this size to the IOhost.
        *tries = 0;
        let (_, cookie) = *challenge;
        if cookie != 0 && cookie != newest.1 && now.since(*since) < patience {
            // To an earlier HELLO, which had no cookie yet: the WELCOME is on its way.
            return Err(Reason::Duplicate);
        }
        // While the IOhost waits for its store, each HELLO is challenged again.
        if cookie == 0 {
            // The IOhost is there: a lost HELLO is repeated soon.
            (*next_at, *timeout) = (now, Nanos::ZERO);
        } else if cookie != newest.1 && now.since(*since) >= first_timeout {
            // The cookie was that of an IOhost which this one has succeeded.
            *next_at = now;
        }
        if cookie != newest.1 {
            *since = now;
            // The message has the cookie in it. Until the next one is made, a WELCOME may answer
            // the last.
            self.hellos.replace(self.number);
        }
        *challenge = newest;
        Ok(())
    }

    /// A hint of the IOhost, or of anyone: it is looked into if the session has been silent, and
    /// else is not true.
    fn refused(&mut self, now: Nanos, ending: &Ending) {
        if !self.phase.is_connected() {
            if self.check_number(ending.life, ending.number).is_ok() {
                self.refusal = Some(ending.code);
            }
            return;
        }
        let timeout = self.round_trip.timeout(&self.options.timing);
        if self.heard_at.is_none_or(|heard_at| now.since(heard_at) > timeout) {
            self.lose(now, 0);
        }
    }

    /// Whether an answer to a HELLO is to the newest number. One to an earlier number is late.
    fn check_answer(&mut self, now: Nanos, life: u64, number: u64) -> Result<(), Reason> {
        let is_earlier = life == self.options.life && number < self.number;
        if is_earlier && !self.phase.is_connected() {
            self.hellos.is_late_for(now, number);
        }
        self.check_number(life, number)
    }

    fn check_number(&self, life: u64, number: u64) -> Result<(), Reason> {
        if life == self.options.life && number == self.number {
            Ok(())
        } else {
            Err(Reason::Session)
        }
    }

    /// Begins the session of a WELCOME whose message was opened. The frame around that may be
    /// damaged.
    fn welcomed(
        &mut self,
        now: Nanos,
        welcome: &Welcome,
        (frame, frame_bytes): (&Frame<'_>, usize),
    ) -> Result<(), Reason> {
        self.check_number(welcome.life, welcome.number)?;
        if welcome.incarnation != frame.header.incarnation {
            return Err(Reason::Incarnation);
        }
        let [largest, _] = self.sizes();
        let is_sound = welcome.session != 0
            && welcome.version == VERSION
            && welcome.features & !(self.options.features & FEATURES) == 0
            && welcome.slots > 0
            && (MIN_FRAME_BYTES..=largest).contains(&welcome.frame_bytes)
            && usize::try_from(welcome.frame_bytes).is_ok_and(|shown| shown <= frame_bytes);
        if !is_sound {
            return Err(Reason::Malformed);
        }
        if let Phase::Hello { since, .. } = self.phase {
            self.hellos.begun_after(now.since(since));
        }
        let is_narrow = matches!(self.phase, Phase::Hello { size: 1.., .. });
        let Widening { interval, .. } = self.widening;
        self.widening = Widening {
            next_at: is_narrow.then(|| now.after(interval)),
            interval: if is_narrow { interval } else { WIDEN_MIN },
        };
        self.phase = Phase::Connected;
        self.refusal = None;
        self.incarnation = welcome.incarnation;
        self.frame_bytes = welcome.frame_bytes;
        self.has_bundles = welcome.features & feature::BUNDLES != 0;
        self.has_packets = welcome.features & feature::PACKETS != 0;
        self.heard_at = Some(now);
        self.full_heard_at = now;
        self.keepalive = Keepalive { tries: 0, next_at: now };
        self.round_trip.acknowledges_after(None);
        self.telling.at = Nanos::MAX;
        self.devices_version = welcome.devices_version;
        self.listing = Listing { version: welcome.devices_version, index: Some(0), ask_at: now };
        self.is_asking = true;
        self.free_slots.reset(welcome.slots.min(self.options.slots.max(1)));
        self.slot_limit = welcome.slot_limit;
        self.untold.connected = true;
        self.looks_again = true;
        Ok(())
    }

    /// The session is over. The client looks for the next one, with frames of the size with index
    /// `size` first; unanswered requests are sent again in it.
    pub(super) fn lose(&mut self, now: Nanos, size: usize) {
        if !self.phase.is_connected() {
            return;
        }
        self.phase = Phase::looking(now, size);
        self.number = self.number.wrapping_add(1);
        self.hellos.renew();
        self.hellos.seek(now, &self.options.timing);
        self.untold.connected = false;
        self.untold.disconnected = true;
        let heard_at = self.heard_at.unwrap_or(now);
        for device in &mut self.devices {
            device.detach(heard_at, &self.stats);
        }
        self.requeue();
        self.fail_left();
    }

    /// The newest frame says how many slots may be used, and of what version the list of devices
    /// is.
    pub(super) fn limits(&mut self, is_newest: bool, slot_limit: u16, devices_version: u32) {
        let neglected = self.options.neglected;
        if !neglected.keeps(Rule::AbsoluteLimits) {
            self.slot_limit = self.slot_limit.wrapping_add(slot_limit);
            self.looks_again |= slot_limit != 0;
        } else if is_newest {
            self.looks_again |= slot_limit > self.slot_limit;
            self.slot_limit = slot_limit;
        }
        if is_newest {
            self.note_version(devices_version);
        }
    }

    fn note_version(&mut self, devices_version: u32) {
        if self.options.neglected.keeps(Rule::Versions) && self.devices_version != devices_version {
            self.devices_version = devices_version;
            self.is_asking = true;
        }
    }

    fn ask_for_devices<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        port: &mut impl Port,
    ) {
        let wait = self.round_trip.timeout(&self.options.timing);
        if self.listing.version != self.devices_version {
            self.listing = Listing { version: self.devices_version, index: Some(0), ask_at: now };
        }
        if let Some(index) = self.listing.index.filter(|_| self.listing.ask_at <= now) {
            channel.send_message(port, Kind::List, &List { index }.encode(), 0);
            self.listing.ask_at = now.after(wait);
        }
        self.is_asking = self.listing.index.is_some();
        let version = self.devices_version;
        for device in self.devices.iter_mut().filter(|device| device.is_stale(version)) {
            self.is_asking = true;
            if device.ask_at <= now {
                channel.send_message(port, Kind::Attach, &Attach { name: device.name }.encode(), 0);
                device.ask_at = now.after(wait);
            }
        }
    }

    pub(super) fn listed<P: Port>(
        &mut self,
        is_newest: bool,
        received: &P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        let entry = DeviceEntry::decode(&message(port, received)?);
        if is_newest {
            self.note_version(entry.version);
        }
        if self.listing.index != Some(entry.index)
            || !is_newest
            || entry.version != self.listing.version
        {
            return Err(Reason::Unasked);
        }
        if entry.index == 0 {
            self.list.clear();
        }
        if entry.is_sound() {
            self.list.push(entry);
        }
        let next = entry.index.saturating_add(1);
        let is_last = next >= entry.count.min(LIST_MAX);
        self.listing.index = (!is_last).then_some(next);
        self.listing.ask_at = Nanos::ZERO;
        self.untold.listed |= is_last;
        Ok(())
    }

    pub(super) fn attached<P: Port>(
        &mut self,
        now: Nanos,
        is_newest: bool,
        received: &P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        let entry = DeviceEntry::decode(&message(port, received)?);
        let is_it = |device: &super::Device| device.is_open && device.name == entry.name;
        let index = self.devices.iter().position(is_it).ok_or(Reason::Unasked)?;
        if !is_newest {
            // An older entry must not replace a newer one; it is asked for again.
            return Err(Reason::Sequence);
        }
        self.note_version(entry.version);
        let executor = Executor { incarnation: self.incarnation, epoch: entry.epoch };
        let replays = self.options.neglected.keeps(Rule::Replay);
        let Some(device) = self.devices.get_mut(index) else { return Ok(()) };
        let takes = device.takes(&entry, self.has_packets);
        let change = device.change(&entry).filter(|_| takes);
        if change != device.refused {
            device.refused = change;
            device.is_untold = true;
            self.untold.devices = true;
        }
        if !takes || change.is_some() {
            self.detached(now, index);
            return Ok(());
        }
        if device.is_new_size(entry.capacity_bytes) {
            device.ask_at = now;
            self.is_asking = true;
            return Ok(());
        }
        let is_other = entry.device != device.entry.device || entry.epoch != device.entry.epoch;
        if device.is_attached && is_other && device.nic.is_none() {
            self.lose(now, 0);
            return Ok(());
        }
        if !device.is_attached && self.given_up.contains(&device.name) {
            // A write that was given up might be executed after later ones. The next session begins
            // when the IOhost has nothing of this one.
            self.lose(now, 0);
            return Ok(());
        }
        if !device.is_known() {
            device.promised = entry;
        }
        // The user learns of growth, and relies on it from then on.
        device.promised.capacity_bytes = entry.capacity_bytes;
        if device.entry != entry {
            device.entry = entry;
            device.is_untold = true;
            self.untold.devices = true;
        }
        self.looks_again |= std::mem::take(&mut device.claims);
        if let Some(nic) = &mut device.nic {
            nic.attach(entry.device, entry.epoch, &self.stats);
        }
        if !device.is_attached {
            self.stats.abandoned.add(device.attach(executor, replays));
            self.untold.devices |= device.is_untold;
            self.looks_again = true;
        }
        Ok(())
    }

    /// The IOhost has no such device, or has another one in its place, or none any more: that is an
    /// error of the owner. The replay log stays as it was.
    fn detached(&mut self, now: Nanos, index: usize) {
        let ask_after = self.options.timing.hello;
        let Some(device) = self.devices.get_mut(index) else { return };
        let was_attached = device.is_attached;
        if was_attached {
            device.detach(now, &self.stats);
            device.is_untold = true;
            self.untold.devices = true;
        }
        device.ask_at = now.after(ask_after);
        self.is_asking = true;
        if was_attached {
            let lost = device.lost;
            self.fail(|entry| entry.device == index, BlockError::EIO);
            if let Some(device) = self.devices.get_mut(index) {
                device.lost = lost;
            }
        }
    }
}
