//! PINGs: they show that both sides are there, what frames the path carries, and the round trip.

use sidecore_units::Nanos;

use super::Core;
use crate::Reason;
use crate::channel::{Channel, message};
use crate::port::{Port, Seal};
use crate::wire::{FrameHeader, Kind, MIN_FRAME_BYTES, Ping, Pong};

/// The first wait of [`Widening`], which doubles.
pub(super) const WIDEN_MIN: Nanos = Nanos::from_millis(1_000);
const WIDEN_MAX: Nanos = Nanos::from_millis(60_000);
/// The shortest interval of PINGs that tell of another round trip.
const TELL_INTERVAL: Nanos = Nanos::from_millis(1);

/// The first multiple of `interval` after `now`. All clients of a process have one clock, so their
/// keepalives fall on the same instants, and an interrupt of the timer, a turn of the IOhost and
/// warm caches serve all of them.
fn next_multiple(now: Nanos, interval: Nanos) -> Nanos {
    let past = now.0.checked_rem(interval.0).unwrap_or(0);
    now.after(Nanos(interval.0.saturating_sub(past)))
}

/// The PINGs that show each side that the other one is there.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Keepalive {
    /// PINGs since the last one that was answered.
    pub(super) tries: u32,
    pub(super) next_at: Nanos,
}

/// When a PING tells the IOhost a round trip that has changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Telling {
    pub(super) at: Nanos,
    not_before: Nanos,
}

impl Default for Telling {
    fn default() -> Self {
        Self { at: Nanos::MAX, not_before: Nanos::ZERO }
    }
}

/// Looks now and then whether the path of a session with small frames carries large ones: a busy
/// IOhost that did not answer in time looks like a narrow path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Widening {
    /// `None` if the session has the frames that were wanted.
    pub(super) next_at: Option<Nanos>,
    pub(super) interval: Nanos,
}

impl Default for Widening {
    fn default() -> Self {
        Self { next_at: None, interval: WIDEN_MIN }
    }
}

impl Core {
    /// Sends a PING of the largest size. Its PONG shows that the path carries such frames.
    pub(super) fn widen<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        port: &mut impl Port,
    ) {
        let ping = self.ping_message(now);
        let [largest, _] = self.sizes();
        channel.send_message(port, Kind::Ping, &ping, self.payload_of(largest));
        let interval = self.widening.interval;
        let longer = Nanos(interval.0.saturating_mul(2)).min(WIDEN_MAX);
        self.widening = Widening { next_at: Some(now.after(interval)), interval: longer };
    }

    /// Size of the payload of a control frame of `frame_bytes`.
    fn payload_of(&self, frame_bytes: u32) -> usize {
        let overhead = FrameHeader::BYTES.saturating_add(self.tag_bytes);
        usize::try_from(frame_bytes).unwrap_or(0).saturating_sub(overhead)
    }

    /// Sends a full PING, which shows that the path still carries full frames. One that is not
    /// answered is repeated as a HELLO is, with a short one that shows whether the size is the
    /// reason.
    pub(super) fn ping<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        port: &mut impl Port,
    ) {
        let timing = self.options.timing;
        let wait = self.round_trip.timeout(&timing).max(timing.first_timeout);
        let Keepalive { tries, next_at } = &mut self.keepalive;
        let longer = Nanos(wait.0.saturating_mul(1_u64.checked_shl(*tries).unwrap_or(u64::MAX)));
        *next_at = now.after(longer.min(timing.keepalive));
        let is_first = *tries == 0;
        *tries = tries.saturating_add(1).min(32);
        let round_trip = self.round_trip.smoothed();
        let ping = self.ping_message(now);
        if !is_first || round_trip == Nanos::ZERO {
            channel.send_message(port, Kind::Ping, &ping, 0);
        }
        channel.send_message(port, Kind::Ping, &ping, self.payload_of(self.frame_bytes));
    }

    pub(super) fn pong<P: Port>(
        &mut self,
        now: Nanos,
        is_newest: bool,
        payload_bytes: usize,
        received: &P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        let pong = Pong::decode(&message(port, received)?);
        let taken = now.0.checked_sub(pong.sent_at).ok_or(Reason::Malformed)?;
        self.limits(is_newest, pong.slot_limit, pong.devices_version);
        if pong.sent_at == 0 {
            return Ok(());
        }
        if self.widening.next_at.is_some() && payload_bytes > self.payload_of(self.frame_bytes) {
            self.lose(now, 0);
            return Ok(());
        }
        let is_full = payload_bytes > Ping::BYTES || self.frame_bytes <= MIN_FRAME_BYTES;
        let keepalive = self.options.timing.keepalive;
        if is_full {
            self.full_heard_at = now;
            self.keepalive = Keepalive { tries: 0, next_at: next_multiple(now, keepalive) };
        }
        if payload_bytes <= Ping::BYTES {
            self.round_trip.sample(Nanos(taken.saturating_sub(pong.held_ns.into())));
        }
        self.round_trip.acknowledges_after(Some(Nanos(pong.acknowledge_ns.into())));
        self.plan_telling(now);
        Ok(())
    }

    /// Plans a PING if the IOhost's idea of the round trip is outdated: until it knows better, lost
    /// frames are found late, or requests are acknowledged that take no longer than usual.
    #[inline]
    pub(super) fn plan_telling(&mut self, now: Nanos) {
        if self.telling.at == Nanos::MAX && self.round_trip.is_outdated() {
            self.telling.at = now.max(self.telling.not_before);
        }
    }

    /// Tells the IOhost the round trip.
    pub(super) fn tell<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        port: &mut impl Port,
    ) {
        self.telling.at = Nanos::MAX;
        self.telling.not_before = now.after(TELL_INTERVAL);
        let ping = self.ping_message(now);
        channel.send_message(port, Kind::Ping, &ping, 0);
    }

    fn ping_message(&self, now: Nanos) -> [u8; Ping::BYTES] {
        let round_trip_ns = u32::try_from(self.round_trip.smoothed().0).unwrap_or(u32::MAX);
        Ping { sent_at: now.0, round_trip_ns }.encode()
    }
}
