//! A latency histogram that one sidecore fills and anybody reads.

use std::collections::BTreeMap;

use sidecore_units::Nanos;

use crate::Counter;

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
        Self { buckets: (0..BUCKETS).map(|_| Counter::default()).collect(), sum_ns: Counter::default() }
    }
}

/// What a histogram says, in nanoseconds. Percentiles are upper ends of their
/// buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencySummary {
    /// Requests counted.
    pub count: u64,
    /// Arithmetic mean.
    pub mean_ns: u64,
    /// Median.
    pub p50_ns: u64,
    /// 90th percentile.
    pub p90_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// 99.9th percentile.
    pub p99_9_ns: u64,
    /// 99.99th percentile.
    pub p99_99_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

impl Histogram {
    /// Counts `count` requests that took `latency` each. Only the owning
    /// sidecore may call it.
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
        let counts = self.buckets.iter().map(Counter::get).enumerate().filter(|(_, count)| *count > 0);
        LatencyCounts {
            buckets: counts.map(|(index, count)| (upper_end(index), count)).collect(),
            sum_ns: self.sum_ns.get(),
        }
    }

    /// Percentiles as of now.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        self.counts().summary()
    }
}

/// A histogram's counts at one moment, or those between two moments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyCounts {
    /// The buckets that are not empty, in ascending order: the longest latency that falls into a
    /// bucket in nanoseconds, and the bucket's count.
    pub buckets: Vec<(u64, u64)>,
    /// The sum of all latencies.
    pub sum_ns: u64,
}

impl LatencyCounts {
    /// How many latencies were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// Adds another queue's counts.
    pub fn add(&mut self, other: &Self) {
        let mut sums: BTreeMap<u64, u64> = self.buckets.iter().copied().collect();
        for (end, count) in &other.buckets {
            let sum = sums.entry(*end).or_default();
            *sum = sum.saturating_add(*count);
        }
        self.buckets = sums.into_iter().collect();
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// The counts that were added after `earlier`: all of them if there are fewer than at that
    /// time, because the counting has begun anew since.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        if self.count() < earlier.count() {
            return self.clone();
        }
        let before: BTreeMap<u64, u64> = earlier.buckets.iter().copied().collect();
        let added = |(end, count): &(u64, u64)| {
            let added = count.saturating_sub(before.get(end).copied().unwrap_or(0));
            (added > 0).then_some((*end, added))
        };
        Self {
            buckets: self.buckets.iter().filter_map(added).collect(),
            sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns),
        }
    }

    /// How many latencies were at most `limit_ns`, if that is the end of a bucket.
    #[must_use]
    pub fn at_most(&self, limit_ns: u64) -> u64 {
        let counts = self.buckets.iter().take_while(|(end, _)| *end <= limit_ns);
        counts.fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// The percentiles.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        let count = self.count();
        let percentile = |per_myriad: u64| {
            // The rank of the request at that place, counted from one.
            let rank = u128::from(count).saturating_mul(u128::from(per_myriad)).div_ceil(10_000);
            let mut seen = 0_u128;
            for (end, n) in &self.buckets {
                seen = seen.saturating_add(u128::from(*n));
                if seen >= rank {
                    return *end;
                }
            }
            0
        };
        LatencySummary {
            count,
            mean_ns: self.sum_ns.checked_div(count).unwrap_or(0),
            p50_ns: percentile(5_000),
            p90_ns: percentile(9_000),
            p99_ns: percentile(9_900),
            p99_9_ns: percentile(9_990),
            p99_99_ns: percentile(9_999),
            max_ns: percentile(10_000),
        }
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
    sub.saturating_add(1).checked_shl(u32::try_from(group).unwrap_or(0)).unwrap_or(u64::MAX).wrapping_sub(1)
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
        assert_eq!(histogram.summary(), LatencySummary::default());
        histogram.record(Nanos(1), 99);
        histogram.record(Nanos(15), 1);
        let summary = histogram.summary();
        assert_eq!((summary.p50_ns, summary.p99_ns), (1, 1));
        assert_eq!((summary.p99_9_ns, summary.max_ns), (15, 15));
        assert_eq!(summary.count, 100);
        assert_eq!(summary.mean_ns, 1);
    }

    #[test]
    fn counts_of_an_interval_are_those_that_were_added_in_it() {
        let histogram = Histogram::default();
        histogram.record(Nanos(1), 1000);
        let before = histogram.counts();
        histogram.record(Nanos(15), 10);
        let interval = histogram.counts().since(&before);
        assert_eq!(interval, LatencyCounts { buckets: vec![(15, 10)], sum_ns: 150 });
        assert_eq!((interval.summary().p50_ns, interval.summary().mean_ns), (15, 15));
        assert_eq!(before.since(&histogram.counts()), before, "the daemon has been restarted between the two");
        let mut sum = before.clone();
        sum.add(&interval);
        assert_eq!(sum, histogram.counts());
        assert_eq!((sum.at_most(1), sum.at_most(15), sum.count()), (1000, 1010, 1010));
    }
}
