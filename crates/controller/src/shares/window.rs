//! How many requests a store can use at a time.
//!
//! More than that only wait inside of it, in its order and not by weight; with fewer it would be partly idle. No store says
//! the number, so it is measured, the way BBR measures a path (Cardwell et al. 2016): requests a second, times how long one
//! takes when none waits. The latter is seen by letting fewer in for some milliseconds, now and then.

use sidecore_units::Nanos;

/// The shortest measurement.
const INTERVAL: Nanos = Nanos::from_millis(4);

/// In each measurement, everything in flight is replaced so many times: the mean time of a request follows from the number
/// in flight and the rate (Little 1961) only over many of them.
const REPLACEMENTS: u64 = 4;

/// The longest time from one look at the unloaded store to the next.
const PROBE_INTERVAL: Nanos = Nanos::from_millis(2_000);

/// Fewer than this are never asked for: a store may do better when it has some to choose from.
const LEAST: u64 = 16;

/// What two functions get at first, before anything is known of the store.
pub(super) const FIRST: u64 = 256;

/// Room for what comes back between two looks of a sidecore at the others.
const SPARE: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing is known.
    New,
    Steady,
    /// Fewer are let in; this is what a request took before.
    Probing {
        before_ns: u64,
    },
}

/// The measurement. One sidecore at a time does it.
#[derive(Debug)]
pub(super) struct Window {
    phase: Phase,
    since: Nanos,
    /// Requests completed until `since`.
    completed: u64,
    /// Nothing is measured before so many are completed.
    settled_at: u64,
    looks: u64,
    /// Requests in flight, of all looks.
    in_flight: u64,
    /// How long a request takes when none waits.
    base_ns: u64,
    probed_at: Nanos,
    per_s: u64,
    last_look: Nanos,
}

const NANOS_PER_S: u64 = 1_000_000_000;

impl Window {
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::New,
            since: Nanos::ZERO,
            completed: 0,
            settled_at: 0,
            looks: 0,
            in_flight: 0,
            base_ns: 0,
            probed_at: Nanos::ZERO,
            per_s: 0,
            last_look: Nanos::ZERO,
        }
    }

    /// There are so many requests in the store, and so many were completed ever. Returns how many may be there from now
    /// on, if that changes.
    pub(super) fn look(&mut self, now: Nanos, in_flight: usize, completed: u64) -> Option<u64> {
        if now.since(self.last_look) > INTERVAL || completed < self.completed {
            // Nobody has competed for a while, or another sidecore has measured.
            self.restart(now, completed);
            self.phase = Phase::New;
            self.last_look = now;
            self.settled_at = completed.saturating_add(in_flight as u64);
            return Some(FIRST);
        }
        self.last_look = now;
        if completed < self.settled_at {
            self.restart(now, completed);
            return None;
        }
        self.looks = self.looks.saturating_add(1);
        self.in_flight = self.in_flight.saturating_add(in_flight as u64);
        let took = now.since(self.since);
        let done = completed.saturating_sub(self.completed);
        let mean = self.in_flight.checked_div(self.looks).unwrap_or(0).max(1);
        if took < INTERVAL || done < mean.saturating_mul(REPLACEMENTS) {
            return None;
        }
        let request_ns = scaled(took.0, self.in_flight, self.looks.saturating_mul(done));
        let per_s = scaled(done, NANOS_PER_S, took.0);
        self.restart(now, completed);
        Some(self.measured(now, mean, request_ns, per_s))
    }

    fn restart(&mut self, now: Nanos, completed: u64) {
        self.since = now;
        self.completed = completed;
        self.looks = 0;
        self.in_flight = 0;
    }

    /// Lets half as many in, to see how long a request takes then.
    fn probe(&mut self, before_ns: u64, in_flight: u64) -> u64 {
        self.phase = Phase::Probing { before_ns };
        self.settle(in_flight);
        (in_flight / 2).max(LEAST)
    }

    /// While the number in flight changes, nothing follows from it.
    fn settle(&mut self, in_flight: u64) {
        self.settled_at = self.completed.saturating_add(in_flight.saturating_mul(2));
    }

    fn measured(&mut self, now: Nanos, mean: u64, request_ns: u64, per_s: u64) -> u64 {
        match self.phase {
            Phase::Probing { before_ns } if mean > LEAST && request_ns < before_ns.saturating_sub(before_ns / 10) => {
                // Some were still waiting.
                return self.probe(request_ns, mean);
            }
            Phase::Probing { before_ns } => {
                self.base_ns = request_ns.min(before_ns);
                self.probed_at = now;
                self.phase = Phase::Steady;
                self.settle(mean);
            }
            Phase::New => {
                self.per_s = per_s;
                return self.probe(request_ns, mean);
            }
            Phase::Steady => {
                // A moment with less demand says nothing of the store.
                self.per_s = per_s.max(self.per_s.saturating_sub(self.per_s / 16));
                if now.since(self.probed_at) > PROBE_INTERVAL {
                    return self.probe(request_ns, mean);
                }
            }
        }
        let busy = scaled(self.per_s, self.base_ns, NANOS_PER_S);
        busy.saturating_add(busy / 8).saturating_add(SPARE).max(LEAST)
    }
}

/// `number` times `by` over `over`, as far as it fits.
fn scaled(number: u64, by: u64, over: u64) -> u64 {
    let product = u128::from(number).saturating_mul(u128::from(by));
    u64::try_from(product.checked_div(u128::from(over.max(1))).unwrap_or(0)).unwrap_or(u64::MAX)
}
