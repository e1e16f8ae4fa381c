//! The table of the results.

use std::fmt::Write as _;

use super::{
    HANDOVER, LOCAL, LOSSLESS, ONE_CLIENT, P99_ROUND_TRIPS, PLAIN, UNFLOODED, breakdown, nbd,
};
use crate::record::{FLOOR, OURS, Record, Records};
use crate::{cells, peer};

const PEERS: [&str; 9] =
    [LOCAL, HANDOVER, FLOOR, nbd::NBDKIT, peer::NAME, ONE_CLIENT, PLAIN, LOSSLESS, UNFLOODED];

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page = String::from(
        "| case | remote, median | p99, p99.9, most | beside |\n| --- | --- | --- | --- |\n",
    );
    for record in records.all() {
        let Record::Measure(measure) = record else { continue };
        if measure.system != OURS || measure.metric != "iops" {
            continue;
        }
        let case = &measure.case;
        let latency = |metric| {
            let found = records.find(case, OURS, metric);
            found.map(|measure| format!("{:.2} us", measure.value / 1e3))
        };
        let tail = ["latency_p99", "latency_p999", "latency_max"].map(latency);
        let tail: Vec<String> = tail.into_iter().flatten().collect();
        let ratio = |peer: &&str| {
            let cell = cells::ratio(records, case, peer);
            (!cell.is_empty()).then(|| format!("{peer} {cell}"))
        };
        let mut peers: Vec<String> = PEERS.iter().filter_map(ratio).collect();
        let trips = records.find(case, OURS, P99_ROUND_TRIPS).map(|measure| measure.value);
        peers.extend(trips.map(|trips| format!("p99 within {trips:.1} round trips")));
        let remote = cells::requests(records, case, OURS);
        let _ =
            writeln!(page, "| {case} | {remote} | {} | {} |", tail.join(", "), peers.join("; "));
    }
    let _ = writeln!(page, "\n{}", breakdown::table(records).trim_end());
    page
}
