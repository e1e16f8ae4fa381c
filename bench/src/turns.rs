//! Two systems in this process that take turns, a run of each in every pair.

use anyhow::Result;

use crate::cores::UNDISTURBED_SHARE;
use crate::record::{Params, Records};
use crate::rounds::{Pairs, Rounds};
use crate::runs::ADDED;
use crate::stop;

/// The runs of two systems.
#[derive(Debug, Default)]
pub struct Turns {
    /// The runs of each system.
    of: [Rounds; 2],
    pairs: Pairs,
    /// The number of pairs that were repeated because other work disturbed them.
    pub repeated: usize,
}

impl Turns {
    /// Runs `count` pairs, with `repeats` more at most for disturbed ones. `run` measures the two
    /// systems in the order of the indexes that it is given. It returns the number of each, and the
    /// greatest share of its time for which a run waited for a core.
    ///
    /// # Errors
    /// A run fails; an interrupt.
    pub fn take(
        count: usize,
        repeats: usize,
        mut run: impl FnMut([usize; 2]) -> Result<([f64; 2], f64)>,
    ) -> Result<Self> {
        let mut turns = Self::default();
        let mut pair = 0;
        while pair < count {
            stop::check()?;
            // The order alternates, so that neither system always comes after the other.
            let first = (pair + turns.repeated) % 2;
            let ([ours, theirs], waited_share) = run([first, 1 - first])?;
            let counts = waited_share < UNDISTURBED_SHARE;
            if !counts && turns.repeated < repeats {
                turns.repeated += 1;
                continue;
            }
            for (rounds, value) in turns.of.iter_mut().zip([ours, theirs]) {
                rounds.add(value, counts);
            }
            turns.pairs.add(ours, theirs, counts);
            pair += 1;
        }
        Ok(turns)
    }

    /// The median of each system.
    #[must_use]
    pub fn medians(&self) -> [f64; 2] {
        self.of.each_ref().map(Rounds::median)
    }

    /// Records both medians and the ratio of the first system to the second one. Returns the ratio.
    pub fn record(
        &self,
        records: &mut Records,
        case: &str,
        systems: [&str; 2],
        (metric, unit): (&str, &str),
        params: Params,
    ) -> f64 {
        for (system, rounds) in systems.into_iter().zip(&self.of) {
            let (median, params) = rounds.settle(params.clone());
            records.measure(case, system, metric, median, unit, params);
        }
        let [ours, theirs] = systems;
        let (ratio, params) = self.pairs.settle(params);
        records.ratio(case, metric, ours, theirs, ratio, params);
        ratio
    }

    /// Records the nanoseconds by which a request takes longer than the other system's, if the
    /// numbers are requests a second. Returns them.
    pub fn record_added(
        &self,
        records: &mut Records,
        case: &str,
        system: &str,
        params: Params,
    ) -> f64 {
        let added = self.pairs.compared(|ours, theirs| 1e9 / ours - 1e9 / theirs);
        let (median, params) = added.settle(params);
        records.measure(case, system, ADDED, median, "ns", params);
        median
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::counts;

    #[test]
    fn systems_change_places_and_disturbed_pairs_are_repeated_a_limited_number_of_times() {
        let mut orders = Vec::new();
        let turns = Turns::take(3, 2, |order| {
            orders.push(order);
            let value = orders.len() as f64;
            // The first, the third and the fourth pair are disturbed.
            Ok(([value, 1.0], if [1, 3, 4].contains(&orders.len()) { 1.0 } else { 0.0 }))
        })
        .unwrap();
        assert_eq!(orders, [[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]]);
        assert_eq!(turns.repeated, 2);
        // Of the pairs 2, 4 and 5, the fourth does not count.
        assert_eq!(turns.medians(), [3.5, 1.0]);
        let mut records = Records::new("e");
        let systems = ["ours", "theirs"];
        let ratio = turns.record(&mut records, "c", systems, ("m", "1/s"), Params::new());
        assert_eq!(ratio, 3.5);
        let recorded = records.find_ratio("c", "m", "theirs").unwrap();
        assert!(recorded.value == 3.5 && counts(&recorded.params));
        assert_eq!(records.find("c", "ours", "m").unwrap().value, 3.5);
        let added_ns = turns.record_added(&mut records, "c", "ours", Params::new());
        assert_eq!(records.find("c", "ours", ADDED).unwrap().value, added_ns);
        let pairs = [2.0, 5.0].map(|ours| 1e9 / ours - 1e9);
        assert_eq!(added_ns, (pairs[0] + pairs[1]) / 2.0);
    }

    #[test]
    fn a_run_that_fails_ends_the_turns() {
        let mut runs = 0;
        let failed = Turns::take(3, 0, |_| {
            runs += 1;
            anyhow::ensure!(runs < 2, "the second run fails");
            Ok(([1.0, 1.0], 0.0))
        });
        assert!(failed.is_err() && runs == 2);
    }
}
