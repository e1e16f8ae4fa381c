//! Medians, spreads and a histogram.

/// The middle value; zero without values.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.len(), sorted.len() / 2) {
        (0, _) => 0.0,
        (len, middle) if len % 2 == 1 => sorted[middle],
        (_, middle) => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// The mean without the lowest and the highest twentieth; zero without values.
#[must_use]
pub fn trimmed_mean(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let cut = values.len() / 20;
    let kept = &values[cut..values.len() - cut];
    if kept.is_empty() { 0.0 } else { kept.iter().sum::<f64>() / kept.len() as f64 }
}

/// The smallest and the largest value; zeros without values.
#[must_use]
pub fn spread(values: &[f64]) -> (f64, f64) {
    let smallest = values.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if values.is_empty() { (0.0, 0.0) } else { (smallest, largest) }
}

/// An interval that holds the true median with a confidence of at least 95 %, by the order of the
/// values alone (the sign test's); of fewer than six values, which give no such interval, the
/// spread.
#[must_use]
pub fn median_interval(values: &[f64]) -> (f64, f64) {
    const TAIL: f64 = 0.025;
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    // P(X = k) of a binomial variable, from k = 0 on: the probability that exactly k values are
    // below the median.
    let (mut probability, mut tail, mut rank) = (0.5_f64.powf(count as f64), 0.0, 0);
    while tail + probability <= TAIL && rank < count {
        tail += probability;
        rank += 1;
        probability *= (count - rank + 1) as f64 / rank as f64;
    }
    let lowest = rank.saturating_sub(1);
    match (sorted.get(lowest), sorted.get((count - lowest).saturating_sub(1))) {
        (Some(low), Some(high)) => (*low, *high),
        _ => (0.0, 0.0),
    }
}

/// Steps within a doubling: values below are counted exactly, and larger ones to 1/256.
const STEPS: u64 = 256;

/// Counts of values, each known to 0.4 %, in constant memory and time.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; Self::bucket(u64::MAX) + 1], count: 0, sum: 0 }
    }
}

impl Histogram {
    /// Counts one value.
    #[inline]
    pub fn add(&mut self, value: u64) {
        self.buckets[Self::bucket(value)] += 1;
        self.count += 1;
        self.sum += value;
    }

    /// The number of counted values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean of the counted values; zero without values.
    #[must_use]
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The value that `share` (0 to 1) of the counted values are at or below.
    #[must_use]
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (self.count as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Self::middle(index);
            }
        }
        0.0
    }

    #[inline]
    fn bucket(value: u64) -> usize {
        let doublings = (u64::BITS - (value / STEPS).leading_zeros()).saturating_sub(1);
        if value < STEPS {
            return value as usize;
        }
        // The leading bit of `value >> doublings` is that of STEPS.
        ((u64::from(doublings) + 1) * STEPS + ((value >> doublings) - STEPS)) as usize
    }

    fn middle(bucket: usize) -> f64 {
        let bucket = bucket as u64;
        if bucket < STEPS {
            return bucket as f64;
        }
        let doublings = bucket / STEPS - 1;
        let start = (bucket % STEPS + STEPS) << doublings;
        start as f64 + ((1_u64 << doublings) - 1) as f64 / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
        let skewed: Vec<f64> = (0..18).map(|_| 2.0).chain([-1e9, 1e9]).collect();
        assert_eq!(trimmed_mean(skewed), 2.0);
        assert_eq!(trimmed_mean(Vec::new()), 0.0);
        assert_eq!(spread(&[2.0, 1.0, 3.0]), (1.0, 3.0));
    }

    #[test]
    fn the_interval_of_a_median_is_that_of_the_sign_test() {
        let values = |count: u32| (1..=count).rev().map(f64::from).collect::<Vec<_>>();
        assert_eq!(median_interval(&values(20)), (6.0, 15.0));
        assert_eq!(median_interval(&values(10)), (2.0, 9.0));
        assert_eq!(median_interval(&values(6)), (1.0, 6.0));
        assert_eq!(median_interval(&values(3)), (1.0, 3.0));
        assert_eq!(median_interval(&[]), (0.0, 0.0));
    }

    #[test]
    fn a_quantile_is_within_half_a_percent() {
        for value in [0, 1, 255, 256, 257, 511, 512, 1000, 123_456, 98_765_432, u64::MAX / 3] {
            let mut histogram = Histogram::default();
            histogram.add(value);
            let found = histogram.quantile(0.5);
            assert!((found - value as f64).abs() <= value as f64 * 0.004, "{value} {found}");
        }
    }

    #[test]
    fn quantiles_split_what_was_counted() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|value| histogram.add(value * 10));
        assert!((histogram.quantile(0.5) - 5000.0).abs() < 25.0);
        assert!((histogram.quantile(0.99) - 9900.0).abs() < 50.0);
        assert_eq!((histogram.mean(), histogram.count()), (5005.0, 1000));
    }
}
