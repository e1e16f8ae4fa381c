//! The table of connections of one port.

use sidecore_net::Way;
use sidecore_units::Nanos;

use crate::connection::{Connection, Key, Life, ticks};
use crate::counts::TableStats;
use crate::packet::{Message, Packet, TCP, tcp};
use crate::rule::state;
use crate::snapshot::{self, Known};

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
    buckets: Box<[Bucket]>,
    connections: Box<[[Connection; WAYS]]>,
    len: usize,
    /// The places of the last packets, by their ways: most packets follow one of their own.
    last: [Place; 2],
    /// Changes with every change of the table but the times of packets.
    version: u64,
    /// The next bucket to be looked at.
    look_at: usize,
}

/// The facts that a search compares, in one cache line.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    /// Parts of the hash values, zero where a place is free.
    tags: [u16; WAYS],
    flags: [u8; WAYS],
    seen: [u32; WAYS],
}

impl Bucket {
    #[inline]
    fn life(&self, way: usize) -> Option<Life> {
        let (flags, seen) = (self.flags.get(way)?, self.seen.get(way)?);
        Some(Life { flags: *flags, seen: *seen })
    }

    #[inline]
    fn set(&mut self, way: usize, life: Life) {
        let places = (self.flags.get_mut(way), self.seen.get_mut(way));
        if let (Some(flags), Some(seen)) = places {
            (*flags, *seen) = (life.flags, life.seen);
        }
    }

    /// The place for another connection, and what its present one is worth: nothing if it is free,
    /// one if that has ended.
    #[inline]
    fn worst(&self, now: u32) -> Option<(usize, u32)> {
        let lives = self.tags.iter().zip(self.flags.iter().zip(&self.seen));
        let worth = |(tag, (flags, seen)): (&u16, (&u8, &u32))| {
            let life = Life { flags: *flags, seen: *seen };
            match (life.is_answered(), life.is_closing()) {
                _ if *tag == 0 => (0, 0),
                _ if life.is_over(now) => (1, 0),
                (false, _) => (2, u32::MAX.wrapping_sub(life.silence(now))),
                (true, true) => (3, u32::MAX.wrapping_sub(life.silence(now))),
                (true, false) => (4, u32::MAX.wrapping_sub(life.silence(now))),
            }
        };
        let (way, (class, _)) = lives.map(worth).enumerate().min_by_key(|(_, worth)| *worth)?;
        Some((way, class))
    }
}

/// Where a connection is in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    bucket: usize,
    way: usize,
}

/// A connection that begins if its first packet is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beginning {
    key: Key,
    source_is_a: bool,
    hash: u64,
    tcp_flags: u8,
}

/// A packet's state, and its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// One of [`state`].
    pub state: u8,
    /// Its connection, and whether it is of the side that began.
    pub place: Option<(Place, bool)>,
    pub begins: Option<Beginning>,
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
            buckets: vec![Bucket::default(); buckets].into(),
            connections: vec![std::array::from_fn(|_| Connection::default()); buckets].into(),
            len: 0,
            last: [Place::default(); 2],
            version: 0,
            look_at: 0,
        }
    }

    /// The most connections that it can have.
    pub fn capacity(&self) -> usize {
        self.buckets.len().saturating_mul(WAYS)
    }

    pub const fn len(&self) -> usize {
        self.len
    }

    /// A number that stays the same while packets change nothing but the times of connections.
    #[inline]
    pub const fn version(&self) -> u64 {
        self.version
    }

    #[inline]
    fn touch(&mut self) {
        self.version = self.version.wrapping_add(1);
    }

    #[inline]
    fn life(&self, place: Place) -> Option<Life> {
        self.buckets.get(place.bucket)?.life(place.way)
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
        (hash as usize & self.buckets.len().wrapping_sub(1), (hash >> 48) as u16 | 1)
    }

    /// The connection of the last packet of this way, if it has this key and has not ended.
    #[inline]
    fn find_last(&self, key: &Key, way: Way, now: u32) -> Option<(Place, Life)> {
        let [from, to] = self.last;
        let last = if way == Way::FromStation { from } else { to };
        let life = self.life(last)?;
        let is_it = life.is_used() && self.connection(last)?.key == *key && !life.is_over(now);
        is_it.then_some((last, life))
    }

    /// Finds a connection that has not ended.
    #[inline]
    fn find(&mut self, key: &Key, hash: u64, way: Way, now: u32) -> Option<(Place, Life)> {
        let place = self.search(key, hash)?;
        let life = self.life(place)?;
        if life.is_over(now) {
            self.remove(place);
            return None;
        }
        let [from, to] = &mut self.last;
        *if way == Way::FromStation { from } else { to } = place;
        Some((place, life))
    }

    #[inline]
    fn search(&self, key: &Key, hash: u64) -> Option<Place> {
        let (bucket, tag) = self.bucket(hash);
        let tags = &self.buckets.get(bucket)?.tags;
        let same = tags.iter().enumerate();
        let mut same = same.fold(0_u32, |all, (way, other)| all | u32::from(*other == tag) << way);
        while same != 0 {
            let place = Place { bucket, way: same.trailing_zeros() as usize };
            if self.connection(place)?.key == *key {
                return Some(place);
            }
            same &= same.wrapping_sub(1);
        }
        None
    }

    pub fn remove(&mut self, place: Place) {
        self.touch();
        if let Some(bucket) = self.buckets.get_mut(place.bucket) {
            bucket.set(place.way, Life::default());
            if bucket.tags.get_mut(place.way).is_some_and(|tag| std::mem::take(tag) != 0) {
                self.len = self.len.wrapping_sub(1);
            }
        }
    }

    /// Enters a connection, which is not there yet.
    #[inline]
    pub fn insert(
        &mut self,
        begins: &Beginning,
        way: Way,
        now: Nanos,
        counts: &TableStats,
    ) -> Option<Place> {
        let now = ticks(now);
        let Beginning { key, source_is_a, hash, tcp_flags } = *begins;
        self.touch();
        let (at, tag) = self.bucket(hash);
        let bucket = self.buckets.get_mut(at)?;
        let (free, class) = bucket.worst(now)?;
        if class == 0 {
            self.len = self.len.wrapping_add(1);
        }
        if class >= 2 {
            counts.evicted.add(1);
        }
        *bucket.tags.get_mut(free)? = tag;
        bucket.set(free, Life::new(&key, way, source_is_a, now).after(true, tcp_flags, now));
        let place = Place { bucket: at, way: free };
        *self.connection_mut(place)? = Connection::new(key);
        counts.opened.add(1);
        Some(place)
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
        if let Some(found) = self.find_last(&key, way, tick)
            && let Some(seen) = self.see_known(packet, source_is_a, found, way, tick)
        {
            return seen;
        }
        let hash = key.hash(self.seeds);
        if let Some(found) = self.find(&key, hash, way, tick)
            && let Some(seen) = self.see_known(packet, source_is_a, found, way, tick)
        {
            return seen;
        }
        if begins_nothing(packet) {
            return Seen::only(state::INVALID);
        }
        let begins = Beginning { key, source_is_a, hash, tcp_flags: packet.tcp_flags };
        Seen { state: state::NEW, place: None, begins: Some(begins) }
    }

    /// A packet of a connection that is in the table; `None` if it begins a new one.
    #[inline]
    fn see_known(
        &mut self,
        packet: &Packet,
        source_is_a: bool,
        (place, life): (Place, Life),
        way: Way,
        now: u32,
    ) -> Option<Seen> {
        let of_beginner = life.is_of_beginner(source_is_a);
        if life.way(of_beginner) != way {
            // The addresses of one side come from the other one.
            return Some(Seen::only(state::INVALID));
        }
        if packet.protocol == TCP && packet.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN {
            if life.is_closing() {
                // The ports are used again: this is another connection.
                self.remove(place);
                return None;
            }
            if !of_beginner {
                // Both sides begin at once, or the other one begins anew: the rules decide.
                return Some(Seen::only(state::NEW));
            }
        }
        let after = life.after(of_beginner, packet.tcp_flags, now);
        if after.flags != life.flags {
            self.touch();
            if !life.is_answered() && after.is_answered() {
                self.connection_mut(place)?.forget_rules();
            }
        }
        self.buckets.get_mut(place.bucket)?.set(place.way, after);
        let state = if after.is_answered() { state::ESTABLISHED } else { state::NEW };
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
            let place = self.search(&key, key.hash(self.seeds));
            place.and_then(|place| self.life(place)).is_some_and(|life| {
                let of_beginner = life.is_of_beginner(source_is_a);
                !life.is_over(ticks(now))
                    && life.way(of_beginner) != way
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
        let place = self.search(&key, key.hash(self.seeds))?;
        let life = self.life(place)?;
        let is_of_it = life.is_of_beginner(source_is_a) && life.way(true) == way;
        if !is_of_it || life.is_over(ticks(now)) {
            return None;
        }
        self.connection(place)?.rule(true, generation)
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
        let (key, source_is_a) = Key::of_fragments(packet, vlan, id);
        let hash = key.hash(self.seeds);
        if let Some(place) = self.search(&key, hash) {
            self.remove(place);
        }
        let begins = Beginning { key, source_is_a, hash, tcp_flags: 0 };
        let place = self.insert(&begins, way, now, counts);
        if let Some(connection) = place.and_then(|place| self.connection_mut(place)) {
            connection.set_rule(true, generation, rule);
        }
    }

    /// The connections that have not ended, up to `most`; those that were answered first.
    pub fn connections(&self, now: u32, most: usize) -> Vec<Known> {
        let mut all = Vec::new();
        for is_answered in [true, false] {
            let lives = self.buckets.iter().zip(&self.connections);
            let lives = lives.flat_map(|(bucket, connections)| {
                (0..WAYS).filter_map(|way| bucket.life(way)).zip(connections)
            });
            let lives = lives.filter(|(life, connection)| {
                let is_right = life.is_used() && life.is_answered() == is_answered;
                is_right && !life.is_over(now) && !connection.key.is_of_fragments()
            });
            let left = most.saturating_sub(all.len());
            all.extend(
                lives.take(left).map(|(life, connection)| known(life, &connection.key, now)),
            );
        }
        all
    }

    /// Enters a connection that was tracked elsewhere, if its bucket has a place and it is neither
    /// over nor known. Returns whether it was entered.
    pub fn restore(&mut self, known: &Known, now: u32) -> bool {
        let (key, source_is_a) = Key::of(&known.packet(), known.vlan);
        let life = Life::new(&key, known.way, source_is_a, now);
        let life = life.of_earlier(known.is_answered, known.is_closing, known.silent_s);
        let hash = key.hash(self.seeds);
        if life.is_over(now) || self.search(&key, hash).is_some() {
            return false;
        }
        self.touch();
        let (at, tag) = self.bucket(hash);
        let Some(bucket) = self.buckets.get_mut(at) else { return false };
        let Some((way, 0)) = bucket.worst(now) else { return false };
        bucket.set(way, life);
        let place = Place { bucket: at, way };
        if let Some(free) = bucket.tags.get_mut(way) {
            *free = tag;
            self.len = self.len.wrapping_add(1);
        }
        if let Some(connection) = self.connection_mut(place) {
            *connection = Connection::new(key);
        }
        true
    }

    /// Forgets connections that have ended, in a part of the table.
    pub fn look(&mut self, now: Nanos) {
        if self.len == 0 {
            return;
        }
        for _ in 0..LOOK_BUCKETS {
            let bucket = self.look_at & self.buckets.len().wrapping_sub(1);
            self.look_at = bucket.wrapping_add(1);
            for way in 0..WAYS {
                let place = Place { bucket, way };
                let life = self.life(place).filter(|life| life.is_used());
                if life.is_some_and(|life| life.is_over(ticks(now))) {
                    self.remove(place);
                }
            }
        }
    }
}

/// A connection of the table, for elsewhere.
fn known(life: Life, key: &Key, now: u32) -> Known {
    let [a, b] = key.sides().map(|(bits, port)| (snapshot::address(key.is_ipv6(), bits), port));
    let (source, target) = if life.is_of_beginner(true) { (a, b) } else { (b, a) };
    Known {
        protocol: key.protocol(),
        vlan: key.vlan(),
        way: life.way(true),
        is_answered: life.is_answered(),
        is_closing: life.is_closing(),
        silent_s: life.silent_s(now),
        source,
        target,
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
