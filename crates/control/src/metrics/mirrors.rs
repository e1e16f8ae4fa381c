//! The metrics of mirrors.

use sidecore_assembly::report::{LegWord, MirrorReport, MirrorState};
use sidecore_telemetry::{Metric, Value};

use super::{Page, counter, gauge};

const MIRRORS: &[Metric<MirrorReport>] = &[
    gauge("waiting", "1 while its requests wait for legs or for a permission.", |mirror| {
        Value::Whole((mirror.state == MirrorState::Waiting).into())
    }),
    gauge("refused", "1 if it could not be opened, so that no guest can use it.", |mirror| {
        Value::Whole((mirror.state == MirrorState::Refused).into())
    }),
    gauge("dirty_regions", "Regions in which its legs may differ.", |mirror| {
        Value::Whole(mirror.dirty_regions)
    }),
    gauge("to_copy_bytes", "Bytes that are still to be copied to a leg.", |mirror| {
        let left = mirror.legs.iter().map(|leg| leg.to_copy_bytes);
        Value::Whole(left.fold(0, u64::saturating_add))
    }),
    counter("copied_bytes_total", "Bytes copied to legs that were away.", |mirror| {
        Value::Whole(mirror.copied_bytes)
    }),
    counter("leg_failures_total", "Times that a leg has failed.", |mirror| {
        Value::Whole(mirror.leg_failures)
    }),
    counter(
        "retried_reads_total",
        "Reads that one leg has failed and another one answered.",
        |mirror| Value::Whole(mirror.retried_reads),
    ),
];

const LEGS_HELP: &str = "Legs and configured stores in each state: `in-sync`, `copying` (being \
                         copied to), `behind` (waits for a copy), `failed`, `missing` (its store \
                         is not there), `out` (the store is no leg).";

impl Page {
    pub(super) fn mirrors(&mut self, mirrors: &[MirrorReport]) {
        self.family("sidecore_mirror_legs", "gauge", LEGS_HELP);
        for mirror in mirrors {
            for state in LegWord::ALL {
                let count = mirror.legs.iter().filter(|leg| leg.state == state).count();
                let labels = [("mirror", mirror.name.as_str()), ("state", state.word())];
                self.sample("sidecore_mirror_legs", &labels, Value::Whole(count as u64));
            }
        }
        let labelled =
            mirrors.iter().map(|mirror| (vec![("mirror", mirror.name.as_str())], mirror));
        self.metrics("sidecore_mirror_", MIRRORS, labelled);
    }
}
