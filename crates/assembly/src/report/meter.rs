//! Reports of meters.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_block::{Meter, MeterCounts};
use sidecore_telemetry::Counts as _;

/// The counts of the meters of one name, since their stores were opened.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct MeterReport {
    /// The meters' name: that of the store, unless the stage has another one.
    pub name: String,
    /// The counters.
    #[serde(flatten)]
    pub counts: MeterCounts,
}

impl MeterReport {
    /// Reads meters. A meter that several devices lead to is counted once.
    pub(crate) fn all(meters: impl Iterator<Item = Arc<Meter>>) -> Vec<Self> {
        let mut seen = BTreeSet::new();
        let mut sums: BTreeMap<String, MeterCounts> = BTreeMap::new();
        for meter in meters {
            if seen.insert(Arc::as_ptr(&meter).addr()) {
                sums.entry(meter.name().to_owned()).or_default().add(&meter.counts());
            }
        }
        sums.into_iter().map(|(name, counts)| Self { name, counts }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meters_of_one_name_are_added_and_a_shared_one_is_counted_once() {
        let counted = |name: &str, flushes: u64| {
            let meter = Arc::new(Meter::new(name));
            let stats = meter.open_channel();
            stats.flushes.add(flushes);
            meter
        };
        let (shared, other, apart) = (counted("t7", 1), counted("t7", 10), counted("disk", 100));
        let meters = [&shared, &apart, &shared, &other, &apart].map(Arc::clone);
        let reports = MeterReport::all(meters.into_iter());
        let shown = reports.iter().map(|report| (report.name.as_str(), report.counts.flushes));
        assert_eq!(shown.collect::<Vec<_>>(), [("disk", 100), ("t7", 11)]);
    }
}
