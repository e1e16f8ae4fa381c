//! The rounds of one measurement, the rounds among them that count, and their summary.

use serde_json::Value;

use crate::record::Params;
use crate::stats;

/// One number of two systems, round by round.
#[derive(Clone, Debug, Default)]
pub struct Pairs(Vec<(f64, f64, bool)>);

impl Pairs {
    /// Adds a round: this system's number, the peer's, and whether the round was undisturbed.
    pub fn add(&mut self, ours: f64, theirs: f64, counts: bool) {
        self.0.push((ours, theirs, counts));
    }

    /// The ratios of this system's numbers to the peer's.
    #[must_use]
    pub fn ratios(&self) -> Rounds {
        self.compared(|ours, theirs| ours / theirs)
    }

    /// Compares this system's number of each round with the peer's.
    pub fn compared(&self, compare: impl Fn(f64, f64) -> f64) -> Rounds {
        let mut rounds = Rounds::new();
        self.0
            .iter()
            .for_each(|(ours, theirs, counts)| rounds.add(compare(*ours, *theirs), *counts));
        rounds
    }

    /// The pair with the median ratio; of an even number of rounds, the lower of the two in the
    /// middle.
    fn middle(&self) -> Option<(f64, f64)> {
        let only_counting = self.ratios().counting().1;
        let counting = self.0.iter().filter(|(_, _, counts)| *counts || !only_counting);
        let mut pairs: Vec<(f64, f64)> =
            counting.map(|(ours, theirs, _)| (*ours, *theirs)).collect();
        pairs.sort_by(|(ours, theirs), (others, peers)| {
            (ours / theirs).total_cmp(&(others / peers))
        });
        pairs.get(pairs.len().saturating_sub(1) / 2).copied()
    }

    /// The median ratio, and `params` with the spread of the ratios and the pair in the middle:
    /// tables show that pair beside its own ratio, because the medians of two systems may come from
    /// different rounds.
    #[must_use]
    pub fn settle(&self, mut params: Params) -> (f64, Params) {
        if let Some((ours, theirs)) = self.middle() {
            params.extend(
                [("ours", ours), ("theirs", theirs)]
                    .map(|(name, value)| (name.to_owned(), value.into())),
            );
        }
        self.ratios().settle(params)
    }
}

/// The values of the rounds, which are summed up by those that count.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    values: Vec<f64>,
    counts: Vec<bool>,
}

impl Rounds {
    /// Starts without rounds.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the value of a round, and whether the round was undisturbed.
    pub fn add(&mut self, value: f64, counts: bool) {
        self.values.push(value);
        self.counts.push(counts);
    }

    /// Whether there are no rounds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The rounds that count, and true, if they are the greater part; else all rounds, and false.
    fn counting(&self) -> (Vec<f64>, bool) {
        let both = self.values.iter().zip(&self.counts);
        let counting: Vec<f64> =
            both.filter(|(_, counts)| **counts).map(|(value, _)| *value).collect();
        if counting.len() * 2 > self.values.len() {
            (counting, true)
        } else {
            (self.values.clone(), false)
        }
    }

    /// The median of the rounds that count, or of all if most do not.
    #[must_use]
    pub fn median(&self) -> f64 {
        stats::median(&self.counting().0)
    }

    /// The median, and `params` with the spread.
    #[must_use]
    pub fn settle(&self, mut params: Params) -> (f64, Params) {
        let (values, counts) = self.counting();
        let (min, max) = stats::spread(&values);
        let more: [(&str, Value); 4] = [
            ("rounds", values.len().into()),
            ("counts", counts.into()),
            ("min", min.into()),
            ("max", max.into()),
        ];
        params.extend(more.map(|(name, value)| (name.to_owned(), value)));
        (self.median(), params)
    }

    /// As [`settle`](Self::settle), with the interval of the median as `low` and `high`.
    #[must_use]
    pub fn settle_with_interval(&self, params: Params) -> (f64, Params) {
        let (low, high) = stats::median_interval(&self.counting().0);
        let (median, mut params) = self.settle(params);
        params.extend(
            [("low", low), ("high", high)].map(|(name, value)| (name.to_owned(), value.into())),
        );
        (median, params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(rounds: &[(f64, f64, bool)]) -> (f64, Params) {
        let mut pairs = Pairs::default();
        rounds.iter().for_each(|(ours, theirs, counts)| pairs.add(*ours, *theirs, *counts));
        pairs.settle(Params::new())
    }

    #[test]
    fn a_ratio_comes_with_the_pair_that_has_it() {
        // The medians are 20 and 10, of different rounds.
        let (ratio, params) = pairs(&[(20.0, 4.0, true), (30.0, 10.0, true), (10.0, 40.0, true)]);
        assert_eq!((ratio, &params["ours"], &params["theirs"]), (3.0, &30.0.into(), &10.0.into()));
        let (ratio, params) = pairs(&[(1.0, 1.0, true), (8.0, 2.0, true)]);
        assert_eq!((ratio, &params["ours"], &params["theirs"]), (2.5, &1.0.into(), &1.0.into()));
    }

    #[test]
    fn a_pair_that_does_not_count_is_shown_only_if_most_do_not() {
        let rounds = [
            (1.0, 1.0, true),
            (2.0, 1.0, true),
            (3.0, 1.0, true),
            (9.0, 1.0, false),
            (9.0, 1.0, false),
        ];
        assert_eq!(pairs(&rounds).1["ours"], 2.0);
        let (ratio, params) = pairs(&rounds[2..]);
        assert_eq!((ratio, &params["ours"], &params["counts"]), (9.0, &9.0.into(), &false.into()));
        assert!(!pairs(&[]).1.contains_key("ours"));
    }
}
