//! The table and the picture of the results.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::{contended, idle};
use crate::plot::{Bar, Chart, Group};
use crate::record::{FLOOR, OURS, Record, Records};
use crate::{cells, peer};

const PICTURE: &str = "docs/bench/local-block.svg";

/// The cases of the matrix, in the order in which they were measured.
fn cases(records: &Records) -> Vec<String> {
    let is_ours = |record: &Record| match record {
        Record::Measure(m) if m.system == OURS && m.metric == "iops" => Some(m.case.clone()),
        _ => None,
    };
    records.all().iter().filter_map(is_ours).collect()
}

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page = String::new();
    let cases = cases(records);
    if !cases.is_empty() {
        page.push_str(
            "| 4 KiB, one queue | sidecored, median | to qemu-storage-daemon | to the floor |\n",
        );
        page.push_str("| --- | --- | --- | --- |\n");
    }
    for case in &cases {
        let ours = cells::requests(records, case, OURS);
        let [theirs, floor] = [peer::NAME, FLOOR].map(|peer| cells::ratio(records, case, peer));
        let _ = writeln!(page, "| {case} | {ours} | {theirs} | {floor} |");
    }
    page.push_str(&smaller(records));
    page
}

/// Formats the smaller experiments, a line each.
fn smaller(records: &Records) -> String {
    let mut rows = String::new();
    let mut row = |name: &str, case: &str, system: &str, metric: &str| {
        if let Some(measure) = records.find(case, system, metric) {
            let _ = writeln!(rows, "| {name} | {} {} |", number(measure.value), measure.unit);
        }
    };
    row(
        "idle devices (256) on the same sidecore add to a request",
        idle::NEIGHBOURS,
        OURS,
        "added_latency",
    );
    row("an idle adaptive daemon uses of a core", idle::CPU, OURS, "cpu_share");
    row("the first request after a sleep takes", idle::WAKE, OURS, "latency_p50");
    row("floor: round trip of a cache line", "floor/one-line", FLOOR, "round_trip");
    row("floor: round trip by two cache lines", "floor/two-lines", FLOOR, "round_trip");
    row("floor: round trip by eventfds, spinning", "floor/eventfd-spinning", FLOOR, "round_trip");
    row("floor: round trip by eventfds, blocking", "floor/eventfd-blocking", FLOOR, "round_trip");
    row("floor: copy of 4 KiB out of the arena", "floor/copy-out-of-arena", FLOOR, "copy");
    row("floor: copy of 4 KiB into the arena", "floor/copy-into-arena", FLOOR, "copy");
    row(
        "the same by the ram store's own loop: out",
        "floor/copy-out-of-arena",
        FLOOR,
        "store_copy",
    );
    row("the same by the ram store's own loop: into", "floor/copy-into-arena", FLOOR, "store_copy");
    for case in contended::CASES {
        for system in [OURS, contended::INTERRUPT] {
            row(
                &format!("median with a busy thread on each core, {case}, {system}"),
                case,
                system,
                "latency_p50",
            );
        }
    }
    for record in records.all() {
        if let Record::Measure(measure) = record
            && measure.case.starts_with("breakdown/")
        {
            let _ = writeln!(
                rows,
                "| one request: {} | {} ns |",
                measure.metric.replace('_', " "),
                number(measure.value)
            );
        }
    }
    if rows.is_empty() { rows } else { format!("\n| what else | |\n| --- | --- |\n{rows}") }
}

fn number(value: f64) -> String {
    if value.abs() >= 10.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// The note below the table: the version of the peer.
pub(super) fn note(records: &Records) -> String {
    let version = records.all().iter().find_map(|record| match record {
        Record::Measure(measure) if measure.system == peer::NAME => {
            measure.params.get("version").and_then(|version| version.as_str()).map(str::to_owned)
        }
        _ => None,
    });
    version.map_or(String::new(), |version| format!("{} has version {version}. ", peer::NAME))
}

pub(super) fn draw(records: &Records) -> Result<()> {
    if let Some(directory) = Path::new(PICTURE).parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(PICTURE, chart(records).to_svg())
        .with_context(|| format!("cannot write {PICTURE}"))
}

fn chart(records: &Records) -> Chart {
    let bar = |case: &String, system: &str, series: usize| {
        records.find(case, system, "iops").map(|measure| Bar { series, value: measure.value })
    };
    let group = |case: String| Group {
        bars: [bar(&case, OURS, 0), bar(&case, peer::NAME, 1), bar(&case, FLOOR, 2)]
            .into_iter()
            .flatten()
            .collect(),
        name: case,
    };
    Chart {
        title:
            "Requests of 4 KiB a second, one queue, client and server on a core each (logarithmic)"
                .to_owned(),
        series: [OURS, peer::NAME, "floor: the copy alone"].map(str::to_owned).to_vec(),
        groups: cases(records).into_iter().map(group).collect(),
    }
}
