//! The handshake, what keeps a session alive, and the devices in it.

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use super::Core;
use super::device::Executor;
use super::entry::Origin;
use crate::channel::{Channel, padded, send};
use crate::wire::{
    Attach, Challenge, DeviceEntry, Frame, FrameHeader, Hello, Kind, List, MAX_FRAME_BYTES,
    MIN_FRAME_BYTES, Ping, Pong, VERSION, Welcome,
};
use crate::{Reason, Rule, Seal, Transmit};

/// A HELLO of one size is sent so often before the next size is tried.
const TRIES_PER_SIZE: u32 = 3;
/// Entries of the IOhost's list that a client keeps.
const LIST_MAX: u16 = 256;
/// A PING that shows only that both sides are there.
const SHORT_PING_BYTES: usize = Ping::BYTES;

/// Whether there is a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The client looks for one.
    Hello {
        /// The index of the frame size that is tried.
        size: usize,
        /// HELLOs of this size that were sent.
        tries: u32,
        /// From the CHALLENGE.
        cookie: u64,
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
    const fn looking(now: Nanos, size: usize) -> Self {
        Self::Hello { size, tries: 0, cookie: 0, next_at: now, timeout: Nanos::ZERO }
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

impl Core {
    /// The sizes of frames that are tried, from the largest on.
    fn sizes(&self) -> [u32; 2] {
        [self.options.frame_bytes.clamp(MIN_FRAME_BYTES, MAX_FRAME_BYTES), MIN_FRAME_BYTES]
    }

    /// Looks for a session, or shows the IOhost that the client is there.
    pub(super) fn keep_session<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        link: &mut impl Transmit,
    ) {
        if !self.phase.is_connected() {
            self.say_hello(now, channel, link);
            return;
        }
        let dead_after = self.options.timing.dead_after;
        let is_dead = self.heard_at.is_none_or(|heard_at| now.since(heard_at) >= dead_after);
        if is_dead {
            self.lose(now, 0);
            self.say_hello(now, channel, link);
            return;
        }
        if self.frame_bytes > MIN_FRAME_BYTES && now.since(self.full_heard_at) >= dead_after {
            // Short frames arrive and full ones do not.
            self.lose(now, 1);
            self.say_hello(now, channel, link);
            return;
        }
        if self.next_ping <= now {
            self.next_ping = now.after(self.options.timing.keepalive);
            let round_trip_ns = u32::try_from(self.round_trip.smoothed().0).unwrap_or(u32::MAX);
            let ping = Ping { sent_at: now.0, round_trip_ns }.encode();
            let overhead = FrameHeader::BYTES.saturating_add(S::TAG_BYTES);
            let full_bytes =
                usize::try_from(self.frame_bytes).unwrap_or(0).saturating_sub(overhead);
            channel.send(link, Kind::Ping, None, SHORT_PING_BYTES, padded(&ping));
            channel.send(link, Kind::Ping, None, full_bytes.max(SHORT_PING_BYTES), padded(&ping));
        }
        self.ask_for_devices(now, channel, link);
    }

    /// When the session needs the next poll.
    pub(super) fn session_deadline(&self) -> Nanos {
        let Phase::Hello { next_at, .. } = self.phase else {
            let devices = self.devices.iter().filter(|device| self.is_stale(device));
            let asks = devices.map(|device| device.ask_at).min().unwrap_or(Nanos::MAX);
            let lists = self.listing.index.map_or(Nanos::MAX, |_| self.listing.ask_at);
            return self.next_ping.min(asks).min(lists);
        };
        next_at
    }

    fn say_hello<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        link: &mut impl Transmit,
    ) {
        let sizes = self.sizes();
        let timing = self.options.timing;
        let Phase::Hello { size, tries, cookie, next_at, timeout } = &mut self.phase else {
            return;
        };
        if now < *next_at {
            return;
        }
        let frame_bytes = sizes.get(*size).copied().unwrap_or(MIN_FRAME_BYTES);
        let hello = Hello {
            client: self.options.client,
            life: self.options.life,
            number: self.number,
            cookie: *cookie,
            features: 0,
            queue: self.options.queue,
            version_min: VERSION,
            version_max: VERSION,
            frame_bytes,
            receive_frames: self.options.receive_frames,
            slots: self.options.slots.max(1),
        };
        let overhead = FrameHeader::BYTES.saturating_add(S::TAG_BYTES);
        let payload_bytes = usize::try_from(frame_bytes).unwrap_or(0).saturating_sub(overhead);
        let payload_bytes = u16::try_from(payload_bytes.max(Hello::BYTES)).unwrap_or(u16::MAX);
        let header = FrameHeader {
            version: VERSION,
            kind: Kind::Hello.code(),
            payload_bytes,
            ..FrameHeader::default()
        };
        if !send(&mut channel.seal, link, channel.peer, &header, None, padded(&hello.encode())) {
            return;
        }
        self.stats.frames_sent.add(1);
        *tries = tries.saturating_add(1);
        if *tries >= TRIES_PER_SIZE {
            *tries = 0;
            *size = if *size == 0 { 1 } else { 0 };
        }
        let longer = Nanos(timeout.0.saturating_mul(2)).min(timing.keepalive);
        *timeout = longer.max(timing.first_timeout);
        *next_at = now.after(*timeout);
    }

    /// Takes a frame that is outside of a session. Returns the session's name if one begins.
    pub(super) fn handshake(
        &mut self,
        now: Nanos,
        frame: &Frame<'_>,
        payload: &[u8],
        len_bytes: usize,
    ) -> Result<Option<u64>, Reason> {
        match frame.kind {
            Kind::Challenge => {
                let challenge = Challenge::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
                self.check_number(challenge.life, challenge.number)?;
                if let Phase::Hello { cookie, next_at, tries, .. } = &mut self.phase {
                    // The path carries frames of this size to the IOhost.
                    *tries = 0;
                    if *cookie != challenge.cookie {
                        *cookie = challenge.cookie;
                        *next_at = now;
                    }
                }
                Ok(None)
            }
            Kind::Welcome => {
                let welcome = Welcome::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
                self.check_number(welcome.life, welcome.number)?;
                if self.phase.is_connected() {
                    return Err(Reason::Duplicate);
                }
                self.welcome(now, &welcome, frame.header.incarnation, len_bytes).map(Some)
            }
            Kind::Ending => {
                // A hint: it is looked into if the session has been silent, and else is not true.
                let timeout = self.round_trip.timeout(&self.options.timing);
                let is_silent = self.heard_at.is_none_or(|heard_at| now.since(heard_at) > timeout);
                if self.phase.is_connected() && is_silent {
                    self.lose(now, 0);
                }
                Ok(None)
            }
            _ => Err(Reason::Kind),
        }
    }

    fn check_number(&self, life: u64, number: u64) -> Result<(), Reason> {
        if life == self.options.life && number == self.number {
            Ok(())
        } else {
            Err(Reason::Session)
        }
    }

    fn welcome(
        &mut self,
        now: Nanos,
        welcome: &Welcome,
        incarnation: u64,
        len_bytes: usize,
    ) -> Result<u64, Reason> {
        let is_sound = welcome.session != 0
            && welcome.version == VERSION
            && welcome.slots > 0
            && (MIN_FRAME_BYTES..=self.sizes()[0]).contains(&welcome.frame_bytes)
            && usize::try_from(welcome.frame_bytes)
                .is_ok_and(|frame_bytes| frame_bytes <= len_bytes);
        if !is_sound {
            return Err(Reason::Malformed);
        }
        self.phase = Phase::Connected;
        self.incarnation = incarnation;
        self.frame_bytes = welcome.frame_bytes;
        self.heard_at = Some(now);
        self.full_heard_at = now;
        self.next_ping = now;
        self.round_trip.acknowledges_after(None);
        self.devices_version = welcome.devices_version;
        self.listing = Listing { version: welcome.devices_version, index: Some(0), ask_at: now };
        self.free_slots.reset(welcome.slots.min(self.options.slots.max(1)));
        self.slot_limit = welcome.slot_limit;
        self.untold.connected = true;
        self.looks_again = true;
        Ok(welcome.session)
    }

    /// The session is over. The client looks for the next one, with frames of the size with index
    /// `size` first; unanswered requests are sent again in it.
    pub(super) fn lose(&mut self, now: Nanos, size: usize) {
        if !self.phase.is_connected() {
            return;
        }
        self.phase = Phase::looking(now, size);
        self.number = self.number.wrapping_add(1);
        self.untold.connected = false;
        self.untold.disconnected = true;
        for device in &mut self.devices {
            device.detach();
        }
        self.requeue();
    }

    pub(super) fn pong(
        &mut self,
        now: Nanos,
        is_newest: bool,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let pong = Pong::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
        let taken = now.0.checked_sub(pong.sent_at).ok_or(Reason::Malformed)?;
        if payload.len() > SHORT_PING_BYTES || self.frame_bytes <= MIN_FRAME_BYTES {
            self.full_heard_at = now;
        }
        let was_unknown = self.round_trip.smoothed() == Nanos::ZERO;
        if payload.len() <= SHORT_PING_BYTES {
            self.round_trip.sample(Nanos(taken.saturating_sub(pong.held_ns.into())));
        }
        self.round_trip.acknowledges_after(Some(Nanos(pong.acknowledge_ns.into())));
        if was_unknown {
            // The IOhost is to know it, too.
            self.next_ping = now;
        }
        self.limits(is_newest, pong.slot_limit, pong.devices_version);
        Ok(())
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
        if is_newest && neglected.keeps(Rule::Versions) {
            self.devices_version = devices_version;
        }
    }

    /// Whether the entry of a device has to be asked for.
    fn is_stale(&self, device: &super::Device) -> bool {
        !device.is_attached || device.entry.version != self.devices_version
    }

    fn ask_for_devices<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        link: &mut impl Transmit,
    ) {
        let wait = self.round_trip.timeout(&self.options.timing);
        if self.listing.version != self.devices_version {
            self.listing = Listing { version: self.devices_version, index: Some(0), ask_at: now };
        }
        if let Some(index) = self.listing.index.filter(|_| self.listing.ask_at <= now) {
            let list = List { index }.encode();
            channel.send(link, Kind::List, None, list.len(), padded(&list));
            self.listing.ask_at = now.after(wait);
        }
        let version = self.devices_version;
        for device in &mut self.devices {
            let is_stale = !device.is_attached || device.entry.version != version;
            if is_stale && device.ask_at <= now {
                let attach = Attach { device: device.number }.encode();
                channel.send(link, Kind::Attach, None, attach.len(), padded(&attach));
                device.ask_at = now.after(wait);
            }
        }
    }

    pub(super) fn listed(&mut self, is_newest: bool, payload: &[u8]) -> Result<(), Reason> {
        let entry = DeviceEntry::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
        if is_newest && self.options.neglected.keeps(Rule::Versions) {
            self.devices_version = entry.version;
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

    pub(super) fn attached(
        &mut self,
        now: Nanos,
        is_newest: bool,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let entry = DeviceEntry::decode(payload.first_chunk().ok_or(Reason::Malformed)?);
        let index = self.index_of(entry.device).ok_or(Reason::Unasked)?;
        if !is_newest {
            // An older entry must not replace a newer one; it is asked for again.
            return Err(Reason::Sequence);
        }
        if self.options.neglected.keeps(Rule::Versions) {
            self.devices_version = entry.version;
        }
        let executor = Executor { incarnation: self.incarnation, epoch: entry.epoch };
        let replays = self.options.neglected.keeps(Rule::Replay);
        let Some(device) = self.devices.get_mut(index) else { return Ok(()) };
        if !entry.is_sound() {
            device.ask_at = now.after(self.options.timing.keepalive);
            let was_attached = std::mem::take(&mut device.is_attached);
            if was_attached {
                // The IOhost has taken the device away: an error of the owner.
                device.detach();
                device.ask_at = now.after(self.options.timing.keepalive);
                device.is_untold = true;
                let lost = device.lost;
                self.fail(|entry| entry.device == index, BlockError::EIO);
                if let Some(device) = self.devices.get_mut(index) {
                    // The replay log is as it was.
                    device.lost = lost;
                }
            }
            return Ok(());
        }
        if device.is_attached && device.entry.epoch != entry.epoch {
            self.lose(now, 0);
            return Ok(());
        }
        device.is_untold |= device.entry != entry;
        device.entry = entry;
        if !device.is_attached {
            device.attach(executor, replays);
            self.looks_again = true;
        }
        Ok(())
    }

    /// Fails requests of the caller, and gives up the engine's own, that `concerns` finds.
    pub(super) fn fail(&mut self, concerns: impl Fn(&super::Entry) -> bool, error: BlockError) {
        let entries = &self.entries;
        let is_failed = |index: u16| entries.get(usize::from(index)).is_none_or(&concerns);
        self.waiting.retain(|index| !is_failed(*index));
        for index in 0..u16::try_from(self.entries.len()).unwrap_or(u16::MAX) {
            let entry = self.entries.get(usize::from(index));
            if entry.is_some_and(|entry| entry.origin != Origin::None && concerns(entry)) {
                self.end(index, Err(error));
            }
        }
    }
}
