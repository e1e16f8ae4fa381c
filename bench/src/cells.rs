//! Cells that the experiments' tables have in common.

use crate::plot;
use crate::record::{self, Records};

/// Formats requests a second, and the median latency if it was measured.
#[must_use]
pub fn requests(records: &Records, case: &str, system: &str) -> String {
    let Some(iops) = records.find(case, system, "iops") else { return String::new() };
    let latency = records.find(case, system, "latency_p50");
    let latency =
        latency.map_or(String::new(), |latency| format!(", {:.2} us", latency.value / 1e3));
    format!("{}{latency}", plot::per_second(iops.value))
}

/// Formats the ratio of requests a second to a peer's: both numbers of the median round and their
/// ratio, with a remark if the ratio does not count.
#[must_use]
pub fn ratio(records: &Records, case: &str, peer: &str) -> String {
    let Some(ratio) = records.find_ratio(case, "iops", peer) else { return String::new() };
    let disturbed = if record::counts(&ratio.params) { "" } else { " (disturbed)" };
    match ratio.pair() {
        Some((ours, theirs)) => {
            let [of, to] = [ours, theirs].map(plot::per_second);
            format!("{of} : {to} = {:.2}{disturbed}", ours / theirs)
        }
        None => format!("{:.2}{disturbed}", ratio.value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{OURS, Params, params};

    #[test]
    fn cells_show_measured_numbers() {
        let mut records = Records::new("e");
        records.measure("a", OURS, "iops", 5e5, "1/s", Params::new());
        records.ratio("a", "iops", OURS, "peer", 1.5, params([("counts", false.into())]));
        assert_eq!(requests(&records, "a", OURS), "500 k/s");
        records.measure("a", OURS, "latency_p50", 2000.0, "ns", Params::new());
        assert_eq!(requests(&records, "a", OURS), "500 k/s, 2.00 us");
        assert_eq!(requests(&records, "b", OURS), "");
        assert_eq!(ratio(&records, "a", "peer"), "1.50 (disturbed)");
        assert_eq!(ratio(&records, "a", "floor"), "");
        records.ratio(
            "b",
            "iops",
            OURS,
            "peer",
            1.6,
            params([("ours", 3e6.into()), ("theirs", 2e6.into())]),
        );
        assert_eq!(ratio(&records, "b", "peer"), "3 M/s : 2 M/s = 1.50");
    }
}
