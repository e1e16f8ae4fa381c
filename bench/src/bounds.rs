//! Bounds on results, checked after the run.

use serde::{Deserialize, Serialize};

use serde_json::Value;

use crate::plot;
use crate::record::{FLOOR, Params, Records, counts};

/// A number of a case and its limit.
#[derive(Clone, Copy, Debug)]
pub struct Bound<'a> {
    /// The case that the number belongs to.
    pub case: &'a str,
    /// Selects the number in the case.
    pub of: Of<'a>,
    /// The limit that the number must keep.
    pub limit: Limit,
}

/// Selects a number of a case: a ratio or a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of<'a> {
    /// The ratio of this metric to this peer.
    Ratio(&'a str, &'a str),
    /// The ratio of this metric to the machine's floor.
    FloorRatio(&'a str),
    /// This metric of the system under test, in this unit.
    Ours(&'a str, &'a str),
}

/// The limit of a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// The number is this or less.
    AtMost(f64),
    /// The number is this or more.
    AtLeast(f64),
    /// The number is more than this.
    MoreThan(f64),
    /// The number is this or more; a smaller number fails only if the interval of its median is
    /// below the limit.
    NotBelow(f64),
}

impl Limit {
    fn verdict(self, value: f64, params: &Params) -> Verdict {
        let holds = match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) | Self::NotBelow(limit) => value >= limit,
            Self::MoreThan(limit) => value > limit,
        };
        let high = params.get("high").and_then(Value::as_f64).unwrap_or(value);
        match self {
            _ if holds => Verdict::Pass,
            Self::NotBelow(limit) if high >= limit => Verdict::Unknown,
            _ => Verdict::Fail,
        }
    }
}

/// The result of the check of a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The number keeps its limit.
    Pass,
    /// The number breaks its limit.
    Fail,
    /// The cores were not near and free for long enough, or the rounds spread across the limit.
    Unknown,
    /// The number was not measured in this run.
    Missing,
}

/// A bound with the result of its check.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The case, the metric and the systems, in words.
    pub what: String,
    /// The limit with its unit, in words.
    pub limit: String,
    /// The number with its unit, if it was measured.
    pub value: Option<String>,
    /// The result of the check.
    pub verdict: Verdict,
}

/// Prints the results of the checks. Returns whether all bounds hold.
pub fn print(checked: &[Checked]) -> bool {
    for bound in checked {
        let word = match bound.verdict {
            Verdict::Pass => "pass",
            Verdict::Fail => "FAIL",
            Verdict::Unknown => {
                "unknown (the cores were far apart or busy, or the rounds spread too far)"
            }
            Verdict::Missing => "not measured",
        };
        let is = bound
            .value
            .as_ref()
            .map_or_else(|| "was not measured".to_owned(), |value| format!("is {value}"));
        println!("{word}: {} {is}, must be {}", bound.what, bound.limit);
    }
    checked.iter().all(|bound| bound.verdict == Verdict::Pass)
}

/// Checks all of `bounds` against `records`.
#[must_use]
pub fn check(bounds: &[Bound<'_>], records: &Records, ours: &str) -> Vec<Checked> {
    bounds.iter().map(|bound| check_one(bound, records, ours)).collect()
}

fn check_one(bound: &Bound<'_>, records: &Records, ours: &str) -> Checked {
    let case = bound.case;
    let ratio_to = |metric: &str, peer: &str| {
        let found = records.find_ratio(case, metric, peer);
        let what = format!("{case}: {metric} of {ours} / {peer}");
        (what, "", found.map(|ratio| (ratio.value, &ratio.params)))
    };
    let (what, unit, found) = match bound.of {
        Of::Ratio(metric, peer) => ratio_to(metric, peer),
        Of::FloorRatio(metric) => ratio_to(metric, FLOOR),
        Of::Ours(metric, unit) => {
            let found =
                records.find(case, ours, metric).map(|measure| (measure.value, &measure.params));
            (format!("{case}: {metric}"), unit, found)
        }
    };
    // Rates are large numbers.
    let rate = |number: f64| (unit.trim() == "1/s").then(|| plot::per_second(number));
    let limit_of = |limit: f64| rate(limit).unwrap_or_else(|| format!("{limit}{unit}"));
    let limit = match bound.limit {
        Limit::AtMost(limit) => format!("at most {}", limit_of(limit)),
        Limit::AtLeast(limit) | Limit::NotBelow(limit) => format!("at least {}", limit_of(limit)),
        Limit::MoreThan(limit) => format!("more than {}", limit_of(limit)),
    };
    let value = |value: f64| rate(value).unwrap_or_else(|| format!("{value:.3}{unit}"));
    let verdict = match found {
        None => Verdict::Missing,
        Some((_, params)) if !counts(params) => Verdict::Unknown,
        Some((value, params)) => bound.limit.verdict(value, params),
    };
    Checked { what, limit, value: found.map(|(number, _)| value(number)), verdict }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{OURS, params};

    #[test]
    fn a_bound_passes_fails_is_unknown_or_missing() {
        let mut records = Records::new("e");
        records.ratio("a", "iops", OURS, "peer", 3.6, Params::new());
        records.ratio("b", "iops", OURS, "peer", 9.0, params([("counts", false.into())]));
        records.measure("c", OURS, "added", 7.0, "us", Params::new());
        let bound = |case, of, limit| Bound { case, of, limit };
        let ratio = Of::Ratio("iops", "peer");
        let bounds = [
            bound("a", ratio, Limit::AtLeast(3.5)),
            bound("a", ratio, Limit::AtMost(3.5)),
            bound("b", ratio, Limit::AtLeast(3.5)),
            bound("c", Of::Ours("added", " us"), Limit::AtMost(6.0)),
            bound("d", ratio, Limit::AtLeast(3.5)),
        ];
        let verdicts: Vec<Verdict> =
            check(&bounds, &records, OURS).iter().map(|checked| checked.verdict).collect();
        assert_eq!(
            verdicts,
            [Verdict::Pass, Verdict::Fail, Verdict::Unknown, Verdict::Fail, Verdict::Missing]
        );
    }

    #[test]
    fn rates_are_shown_in_few_digits_and_other_numbers_with_their_unit() {
        let mut records = Records::new("e");
        records.measure("a", OURS, "packets", 1.17e6, "1/s", params([]));
        records.measure("a", OURS, "added", 4.0, "ns", params([]));
        let bound = |metric, unit, limit| Bound { case: "a", of: Of::Ours(metric, unit), limit };
        let bounds = [
            bound("packets", "1/s", Limit::AtLeast(1e6)),
            bound("added", " ns", Limit::AtMost(15.0)),
        ];
        let shown = check(&bounds, &records, OURS);
        let shown: Vec<_> =
            shown.into_iter().map(|bound| (bound.limit, bound.value.unwrap())).collect();
        let expected = [("at least 1 M/s", "1.17 M/s"), ("at most 15 ns", "4.000 ns")]
            .map(|(limit, value)| (limit.to_owned(), value.to_owned()));
        assert_eq!(shown, expected);
    }

    #[test]
    fn a_small_ratio_fails_only_if_its_interval_is_below_the_limit() {
        let mut records = Records::new("e");
        let cases = [("a", 0.99, 1.5), ("b", 0.97, 0.981), ("c", 0.97, 0.979)];
        for (case, value, high) in cases {
            records.ratio(case, "iops", OURS, "before", value, params([("high", high.into())]));
        }
        let of = Of::Ratio("iops", "before");
        let bounds = cases.map(|(case, ..)| Bound { case, of, limit: Limit::NotBelow(0.98) });
        let verdicts: Vec<Verdict> =
            check(&bounds, &records, OURS).iter().map(|checked| checked.verdict).collect();
        assert_eq!(verdicts, [Verdict::Pass, Verdict::Unknown, Verdict::Fail]);
    }
}
