//! The table of the results.

use std::fmt::Write as _;

use super::{ALONE, BYTES, OVERLAPPED};
use crate::record::{OURS, Record, Records};

/// The cases, in the order of their measurement.
fn cases(records: &Records) -> Vec<String> {
    let mut cases: Vec<String> = Vec::new();
    for record in records.all() {
        if let Record::Measure(measure) = record
            && !cases.contains(&measure.case)
        {
            cases.push(measure.case.clone());
        }
    }
    cases
}

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page = String::from(
        "| translation | one after the other | independent | bytes an extent | an update |\n",
    );
    page.push_str("| --- | --- | --- | --- | --- |\n");
    for case in cases(records) {
        let cell = |metric: &str| {
            let found = records.find(&case, OURS, metric);
            found.map_or(String::new(), |measure| match measure.unit.as_str() {
                "ns" if measure.value >= 100.0 => format!("{:.0} ns", measure.value),
                "ns" => format!("{:.1} ns", measure.value),
                _ => format!("{:.1}", measure.value),
            })
        };
        let cells = [ALONE, OVERLAPPED, BYTES, "update"].map(cell);
        let _ = writeln!(page, "| {case} | {} |", cells.join(" | "));
    }
    page
}
