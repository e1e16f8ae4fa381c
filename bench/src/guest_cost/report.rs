//! The results in a table.

use std::fmt::Write as _;

use anyhow::Result;

use super::{BEFORE, NAME};
use crate::record::{FLOOR, OURS, Record, Records};
use crate::{cells, readme};

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let is_floor = |record: &Record| match record {
        Record::Measure(measure) if measure.system == FLOOR && measure.metric == "client_ns" => {
            Some(measure.case.clone())
        }
        _ => None,
    };
    let cases: Vec<String> = records.all().iter().filter_map(is_floor).collect();
    let with_before = cases.iter().any(|case| records.find(case, BEFORE, "client_ns").is_some());
    let more = if with_before { " before | requests | p50 | p99 |" } else { "" };
    let mut page = format!("| the client's ns a request | floor | sidecored | requests of the floor's |{more}\n");
    let columns = if with_before { 8 } else { 4 };
    let _ = writeln!(page, "|{}", " --- |".repeat(columns));
    for case in &cases {
        let [floor, ours, before] = [FLOOR, OURS, BEFORE].map(|system| {
            records.find(case, system, "client_ns").map_or(String::new(), |measure| format!("{:.0}", measure.value))
        });
        let _ = write!(page, "| {case} | {floor} | {ours} | {} |", cells::ratio(records, case, FLOOR, ""));
        if with_before {
            let [iops, p50, p99] = ["iops", "latency_p50", "latency_p99"].map(|metric| {
                records.find_ratio(case, metric, BEFORE).map_or(String::new(), |ratio| format!("{:.2}x", ratio.value))
            });
            let _ = write!(page, " {before} | {iops} | {p50} | {p99} |");
        }
        page.push('\n');
    }
    page
}

/// Writes the table into the README.
pub(super) fn publish(records: &Records) -> Result<()> {
    let source = readme::source(NAME, records);
    readme::update(NAME, &format!("{}\n{source}.\n", table(records)))
}
