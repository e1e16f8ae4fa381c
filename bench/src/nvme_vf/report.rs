//! The table of the results.

use std::fmt::Write as _;

use super::{NVME, VIRTIO};
use crate::record::{Record, Records};
use crate::{cells, peer};

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page = format!(
        "| 4 KiB | nvme, median | to virtio-blk | to {} | completions per interrupt |\n",
        peer::NAME
    );
    page.push_str("| --- | --- | --- | --- | --- |\n");
    for record in records.all() {
        let Record::Measure(measure) = record else { continue };
        if measure.system != NVME || measure.metric != "iops" {
            continue;
        }
        let case = &measure.case;
        let nvme = cells::requests(records, case, NVME);
        let [to_virtio, to_theirs] =
            [VIRTIO, peer::NAME].map(|system| cells::ratio(records, case, system));
        let calls = [NVME, VIRTIO]
            .map(|system| records.find(case, system, "completions_per_interrupt"))
            .into_iter()
            .flatten()
            .map(|measure| format!("{:.1}", measure.value))
            .collect::<Vec<_>>()
            .join(", virtio-blk ");
        let _ = writeln!(page, "| {case} | {nvme} | {to_virtio} | {to_theirs} | {calls} |");
    }
    page
}
