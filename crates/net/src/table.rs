//! The table of stations: bounded, and fair between ports when it is full.

use sidecore_units::Nanos;

use crate::MacAddress;
use crate::config::PORTS_MAX;

/// Stations in a bucket: their keys are a cache line.
const WAYS: usize = 8;
/// Buckets that one call of [`Table::age`] looks at.
const SWEEP: usize = 64;
/// Moves within this time count as one series.
const SERIES: Nanos = Nanos::from_millis(1_000);

/// A station in a VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

impl Key {
    /// No station.
    pub const NONE: Self = Self(0);

    #[inline]
    pub const fn new(mac: MacAddress, vlan: u16) -> Self {
        Self(mac.to_bits() | (vlan as u64) << 48)
    }

    pub const fn mac(self) -> MacAddress {
        MacAddress::from_bits(self.0)
    }

    pub const fn vlan(self) -> u16 {
        (self.0 >> 48) as u16
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    port: u16,
    /// The port's configuration says so: it neither ages nor moves.
    is_fixed: bool,
    /// The moves in this series.
    moves: u8,
    seen_at: Nanos,
    moved_at: Nanos,
}

const NO_ENTRY: Entry =
    Entry { port: 0, is_fixed: false, moves: 0, seen_at: Nanos::ZERO, moved_at: Nanos::ZERO };

/// The result of learning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Learned {
    /// The station was known on this port.
    Known,
    /// It is new.
    New,
    /// It was known on another port; `moves` says how often it moved lately.
    Moved { from: u16, moves: u8 },
    /// It belongs to another port by configuration.
    Foreign,
    /// There is no room for it.
    Full,
}

/// The stations that a switch knows.
#[derive(Debug)]
pub(crate) struct Table {
    keys: Box<[[Key; WAYS]]>,
    entries: Box<[[Entry; WAYS]]>,
    multiplier: u64,
    shift: u32,
    capacity: usize,
    len: usize,
    /// Stations of each port.
    counts: Box<[usize]>,
    /// Changes with every change of what is where.
    version: u64,
    /// The next bucket to age.
    hand: usize,
}

impl Table {
    /// A table for `capacity` stations.
    pub fn new(capacity: usize, seed: u64) -> Self {
        // Half full at most, so that buckets seldom overflow.
        let buckets = capacity.clamp(WAYS, 1 << 20).div_ceil(WAYS / 2).next_power_of_two();
        Self {
            keys: vec![[Key::NONE; WAYS]; buckets].into(),
            entries: vec![[NO_ENTRY; WAYS]; buckets].into(),
            multiplier: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            shift: 64_u32.saturating_sub(buckets.trailing_zeros()),
            capacity,
            len: 0,
            counts: vec![0; PORTS_MAX].into(),
            version: 0,
            hand: 0,
        }
    }

    /// The number of stations.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// The number of stations of a port.
    pub fn len_of(&self, port: u16) -> usize {
        self.counts.get(usize::from(port)).copied().unwrap_or(0)
    }

    /// A number that changes whenever a station comes, moves or goes.
    #[inline]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Makes everything that was noted by an earlier version invalid.
    pub const fn touch(&mut self) {
        self.version = self.version.wrapping_add(1);
    }

    /// The bucket of a key: multiplicative hashing with an odd number that stations do not know.
    #[inline]
    fn bucket(&self, key: Key) -> usize {
        let mixed = (key.0 ^ key.0 >> 29).wrapping_mul(self.multiplier);
        // The shift is at least 44, for 2^20 buckets.
        mixed.checked_shr(self.shift).unwrap_or(0) as usize
    }

    #[inline]
    fn find(&self, key: Key) -> Option<(usize, usize)> {
        let bucket = self.bucket(key);
        let way = self.keys.get(bucket)?.iter().position(|other| *other == key)?;
        Some((bucket, way))
    }

    #[inline]
    fn entry(&self, (bucket, way): (usize, usize)) -> Option<&Entry> {
        self.entries.get(bucket)?.get(way)
    }

    #[inline]
    fn entry_mut(&mut self, (bucket, way): (usize, usize)) -> Option<&mut Entry> {
        self.entries.get_mut(bucket)?.get_mut(way)
    }

    /// The port of a station.
    #[inline]
    pub fn port_of(&self, key: Key) -> Option<u16> {
        Some(self.entry(self.find(key)?)?.port)
    }

    /// Notes that a station has sent a frame from `port`, which may have `limit` stations.
    pub fn learn(&mut self, key: Key, port: u16, now: Nanos, limit: usize) -> Learned {
        if let Some(place) = self.find(key) {
            return self.relearn(place, port, now);
        }
        if self.len_of(port) >= limit {
            return Learned::Full;
        }
        let Some(way) = self.make_way(key, port, false) else {
            return Learned::Full;
        };
        let bucket = self.bucket(key);
        self.put((bucket, way), key, Entry { port, seen_at: now, ..NO_ENTRY });
        Learned::New
    }

    /// Notes a station that was seen on `port` at this time, unless it is known by now. Returns
    /// whether it was noted.
    pub fn restore(&mut self, key: Key, port: u16, seen_at: Nanos, limit: usize) -> bool {
        self.find(key).is_none() && self.learn(key, port, seen_at, limit) == Learned::New
    }

    fn relearn(&mut self, place: (usize, usize), port: u16, now: Nanos) -> Learned {
        let Some(entry) = self.entry_mut(place) else {
            return Learned::Full;
        };
        if entry.port == port {
            entry.seen_at = now;
            return Learned::Known;
        }
        if entry.is_fixed {
            return Learned::Foreign;
        }
        let is_series = now.since(entry.moved_at) <= SERIES && entry.moves > 0;
        entry.moves = if is_series { entry.moves.saturating_add(1) } else { 1 };
        if !is_series {
            entry.moved_at = now;
        }
        let from = std::mem::replace(&mut entry.port, port);
        entry.seen_at = now;
        let moves = entry.moves;
        self.count(from, false);
        self.count(port, true);
        self.version = self.version.wrapping_add(1);
        Learned::Moved { from, moves }
    }

    /// Finds a place in the key's bucket for a station of `port`. In a full bucket, that is the
    /// place of the oldest station of the port with the most stations, unless it has fewer than
    /// `port`: a flood of addresses takes no place from ports with few of them. A station that is
    /// configured gets a place in any case.
    fn make_way(&mut self, key: Key, port: u16, is_fixed: bool) -> Option<usize> {
        if self.len >= self.capacity && !self.evict() && !is_fixed {
            return None;
        }
        let bucket = self.bucket(key);
        let keys = self.keys.get(bucket)?;
        if let Some(way) = keys.iter().position(|key| *key == Key::NONE) {
            return Some(way);
        }
        let entries = self.entries.get(bucket)?.iter().enumerate();
        let (way, victim) = entries
            .filter(|(_, entry)| !entry.is_fixed)
            .max_by_key(|(_, entry)| (self.len_of(entry.port), std::cmp::Reverse(entry.seen_at)))?;
        if self.len_of(victim.port) < self.len_of(port) && !is_fixed {
            return None;
        }
        self.remove((bucket, way));
        Some(way)
    }

    /// Forgets a station of the port that has the most, of those that a bounded search finds.
    fn evict(&mut self) -> bool {
        let most = self.counts.iter().enumerate().max_by_key(|(_, count)| **count);
        let Some(heaviest) = most.map(|(port, _)| port) else {
            return false;
        };
        for _ in 0..SWEEP.min(self.keys.len()) {
            let bucket = self.next_bucket();
            let found = (0..WAYS).find(|way| {
                let place = (bucket, *way);
                let is_there = self.keys.get(bucket).and_then(|keys| keys.get(*way));
                is_there.is_some_and(|key| *key != Key::NONE)
                    && self
                        .entry(place)
                        .is_some_and(|e| usize::from(e.port) == heaviest && !e.is_fixed)
            });
            if let Some(way) = found {
                self.remove((bucket, way));
                return true;
            }
        }
        false
    }

    fn next_bucket(&mut self) -> usize {
        let bucket = self.hand;
        self.hand = self.hand.wrapping_add(1);
        if self.hand >= self.keys.len() {
            self.hand = 0;
        }
        bucket
    }

    /// Makes a station one of `port` for as long as the port has it, even if others claim its
    /// address. False if it is another port's already, or the table has no room.
    pub fn fix(&mut self, key: Key, port: u16, now: Nanos) -> bool {
        let place = match self.find(key) {
            Some(place) if self.entry(place).is_some_and(|entry| entry.is_fixed) => {
                return self.entry(place).is_some_and(|entry| entry.port == port);
            }
            Some(place) => {
                self.remove(place);
                place
            }
            None => match self.make_way(key, port, true) {
                Some(way) => (self.bucket(key), way),
                None => return false,
            },
        };
        self.put(place, key, Entry { port, is_fixed: true, seen_at: now, ..NO_ENTRY });
        true
    }

    /// Forgets all stations of a port, or those that were learnt.
    pub fn forget(&mut self, port: u16, fixed_too: bool) {
        self.retain(|_, entry| entry.port != port || (entry.is_fixed && !fixed_too));
    }

    fn retain(&mut self, keep: impl Fn(Key, &Entry) -> bool) {
        for bucket in 0..self.keys.len() {
            self.retain_in(bucket, &keep);
        }
    }

    fn retain_in(&mut self, bucket: usize, keep: impl Fn(Key, &Entry) -> bool) {
        for way in 0..WAYS {
            let key = self.keys.get(bucket).and_then(|keys| keys.get(way)).copied();
            let entry = self.entry((bucket, way));
            if let (Some(key), Some(entry)) = (key, entry)
                && key != Key::NONE
                && !keep(key, entry)
            {
                self.remove((bucket, way));
            }
        }
    }

    /// Forgets stations that were silent for longer than `age`, in a part of the table.
    pub fn age(&mut self, now: Nanos, age: Nanos) {
        for _ in 0..SWEEP.min(self.keys.len()) {
            let bucket = self.next_bucket();
            self.retain_in(bucket, |_, entry| entry.is_fixed || now.since(entry.seen_at) <= age);
        }
    }

    /// All stations, with their ports and whether they are configured.
    pub fn iter(&self) -> impl Iterator<Item = (Key, u16, bool, Nanos)> + '_ {
        let all = self.keys.iter().flatten().zip(self.entries.iter().flatten());
        all.filter(|(key, _)| **key != Key::NONE)
            .map(|(key, entry)| (*key, entry.port, entry.is_fixed, entry.seen_at))
    }

    fn put(&mut self, place: (usize, usize), key: Key, entry: Entry) {
        let (bucket, way) = place;
        let there = self.keys.get_mut(bucket).and_then(|keys| keys.get_mut(way));
        if let Some(there) = there {
            *there = key;
            self.len = self.len.saturating_add(1);
            self.count(entry.port, true);
            self.version = self.version.wrapping_add(1);
        }
        if let Some(there) = self.entry_mut(place) {
            *there = entry;
        }
    }

    fn remove(&mut self, place: (usize, usize)) {
        let (bucket, way) = place;
        let Some(port) = self.entry(place).map(|entry| entry.port) else {
            return;
        };
        if let Some(key) = self.keys.get_mut(bucket).and_then(|keys| keys.get_mut(way)) {
            *key = Key::NONE;
            self.len = self.len.saturating_sub(1);
            self.count(port, false);
            self.version = self.version.wrapping_add(1);
        }
    }

    fn count(&mut self, port: u16, more: bool) {
        if let Some(count) = self.counts.get_mut(usize::from(port)) {
            *count = if more { count.saturating_add(1) } else { count.saturating_sub(1) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(station: u64) -> Key {
        Key::new(MacAddress::from_bits(0x0200_0000_0000 | station), 7)
    }

    const NOW: Nanos = Nanos::from_millis(5_000);

    #[test]
    fn a_station_is_learnt_in_its_vlan_moves_and_ages() {
        let mut table = Table::new(64, 1);
        assert_eq!(table.learn(key(1), 3, NOW, 8), Learned::New);
        assert_eq!(table.learn(key(1), 3, NOW, 8), Learned::Known);
        assert_eq!(table.port_of(key(1)), Some(3));
        assert_eq!(table.port_of(Key::new(key(1).mac(), 8)), None, "another VLAN");
        assert_eq!(table.learn(key(1), 4, NOW, 8), Learned::Moved { from: 3, moves: 1 });
        assert_eq!(table.learn(key(1), 3, NOW, 8), Learned::Moved { from: 4, moves: 2 });
        let later = NOW.after(Nanos::from_millis(1_001));
        assert_eq!(table.learn(key(1), 4, later, 8), Learned::Moved { from: 3, moves: 1 });
        assert_eq!((table.len_of(3), table.len_of(4), table.len()), (0, 1, 1));
        table.age(later.after(Nanos(10)), Nanos(10));
        assert_eq!(table.len(), 1);
        table.age(later.after(Nanos(11)), Nanos(10));
        assert_eq!((table.len(), table.port_of(key(1))), (0, None));
        assert_eq!((key(5).vlan(), key(5).mac().to_bits()), (7, 0x0200_0000_0005));
    }

    #[test]
    fn a_configured_station_neither_ages_nor_moves() {
        let mut table = Table::new(64, 1);
        table.learn(key(1), 9, NOW, 8);
        assert!(table.fix(key(1), 3, NOW) && table.fix(key(1), 3, NOW));
        assert!(!table.fix(key(1), 4, NOW), "another port has it");
        assert_eq!(table.learn(key(1), 9, NOW, 8), Learned::Foreign);
        table.age(Nanos::MAX, Nanos(10));
        table.forget(3, false);
        assert_eq!(table.port_of(key(1)), Some(3));
        table.forget(3, true);
        assert_eq!((table.port_of(key(1)), table.len(), table.len_of(3)), (None, 0, 0));
    }

    #[test]
    fn a_flood_of_addresses_takes_no_place_from_ports_with_few_of_them() {
        let mut table = Table::new(256, 99);
        for station in 0..20 {
            assert_eq!(table.learn(key(station), 1, NOW, 1024), Learned::New);
        }
        for station in 1_000..101_000 {
            table.learn(key(station), 2, NOW.after(Nanos(station)), 1_000_000);
        }
        assert_eq!(table.len_of(1), 20, "none was evicted");
        assert!(table.len() <= 256 && table.len_of(2) > 100, "{}", table.len_of(2));
        // And a third port still gets its stations in: the flood makes way.
        for station in 200_000..200_020 {
            assert_eq!(table.learn(key(station), 3, Nanos::MAX, 1024), Learned::New);
        }
        assert_eq!((table.len_of(1), table.len_of(3)), (20, 20));
    }

    #[test]
    fn a_port_has_as_many_stations_as_it_may_have() {
        let mut table = Table::new(256, 3);
        let learned = (0..100).filter(|n| table.learn(key(*n), 1, NOW, 10) == Learned::New);
        assert_eq!(learned.count(), 10);
        assert_eq!(table.learn(key(0), 1, NOW, 10), Learned::Known);
    }

    #[test]
    fn an_age_sweep_reaches_every_bucket() {
        let mut table = Table::new(8192, 3);
        for station in 0..4000 {
            table.learn(key(station), 1, NOW, 8192);
        }
        let version = table.version();
        for _ in 0..table.keys.len().div_ceil(SWEEP) {
            table.age(Nanos::MAX, Nanos(1));
        }
        assert_eq!((table.len(), table.iter().count()), (0, 0));
        assert_ne!(table.version(), version);
    }
}
