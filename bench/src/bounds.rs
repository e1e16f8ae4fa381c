//! What must hold: bounds on results, checked after the run.

use serde::{Deserialize, Serialize};

use crate::record::{FLOOR, Records, counts};

/// Which number, and where it has to be.
#[derive(Clone, Copy, Debug)]
pub struct Bound<'a> {
    /// The case that it is about.
    pub case: &'a str,
    /// Which number.
    pub of: Of,
    /// Where it has to be.
    pub limit: Limit,
}

/// Which number.
#[derive(Clone, Copy, Debug)]
pub enum Of {
    /// The ratio of this metric to this peer.
    Ratio(&'static str, &'static str),
    /// The ratio of this metric to the machine's floor.
    FloorRatio(&'static str),
    /// Our own number, in this unit.
    Ours(&'static str, &'static str),
}

/// Where a number has to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// This, or less.
    AtMost(f64),
    /// This, or more.
    AtLeast(f64),
    /// More than this.
    MoreThan(f64),
}

impl Limit {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
            Self::MoreThan(limit) => value > limit,
        }
    }
}

/// How a bound fared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It holds.
    Pass,
    /// It does not.
    Fail,
    /// The cores were never near and free for long enough: nobody knows.
    Unknown,
    /// It was not measured in this run.
    Missing,
}

/// A bound, and how it fared.
#[derive(Clone, Debug)]
pub struct Checked {
    /// What it is about.
    pub what: String,
    /// Where it has to be, in words.
    pub limit: String,
    /// The number with its unit, if it was measured.
    pub value: Option<String>,
    /// How it fared.
    pub verdict: Verdict,
}

/// Prints how bounds fared; whether all of them hold.
pub fn print(checked: &[Checked]) -> bool {
    for bound in checked {
        let word = match bound.verdict {
            Verdict::Pass => "pass",
            Verdict::Fail => "FAIL",
            Verdict::Unknown => "unknown (the cores were far apart, or busy with something else)",
            Verdict::Missing => "not measured",
        };
        let is = bound.value.as_ref().map_or_else(|| "was not measured".to_owned(), |value| format!("is {value}"));
        println!("{word}: {} {is}, must be {}", bound.what, bound.limit);
    }
    checked.iter().all(|bound| bound.verdict == Verdict::Pass)
}

/// Looks all of `bounds` up in `records`.
#[must_use]
pub fn check(bounds: &[Bound<'_>], records: &Records, ours: &str) -> Vec<Checked> {
    bounds.iter().map(|bound| check_one(bound, records, ours)).collect()
}

fn check_one(bound: &Bound<'_>, records: &Records, ours: &str) -> Checked {
    let case = bound.case;
    let (what, unit, found) = match bound.of {
        Of::Ratio(metric, peer) => {
            let found = records.find_ratio(case, metric, peer).map(|ratio| (ratio.value, &ratio.params));
            (format!("{case}: {metric} of {ours} / {peer}"), "", found)
        }
        Of::FloorRatio(metric) => {
            let found = records.find_ratio(case, metric, FLOOR).map(|ratio| (ratio.value, &ratio.params));
            (format!("{case}: {metric} of {ours} / floor"), "", found)
        }
        Of::Ours(metric, unit) => {
            let found = records.find(case, ours, metric).map(|measure| (measure.value, &measure.params));
            (format!("{case}: {metric}"), unit, found)
        }
    };
    let limit = match bound.limit {
        Limit::AtMost(limit) => format!("at most {limit}{unit}"),
        Limit::AtLeast(limit) => format!("at least {limit}{unit}"),
        Limit::MoreThan(limit) => format!("more than {limit}{unit}"),
    };
    let verdict = match found {
        None => Verdict::Missing,
        Some((_, params)) if !counts(params) => Verdict::Unknown,
        Some((value, _)) if bound.limit.holds(value) => Verdict::Pass,
        Some(_) => Verdict::Fail,
    };
    Checked { what, limit, value: found.map(|(value, _)| format!("{value:.3}{unit}")), verdict }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{OURS, Params, params};

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
        let verdicts: Vec<Verdict> = check(&bounds, &records, OURS).iter().map(|checked| checked.verdict).collect();
        assert_eq!(verdicts, [Verdict::Pass, Verdict::Fail, Verdict::Unknown, Verdict::Fail, Verdict::Missing]);
    }
}
