//! The results of the bounds of all experiments, collected from their runs into one table of
//! docs/bench.md.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::bounds::{Checked, Verdict};
use crate::publish;

const PAGE: &str = "docs/bench.md";
const NAME: &str = "bench: bounds";
const README: &str = "README.md";

/// A bound with its result in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Line {
    experiment: String,
    /// `full` or `quick`.
    scale: String,
    revision: String,
    what: String,
    limit: String,
    /// `None` if the number was not measured.
    value: Option<String>,
    verdict: Verdict,
}

/// The reason why no design can keep a bound: for lines of this experiment whose text starts with
/// `what`.
struct Note {
    experiment: &'static str,
    what: &'static str,
    why: &'static str,
}

const OUT_OF_REACH: &str = "out of reach: see below the table";

const NOTES: [Note; 2] = [
    Note {
        experiment: "nested",
        what: "loop/randread/4KiB/qd32: iops of vf / file",
        why: OUT_OF_REACH,
    },
    Note {
        experiment: "nested",
        what: "loop/randwrite/4KiB/qd32: iops of vf / file",
        why: OUT_OF_REACH,
    },
];

/// Appends the results of an experiment's bounds to `file`, a JSON object a line.
///
/// # Errors
/// The file cannot be written.
pub fn append(
    file: &Path,
    (experiment, scale, revision): (&str, &str, &str),
    checked: &[Checked],
) -> Result<()> {
    let mut text = Vec::new();
    for bound in checked {
        let line = Line {
            experiment: experiment.to_owned(),
            scale: scale.to_owned(),
            revision: revision.to_owned(),
            what: bound.what.clone(),
            limit: bound.limit.clone(),
            value: bound.value.clone(),
            verdict: bound.verdict,
        };
        serde_json::to_writer(&mut text, &line)?;
        text.push(b'\n');
    }
    let open = std::fs::File::options().create(true).append(true).open(file);
    open.and_then(|mut open| open.write_all(&text))
        .with_context(|| format!("cannot write {}", file.display()))
}

/// The options of `sidecore-bench verdicts`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The file that the experiments' `--verdicts` wrote.
    file: std::path::PathBuf,
}

/// Writes the table into docs/bench.md. Returns whether all bounds hold.
///
/// # Errors
/// A file cannot be read or written, or is not in the format of `--verdicts`.
pub fn run(options: &Options) -> Result<bool> {
    let name = options.file.display();
    let text =
        std::fs::read_to_string(&options.file).with_context(|| format!("cannot read {name}"))?;
    let lines: Vec<Line> = text
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{name} is not what `--verdicts` writes"))?;
    let table = table(lines.clone());
    println!("{table}");
    publish::update(PAGE, NAME, &table)?;
    let sum = table.lines().next().unwrap_or_default().trim_end_matches('.');
    publish::update(README, "bounds", &format!("{sum}\n([each of them](docs/bench.md#bounds))."))?;
    Ok(!lines.is_empty() && lines.iter().all(|line| line.verdict == Verdict::Pass))
}

/// Orders the bounds: failing ones first, then unmeasured and unknown ones, then those that hold.
fn table(mut lines: Vec<Line>) -> String {
    let rank = |line: &Line| match line.verdict {
        Verdict::Fail => 0,
        Verdict::Missing => 1,
        Verdict::Unknown => 2,
        Verdict::Pass => 3,
    };
    lines.sort_by_key(rank);
    let count = |verdict| lines.iter().filter(|line| line.verdict == verdict).count();
    let mut text = format!(
        "{} bounds: {} fail, {} were not measured, {} are unknown (the machine was disturbed), {} \
         hold.\n\n",
        lines.len(),
        count(Verdict::Fail),
        count(Verdict::Missing),
        count(Verdict::Unknown),
        count(Verdict::Pass),
    );
    text.push_str(
        "| experiment | what | bound | value | verdict |\n| --- | --- | --- | --- | --- |\n",
    );
    for line in &lines {
        let note = NOTES
            .iter()
            .find(|note| note.experiment == line.experiment && line.what.starts_with(note.what));
        let word = publish::word(line.verdict);
        let verdict = match note {
            Some(note) if line.verdict == Verdict::Fail => format!("{word} ({})", note.why),
            _ => word.to_owned(),
        };
        let value = line.value.as_deref().unwrap_or("");
        let _ = writeln!(
            text,
            "| {} | {} | {} | {value} | {verdict} |",
            line.experiment, line.what, line.limit
        );
    }
    let mut runs: Vec<String> = lines
        .iter()
        .map(|line| {
            format!(
                "`cargo xtask bench {}` ({}) at revision {}",
                line.experiment, line.scale, line.revision
            )
        })
        .collect();
    runs.sort();
    runs.dedup();
    let _ = writeln!(text, "\nMeasured by {}.", runs.join(", "));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::{Bound, Limit, Of, check};
    use crate::record::{OURS, Params, Records, params};

    fn lines() -> Vec<Line> {
        let mut records = Records::new("nested");
        let case = "loop/randread/4KiB/qd32";
        records.ratio("good", "iops", OURS, "peer", 3.6, Params::new());
        records.ratio(case, "iops", OURS, "file", 1.3, Params::new());
        records.ratio("far", "iops", OURS, "peer", 9.0, params([("counts", false.into())]));
        let bound =
            |case, peer| Bound { case, of: Of::Ratio("iops", peer), limit: Limit::AtLeast(2.0) };
        let bounds = [
            bound("good", "peer"),
            bound("far", "peer"),
            bound("none", "peer"),
            bound(case, "file"),
        ];
        let file = tempfile::NamedTempFile::new().unwrap();
        append(file.path(), ("nested", "quick", "abc"), &check(&bounds, &records, "vf")).unwrap();
        let text = std::fs::read_to_string(file.path()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn bounds_that_do_not_hold_come_first_and_all_bounds_are_listed() {
        let table = table(lines());
        let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| nested")).collect();
        assert_eq!(rows.len(), 4, "{table}");
        for (row, (start, end)) in rows.iter().zip([
            (
                "| nested | loop/randread/4KiB/qd32: iops of vf / file | at least 2 | 1.300 |",
                "see below the table) |",
            ),
            ("| nested | none:", "not measured |"),
            ("| nested | far:", "unknown |"),
            ("| nested | good:", "holds |"),
        ]) {
            assert!(row.starts_with(start) && row.ends_with(end), "{row}");
        }
        assert!(
            table.starts_with("4 bounds: 1 fail, 1 were not measured, 1 are unknown"),
            "{table}"
        );
        assert!(
            table.ends_with("Measured by `cargo xtask bench nested` (quick) at revision abc.\n"),
            "{table}"
        );
    }
}
