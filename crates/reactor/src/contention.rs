//! Whether a sidecore has its core: decided from what the kernel says about its thread and its core.
//!
//! A thread that polls uses up its time slice and then waits for a whole one of each thread that shares
//! its core, while requests lie in the ring. One that sleeps is let run at once when it wakes. So a
//! sidecore that has lost its core to others gets more done if it does not poll.

use sidecore_units::Nanos;

/// Over how long the shares are taken.
const WINDOW: Nanos = Nanos::from_millis(1_000);

/// The core counts as lost if its thread was kept from running for this share of a window.
const LOST: f64 = 0.25;

/// It may count as regained if its thread was kept from running for less than this share.
const REGAINED: f64 = 0.05;

/// It may count as regained if others used less than this share of the core: a thread that sleeps
/// most of the time is not kept waiting, though others are there.
const FREE: f64 = 0.10;

/// For how long a core must be free before its sidecore polls again; twice as long each time that it
/// is lost again soon after.
const HOLD_MIN: Nanos = Nanos::from_millis(2_000);

/// The longest such time.
const HOLD_MAX: Nanos = Nanos::from_millis(60_000);

/// What the kernel has counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreSample {
    /// When it was asked.
    pub at: Nanos,
    /// For how long the thread could have run and others did.
    pub waited: Nanos,
    /// For how long the hypervisor below ran something else in place of the core.
    pub stolen: Nanos,
    /// For how long other threads ran on the core, if the thread has one of its own.
    pub others: Nanos,
}

/// A change of whether a sidecore has its core.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CoreChange {
    /// It was kept from running for this share of the time, 0 to 1.
    Lost(f64),
    /// It has the core again.
    Regained,
}

/// Decides it for one sidecore.
#[derive(Debug)]
pub struct Contention {
    window_start: Option<CoreSample>,
    is_lost: bool,
    /// Since when the core has been free, while it counts as lost.
    free_since: Option<Nanos>,
    regained_at: Option<Nanos>,
    hold: Nanos,
}

impl Default for Contention {
    fn default() -> Self {
        Self { window_start: None, is_lost: false, free_since: None, regained_at: None, hold: HOLD_MIN }
    }
}

impl Contention {
    /// Whether the core counts as lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Takes note of a sample; returns what has changed.
    pub fn look(&mut self, sample: CoreSample) -> Option<CoreChange> {
        let start = *self.window_start.get_or_insert(sample);
        let elapsed = sample.at.since(start.at);
        if elapsed < WINDOW {
            return None;
        }
        self.window_start = Some(sample);
        let share = |now: Nanos, before: Nanos| now.since(before).0 as f64 / elapsed.0 as f64;
        let lost = share(sample.waited, start.waited) + share(sample.stolen, start.stolen);
        if !self.is_lost {
            return (lost >= LOST).then(|| self.lose(sample.at, lost));
        }
        if lost >= REGAINED || share(sample.others, start.others) >= FREE {
            self.free_since = None;
            return None;
        }
        let since = *self.free_since.get_or_insert(start.at);
        if sample.at.since(since) < self.hold {
            return None;
        }
        (self.is_lost, self.free_since, self.regained_at) = (false, None, Some(sample.at));
        Some(CoreChange::Regained)
    }

    fn lose(&mut self, now: Nanos, share: f64) -> CoreChange {
        let soon = Nanos(self.hold.0.saturating_mul(2));
        let is_soon = self.regained_at.is_some_and(|at| now.since(at) < soon);
        self.hold = if is_soon { soon.min(HOLD_MAX) } else { HOLD_MIN };
        (self.is_lost, self.free_since) = (true, None);
        CoreChange::Lost(share.min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples four times a second of a thread that is kept waiting for `waits`, and of a core that
    /// others use for `others`, in percent.
    struct Bench {
        contention: Contention,
        sample: CoreSample,
    }

    impl Bench {
        fn new() -> Self {
            Self { contention: Contention::default(), sample: CoreSample::default() }
        }

        fn run(&mut self, seconds: u64, waits: u64, others: u64) -> Vec<(u64, CoreChange)> {
            let quarter = 250_000_000;
            let mut changes = Vec::new();
            for _ in 0..seconds * 4 {
                self.sample.at.0 += quarter;
                self.sample.waited.0 += quarter / 100 * waits;
                self.sample.others.0 += quarter / 100 * others;
                let change = self.contention.look(self.sample);
                changes.extend(change.map(|change| (self.sample.at.0 / 1_000_000_000, change)));
            }
            changes
        }
    }

    #[test]
    fn a_core_is_lost_to_a_neighbour_and_regained_when_that_is_gone() {
        let mut bench = Bench::new();
        assert_eq!(bench.run(10, 3, 3), []);
        assert_eq!(bench.run(10, 50, 50), [(11, CoreChange::Lost(0.5))]);
        // It sleeps, so it is not kept waiting; the neighbour is still there.
        assert_eq!(bench.run(100, 1, 80), []);
        assert_eq!(bench.run(10, 1, 2), [(122, CoreChange::Regained)]);
    }

    #[test]
    fn a_short_disturbance_changes_nothing() {
        let mut bench = Bench::new();
        assert_eq!(bench.run(3, 20, 20), []);
        bench.run(2, 60, 60);
        assert!(bench.contention.is_lost());
        assert_eq!(bench.run(1, 0, 0), []);
        assert_eq!(bench.run(1, 0, 50), [], "not free for long enough");
        assert_eq!(bench.run(1, 0, 0), []);
        assert!(bench.contention.is_lost());
    }

    #[test]
    fn a_core_that_is_lost_again_and_again_is_held_to_be_lost_for_longer() {
        let mut bench = Bench::new();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            bench.run(2, 60, 60);
            assert!(bench.contention.is_lost());
            let mut seconds = 0;
            while bench.contention.is_lost() {
                bench.run(1, 0, 0);
                seconds += 1;
            }
            pauses.push(seconds);
        }
        assert!(pauses.is_sorted() && pauses[0] <= 3, "{pauses:?}");
        assert!((60..=61).contains(pauses.last().unwrap()), "{pauses:?}");
        bench.run(200, 0, 0);
        assert_eq!(bench.run(2, 60, 60).len(), 1);
        assert_eq!(bench.run(4, 0, 0).len(), 1, "forgotten after a long while");
    }

    #[test]
    fn what_the_hypervisor_below_takes_counts_as_lost() {
        let mut contention = Contention::default();
        let at = |seconds: u64, stolen_ms| CoreSample {
            at: Nanos(seconds * 1_000_000_000),
            stolen: Nanos::from_millis(stolen_ms),
            ..CoreSample::default()
        };
        assert_eq!(contention.look(at(0, 0)), None);
        assert_eq!(contention.look(at(1, 400)), Some(CoreChange::Lost(0.4)));
    }
}
