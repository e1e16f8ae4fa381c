//! The table of the results.

use std::fmt::Write as _;

use crate::cells;
use crate::record::{FLOOR, OURS, Record, Records};

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let is_floor = |record: &Record| match record {
        Record::Measure(measure) if measure.system == FLOOR && measure.metric == "client_ns" => {
            Some(measure.case.clone())
        }
        _ => None,
    };
    let cases: Vec<String> = records.all().iter().filter_map(is_floor).collect();
    let mut page = String::from(
        "| the client's ns a request, medians | floor | sidecored | requests to the floor's |\n",
    );
    page.push_str("| --- | --- | --- | --- |\n");
    for case in &cases {
        let [floor, ours] = [FLOOR, OURS].map(|system| {
            records
                .find(case, system, "client_ns")
                .map_or(String::new(), |measure| format!("{:.0}", measure.value))
        });
        let _ = writeln!(
            page,
            "| {case} | {floor} | {ours} | {} |",
            cells::ratio(records, case, FLOOR)
        );
    }
    page
}
