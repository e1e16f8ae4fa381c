//! The handshakes that an IOhost has time for, and their division among those who ask.
//!
//! A handshake costs public-key operations, so a flood of them must leave the sidecore to the
//! sessions. A flood of one station must leave handshakes to the other stations, too.

use sidecore_units::Nanos;

/// A station may have this part of all handshakes.
const SHARES: u32 = 4;
/// Stations that are known at a time.
const STATIONS: usize = 256;

/// A token bucket. Its rate is the caller's.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: u32,
    /// It was filled up to this time.
    filled_at: Nanos,
}

impl Bucket {
    /// A full bucket.
    const fn full(now: Nanos, burst: u32) -> Self {
        Self { tokens: burst, filled_at: now }
    }

    /// Adds a token for each interval that has passed, up to `burst`.
    fn fill(&mut self, now: Nanos, (burst, every): (u32, Nanos)) {
        let earned = now.since(self.filled_at).0.checked_div(every.0);
        let earned = earned.map_or(burst, |earned| u32::try_from(earned).unwrap_or(u32::MAX));
        self.tokens = self.tokens.saturating_add(earned).min(burst);
        let spent = every.0.saturating_mul(earned.into());
        self.filled_at = self.filled_at.after(Nanos(spent));
        if self.tokens >= burst {
            self.filled_at = now;
        }
    }
}

/// A station that has asked for a handshake.
#[derive(Clone, Copy, Debug)]
struct Station {
    name: u64,
    bucket: Bucket,
    /// A client has proved itself from there.
    is_proved: bool,
}

/// The budget of an IOhost's link queue.
///
/// Each station has a bucket of its own, and all of them have a common one. The more of its own
/// bucket a station has used, the more has to be left in the common one: stations that have asked
/// little come before those that ask much. A station from which a client has proved itself needs
/// nothing of the common bucket, so strangers do not delay its return.
pub(super) struct Budget {
    common: Bucket,
    burst: u32,
    every: Nanos,
    /// In no order; at most [`STATIONS`].
    stations: Vec<Station>,
}

impl Budget {
    /// So many handshakes at once, and one each `every` after those.
    pub(super) fn new(burst: u32, every: Nanos) -> Self {
        let burst = burst.max(1);
        Self { common: Bucket::full(Nanos::ZERO, burst), burst, every, stations: Vec::new() }
    }

    /// The limits of a single station.
    fn share(&self) -> (u32, Nanos) {
        let burst = self.burst.checked_div(SHARES).unwrap_or(1).max(1);
        (burst, Nanos(self.every.0.saturating_mul(SHARES.into())))
    }

    /// Takes a handshake for a station. False if there is none left for it.
    pub(super) fn take(&mut self, now: Nanos, name: u64) -> bool {
        let (burst, every, share) = (self.burst, self.every, self.share());
        let index = self.index_of(now, name);
        let Self { common, stations, .. } = self;
        let Some(station) = stations.get_mut(index) else { return false };
        station.bucket.fill(now, share);
        let used = share.0.saturating_sub(station.bucket.tokens);
        // A refused try counts as well: a station that tries without end stays behind.
        let Some(left) = station.bucket.tokens.checked_sub(1) else { return false };
        station.bucket.tokens = left;
        if station.is_proved {
            return true;
        }
        common.fill(now, (burst, every));
        let reserved = burst.saturating_mul(used).checked_div(share.0).unwrap_or(burst);
        if common.tokens <= reserved {
            return false;
        }
        common.tokens = common.tokens.saturating_sub(1);
        true
    }

    /// A client at this station has proved itself.
    pub(super) fn proved(&mut self, name: u64) {
        if let Some(station) = self.stations.iter_mut().find(|station| station.name == name) {
            station.is_proved = true;
        }
    }

    /// The place of a station. A new one takes the place of the one that has used least, unless
    /// that is proved.
    fn index_of(&mut self, now: Nanos, name: u64) -> usize {
        if let Some(index) = self.stations.iter().position(|station| station.name == name) {
            return index;
        }
        let share = self.share();
        let new = Station { name, bucket: Bucket::full(now, share.0), is_proved: false };
        if self.stations.len() < STATIONS {
            self.stations.push(new);
            return self.stations.len().saturating_sub(1);
        }
        let rank = |station: &Station| {
            let mut bucket = station.bucket;
            bucket.fill(now, share);
            (station.is_proved, u32::MAX.saturating_sub(bucket.tokens), bucket.filled_at)
        };
        let stations = self.stations.iter().enumerate();
        let least = stations.min_by_key(|(_, station)| rank(station)).map(|(index, _)| index);
        let index = least.unwrap_or(0);
        if let Some(place) = self.stations.get_mut(index) {
            *place = new;
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Nanos = Nanos::from_millis(1_000);

    fn budget(burst: u32) -> Budget {
        Budget::new(burst, Nanos::from_millis(1))
    }

    /// Handshakes that these stations get of so many tries, in turns.
    fn taken(budget: &mut Budget, now: Nanos, stations: &[u64], tries: usize) -> Vec<usize> {
        let mut taken = vec![0; stations.len()];
        for _ in 0..tries {
            for (count, name) in taken.iter_mut().zip(stations) {
                *count += usize::from(budget.take(now, *name));
            }
        }
        taken
    }

    #[test]
    fn a_station_gets_its_share_and_earns_it_again() {
        let mut budget = budget(16);
        assert_eq!(taken(&mut budget, BEGIN, &[1], 100), [4]);
        assert_eq!(taken(&mut budget, BEGIN.after(Nanos::from_millis(3)), &[1], 100), [0]);
        assert_eq!(taken(&mut budget, BEGIN.after(Nanos::from_millis(10)), &[1], 100), [2]);
        let later = BEGIN.after(Nanos::from_millis(12));
        assert_eq!(taken(&mut budget, later, &[1], 100), [1], "the rest of an interval counts");
        assert_eq!(taken(&mut budget, BEGIN.after(Nanos::from_millis(500)), &[1], 100), [4]);
    }

    #[test]
    fn all_stations_together_get_what_there_is_time_for() {
        let mut budget = budget(16);
        let stations: Vec<u64> = (0..10_000).collect();
        let all: usize = taken(&mut budget, BEGIN, &stations, 3).iter().sum();
        assert_eq!(all, 16);
        assert!(budget.stations.len() <= STATIONS);
        let later = BEGIN.after(Nanos::from_millis(5));
        let all: usize = taken(&mut budget, later, &stations, 3).iter().sum();
        assert_eq!(all, 5);
    }

    #[test]
    fn a_station_that_asks_little_comes_before_those_that_ask_much() {
        let mut budget = budget(64);
        let floods: Vec<u64> = (1..=20).collect();
        let mut now = BEGIN;
        for _ in 0..1_000 {
            now = now.after(Nanos::from_micros(100));
            taken(&mut budget, now, &floods, 2);
        }
        assert!(!budget.take(now, 1), "the floods take all that they get");
        for quiet in 100..110 {
            assert!(budget.take(now, quiet), "station {quiet} asks for the first time");
        }
    }

    #[test]
    fn a_proved_station_needs_nothing_of_the_others() {
        let mut budget = budget(16);
        assert!(budget.take(BEGIN, 7));
        budget.proved(7);
        let strangers: Vec<u64> = (100..100_100).collect();
        taken(&mut budget, BEGIN, &strangers, 1);
        assert!(!budget.take(BEGIN, 100_200));
        assert_eq!(taken(&mut budget, BEGIN, &[7], 100), [3], "it is limited as well");
        assert!(budget.stations.len() <= STATIONS);
    }
}
