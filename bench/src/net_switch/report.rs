//! The table of the results.

use std::fmt::Write as _;

use super::{NO_RULES, ONE_FLOW, OVS, TESTPMD};
use crate::plot;
use crate::record::{self, OURS, Record, Records};

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page = String::from(
        "| case | sidecored, median | p50, p99, p99.9, p99.99 | beside |\n\
         | --- | --- | --- | --- |\n",
    );
    for record in records.all() {
        let Record::Measure(measure) = record else { continue };
        if measure.system != OURS || measure.metric != "packets" {
            continue;
        }
        let case = &measure.case;
        let latencies = ["latency_p50", "latency_p99", "latency_p999", "latency_p9999"];
        let latencies: Vec<String> = latencies
            .iter()
            .filter_map(|metric| records.find(case, OURS, metric))
            .map(|measure| format!("{:.2} us", measure.value / 1e3))
            .collect();
        let is_round_trip = !latencies.is_empty();
        let bytes = records.find(case, OURS, "bytes").map_or(0.0, |measure| measure.value);
        let beside: Vec<String> = [OVS, TESTPMD, ONE_FLOW, NO_RULES]
            .iter()
            .filter_map(|peer| ratio(records, case, peer, is_round_trip))
            .collect();
        let _ = writeln!(
            page,
            "| {case} | {}, {:.2} GB/s | {} | {} |",
            plot::per_second(measure.value),
            bytes / 1e9,
            latencies.join(", "),
            beside.join("; ")
        );
    }
    page
}

fn ratio(records: &Records, case: &str, peer: &str, is_round_trip: bool) -> Option<String> {
    let metric = if is_round_trip { "latency_p50" } else { "packets" };
    let ratio = records.find_ratio(case, metric, peer)?;
    let disturbed = if record::counts(&ratio.params) { "" } else { " (disturbed)" };
    let (ours, theirs) = ratio.pair()?;
    let number = |value: f64| {
        if is_round_trip { format!("{:.2} us", value / 1e3) } else { plot::per_second(value) }
    };
    let tail = records.find_ratio(case, "latency_p99", peer).filter(|_| is_round_trip);
    let tail = tail.map_or(String::new(), |tail| format!(", p99 {:.2}", tail.value));
    let value = ours / theirs;
    Some(format!("{peer} {} : {} = {value:.2}{tail}{disturbed}", number(ours), number(theirs)))
}
