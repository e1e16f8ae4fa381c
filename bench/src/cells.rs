//! Cells that the experiments' tables have in common.

use crate::plot;
use crate::record::{self, Records};

/// Requests a second, and the median latency where it was measured.
#[must_use]
pub fn requests(records: &Records, case: &str, system: &str) -> String {
    let Some(iops) = records.find(case, system, "iops") else { return String::new() };
    let latency = records.find(case, system, "latency_p50");
    let latency = latency.map_or(String::new(), |latency| format!(", {:.2} us", latency.value / 1e3));
    format!("{}{latency}", plot::per_second(iops.value))
}

/// The ratio of requests a second to a peer's, `unit` after it; and whether it does not count.
#[must_use]
pub fn ratio(records: &Records, case: &str, peer: &str, unit: &str) -> String {
    records.find_ratio(case, "iops", peer).map_or(String::new(), |ratio| {
        format!("{:.2}{unit}{}", ratio.value, if record::counts(&ratio.params) { "" } else { " (disturbed)" })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{OURS, Params, params};

    #[test]
    fn cells_say_what_there_is() {
        let mut records = Records::new("e");
        records.measure("a", OURS, "iops", 5e5, "1/s", Params::new());
        records.ratio("a", "iops", OURS, "peer", 1.5, params([("counts", false.into())]));
        assert_eq!(requests(&records, "a", OURS), "500 k/s");
        records.measure("a", OURS, "latency_p50", 2000.0, "ns", Params::new());
        assert_eq!(requests(&records, "a", OURS), "500 k/s, 2.00 us");
        assert_eq!(requests(&records, "b", OURS), "");
        assert_eq!(ratio(&records, "a", "peer", "x"), "1.50x (disturbed)");
        assert_eq!(ratio(&records, "a", "floor", ""), "");
    }
}
