//! A latency histogram that one sidecore fills and any thread reads.

use sidecore_units::Nanos;

use crate::{Counter, Latency, LatencyCounts};

/// Sub-buckets per power of two: values are kept to within 1/16 (6 %).
const SUB_BITS: u32 = 4;
const SUB_COUNT: u64 = 1 << SUB_BITS;
/// Powers of two above the first, linear, [`SUB_COUNT`] values: up to 2^40 ns
/// (18 minutes); what is longer counts as that.
const GROUPS: usize = 36;
const BUCKETS: usize = (GROUPS + 1) << SUB_BITS;

/// Counts of latencies in buckets that grow with the latency.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[Counter]>,
    sum_ns: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| Counter::default()).collect(),
            sum_ns: Counter::default(),
        }
    }
}

impl Histogram {
    /// Counts `count` requests that took `latency` each. Only the owning sidecore may call it.
    #[inline]
    pub fn record(&self, latency: Nanos, count: u64) {
        if let Some(bucket) = self.buckets.get(bucket_of(latency.0)) {
            bucket.add(count);
        }
        self.sum_ns.add(latency.0.wrapping_mul(count));
    }

    /// The counts as of now.
    #[must_use]
    pub fn counts(&self) -> LatencyCounts {
        let counts =
            self.buckets.iter().map(Counter::get).enumerate().filter(|(_, count)| *count > 0);
        LatencyCounts {
            buckets: counts.map(|(index, count)| (upper_end(index), count)).collect(),
            sum_ns: self.sum_ns.get(),
        }
    }

    /// Percentiles as of now.
    #[must_use]
    pub fn summary(&self) -> Latency {
        Latency::of(self.counts())
    }
}

/// Values below 16 have a bucket each; above, the top five bits choose it.
#[inline]
fn bucket_of(value: u64) -> usize {
    let group = value.checked_ilog2().unwrap_or(0).saturating_sub(SUB_BITS);
    let index = if value < SUB_COUNT {
        value
    } else {
        let sub = (value >> group) & SUB_COUNT.wrapping_sub(1);
        ((u64::from(group).wrapping_add(1)) << SUB_BITS) | sub
    };
    usize::try_from(index).unwrap_or(usize::MAX).min(BUCKETS.wrapping_sub(1))
}

/// The largest value that falls into a bucket.
fn upper_end(index: usize) -> u64 {
    let index = index as u64;
    let Some(group) = (index >> SUB_BITS).checked_sub(1) else {
        return index;
    };
    let sub = (index & SUB_COUNT.wrapping_sub(1)) | SUB_COUNT;
    sub.saturating_add(1)
        .checked_shl(u32::try_from(group).unwrap_or(0))
        .unwrap_or(u64::MAX)
        .wrapping_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_bucket_and_within_a_sixteenth() {
        for shift in 0..40 {
            for offset in [0_u64, 1, 3] {
                let value = (1_u64 << shift) + offset;
                let end = upper_end(bucket_of(value));
                assert!(end >= value, "{value} -> {end}");
                assert!(end - value <= value / 16, "{value} -> {end}");
            }
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_name_the_request_at_their_rank() {
        let histogram = Histogram::default();
        assert_eq!(histogram.summary(), Latency::default());
        histogram.record(Nanos(1), 99);
        histogram.record(Nanos(15), 1);
        let summary = histogram.summary();
        assert_eq!((summary.p50, summary.p99), (1, 1));
        assert_eq!((summary.p99_9, summary.max), (15, 15));
        assert_eq!(summary.count, 100);
        assert!((summary.mean - 1.14).abs() < 1e-9);
    }

    #[test]
    fn counts_of_an_interval_are_those_that_were_added_in_it() {
        let histogram = Histogram::default();
        histogram.record(Nanos(1), 1000);
        let before = histogram.counts();
        histogram.record(Nanos(15), 10);
        let interval = histogram.counts().since(&before);
        assert_eq!(interval, LatencyCounts { buckets: vec![(15, 10)], sum_ns: 150 });
        let summary = Latency::of(interval.clone());
        assert_eq!((summary.p50, summary.mean), (15, 15.0));
        assert_eq!(
            before.since(&histogram.counts()),
            before,
            "the daemon has been restarted between the two"
        );
        let mut sum = before.clone();
        sum.add(&interval);
        assert_eq!(sum, histogram.counts());
        assert_eq!((sum.at_most(1), sum.at_most(15), sum.count()), (1000, 1010, 1010));
    }
}
