//! The rounds of one measurement, those among them that count, and what to say of them.

use serde_json::Value;

use crate::record::Params;
use crate::stats;

/// The median of the rounds that count, and what is to be said of all of them.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    values: Vec<f64>,
    counts: Vec<bool>,
}

impl Rounds {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the value of a round, and whether it was measured in circumstances that count.
    pub fn add(&mut self, value: f64, counts: bool) {
        self.values.push(value);
        self.counts.push(counts);
    }

    /// Whether there are no rounds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The rounds that count, if they are the greater part; else all of them, and that they do not.
    fn counting(&self) -> (Vec<f64>, bool) {
        let both = self.values.iter().zip(&self.counts);
        let counting: Vec<f64> = both.filter(|(_, counts)| **counts).map(|(value, _)| *value).collect();
        if counting.len() * 2 > self.values.len() { (counting, true) } else { (self.values.clone(), false) }
    }

    /// The median.
    #[must_use]
    pub fn median(&self) -> f64 {
        stats::median(&self.counting().0)
    }

    /// The median, and the parameters with the spread.
    #[must_use]
    pub fn settle(&self, mut params: Params) -> (f64, Params) {
        let (values, counts) = self.counting();
        let (min, max) = stats::spread(&values);
        let more: [(&str, Value); 4] =
            [("rounds", values.len().into()), ("counts", counts.into()), ("min", min.into()), ("max", max.into())];
        params.extend(more.map(|(name, value)| (name.to_owned(), value)));
        (self.median(), params)
    }

    /// The same with the interval of the median, as `low` and `high`.
    #[must_use]
    pub fn settle_with_interval(&self, params: Params) -> (f64, Params) {
        let (low, high) = stats::median_interval(&self.counting().0);
        let (median, mut params) = self.settle(params);
        params.extend([("low", low), ("high", high)].map(|(name, value)| (name.to_owned(), value.into())));
        (median, params)
    }
}
