//! This build against another one (`--against PROGRAM`): the same work in pairs, this build first
//! in one pair and the other build first in the next.
//!
//! The daemons of both builds are driven by this build's client. Experiments without a daemon run
//! as children, from the `sidecore-bench` of each build.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::bounds::{Bound, Limit, Of};
use crate::experiment::{Common, Outcome, Report, Scale};
use crate::load::Work;
use crate::record::{self, Measure, Params, Ratio, Record, Records};
use crate::rounds::Rounds;
use crate::runs::{self, Named};
use crate::stop;

/// The other build's daemon in records.
pub const BEFORE: &str = "before";

/// The name of this build in verdicts.
pub const THIS: &str = "this build";

/// The lowest allowed ratio of this build to the other one.
pub const LIMIT: f64 = 0.98;

/// The longest run of a pair: more pairs narrow the interval more than longer runs do.
const MAX_RUN: Duration = Duration::from_millis(100);

/// The pairs of each case for which programs run before they are started again: a process's memory
/// lies elsewhere at each start, which changes its speed by some percent, more than the difference
/// that a comparison is to find.
pub const PAIRS_PER_START: usize = 4;

/// The number of pairs of each case.
fn pairs(scale: Scale) -> usize {
    match scale {
        Scale::Full => 20,
        Scale::Quick => 10,
        Scale::Tiny => 2,
    }
}

/// The length and the number of the runs of each case, which take `run` and are `rounds` without
/// another build.
#[must_use]
pub fn runs(common: &Common, run: Duration, rounds: usize) -> (Duration, usize) {
    match common.against {
        Some(_) => (run.min(MAX_RUN), pairs(common.scale())),
        None => (run, rounds),
    }
}

/// The rounds of all cases that one start of the programs measures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The number of starts before this one.
    pub start: usize,
    /// The rounds of each case.
    pub rounds: Range<usize>,
    /// Whether each case has all of its rounds after this part.
    pub is_last: bool,
}

/// Divides the rounds of an experiment. The programs of two builds are started for each part, and
/// those of one build once.
#[must_use]
pub fn parts(common: &Common, rounds: usize) -> Vec<Part> {
    in_parts(rounds, if common.against.is_some() { PAIRS_PER_START } else { rounds.max(1) })
}

/// Divides the rounds of an experiment into parts of `per_start` rounds, at least one.
#[must_use]
pub fn in_parts(rounds: usize, per_start: usize) -> Vec<Part> {
    let starts = (0..rounds).step_by(per_start).enumerate();
    starts
        .map(|(start, first)| {
            let end = rounds.min(first + per_start);
            Part { start, rounds: first..end, is_last: end == rounds }
        })
        .collect()
}

/// Starts two builds: this build first at one start, and the other one first at the next. A process
/// that starts later finds other memory free.
///
/// # Errors
/// Those of the two calls.
pub fn start_in_turn<T, U>(
    start: usize,
    this: impl FnOnce() -> Result<T>,
    other: impl FnOnce() -> Result<U>,
) -> Result<(T, U)> {
    if index(0, start) == 0 {
        let this = this()?;
        return Ok((this, other()?));
    }
    let other = other()?;
    Ok((this()?, other))
}

/// The runs of the systems of each case, by its name, while the systems are started again.
#[derive(Debug)]
pub struct Kept<R>(HashMap<String, Vec<R>>);

impl<R> Default for Kept<R> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<R: Default> Kept<R> {
    /// Takes the runs of a case's systems from the parts so far.
    #[must_use]
    pub fn take(&mut self, case: &str, systems: usize) -> Vec<R> {
        let mut runs = self.0.remove(case).unwrap_or_default();
        runs.resize_with(systems, R::default);
        runs
    }

    /// Keeps the runs of a case for the next part.
    pub fn keep(&mut self, case: &str, runs: impl IntoIterator<Item = R>) {
        self.0.insert(case.to_owned(), runs.into_iter().collect());
    }
}

/// The name in records of a system that the other build serves.
#[must_use]
pub fn before(system: &str) -> String {
    format!("{system}-{BEFORE}")
}

/// The index of the system whose turn it is. Systems of the two builds are neighbours (this build's
/// at even indexes), and change places from one round to the next.
#[must_use]
pub fn index(turn: usize, round: usize) -> usize {
    turn ^ (round & 1)
}

/// Records the ratio of each pair of neighbouring systems.
pub fn record_pairs(records: &mut Records, case: &str, work: &Work, systems: &[Named<'_>]) {
    for pair in systems.chunks_exact(2) {
        let [(this, this_runs), (other, other_runs)] = [pair[0], pair[1]];
        let iops = |sample: &_| (runs::IOPS.value)(sample, work);
        let ratios = this_runs.compared(other_runs, |this, other| iops(this) / iops(other));
        let (median, params) = ratios.settle_with_interval(Params::new());
        records.ratio(case, runs::IOPS.name, this, other, median, params);
    }
}

fn ratios(records: &Records) -> impl Iterator<Item = &Ratio> {
    records.all().iter().filter_map(|record| match record {
        Record::Ratio(ratio) if ratio.params.contains_key("low") => Some(ratio),
        _ => None,
    })
}

/// The bound on every pair that was measured.
#[must_use]
pub fn bounds(records: &Records) -> Vec<Bound<'_>> {
    let limit = Limit::NotBelow(LIMIT);
    let bounds = ratios(records).map(|ratio| Bound {
        case: &ratio.case,
        of: Of::Ratio(&ratio.of, &ratio.peer),
        limit,
    });
    bounds.collect()
}

/// Formats the ratios in Markdown.
#[must_use]
pub fn table(records: &Records) -> String {
    let mut page = String::from(
        "| case | this build / the other | 95 % interval of the median | least to greatest |\n",
    );
    page.push_str("| --- | --- | --- | --- |\n");
    for ratio in ratios(records) {
        let Ratio { case, of, ours, params, value, .. } = ratio;
        let number =
            |name: &str| params.get(name).and_then(serde_json::Value::as_f64).unwrap_or_default();
        let disturbed = if record::counts(params) { "" } else { " (disturbed)" };
        let [low, high, min, max] = ["low", "high", "min", "max"].map(number);
        let _ = writeln!(
            page,
            "| {case}, {of} of {ours} | {value:.3}{disturbed} | {low:.3} to {high:.3} | {min:.3} \
             to {max:.3} |"
        );
    }
    page
}

/// Runs an experiment that needs no daemon in pairs of children, each build's `sidecore-bench` in
/// turn. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// There is no `sidecore-bench` beside `daemon`, the other build's; a child fails; an interrupt.
pub fn children(name: &str, common: &Common, daemon: &Path) -> Result<bool> {
    let begin = Instant::now();
    stop::listen()?;
    let this = std::env::current_exe().context("the path of this program is unknown")?;
    let other = daemon.with_file_name(this.file_name().context("this program has no name")?);
    ensure!(
        other.exists(),
        "there is no {}: build it beside {}",
        other.display(),
        daemon.display()
    );
    let directory = tempfile::tempdir()?;
    let (mut measured, mut records) = (Vec::new(), Records::new(name));
    for pair in 0..pairs(common.scale()) {
        stop::check()?;
        let mut of_pair = [Vec::new(), Vec::new()];
        for turn in 0..2 {
            let of = index(turn, pair);
            let program = if of == 0 { &this } else { &other };
            of_pair[of] =
                child(program, name, common, &directory.path().join(format!("{pair}-{of}")))?;
        }
        let [this, other] = of_pair;
        measured.push((this, other));
        eprintln!("  {name}: pair {}", pair + 1);
    }
    record_children(&mut records, &measured)?;
    let bounds = bounds(&records);
    let outcome = Outcome {
        records: &records,
        report: Report::new(table(&records), (THIS, &bounds), &[]),
        disturbed: "children repeat disturbed runs on their own".to_owned(),
    };
    common.conclude(begin, &outcome)
}

/// Runs an experiment of one build once. Returns the measurements.
fn child(program: &PathBuf, name: &str, common: &Common, json: &Path) -> Result<Vec<Measure>> {
    // Many short runs instead of a long one: the memory layout of each process is a part of the
    // spread.
    let scale = if common.scale() == Scale::Tiny { "--tiny" } else { "--quick" };
    let mut command = Command::new(program);
    command.args([name, scale, "--json"]).arg(json).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("cannot start {}", program.display()))?;
    ensure!(
        output.status.success(),
        "{} failed ({}):\n{}",
        program.display(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let text = std::fs::read_to_string(json)
        .with_context(|| format!("{} has no records", program.display()))?;
    // Lines of ratios have other fields and are left out.
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

fn record_children(records: &mut Records, pairs: &[(Vec<Measure>, Vec<Measure>)]) -> Result<()> {
    let (first, _) = pairs.first().context("no pairs")?;
    for Measure { case, system, metric, unit, .. } in first {
        let is_same = |measure: &&Measure| {
            (&measure.case, &measure.system, &measure.metric) == (case, system, metric)
        };
        let mut ratios = Rounds::new();
        for (this, other) in pairs {
            // A case that only one of the builds has cannot be compared.
            let (Some(this), Some(other)) = (this.iter().find(is_same), other.iter().find(is_same))
            else {
                continue;
            };
            let is_rate = unit.ends_with("/s");
            let ratio = if is_rate { this.value / other.value } else { other.value / this.value };
            ratios.add(ratio, record::counts(&this.params) && record::counts(&other.params));
        }
        if ratios.is_empty() {
            eprintln!("  {case}: the other build does not measure {metric} of {system}");
            continue;
        }
        let of = if unit.ends_with("/s") { metric.clone() } else { format!("1/{metric}") };
        let (median, params) = ratios.settle_with_interval(Params::new());
        records.ratio(case, &of, system, &before(system), median, params);
    }
    ensure!(ratios(records).next().is_some(), "the builds have no measurement in common");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::{Verdict, check};
    use crate::record::{OURS, params};

    fn measure(case: &str, unit: &str, value: f64, counts: bool) -> Measure {
        Measure {
            experiment: "e".to_owned(),
            case: case.to_owned(),
            system: OURS.to_owned(),
            metric: "m".to_owned(),
            value,
            unit: unit.to_owned(),
            params: params([("counts", counts.into())]),
            revision: "r".to_owned(),
        }
    }

    #[test]
    fn builds_change_places_within_their_pair() {
        let order = |round| (0..4).map(|turn| index(turn, round)).collect::<Vec<_>>();
        assert_eq!(
            (order(0), order(1), order(2)),
            (vec![0, 1, 2, 3], vec![1, 0, 3, 2], vec![0, 1, 2, 3])
        );
    }

    #[test]
    fn two_builds_are_started_again_after_some_pairs_in_the_other_order() {
        let mut common = Common::default();
        let part = |start, rounds: Range<usize>, is_last| Part { start, rounds, is_last };
        assert_eq!(parts(&common, 11), [part(0, 0..11, true)]);
        common.against = Some("before".into());
        let expected = [part(0, 0..4, false), part(1, 4..8, false), part(2, 8..10, true)];
        assert_eq!(parts(&common, 10), expected);
        let mut kept = Kept::default();
        let order = std::cell::RefCell::new(Vec::new());
        for Part { start, rounds, is_last } in expected {
            let note = |name| {
                order.borrow_mut().push(name);
                Ok(name)
            };
            let started = start_in_turn(start, || note(THIS), || note(BEFORE)).unwrap();
            assert_eq!(started, (THIS, BEFORE));
            let mut runs: Vec<Vec<usize>> = kept.take("a", 2);
            runs.iter_mut().for_each(|runs| runs.extend(rounds.clone()));
            if is_last {
                assert_eq!(runs, vec![(0..10).collect::<Vec<_>>(); 2]);
            } else {
                kept.keep("a", runs);
            }
        }
        assert_eq!(*order.borrow(), [THIS, BEFORE, BEFORE, THIS, THIS, BEFORE]);
        assert!(start_in_turn(0, || anyhow::bail!("no"), || Ok(())).map(|((), ())| ()).is_err());
    }

    #[test]
    fn a_ratio_above_one_is_faster_whatever_the_unit() {
        let pair = |ns: f64, per_s: f64, counts| {
            let of =
                |ns, per_s| vec![measure("a", "ns", ns, counts), measure("b", "1/s", per_s, true)];
            (of(ns, per_s), of(10.0, 100.0))
        };
        let pairs = [pair(8.0, 90.0, false), pair(8.0, 90.0, false), pair(8.0, 80.0, true)];
        let mut records = Records::new("e");
        record_children(&mut records, &pairs).unwrap();
        let value = |case, of| records.find_ratio(case, of, "sidecored-before").unwrap().value;
        assert_eq!((value("a", "1/m"), value("b", "m")), (1.25, 0.9));
        let verdicts: Vec<Verdict> = check(&bounds(&records), &records, OURS)
            .iter()
            .map(|checked| checked.verdict)
            .collect();
        // The first was measured in pairs most of which were disturbed; the second is slower in
        // every pair.
        assert_eq!(verdicts, [Verdict::Unknown, Verdict::Fail]);
        assert!(
            table(&records).contains("| b, m of sidecored | 0.900 | 0.800 to 0.900 |"),
            "{}",
            table(&records)
        );
    }

    #[test]
    fn a_case_of_one_build_alone_is_left_out_and_builds_without_a_common_case_are_an_error() {
        let both = (
            vec![measure("a", "ns", 1.0, true), measure("new", "ns", 1.0, true)],
            vec![measure("a", "ns", 1.0, true)],
        );
        let mut records = Records::new("e");
        record_children(&mut records, &[both]).unwrap();
        assert_eq!(bounds(&records).len(), 1);
        let none = (vec![measure("new", "ns", 1.0, true)], Vec::new());
        assert!(record_children(&mut Records::new("e"), &[none]).is_err());
        assert!(record_children(&mut Records::new("e"), &[]).is_err());
    }
}
