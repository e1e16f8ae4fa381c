//! Two years of a daemon that crashes, is down, has a full pool and a bad clock, in no time.

use std::collections::{BTreeMap, BTreeSet};

use sidecore_schedule::{Keep, Period, Unchanged, plan};

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;
const START: u64 = 20_783 * DAY;
const TWO_YEARS: u64 = 731 * DAY;

/// The periods of the schedules below, by a calendar of their own: the year and the month of a day
/// are counted, not computed.
struct Calendar {
    months: Vec<u64>,
}

impl Calendar {
    fn new() -> Self {
        let mut months = vec![0];
        for year in 1970_u64.. {
            let leap =
                year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
            let february = if leap { 29 } else { 28 };
            for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
                months.push(months[months.len() - 1] + days);
            }
            if year == 2100 {
                break;
            }
        }
        Self { months }
    }

    fn slot(&self, period: Period, at: u64) -> u64 {
        match period {
            Period::Minutes(minutes) => at / MINUTE / u64::from(minutes),
            Period::Hourly => at / HOUR,
            Period::Daily => at / DAY,
            // 1970-01-05 was a Monday.
            Period::Weekly => (at / DAY + 7 - 4) / 7,
            Period::Monthly => self.months.partition_point(|&first| first <= at / DAY) as u64,
            Period::Yearly => self.months.partition_point(|&first| first <= at / DAY) as u64 / 12,
        }
    }

    fn slots(&self, period: Period, times: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
        times.into_iter().map(|at| self.slot(period, at)).collect()
    }
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }
}

/// The outcome of a run.
#[derive(PartialEq, Debug)]
enum Ran {
    Whole,
    /// The pool was full.
    Full,
    /// Killed before the snapshot was durable.
    KilledBefore,
    /// Killed when the snapshot was there, or none was due.
    KilledAfter,
}

/// A volume's scheduled snapshots, and the daemon that has them.
struct Volume {
    keep: Keep,
    there: BTreeSet<u64>,
}

impl Volume {
    /// Carries out a plan, step by step, up to a crash.
    fn run(&mut self, now: u64, is_full: bool, mut steps: u64) -> Ran {
        let existing: Vec<u64> = self.there.iter().copied().collect();
        let plan = plan(now, &existing, &self.keep, None);
        if plan.create {
            if is_full {
                return Ran::Full;
            }
            if steps == 0 {
                return Ran::KilledBefore;
            }
            steps -= 1;
            assert!(self.there.insert(now / MINUTE * MINUTE), "made twice");
        }
        for at in plan.delete {
            if steps == 0 {
                return Ran::KilledAfter;
            }
            steps -= 1;
            assert!(self.there.remove(&at));
        }
        Ran::Whole
    }
}

fn seed() -> u64 {
    std::env::var("SIDECORE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

/// The newest slots in which the daemon could make a snapshot have one, in whatever state the last
/// run ended.
fn covers(volume: &Volume, calendar: &Calendar, ran: &BTreeMap<Period, BTreeSet<u64>>, now: u64) {
    for rule in volume.keep.rules() {
        let has = calendar.slots(rule.period, volume.there.iter().copied());
        let newest = ran[&rule.period].iter().rev().take(rule.count as usize);
        for slot in newest {
            assert!(has.contains(slot), "no {} snapshot of slot {slot} at {now}", rule.period);
        }
    }
}

#[test]
fn outages_crashes_and_a_full_pool() {
    let calendar = Calendar::new();
    for (round, rules) in
        ["24 hourly, 7 daily, 4 weekly, 12 monthly", "8 every 30min, 3 daily, 2 yearly"]
            .iter()
            .enumerate()
    {
        let mut random = Random(seed() + round as u64);
        let mut volume = Volume { keep: rules.parse().unwrap(), there: BTreeSet::new() };
        let mut ran: BTreeMap<Period, BTreeSet<u64>> = BTreeMap::new();
        let (mut now, mut full_until, mut seen) = (START, 0, [0_u32; 4]);
        while now < START + TWO_YEARS {
            let steps = if random.one_in(50) { random.below(3) } else { u64::MAX };
            let before = volume.there.clone();
            let outcome = volume.run(now, now < full_until, steps);
            if matches!(outcome, Ran::Whole | Ran::KilledAfter) {
                for rule in volume.keep.rules() {
                    let slots = ran.entry(rule.period).or_default();
                    slots.insert(calendar.slot(rule.period, now));
                }
                if outcome == Ran::KilledAfter || random.one_in(8) {
                    covers(&volume, &calendar, &ran, now);
                }
            } else {
                assert_eq!(volume.there, before, "a failure changes nothing");
            }
            if outcome == Ran::Whole {
                let most: u32 = volume.keep.rules().iter().map(|rule| rule.count).sum();
                assert!(volume.there.len() <= most as usize, "{}", volume.there.len());
                if random.one_in(8) {
                    assert_eq!(volume.run(now, false, 0), Ran::Whole, "nothing is left to do");
                }
            }
            seen[outcome as usize] += 1;
            if random.one_in(200) {
                full_until = now + random.below(2 * DAY);
            }
            now += 10 * MINUTE + random.below(29 * MINUTE);
            if random.one_in(400) {
                now += random.below(12 * DAY);
            }
        }
        assert!(seen.iter().all(|&times| times > 0), "{seen:?}");
    }
}

#[test]
fn clocks_that_jump() {
    let calendar = Calendar::new();
    let mut random = Random(seed());
    let keep: Keep = "24 hourly, 7 daily, 6 monthly".parse().unwrap();
    let mut volume = Volume { keep, there: BTreeSet::new() };
    let (mut now, mut jumps) = (START, 0);
    let mut error: i64 = 0;
    while now < START + TWO_YEARS {
        let clock = now.saturating_add_signed(error);
        let before = volume.there.clone();
        let steps = if random.one_in(50) { random.below(3) } else { u64::MAX };
        volume.run(clock, random.one_in(100), steps);
        let rules = volume.keep.rules().iter().filter(|_| before != volume.there);
        for rule in rules {
            let [had, has] = [&before, &volume.there]
                .map(|times| calendar.slots(rule.period, times.iter().copied()).len());
            assert!(has >= had.min(rule.count as usize), "{} {had} {has}", rule.period);
        }
        let later = |times: &BTreeSet<u64>| times.range(clock + 1..).count();
        assert_eq!(later(&before), later(&volume.there), "the future is left alone");
        now += 30 * MINUTE;
        if random.one_in(100) {
            jumps += 1;
            let far = [HOUR, DAY, 40 * DAY, 400 * DAY][random.below(4) as usize];
            let by = random.below(far) as i64;
            error = match random.below(3) {
                0 => 0,
                1 => by,
                _ => -by,
            };
        }
    }
    assert!(jumps > 100, "{jumps}");
    // The clock is right again: after the rules' times, they hold.
    let mut later = now;
    while later < now + 200 * DAY {
        volume.run(later, false, u64::MAX);
        later += HOUR;
    }
    let present: Vec<u64> = volume.there.range(..=later).copied().collect();
    for rule in volume.keep.rules() {
        let last = calendar.slot(rule.period, later - HOUR);
        let has = calendar.slots(rule.period, present.iter().copied());
        let newest = (0..u64::from(rule.count)).map(|back| last - back);
        assert!(newest.clone().all(|slot| has.contains(&slot)), "{}", rule.period);
    }
}

/// A snapshot of one state of a volume. Later ones have larger numbers, whatever the clock says.
struct Snapshot {
    number: u64,
    state: u64,
}

/// A volume that is written now and then, and its scheduled snapshots by their times.
#[derive(Default)]
struct Written {
    there: BTreeMap<u64, Snapshot>,
    unchanged: Option<Unchanged>,
    state: u64,
    made: u64,
}

impl Written {
    /// Returns whether a snapshot was made; `None` if none was due.
    fn look(&mut self, now: u64, keep: &Keep) -> Option<bool> {
        let times: Vec<u64> = self.there.keys().copied().collect();
        let is_due = plan(now, &times, keep, None).create;
        let mut next = plan(now, &times, keep, self.unchanged);
        let is_new = next.create;
        if is_new {
            let newest = self.there.iter().max_by_key(|(_, snapshot)| snapshot.number);
            let same = newest.filter(|(_, snapshot)| snapshot.state == self.state);
            self.unchanged = same.map(|(&since, _)| Unchanged { at: now, since });
            next = plan(now, &times, keep, self.unchanged);
        }
        if next.create {
            self.made += 1;
            let snapshot = Snapshot { number: self.made, state: self.state };
            assert!(self.there.insert(now / MINUTE * MINUTE, snapshot).is_none(), "made twice");
        }
        next.delete.iter().for_each(|at| assert!(self.there.remove(at).is_some()));
        if is_new {
            let mut states = self.there.values().map(|snapshot| snapshot.state);
            assert!(states.any(|state| state == self.state), "the newest state is lost at {now}");
        } else if is_due {
            let since = self.unchanged.unwrap().since;
            assert!(self.there.contains_key(&since), "the state of {since} is lost at {now}");
        }
        is_due.then_some(next.create)
    }
}

#[test]
fn the_newest_state_of_an_unchanged_volume_stays() {
    let rules = ["24 hourly", "8 every 15min", "2 every 30min, 3 daily", "1 hourly, 1 monthly"];
    let keeps = rules.map(|rules| rules.parse::<Keep>().unwrap());
    let mut random = Random(seed());
    let mut volume = Written::default();
    let (mut keep, mut now, mut back, mut seen) = (&keeps[0], START, 0, [0_u32; 3]);
    while now < START + TWO_YEARS {
        let index = volume.look(now - back, keep).map_or(0, |made| 1 + usize::from(made));
        seen[index] += 1;
        volume.state += u64::from(random.one_in(6));
        now += MINUTE + random.below(20 * MINUTE);
        if random.one_in(100) {
            keep = &keeps[random.below(4) as usize];
        }
        if random.one_in(100) {
            // A machine without a battery starts in 1970.
            back = [0, 0, random.below(DAY), now][random.below(4) as usize];
        }
        back = back.min(now);
    }
    assert!(seen.iter().all(|&times| times > 1000), "{seen:?}");
}
