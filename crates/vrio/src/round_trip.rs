//! The smoothed round trip of a path, and the timeout that follows from it.

use sidecore_units::Nanos;

use crate::client::Timing;

/// An acknowledgement is due after the client's round trip, within these bounds.
const ACKNOWLEDGE_MIN: Nanos = Nanos::from_micros(20);
const ACKNOWLEDGE_MAX: Nanos = Nanos::from_millis(100);

/// The time after which an IOhost acknowledges the requests of a client with this round trip.
pub(crate) fn acknowledge_after(round_trip: Nanos) -> Nanos {
    round_trip.clamp(ACKNOWLEDGE_MIN, ACKNOWLEDGE_MAX)
}

/// The round trip without the time that the IOhost holds a request, smoothed as in RFC 6298. A
/// sample names the attempt that it was taken of, so that no repeated request spoils it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RoundTrip {
    /// Zero before the first sample.
    smoothed_ns: u64,
    deviation_ns: u64,
    /// When the IOhost acknowledges, as it said last; `None` if it has not said.
    acknowledge_after: Option<Nanos>,
}

impl RoundTrip {
    /// Takes a sample.
    #[inline]
    pub(crate) fn sample(&mut self, round_trip: Nanos) {
        let sample_ns = round_trip.0.max(1);
        if self.smoothed_ns == 0 {
            self.smoothed_ns = sample_ns;
            self.deviation_ns = sample_ns / 2;
            return;
        }
        let off_ns = self.smoothed_ns.abs_diff(sample_ns);
        self.deviation_ns = weigh(self.deviation_ns, off_ns, 4);
        self.smoothed_ns = weigh(self.smoothed_ns, sample_ns, 8).max(1);
    }

    /// The smoothed round trip; zero if there was no sample.
    pub(crate) const fn smoothed(&self) -> Nanos {
        Nanos(self.smoothed_ns)
    }

    /// The IOhost has said when it acknowledges; `None` for a new session, in which it has not.
    pub(crate) fn acknowledges_after(&mut self, acknowledge_after: Option<Nanos>) {
        self.acknowledge_after = acknowledge_after;
    }

    /// Whether the IOhost acknowledges after less than half the time that follows from the round
    /// trip, or after more than twice that. A new session's round trip is often a sleeping
    /// sidecore's.
    #[inline]
    pub(crate) fn is_outdated(&self) -> bool {
        let Some(Nanos(said_ns)) = self.acknowledge_after.filter(|_| self.smoothed_ns > 0) else {
            return false;
        };
        let Nanos(due_ns) = acknowledge_after(Nanos(self.smoothed_ns));
        said_ns > due_ns.saturating_mul(2) || due_ns > said_ns.saturating_mul(2)
    }

    /// How long an answer waits for segments that were sent before its last one: links reorder
    /// frames by less than a quarter of the round trip (RFC 8985, 6.2).
    pub(crate) const fn reordering(&self) -> Nanos {
        Nanos(self.smoothed_ns / 4)
    }

    /// How long an attempt may be without an answer or an acknowledgement. The IOhost acknowledges
    /// after about one round trip, and that takes another one to arrive.
    #[inline]
    pub(crate) fn timeout(&self, timing: &Timing) -> Nanos {
        let Some(acknowledge_after) = self.acknowledge_after.filter(|_| self.smoothed_ns > 0)
        else {
            return timing.first_timeout;
        };
        let held_ns = acknowledge_after.0.max(self.smoothed_ns);
        // On a path without any deviation an acknowledgement would come just in time.
        let margin_ns = self.deviation_ns.saturating_mul(4).max(timing.min_timeout.0 / 4);
        let wait_ns = self.smoothed_ns.saturating_add(held_ns).saturating_add(margin_ns);
        Nanos(wait_ns).max(timing.min_timeout).min(timing.max_timeout)
    }
}

/// `old` with a new value that counts for one in `parts`.
const fn weigh(old: u64, new: u64, parts: u64) -> u64 {
    let Some(part) = old.checked_div(parts) else { return new };
    let Some(fresh) = new.checked_div(parts) else { return new };
    old.saturating_sub(part).saturating_add(fresh)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_timeout_is_the_papers_and_then_it_is_measured() {
        let timing = Timing::default();
        let mut round_trip = RoundTrip::default();
        assert_eq!(round_trip.timeout(&timing), Nanos::from_millis(10));
        for _ in 0..100 {
            round_trip.sample(Nanos::from_micros(100));
        }
        assert_eq!(
            round_trip.timeout(&timing),
            Nanos::from_millis(10),
            "the IOhost has not said when it acknowledges"
        );
        round_trip.acknowledges_after(Some(Nanos::from_micros(500)));
        assert!(round_trip.timeout(&timing) >= Nanos::from_micros(600));
        round_trip.acknowledges_after(Some(Nanos::from_micros(20)));
        let timeout = round_trip.timeout(&timing);
        assert!(
            timeout >= Nanos::from_micros(200) && timeout < Nanos::from_micros(300),
            "{timeout:?}"
        );
        assert!(round_trip.smoothed().0.abs_diff(100_000) < 10, "{round_trip:?}");
    }

    #[test]
    fn a_timeout_stays_within_its_bounds() {
        let timing = Timing::default();
        let mut round_trip = RoundTrip::default();
        round_trip.acknowledges_after(Some(Nanos(1)));
        round_trip.sample(Nanos(0));
        assert_eq!(round_trip.timeout(&timing), timing.min_timeout);
        for _ in 0..100 {
            round_trip.sample(Nanos::MAX);
        }
        assert_eq!(round_trip.timeout(&timing), timing.max_timeout);
    }
}
