//! The results in a table.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::{NAME, NVME, VIRTIO};
use crate::record::{Record, Records};
use crate::{peer, plot, readme};

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page =
        format!("| 4 KiB | nvme | virtio-blk | ratio | {} | ratio | completions per interrupt |\n", peer::NAME);
    page.push_str("| --- | --- | --- | --- | --- | --- | --- |\n");
    for record in records.all() {
        let Record::Measure(measure) = record else { continue };
        if measure.system != NVME || measure.metric != "iops" {
            continue;
        }
        let case = &measure.case;
        let [nvme, virtio, theirs] = [NVME, VIRTIO, peer::NAME].map(|system| cell(records, case, system));
        let [to_virtio, to_theirs] = [VIRTIO, peer::NAME].map(|system| ratio(records, case, system));
        let calls = [NVME, VIRTIO]
            .map(|system| records.find(case, system, "completions_per_interrupt"))
            .into_iter()
            .flatten()
            .map(|measure| format!("{:.1}", measure.value))
            .collect::<Vec<_>>()
            .join(", virtio-blk ");
        let _ = writeln!(page, "| {case} | {nvme} | {virtio} | {to_virtio} | {theirs} | {to_theirs} | {calls} |");
    }
    page
}

/// Requests a second, and the median latency where it was measured.
fn cell(records: &Records, case: &str, system: &str) -> String {
    let Some(iops) = records.find(case, system, "iops") else { return String::new() };
    let latency = records.find(case, system, "latency_p50");
    let latency = latency.map_or(String::new(), |latency| format!(", {:.2} us", latency.value / 1e3));
    format!("{}{latency}", plot::per_second(iops.value))
}

fn ratio(records: &Records, case: &str, system: &str) -> String {
    records.find_ratio(case, "iops", system).map_or(String::new(), |ratio| {
        let counts = ratio.params.get("counts").and_then(serde_json::Value::as_bool).unwrap_or(true);
        format!("{:.2}x{}", ratio.value, if counts { "" } else { " (disturbed)" })
    })
}

/// Writes the table into the README.
pub(super) fn publish(records: &Records) -> Result<()> {
    let note = format!("\nMeasured by `cargo xtask bench {NAME}` at revision {}.\n", records.revision());
    readme::update(Path::new("README.md"), NAME, &(table(records) + &note))
}
