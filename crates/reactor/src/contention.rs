//! Decides whether a sidecore has its core, from the kernel's accounts of its thread and of the
//! core.
//!
//! A thread that polls uses up its time slice and then waits for a whole slice of each thread that
//! shares its core, while requests wait in the ring. A thread that sleeps runs soon after its
//! wake-up. So a sidecore that shares its core answers sooner if it sleeps between requests.

use sidecore_units::Nanos;

/// The length of a window, over which shares are taken: hundreds of time slices.
const WINDOW: Nanos = Nanos::from_millis(1_000);

/// A longer time than this between two samples ends the sequence of windows: the sidecore slept, or
/// the process was stopped.
const GAP: Nanos = Nanos::from_millis(500);

/// A window is contended if the thread was kept from running for this share of it. A second thread
/// that is always ready takes a half; bursts of kernel work and of interrupts take less than this.
const CONTENDED: f64 = 1.0 / 3.0;

/// The core counts as lost after this many contended windows in a row, so that no burst is enough.
const WINDOWS_TO_LOSE: u32 = 3;

/// A window is free if the thread was kept from running for less than this share of it ...
const FREE_WAIT: f64 = 0.05;

/// ... and if other threads used less than this share of the core: a thread that mostly sleeps
/// hardly waits, though its neighbours are there.
const FREE_USE: f64 = 0.10;

/// The time for which a lost core must be free before it counts as regained; doubled each time that
/// the core is lost again soon after.
const HOLD_MIN: Nanos = Nanos::from_millis(2_000);

/// The upper bound of that time.
const HOLD_MAX: Nanos = Nanos::from_millis(60_000);

/// A core that is lost within this time after it was regained counts as lost again soon.
const SOON: Nanos = Nanos::from_millis(120_000);

/// The kernel's accounts at one moment. Each duration counts from the same fixed start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreSample {
    /// The moment of the sample.
    pub at: Nanos,
    /// The time in which the sidecore's thread was ready to run while other threads ran.
    pub waited: Nanos,
    /// The time in which the hypervisor below this machine ran other work on the core (steal time).
    pub stolen: Nanos,
    /// The time in which other threads ran on the core; zero if the sidecore is not pinned.
    pub others: Nanos,
}

/// A change in the state of a sidecore's core.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CoreChange {
    /// The core is lost: the thread was kept from running for this share of the last window, 0 to
    /// 1.
    Lost(f64),
    /// The core is free again.
    Regained,
}

/// Decides for one sidecore whether it has its core.
#[derive(Debug, Default)]
pub struct Contention {
    window_start: Option<CoreSample>,
    last_sample: Nanos,
    /// The number of contended windows in a row, while the core does not count as lost.
    contended: u32,
    is_lost: bool,
    /// The time since which the core has been free, while it counts as lost.
    free_since: Option<Nanos>,
    regained_at: Option<Nanos>,
    /// The time for which the core must be free; set when the core is lost.
    hold: Nanos,
}

impl Contention {
    /// Whether the core counts as lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Evaluates a sample. Returns the change that it causes.
    pub fn look(&mut self, sample: CoreSample) -> Option<CoreChange> {
        if sample.at.since(self.last_sample) > GAP {
            (self.window_start, self.contended, self.free_since) = (None, 0, None);
        }
        self.last_sample = sample.at;
        let start = *self.window_start.get_or_insert(sample);
        let elapsed = sample.at.since(start.at);
        if elapsed < WINDOW {
            return None;
        }
        self.window_start = Some(sample);
        let share = |now: Nanos, before: Nanos| now.since(before).0 as f64 / elapsed.0 as f64;
        let lost = share(sample.waited, start.waited) + share(sample.stolen, start.stolen);
        if self.is_lost {
            let is_free = lost < FREE_WAIT && share(sample.others, start.others) < FREE_USE;
            return self.evaluate_freedom(is_free, start.at, sample.at);
        }
        self.contended = if lost >= CONTENDED { self.contended + 1 } else { 0 };
        (self.contended >= WINDOWS_TO_LOSE).then(|| self.lose(sample.at, lost))
    }

    fn lose(&mut self, now: Nanos, share: f64) -> CoreChange {
        let is_soon = self.regained_at.is_some_and(|at| now.since(at) < SOON);
        self.hold =
            if is_soon { Nanos(self.hold.0.saturating_mul(2)).min(HOLD_MAX) } else { HOLD_MIN };
        (self.is_lost, self.contended, self.free_since) = (true, 0, None);
        CoreChange::Lost(share.min(1.0))
    }

    fn evaluate_freedom(&mut self, is_free: bool, start: Nanos, now: Nanos) -> Option<CoreChange> {
        if !is_free {
            self.free_since = None;
            return None;
        }
        let since = *self.free_since.get_or_insert(start);
        if now.since(since) < self.hold {
            return None;
        }
        (self.is_lost, self.free_since, self.regained_at) = (false, None, Some(now));
        Some(CoreChange::Regained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Four samples a second of a thread that waits for `waits`, and of a core that other threads
    /// use for `others`, in percent of the time.
    #[derive(Default)]
    struct Bench {
        contention: Contention,
        sample: CoreSample,
    }

    impl Bench {
        fn run(&mut self, seconds: u64, waits: u64, others: u64) -> Vec<(u64, CoreChange)> {
            let quarter = SECOND / 4;
            let mut changes = Vec::new();
            for _ in 0..seconds * 4 {
                self.sample.at.0 += quarter;
                self.sample.waited.0 += quarter / 100 * waits;
                self.sample.others.0 += quarter / 100 * others;
                let change = self.contention.look(self.sample);
                changes.extend(change.map(|change| (self.sample.at.0 / SECOND, change)));
            }
            changes
        }

        /// Runs on a free core until it counts as regained. Returns the seconds that this takes.
        fn regain(&mut self) -> u64 {
            let begin = self.sample.at.0;
            while self.contention.is_lost() {
                self.run(1, 0, 0);
            }
            (self.sample.at.0 - begin) / SECOND
        }
    }

    #[test]
    fn a_core_is_lost_to_a_busy_neighbour_and_regained_when_the_neighbour_is_gone() {
        let mut bench = Bench::default();
        assert_eq!(bench.run(10, 3, 3), []);
        assert_eq!(bench.run(10, 50, 50), [(13, CoreChange::Lost(0.5))]);
        // The sidecore sleeps, so it hardly waits; but the neighbour is still there.
        assert_eq!(bench.run(100, 1, 80), []);
        assert_eq!(bench.run(10, 1, 2), [(122, CoreChange::Regained)]);
        assert_eq!(bench.run(100, 3, 3), []);
    }

    #[test]
    fn bursts_and_small_shares_lose_no_core() {
        let mut bench = Bench::default();
        for _ in 0..100 {
            assert_eq!(bench.run(2, 90, 90), [], "two contended windows, or parts of three");
            assert_eq!(bench.run(2, 10, 10), []);
        }
        assert_eq!(bench.run(1_000, 30, 30), []);
        assert_eq!(
            bench.run(1_000, 10, 90),
            [],
            "a neighbour that does not keep the thread waiting"
        );
    }

    #[test]
    fn a_core_is_not_regained_in_a_pause_of_its_neighbour() {
        let mut bench = Bench::default();
        bench.run(5, 60, 60);
        assert!(bench.contention.is_lost());
        for _ in 0..100 {
            assert_eq!(bench.run(1, 0, 0), []);
            assert_eq!(bench.run(1, 0, 50), []);
        }
    }

    #[test]
    fn a_core_that_is_lost_again_soon_must_be_free_for_longer() {
        let mut bench = Bench::default();
        let mut waits = Vec::new();
        for _ in 0..8 {
            assert_eq!(bench.run(4, 60, 60).len(), 1);
            waits.push(bench.regain());
        }
        assert!(waits.is_sorted() && (2..=3).contains(&waits[0]), "{waits:?}");
        assert!((60..=61).contains(waits.last().unwrap()), "{waits:?}");
        bench.run(200, 0, 0);
        assert_eq!(bench.run(4, 60, 60).len(), 1);
        assert!((2..=3).contains(&bench.regain()), "a loss long ago does not count");
    }

    #[test]
    fn steal_time_loses_a_core() {
        let mut contention = Contention::default();
        let at = |half: u64| CoreSample {
            at: Nanos(half * SECOND / 2),
            stolen: Nanos::from_millis(200 * half),
            ..CoreSample::default()
        };
        let changes: Vec<_> = (0..7).filter_map(|half| contention.look(at(half))).collect();
        assert_eq!(changes, [CoreChange::Lost(0.4)]);
    }

    #[test]
    fn a_stopped_process_neither_loses_nor_regains_its_core() {
        let mut bench = Bench::default();
        let stop_for = |bench: &mut Bench, seconds: u64| bench.sample.at.0 += seconds * SECOND;
        for _ in 0..100 {
            assert_eq!(bench.run(2, 60, 60), []);
            stop_for(&mut bench, 1);
        }
        assert_eq!(bench.run(4, 60, 60).len(), 1);
        for _ in 0..100 {
            assert_eq!(bench.run(1, 0, 0), []);
            stop_for(&mut bench, 100);
        }
        assert!(bench.contention.is_lost());
    }
}
