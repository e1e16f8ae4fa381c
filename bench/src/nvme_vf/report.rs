//! The results in a table.

use std::fmt::Write as _;

use anyhow::Result;

use super::{NAME, NVME, VIRTIO};
use crate::record::{Record, Records};
use crate::{cells, peer, readme};

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
        let [nvme, virtio, theirs] = [NVME, VIRTIO, peer::NAME].map(|system| cells::requests(records, case, system));
        let [to_virtio, to_theirs] = [VIRTIO, peer::NAME].map(|system| cells::ratio(records, case, system, "x"));
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

/// Writes the table into the README.
pub(super) fn publish(records: &Records) -> Result<()> {
    let source = readme::source(NAME, records);
    readme::update(NAME, &format!("{}\n{source}.\n", table(records)))
}
