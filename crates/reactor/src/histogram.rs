//! A latency histogram that one sidecore fills and anybody reads.

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

    /// Percentiles as of now.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        let counts: Vec<u64> = self.buckets.iter().map(Counter::get).collect();
        let count = counts.iter().fold(0_u64, |sum, n| sum.saturating_add(*n));
        let percentile = |per_myriad: u64| {
            // The rank of the request at that place, counted from one.
            let rank = u128::from(count).saturating_mul(u128::from(per_myriad)).div_ceil(10_000);
            let mut seen = 0_u128;
            for (index, n) in counts.iter().enumerate() {
                seen = seen.saturating_add(u128::from(*n));
                if *n > 0 && seen >= rank {
                    return upper_end(index);
                }
            }
            0
        };
        LatencySummary {
            count,
            mean_ns: self.sum_ns.get().checked_div(count).unwrap_or(0),
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
}
