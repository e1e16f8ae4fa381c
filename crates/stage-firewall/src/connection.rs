//! A connection: its addresses, how far it is, and when it has ended.

use sidecore_net::Way;
use sidecore_units::Nanos;

use crate::packet::{Packet, TCP, kind, tcp};

/// Time in units of 134 ms: 32 bits of them are 18 years.
pub(crate) const fn ticks(now: Nanos) -> u32 {
    (now.0 >> 27) as u32
}

const fn seconds(seconds: u64) -> u32 {
    ticks(Nanos::from_millis(seconds.saturating_mul(1000)))
}

/// A connection that no packet has answered.
const UNANSWERED: u32 = seconds(30);
/// One of TCP that both sides have used (RFC 5382, REQ-5: not before 2 hours and 4 minutes).
const TCP_IDLE: u32 = seconds(7_440);
/// One of TCP that has a FIN or RST.
const CLOSING: u32 = seconds(120);
/// One of another protocol (RFC 4787, REQ-5: not before 2 minutes).
const OTHER_IDLE: u32 = seconds(180);
/// A packet whose first fragment has passed.
const FRAGMENTS: u32 = seconds(10);

/// Which packets are of one connection, in both directions: the smaller address comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Key {
    a: u128,
    b: u128,
    /// The ports, or a fragment's identification.
    ports: u32,
    /// VLAN, protocol, and the class: family, and whether it is about fragments.
    meta: u32,
}

impl Key {
    /// The key of a packet, and whether its source comes first in it.
    #[inline]
    pub fn of(packet: &Packet, vlan: u16) -> (Self, bool) {
        let source = (packet.source, packet.source_port);
        let target = (packet.target, packet.target_port);
        let is_first = source <= target;
        let (a, b) = if is_first { (source, target) } else { (target, source) };
        let ports = u32::from(a.1) << 16 | u32::from(b.1);
        (Self { a: a.0, b: b.0, ports, meta: meta(packet, vlan, 0) }, is_first)
    }

    /// The key of the fragments of one packet.
    pub fn of_fragments(packet: &Packet, vlan: u16, id: u32) -> (Self, bool) {
        let is_first = packet.source <= packet.target;
        let (a, b) =
            if is_first { (packet.source, packet.target) } else { (packet.target, packet.source) };
        (Self { a, b, ports: id, meta: meta(packet, vlan, 0x80) }, is_first)
    }

    /// A number that depends on all bits of the key and on the secret ones.
    #[inline]
    pub fn hash(&self, seeds: [u64; 2]) -> u64 {
        let words = [self.a as u64, self.b as u64];
        let high = [(self.a >> 64) as u64, (self.b >> 64) as u64];
        let rest = u64::from(self.ports) << 32 | u64::from(self.meta);
        let mut mixed = fold(words[0] ^ seeds[0], words[1] ^ seeds[1]);
        if high != [0, 0] {
            mixed ^= fold(high[0] ^ seeds[1], high[1] ^ seeds[0].rotate_left(32));
        }
        fold(mixed ^ seeds[1], rest ^ seeds[0])
    }

    pub const fn protocol(&self) -> u8 {
        (self.meta >> 16) as u8
    }

    /// The addresses and ports of the two sides.
    pub const fn sides(&self) -> [(u128, u16); 2] {
        [(self.a, (self.ports >> 16) as u16), (self.b, self.ports as u16)]
    }

    pub const fn vlan(&self) -> u16 {
        self.meta as u16
    }

    pub const fn is_ipv6(&self) -> bool {
        self.meta & 0x0100_0000 != 0
    }

    pub const fn is_of_fragments(&self) -> bool {
        self.meta & 0x8000_0000 != 0
    }
}

#[inline]
fn meta(packet: &Packet, vlan: u16, class: u32) -> u32 {
    let family = u32::from(packet.kind == kind::IPV6);
    u32::from(vlan) | u32::from(packet.protocol) << 16 | (class | family) << 24
}

/// The halves of a product, mixed.
#[inline]
fn fold(one: u64, other: u64) -> u64 {
    let product = u128::from(one).wrapping_mul(u128::from(other));
    product as u64 ^ (product >> 64) as u64
}

/// Facts of a connection.
mod flag {
    /// The place is taken.
    pub(super) const USED: u8 = 1;
    /// The first packet came from the station.
    pub(super) const FROM_STATION: u8 = 2;
    /// The source of the first packet comes first in the key.
    pub(super) const FIRST_IS_A: u8 = 4;
    /// The other side has answered.
    pub(super) const ANSWERED: u8 = 8;
    /// TCP's FIN or RST was seen.
    pub(super) const CLOSING: u8 = 16;
    /// It is about TCP.
    pub(super) const TCP: u8 = 32;
    /// It is about the fragments of one packet.
    pub(super) const FRAGMENTS: u8 = 64;
}

/// How far a connection is, and when its last packet came. That of a free place is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Life {
    pub flags: u8,
    pub seen: u32,
}

impl Life {
    /// The life of a connection that begins.
    pub fn new(key: &Key, way: Way, source_is_a: bool, now: u32) -> Self {
        let when = |is: bool, flag: u8| if is { flag } else { 0 };
        let flags = flag::USED
            | when(way == Way::FromStation, flag::FROM_STATION)
            | when(source_is_a, flag::FIRST_IS_A)
            | when(key.protocol() == TCP, flag::TCP)
            | when(key.is_of_fragments(), flag::FRAGMENTS);
        Self { flags, seen: now }
    }

    pub const fn is_used(self) -> bool {
        self.flags & flag::USED != 0
    }

    pub const fn is_answered(self) -> bool {
        self.flags & flag::ANSWERED != 0
    }

    pub const fn is_closing(self) -> bool {
        self.flags & flag::CLOSING != 0
    }

    /// The life of a connection that was tracked elsewhere, and silent for so many seconds.
    pub fn of_earlier(self, is_answered: bool, is_closing: bool, silent_s: u32) -> Self {
        let answered = if is_answered { flag::ANSWERED } else { 0 };
        let closing = if is_closing { flag::CLOSING } else { 0 };
        let seen = self.seen.wrapping_sub(seconds(silent_s.into()));
        Self { flags: self.flags | answered | closing, seen }
    }

    /// The seconds of its silence.
    pub fn silent_s(self, now: u32) -> u32 {
        let silent = u64::from(self.silence(now)) << 27;
        u32::try_from(silent / 1_000_000_000).unwrap_or(u32::MAX)
    }

    /// How long it was silent.
    pub const fn silence(self, now: u32) -> u32 {
        now.wrapping_sub(self.seen)
    }

    #[inline]
    pub fn is_over(self, now: u32) -> bool {
        let limit = if self.flags & flag::FRAGMENTS != 0 {
            FRAGMENTS
        } else if self.is_closing() {
            CLOSING
        } else if !self.is_answered() {
            UNANSWERED
        } else if self.flags & flag::TCP != 0 {
            TCP_IDLE
        } else {
            OTHER_IDLE
        };
        // A clock that steps back by a tick makes no silence of 18 years.
        let silence = self.silence(now);
        silence > limit && silence < 1 << 31
    }

    /// Whether a packet with this key is of the side that began.
    #[inline]
    pub const fn is_of_beginner(self, source_is_a: bool) -> bool {
        (self.flags & flag::FIRST_IS_A != 0) == source_is_a
    }

    /// The way of packets of the side that began, or of the other one.
    #[inline]
    pub fn way(self, of_beginner: bool) -> Way {
        let from_station = self.flags & flag::FROM_STATION != 0;
        if from_station == of_beginner { Way::FromStation } else { Way::ToStation }
    }

    /// The life after a packet.
    #[inline]
    pub const fn after(self, of_beginner: bool, tcp_flags: u8, now: u32) -> Self {
        let answered = if of_beginner { 0 } else { flag::ANSWERED };
        let closing = if tcp_flags & (tcp::FIN | tcp::RST) == 0 { 0 } else { flag::CLOSING };
        Self { flags: self.flags | answered | closing, seen: now }
    }
}

/// The addresses of a connection and the decisions on its packets, in a cache line of its own.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
pub(crate) struct Connection {
    pub key: Key,
    /// The set of rules that `rules` are of.
    generation: u32,
    /// For packets of the side that answers, and of the one that began: the number of the rule that
    /// decided, plus one; zero if none has.
    rules: [u16; 2],
}

/// In place of a rule's number plus one: no rule matches.
const NO_RULE: u16 = u16::MAX;

impl Connection {
    pub const fn new(key: Key) -> Self {
        Self { key, generation: 0, rules: [0; 2] }
    }

    /// Forgets the rules of both sides: packets of the side that began were new until now.
    pub const fn forget_rules(&mut self) {
        self.rules = [0; 2];
    }

    /// The rule that has decided on an earlier packet of this side, by the rules of this
    /// generation: `Some(None)` if none matched.
    #[inline]
    pub fn rule(&self, of_beginner: bool, generation: u32) -> Option<Option<u16>> {
        if self.generation != generation {
            return None;
        }
        let [of_other, of_first] = self.rules;
        match if of_beginner { of_first } else { of_other } {
            0 => None,
            NO_RULE => Some(None),
            number => Some(Some(number.wrapping_sub(1))),
        }
    }

    /// Notes the rule for later packets of this side.
    pub fn set_rule(&mut self, of_beginner: bool, generation: u32, rule: Option<u16>) {
        if self.generation != generation {
            (self.generation, self.rules) = (generation, [0; 2]);
        }
        let [of_other, of_first] = &mut self.rules;
        let place = if of_beginner { of_first } else { of_other };
        *place = rule.map_or(NO_RULE, |rule| rule.wrapping_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_a_cache_line() {
        assert_eq!(size_of::<Connection>(), 64);
    }

    #[test]
    fn times_are_those_of_the_state() {
        let key = Key { meta: u32::from(TCP) << 16, ..Key::default() };
        let life = Life::new(&key, Way::FromStation, true, 100);
        let ends = |life: Life| {
            let end = (0..u32::MAX / 2).find(|wait| life.is_over(100 + wait)).unwrap();
            u64::from(end) * (1 << 27) / 1_000_000_000
        };
        assert_eq!(ends(life), 30);
        let answered = life.after(false, 0, 100);
        assert_eq!(ends(answered), 7_440);
        assert_eq!(ends(answered.after(true, tcp::FIN, 100)), 120);
        assert!(!answered.is_over(99));
        let other = Life::new(&Key::default(), Way::FromStation, true, 100);
        assert_eq!(ends(other.after(false, 0, 100)), 180);
        let fragments = Key { meta: u32::from(TCP) << 16 | 0x8000_0000, ..Key::default() };
        assert_eq!(ends(Life::new(&fragments, Way::ToStation, false, 100)), 10);
    }
}
