//! Results in the documentation: all of them in docs/bench.md, the main rows of each experiment in
//! README.md.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use sidecore_kit::pages;

use crate::bounds::{Bound, Checked, Of, Verdict};
use crate::experiment::Report;
use crate::plot;
use crate::record::{FLOOR, Records};

const PAGE: &str = "docs/bench.md";
const README: &str = "README.md";

/// The name of the place in README.md that holds the rows of all experiments.
const ROWS: &str = "bench";

/// The most rows of an experiment in README.md.
const MAX_ROWS: usize = 6;

const HEADER: &str = "| experiment | case | Sidecore | beside | ratio | bound | revision |\n\
    | --- | --- | --- | --- | --- | --- | --- |\n";

/// A row of README.md: the case, and its number.
pub type Headline = (&'static str, Of<'static>);

/// Writes the results of an experiment into the documentation.
///
/// # Errors
/// A page cannot be read or written, or has no place for the results.
pub fn publish(records: &Records, report: &Report<'_>, checked: &[Checked]) -> Result<()> {
    let (name, Report { table, note, .. }) = (records.experiment(), report);
    let note = note.trim_end();
    let source = format!(
        "{note}\nMeasured by `cargo xtask bench {name}` at revision {}.",
        records.revision()
    );
    update(
        PAGE,
        &format!("bench: {name}"),
        &format!("{}\n\n{}", table.trim_end(), source.trim_start()),
    )?;
    let readme =
        std::fs::read_to_string(README).with_context(|| format!("cannot read {README}"))?;
    let rows = rows(records, report, checked);
    let old =
        pages::between(&readme, ROWS).with_context(|| format!("{README} has no place for rows"))?;
    update(README, ROWS, &replace_rows(old, name, &rows))?;
    (report.draw)(records)
}

/// Replaces the text of a named place of a page.
///
/// # Errors
/// As [`pages::update`].
pub fn update(page: &str, name: &str, text: &str) -> Result<()> {
    pages::update(Path::new(page), name, text).context("cannot publish")
}

/// The word for a verdict in tables; a failure stands out.
#[must_use]
pub fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "holds",
        Verdict::Fail => "**fails**",
        Verdict::Unknown => "unknown",
        Verdict::Missing => "not measured",
    }
}

/// The measured rows of an experiment.
fn rows(records: &Records, report: &Report<'_>, checked: &[Checked]) -> Vec<String> {
    let (ours, bounds) = report.bounds;
    let row = |(case, of): &Headline| {
        let (metric, peer) = match *of {
            Of::Ratio(metric, peer) => (metric, Some(peer)),
            Of::FloorRatio(metric) => (metric, Some(FLOOR)),
            Of::Ours(metric, _) => (metric, None),
        };
        let measure = records.find(case, ours, metric)?;
        let number = |value| number(value, &measure.unit);
        let cells = match peer {
            Some(peer) => {
                let ratio = records.find_ratio(case, metric, peer)?;
                let (this, other) = ratio.pair()?;
                format!("{} | {peer} {} | {:.2}", number(this), number(other), this / other)
            }
            None => format!("{} | |", number(measure.value)),
        };
        let is_of = |bound: &Bound<'_>| bound.case == *case && bound.of == *of;
        let bound = bounds.iter().position(is_of).and_then(|index| checked.get(index));
        let bound = bound
            .map_or(String::new(), |bound| format!("{}: {}", bound.limit, word(bound.verdict)));
        let (name, revision) = (records.experiment(), records.revision());
        let case = if metric.starts_with("latency") {
            format!("{case}, latency")
        } else {
            (*case).to_owned()
        };
        Some(format!(
            "| [{name}](docs/bench.md#{name}) | {case} | {cells} | {bound} | {revision} |"
        ))
    };
    report.headlines.iter().filter_map(row).take(MAX_ROWS).collect()
}

fn number(value: f64, unit: &str) -> String {
    match unit {
        "1/s" => plot::per_second(value),
        "ns" if value.abs() >= 1e4 => format!("{:.0} us", value / 1e3),
        "ns" if value.abs() >= 100.0 => format!("{value:.0} ns"),
        "ns" => format!("{value:.1} ns"),
        _ => format!("{value:.2} {unit}"),
    }
}

/// Replaces the rows of one experiment in the table of README.md, at their place.
fn replace_rows(table: &str, name: &str, rows: &[String]) -> String {
    let start = format!("| [{name}](");
    let old: Vec<&str> = table.lines().filter(|line| line.starts_with("| [")).collect();
    let at = old.iter().position(|row| row.starts_with(&start)).unwrap_or(old.len());
    let mut new = HEADER.to_owned();
    let (before, after) = old.split_at(at);
    let after = after.iter().filter(|row| !row.starts_with(&start)).copied();
    for row in before.iter().copied().chain(rows.iter().map(String::as_str)).chain(after) {
        let _ = writeln!(new, "{row}");
    }
    new
}

/// Fails unless a table of README.md has the format that this program writes.
#[cfg(test)]
fn check_rows(table: &str) -> Result<()> {
    use anyhow::ensure;
    ensure!(table.trim_start().starts_with(HEADER), "another header");
    let mut counts = std::collections::BTreeMap::new();
    for row in table.lines().filter(|line| line.starts_with("| [")) {
        let name = row.split(['[', ']']).nth(1).context("no experiment")?;
        *counts.entry(name).or_insert(0) += 1;
        ensure!(
            row.split('|').count()
                == HEADER.lines().next().map_or(0, |line| line.split('|').count()),
            "{row}"
        );
    }
    ensure!(
        counts.values().all(|count| *count <= MAX_ROWS),
        "more than {MAX_ROWS} rows: {counts:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::{Limit, check};
    use crate::record::{OURS, Params, params};

    #[test]
    fn rows_have_the_pair_of_their_ratio_and_say_how_the_bound_fared() {
        let mut records = Records::new("nested");
        records.measure("a", OURS, "iops", 9e6, "1/s", Params::new());
        let pair = params([("ours", 3e6.into()), ("theirs", 2e6.into())]);
        records.ratio("a", "iops", OURS, "peer", 1.6, pair);
        records.measure("b", OURS, "wait", 27.25, "ns", Params::new());
        let bounds = [
            Bound { case: "b", of: Of::Ours("wait", " ns"), limit: Limit::AtMost(30.0) },
            Bound { case: "a", of: Of::Ratio("iops", "peer"), limit: Limit::AtLeast(2.0) },
        ];
        let headlines = [
            ("a", Of::Ratio("iops", "peer")),
            ("b", Of::Ours("wait", " ns")),
            ("c", Of::Ours("wait", " ns")),
        ];
        let report = Report::new(String::new(), (OURS, &bounds), &headlines);
        let rows = rows(&records, &report, &check(&bounds, &records, OURS));
        let revision = records.revision();
        let expected = [
            format!(
                "| [nested](docs/bench.md#nested) | a | 3 M/s | peer 2 M/s | 1.50 | at least 2: \
                 **fails** | {revision} |"
            ),
            format!(
                "| [nested](docs/bench.md#nested) | b | 27.2 ns | | | at most 30 ns: holds | \
                 {revision} |"
            ),
        ];
        assert_eq!(rows, expected);
        check_rows(&replace_rows("", "nested", &rows)).unwrap();
    }

    #[test]
    fn the_rows_of_an_experiment_replace_its_old_ones_in_their_place() {
        let row = |name: &str, text: &str| format!("| [{name}](docs/bench.md#{name}) | {text} |");
        let table = format!(
            "{HEADER}{}\n{}\n{}\n{}\n",
            row("x", "1"),
            row("y", "1"),
            row("y", "2"),
            row("z", "1")
        );
        let changed = replace_rows(&table, "y", &[row("y", "3")]);
        assert_eq!(
            changed,
            format!("{HEADER}{}\n{}\n{}\n", row("x", "1"), row("y", "3"), row("z", "1"))
        );
        assert!(
            replace_rows(&table, "w", &[row("w", "1")]).ends_with(&format!("{}\n", row("w", "1")))
        );
    }

    #[test]
    fn the_pages_have_a_place_for_each_experiment() {
        let read = |page| {
            std::fs::read_to_string(format!("{}/../{page}", env!("CARGO_MANIFEST_DIR"))).unwrap()
        };
        let (readme, page) = (read(README), read(PAGE));
        check_rows(pages::between(&readme, ROWS).unwrap()).unwrap();
        assert!(pages::between(&readme, "bounds").is_some());
        let experiments = [
            "local-block",
            "translation",
            "nested",
            "vf-cost",
            "nvme-vf",
            "guest-cost",
            "fresh-writes",
            "shares",
            "stages",
            "remote-block",
            "remote-figures",
            "net-switch",
        ];
        for name in experiments
            .map(|name| format!("bench: {name}"))
            .iter()
            .chain([&"bench: bounds".to_owned()])
        {
            assert!(pages::between(&page, name).is_some(), "{name}");
        }
        assert!(readme.lines().count() <= 200, "README.md has {} lines", readme.lines().count());
    }
}
