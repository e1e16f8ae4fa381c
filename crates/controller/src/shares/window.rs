//! The window of a store: the number of requests that it can use at a time.
//!
//! More requests than that are only queued inside of the store, in its order and not by weight;
//! with fewer the store would be partly idle. Stores do not report the number, so it is measured,
//! the way BBR measures a path (Cardwell et al. 2016): requests a second, times the service time of
//! a request when none is queued. The service time is measured by submitting fewer requests for
//! some milliseconds, at intervals.

use sidecore_units::Nanos;

/// The shortest measurement.
const INTERVAL: Nanos = Nanos::from_millis(4);

/// The number of times that all requests in flight are replaced in a measurement: the mean time of
/// a request follows from the number in flight and the rate (Little 1961) only over many of them.
const REPLACEMENTS: u64 = 4;

/// The longest time between two measurements of the unloaded store.
const PROBE_INTERVAL: Nanos = Nanos::from_millis(2_000);

/// The smallest window: a store may be faster when it can choose between requests.
const LEAST: u64 = 16;

/// The first window of two functions, before any measurement.
pub(super) const FIRST: u64 = 256;

/// Added for completions between two looks of a sidecore at the others.
const SPARE: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing is measured yet.
    New,
    Steady,
    /// Fewer requests are submitted; the field is the time of a request before.
    Probing {
        before_ns: u64,
    },
}

/// The measurement, by one sidecore at a time.
#[derive(Debug)]
pub(super) struct Window {
    phase: Phase,
    since: Nanos,
    /// The requests completed until `since`.
    completed: u64,
    /// The number of completions before which nothing is measured.
    settled_at: u64,
    looks: u64,
    /// The sum of the requests in flight over all looks.
    in_flight: u64,
    /// The time of a request when none is queued in the store.
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

    /// Adds a sample: the requests in the store, and the total of completions. Returns the new
    /// window if it changes.
    pub(super) fn look(&mut self, now: Nanos, in_flight: usize, completed: u64) -> Option<u64> {
        if now.since(self.last_look) > INTERVAL || completed < self.completed {
            // No functions have competed for a while, or another sidecore has measured.
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

    /// Halves the window, to measure how long a request takes then.
    fn probe(&mut self, before_ns: u64, in_flight: u64) -> u64 {
        self.phase = Phase::Probing { before_ns };
        self.settle(in_flight);
        (in_flight / 2).max(LEAST)
    }

    /// Skips the samples while the number in flight changes: they have no meaning.
    fn settle(&mut self, in_flight: u64) {
        self.settled_at = self.completed.saturating_add(in_flight.saturating_mul(2));
    }

    fn measured(&mut self, now: Nanos, mean: u64, request_ns: u64, per_s: u64) -> u64 {
        match self.phase {
            Phase::Probing { before_ns }
                if mean > LEAST && request_ns < before_ns.saturating_sub(before_ns / 10) =>
            {
                // Some requests were still queued in the store.
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
                // A moment with less demand is no measure of the store.
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

/// `number` times `by` over `over`, saturating.
fn scaled(number: u64, by: u64, over: u64) -> u64 {
    let product = u128::from(number).saturating_mul(u128::from(by));
    u64::try_from(product.checked_div(u128::from(over.max(1))).unwrap_or(0)).unwrap_or(u64::MAX)
}
