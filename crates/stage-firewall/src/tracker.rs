//! The table of connections of one port.

use sidecore_net::Way;
use sidecore_units::Nanos;

use crate::connection::{Connection, Key, ticks};
use crate::counts::TableStats;
use crate::packet::{Message, Packet, TCP, tcp};
use crate::rule::state;

/// The fewest connections that a table may have.
pub const CONNECTIONS_MIN: usize = 64;
/// The most.
pub const CONNECTIONS_MAX: usize = 1 << 20;

/// Places of a bucket, whose tags are in one part of a cache line.
const WAYS: usize = 8;
/// Buckets that one look visits.
const LOOK_BUCKETS: usize = 16;

/// A table of connections, bounded. A full bucket forgets the connection that is worth least: one
/// that has ended, was never answered, is closing, or was silent for longest.
pub(crate) struct Tracker {
    seeds: [u64; 2],
    /// Parts of the hash values, zero where a place is free.
    tags: Box<[[u16; WAYS]]>,
    connections: Box<[[Connection; WAYS]]>,
    len: usize,
    /// The places of the last packets, by their ways: most packets follow one of their own.
    last: [Place; 2],
    /// The next bucket to be looked at.
    look_at: usize,
}

/// Where a connection is in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    bucket: usize,
    way: usize,
}

/// A packet's state, and its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// One of [`state`].
    pub state: u8,
    /// Its connection, and whether it is of the side that began.
    pub place: Option<(Place, bool)>,
    /// The key of a connection that begins if the packet is accepted.
    pub begins: Option<(Key, bool)>,
}

impl Seen {
    const fn only(state: u8) -> Self {
        Self { state, place: None, begins: None }
    }
}

impl Tracker {
    /// An empty table for about so many connections.
    pub fn new(connections: usize, seeds: [u64; 2]) -> Self {
        let wanted = connections.clamp(CONNECTIONS_MIN, CONNECTIONS_MAX);
        let buckets = (wanted / WAYS).next_power_of_two();
        Self {
            seeds: seeds.map(|seed| seed | 1),
            tags: vec![[0; WAYS]; buckets].into(),
            connections: vec![std::array::from_fn(|_| Connection::default()); buckets].into(),
            len: 0,
            last: [Place::default(); 2],
            look_at: 0,
        }
    }

    /// The most connections that it can have.
    pub fn capacity(&self) -> usize {
        self.tags.len().saturating_mul(WAYS)
    }

    pub const fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn connection(&self, place: Place) -> Option<&Connection> {
        self.connections.get(place.bucket)?.get(place.way)
    }

    #[inline]
    pub fn connection_mut(&mut self, place: Place) -> Option<&mut Connection> {
        self.connections.get_mut(place.bucket)?.get_mut(place.way)
    }

    #[inline]
    fn bucket(&self, hash: u64) -> (usize, u16) {
        (hash as usize & self.tags.len().wrapping_sub(1), (hash >> 48) as u16 | 1)
    }

    /// Finds a connection that has not ended.
    #[inline]
    fn find(&mut self, key: &Key, way: usize, now: u32) -> Option<Place> {
        if let Some(last) = self.last.get(way).copied()
            && let Some(connection) = self.connection(last)
            && connection.has(key)
            && !connection.is_over(now)
        {
            return Some(last);
        }
        let place = self.search(key)?;
        if self.connection(place)?.is_over(now) {
            self.remove(place);
            return None;
        }
        *self.last.get_mut(way)? = place;
        Some(place)
    }

    #[inline]
    fn search(&self, key: &Key) -> Option<Place> {
        let (bucket, tag) = self.bucket(key.hash(self.seeds));
        let tags = self.tags.get(bucket)?;
        let connections = self.connections.get(bucket)?;
        let mut both = tags.iter().zip(connections);
        let way = both.position(|(other, connection)| *other == tag && connection.has(key))?;
        Some(Place { bucket, way })
    }

    pub fn remove(&mut self, place: Place) {
        let tag = self.tags.get_mut(place.bucket).and_then(|tags| tags.get_mut(place.way));
        if let Some(tag) = tag
            && std::mem::take(tag) != 0
        {
            self.len = self.len.wrapping_sub(1);
        }
        if let Some(connection) = self.connection_mut(place) {
            *connection = Connection::default();
        }
    }

    /// Enters a connection, which is not there yet.
    pub fn insert(
        &mut self,
        (key, source_is_a): (Key, bool),
        way: Way,
        now: Nanos,
        counts: &TableStats,
    ) -> Option<Place> {
        let now = ticks(now);
        let (bucket, tag) = self.bucket(key.hash(self.seeds));
        let connections = self.connections.get_mut(bucket)?;
        let tags = self.tags.get_mut(bucket)?;
        let worth = |(tag, connection): (&u16, &Connection)| match connection {
            _ if *tag == 0 => (0, 0),
            over if over.is_over(now) => (1, 0),
            live => {
                let class = match (live.is_answered(), live.is_closing()) {
                    (false, _) => 2,
                    (true, true) => 3,
                    (true, false) => 4,
                };
                (class, u32::MAX.wrapping_sub(live.silence(now)))
            }
        };
        let worths = tags.iter().zip(connections.iter()).map(worth).enumerate();
        let (at, (class, _)) = worths.min_by_key(|(_, worth)| *worth)?;
        if class == 0 {
            self.len = self.len.wrapping_add(1);
        }
        if class >= 2 {
            counts.evicted.add(1);
        }
        *tags.get_mut(at)? = tag;
        *connections.get_mut(at)? = Connection::new(key, way, source_is_a, now);
        counts.opened.add(1);
        Some(Place { bucket, way: at })
    }

    /// Finds out what a packet is to the connections, and notes it.
    #[inline]
    pub fn see(
        &mut self,
        packet: &Packet,
        (vlan, way): (u16, Way),
        payload: &[u8],
        now: Nanos,
    ) -> Seen {
        match packet.message {
            Message::Other => return Seen::only(state::UNTRACKED),
            Message::Error(_) => return self.see_error(packet, (vlan, way), payload, now),
            Message::None | Message::EchoRequest | Message::EchoReply => {}
        }
        let tick = ticks(now);
        let (key, source_is_a) = Key::of(packet, vlan);
        if let Some(place) = self.find(&key, usize::from(way == Way::ToStation), tick) {
            let seen = self.see_known(packet, (place, source_is_a), way, tick);
            if let Some(seen) = seen {
                return seen;
            }
        }
        if begins_nothing(packet) {
            return Seen::only(state::INVALID);
        }
        Seen { state: state::NEW, place: None, begins: Some((key, source_is_a)) }
    }

    /// A packet of a connection that is in the table; `None` if it begins a new one.
    #[inline]
    fn see_known(
        &mut self,
        packet: &Packet,
        (place, source_is_a): (Place, bool),
        way: Way,
        now: u32,
    ) -> Option<Seen> {
        let connection = self.connection_mut(place)?;
        let of_beginner = connection.is_of_beginner(source_is_a);
        if connection.way(of_beginner) != way {
            // The addresses of one side come from the other one.
            return Some(Seen::only(state::INVALID));
        }
        if packet.protocol == TCP && packet.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN {
            if connection.is_closing() {
                // The ports are used again: this is another connection.
                self.remove(place);
                return None;
            }
            if !of_beginner {
                // Both sides begin at once, or the other one begins anew: the rules decide.
                return Some(Seen::only(state::NEW));
            }
        }
        connection.note(of_beginner, packet.tcp_flags, now);
        let state = if connection.is_answered() { state::ESTABLISHED } else { state::NEW };
        Some(Seen { state, place: Some((place, of_beginner)), begins: None })
    }

    /// An error of ICMP is related to the connection whose packet it quotes, if that packet has
    /// taken the other way.
    fn see_error(
        &mut self,
        packet: &Packet,
        (vlan, way): (u16, Way),
        payload: &[u8],
        now: Nanos,
    ) -> Seen {
        let related = packet.quoted(payload).is_some_and(|quoted| {
            let (key, source_is_a) = Key::of(&quoted, vlan);
            let place = self.search(&key);
            let connection = place.and_then(|place| self.connection(place));
            connection.is_some_and(|connection| {
                let of_beginner = connection.is_of_beginner(source_is_a);
                !connection.is_over(ticks(now))
                    && connection.way(of_beginner) != way
                    && quoted.source == packet.target
            })
        });
        Seen::only(if related { state::RELATED } else { state::INVALID })
    }

    /// The rule by which the first fragment of a packet has passed.
    pub fn rule_of_fragment(
        &mut self,
        packet: &Packet,
        (vlan, way): (u16, Way),
        id: u32,
        (now, generation): (Nanos, u32),
    ) -> Option<Option<u16>> {
        let (key, source_is_a) = Key::of_fragments(packet, vlan, id);
        let place = self.search(&key)?;
        let connection = self.connection(place)?;
        let is_of_it = connection.is_of_beginner(source_is_a) && connection.way(true) == way;
        if !is_of_it || connection.is_over(ticks(now)) {
            return None;
        }
        connection.rule(true, generation)
    }

    /// Notes that the first fragment of a packet has passed by this rule.
    pub fn note_fragment(
        &mut self,
        packet: &Packet,
        (vlan, way): (u16, Way),
        (id, rule): (u32, Option<u16>),
        (now, generation): (Nanos, u32),
        counts: &TableStats,
    ) {
        let key = Key::of_fragments(packet, vlan, id);
        if let Some(place) = self.search(&key.0) {
            self.remove(place);
        }
        let place = self.insert(key, way, now, counts);
        if let Some(connection) = place.and_then(|place| self.connection_mut(place)) {
            connection.set_rule(true, generation, rule);
        }
    }

    /// Forgets connections that have ended, in a part of the table.
    pub fn look(&mut self, now: Nanos) {
        if self.len == 0 {
            return;
        }
        for _ in 0..LOOK_BUCKETS {
            let bucket = self.look_at & self.tags.len().wrapping_sub(1);
            self.look_at = bucket.wrapping_add(1);
            if self.tags.get(bucket).is_none_or(|tags| *tags == [0; WAYS]) {
                continue;
            }
            for way in 0..WAYS {
                let place = Place { bucket, way };
                let is_used = self.tags.get(bucket).and_then(|tags| tags.get(way)) != Some(&0);
                let is_over = |of: &Connection| of.is_over(ticks(now));
                if is_used && self.connection(place).is_some_and(is_over) {
                    self.remove(place);
                }
            }
        }
    }
}

/// Whether a packet without a connection cannot begin one: an answer, or TCP with flags that no
/// first packet has. Other packets of TCP may, so that connections outlive the table.
fn begins_nothing(packet: &Packet) -> bool {
    if packet.message == Message::EchoReply {
        return true;
    }
    let flags = packet.tcp_flags & (tcp::FIN | tcp::SYN | tcp::RST | tcp::ACK);
    let has_contradiction = flags & tcp::SYN != 0 && flags & (tcp::FIN | tcp::RST) != 0;
    packet.protocol == TCP && (flags == 0 || flags & tcp::RST != 0 || has_contradiction)
}
