//! The counts of a histogram, and the percentiles that follow from them.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

    /// Adds the counts of another queue.
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
}

/// How long requests took, in nanoseconds. Percentiles are the upper ends of their buckets: exact
/// to within a sixteenth.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Latency {
    /// Requests that were timed.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p99_9: u64,
    /// 99.99th percentile.
    pub p99_99: u64,
    /// Longest.
    pub max: u64,
    /// The sum of all latencies.
    #[serde(default)]
    pub sum: u64,
    /// The histogram without its empty buckets: the longest latency that falls into a bucket, and
    /// the bucket's count. The difference of two histograms is the histogram of the time between
    /// them. Left out of a device's own report.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<(u64, u64)>,
}

impl Latency {
    /// The percentiles of these counts.
    #[must_use]
    pub fn of(counts: LatencyCounts) -> Self {
        let count = counts.count();
        let percentile = |per_myriad: u64| {
            // The rank of the request at that place, counted from one.
            let rank = u128::from(count).saturating_mul(u128::from(per_myriad)).div_ceil(10_000);
            let mut seen = 0_u128;
            for (end, n) in &counts.buckets {
                seen = seen.saturating_add(u128::from(*n));
                if seen >= rank {
                    return *end;
                }
            }
            0
        };
        Self {
            count,
            mean: if count == 0 { 0.0 } else { counts.sum_ns as f64 / count as f64 },
            p50: percentile(5_000),
            p90: percentile(9_000),
            p99: percentile(9_900),
            p99_9: percentile(9_990),
            p99_99: percentile(9_999),
            max: percentile(10_000),
            sum: counts.sum_ns,
            buckets: counts.buckets,
        }
    }

    /// The latencies that were counted after `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self::of(self.counts().since(&earlier.counts()))
    }

    /// Adds the latencies of another queue.
    pub fn add(&mut self, other: &LatencyCounts) {
        let mut counts = self.counts();
        counts.add(other);
        *self = Self::of(counts);
    }

    /// The histogram.
    #[must_use]
    pub fn counts(&self) -> LatencyCounts {
        LatencyCounts { buckets: self.buckets.clone(), sum_ns: self.sum }
    }
}
