//! How long requests took.

use serde::{Deserialize, Serialize};
use sidecore_reactor::LatencyCounts;

/// How long requests took, in nanoseconds. Percentiles are to within a sixteenth.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// How many were timed.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Half took at most this long.
    pub p50: u64,
    /// Nine in ten.
    pub p90: u64,
    /// 99 in a hundred.
    pub p99: u64,
    /// 999 in a thousand.
    pub p99_9: u64,
    /// 9,999 in ten thousand.
    pub p99_99: u64,
    /// The longest.
    pub max: u64,
    /// All of them together.
    #[serde(default)]
    pub sum: u64,
    /// The histogram, without its empty buckets: the longest latency that falls into a bucket, and the bucket's count.
    /// Two of them subtracted are the latencies of the time between. Left out of a device's own report.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<(u64, u64)>,
}

impl Latency {
    /// The latencies that were counted.
    #[must_use]
    pub fn of(counts: LatencyCounts) -> Self {
        let summary = counts.summary();
        Self {
            count: summary.count,
            mean: if summary.count == 0 { 0.0 } else { counts.sum_ns as f64 / summary.count as f64 },
            p50: summary.p50_ns,
            p90: summary.p90_ns,
            p99: summary.p99_ns,
            p99_9: summary.p99_9_ns,
            p99_99: summary.p99_99_ns,
            max: summary.max_ns,
            sum: counts.sum_ns,
            buckets: counts.buckets,
        }
    }

    /// Those of the time after `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self::of(self.counts().since(&earlier.counts()))
    }

    /// Those of two queues together.
    pub(super) fn add(&mut self, other: &Self) {
        let mut counts = self.counts();
        counts.add(&other.counts());
        *self = Self::of(counts);
    }

    /// The histogram.
    #[must_use]
    pub fn counts(&self) -> LatencyCounts {
        LatencyCounts { buckets: self.buckets.clone(), sum_ns: self.sum }
    }
}
