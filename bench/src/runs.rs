//! The runs of one system in one case, and their records.

use crate::cores::Gated;
use crate::load::{Sample, Work};
use crate::record::{self, Params, Records};
use crate::rounds::{Pairs, Rounds};
use crate::stats;

/// A number of a sample that becomes a record.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The name of the metric in records.
    pub name: &'static str,
    /// The unit of the value.
    pub unit: &'static str,
    /// Whether the metric is measured only with a single request in flight.
    pub alone: bool,
    /// Takes the metric from a sample.
    pub value: fn(&Sample, &Work) -> f64,
}

const fn metric(
    name: &'static str,
    unit: &'static str,
    alone: bool,
    value: fn(&Sample, &Work) -> f64,
) -> Metric {
    Metric { name, unit, alone, value }
}

/// Requests a second.
pub const IOPS: Metric = metric("iops", "1/s", false, |sample, _| sample.iops);
/// Bytes a second.
pub const BANDWIDTH: Metric =
    metric("bandwidth", "B/s", false, |sample, work| sample.iops * f64::from(work.bytes));
/// The median latency.
pub const LATENCY_P50: Metric =
    metric("latency_p50", "ns", true, |sample, _| sample.latency_p50_ns);
/// The 99th percentile of the latency.
pub const LATENCY_P99: Metric =
    metric("latency_p99", "ns", true, |sample, _| sample.latency_p99_ns);
/// The 99.9th percentile of the latency.
pub const LATENCY_P999: Metric =
    metric("latency_p999", "ns", true, |sample, _| sample.latency_p999_ns);
/// The 99.99th percentile of the latency.
pub const LATENCY_P9999: Metric =
    metric("latency_p9999", "ns", true, |sample, _| sample.latency_p9999_ns);
/// The longest latency.
pub const LATENCY_MAX: Metric =
    metric("latency_max", "ns", true, |sample, _| sample.latency_max_ns);
/// The mean latency.
pub const LATENCY_MEAN: Metric =
    metric("latency_mean", "ns", true, |sample, _| sample.latency_mean_ns);
/// Notifications of the device (kicks) for each request.
pub const KICKS: Metric =
    metric("kicks_per_request", "1", false, |sample, _| sample.kicks_per_request);
/// Interrupts for each request.
pub const INTERRUPTS: Metric =
    metric("interrupts_per_request", "1", false, |sample, _| sample.interrupts_per_request);

/// Frames a second.
pub const PACKETS: Metric = metric("packets", "1/s", false, |sample, _| sample.iops);
/// Bytes of frames a second.
pub const BYTES: Metric = Metric { name: "bytes", ..BANDWIDTH };

/// The metrics whose ratio is recorded.
const RATIOS: [Metric; 2] = [IOPS, LATENCY_P50];

/// The runs of one system in one case, a run for each round.
#[derive(Clone, Debug, Default)]
pub struct Runs(Vec<Gated<Sample>>);

impl Runs {
    /// Adds the run of a round.
    pub fn add(&mut self, run: Gated<Sample>) {
        self.0.push(run);
    }

    /// All runs in order.
    #[must_use]
    pub fn all(&self) -> &[Gated<Sample>] {
        &self.0
    }

    /// Takes one number from each run.
    pub fn rounds(&self, value: impl Fn(&Sample) -> f64) -> Rounds {
        let mut rounds = Rounds::new();
        self.0.iter().for_each(|run| rounds.add(value(&run.result), run.counts()));
        rounds
    }

    /// Compares each run with the peer's run of the same round.
    pub(crate) fn compared(
        &self,
        peer: &Self,
        compare: impl Fn(&Sample, &Sample) -> f64,
    ) -> Rounds {
        let mut rounds = Rounds::new();
        for (ours, peer) in self.0.iter().zip(&peer.0) {
            rounds.add(compare(&ours.result, &peer.result), ours.counts() && peer.counts());
        }
        rounds
    }

    /// The median of the round trips before and after each run.
    #[must_use]
    pub fn line_ns(&self) -> f64 {
        stats::median(
            &self.0.iter().flat_map(|run| [run.before_ns, run.after_ns]).collect::<Vec<_>>(),
        )
    }

    /// The median share of the time that was spent waiting for a core.
    #[must_use]
    pub fn waited_share(&self) -> f64 {
        stats::median(&self.0.iter().map(|run| run.waited_share).collect::<Vec<_>>())
    }

    /// The parameters of every record of these runs: `more`, the load, and the disturbance.
    #[must_use]
    pub fn params(&self, work: &Work, mut more: Params) -> Params {
        more.extend(record::params([
            ("depth", work.depth.into()),
            ("run_ms", (work.duration.as_millis() as u64).into()),
            ("line_ns", self.line_ns().into()),
            ("waited_share", self.waited_share().into()),
        ]));
        more
    }

    /// The median of a metric, and `params` with its spread.
    #[must_use]
    pub fn settle(&self, metric: &Metric, work: &Work, params: Params) -> (f64, Params) {
        self.rounds(|sample| (metric.value)(sample, work)).settle(params)
    }
}

/// A system's name and its runs.
pub type Named<'a> = (&'a str, &'a Runs);

/// Records the ratios of one system to another; `is_alone` if a single request was in flight.
pub fn record_ratios(
    records: &mut Records,
    case: &str,
    work: &Work,
    is_alone: bool,
    (ours, our_runs): Named<'_>,
    (peer, peer_runs): Named<'_>,
) {
    let metrics = RATIOS.iter().filter(|metric| is_alone || !metric.alone);
    record_ratios_of(records, case, work, metrics, (ours, our_runs), (peer, peer_runs));
}

/// Records the ratios of these metrics of one system to another.
pub fn record_ratios_of<'a>(
    records: &mut Records,
    case: &str,
    work: &Work,
    metrics: impl IntoIterator<Item = &'a Metric>,
    (ours, our_runs): Named<'_>,
    (peer, peer_runs): Named<'_>,
) {
    for metric in metrics {
        let value = |sample: &Sample| (metric.value)(sample, work);
        let mut pairs = Pairs::default();
        for (ours, peer) in our_runs.0.iter().zip(&peer_runs.0) {
            pairs.add(value(&ours.result), value(&peer.result), ours.counts() && peer.counts());
        }
        let (median, params) = pairs.settle(Params::new());
        records.ratio(case, metric.name, ours, peer, median, params);
    }
}

/// The metric of the nanoseconds by which a request takes longer than a peer's.
pub const ADDED: &str = "added_ns";

/// Records the time that a request takes beyond a peer's, by the requests a second of each round.
pub fn record_added(
    records: &mut Records,
    case: &str,
    (ours, our_runs): Named<'_>,
    (_, peer_runs): Named<'_>,
) {
    let request_ns = |sample: &Sample| 1e9 / sample.iops;
    let added = our_runs.compared(peer_runs, |ours, peer| request_ns(ours) - request_ns(peer));
    let (median, params) = added.settle(Params::new());
    records.measure(case, ours, ADDED, median, "ns", params);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;

    fn runs(iops: &[f64], before_ns: f64) -> Runs {
        let run = |iops: &f64| Gated {
            result: Sample { iops: *iops, latency_p50_ns: 1e9 / iops, ..Sample::default() },
            before_ns,
            after_ns: before_ns + 2.0,
            waited_share: 0.0,
        };
        Runs(iops.iter().map(run).collect())
    }

    #[test]
    fn ratios_are_of_rounds_and_count_if_both_do() {
        let (ours, peer) = (runs(&[2.0, 30.0, 8.0], 50.0), runs(&[1.0, 10.0, 2.0], 1e6));
        let mut records = Records::new("e");
        let work = Work::default();
        record_ratios(&mut records, "c", &work, true, ("ours", &ours), ("peer", &peer));
        let ratio = records.find_ratio("c", "iops", "peer").unwrap();
        assert_eq!((ratio.value, ratio.pair()), (3.0, Some((30.0, 10.0))));
        assert_eq!(records.find_ratio("c", "iops", "peer").unwrap().params["counts"], false);
        assert!(
            (records.find_ratio("c", "latency_p50", "peer").unwrap().value - 1.0 / 3.0).abs()
                < 1e-9
        );
        record_ratios(&mut records, "d", &work, false, ("ours", &ours), ("ours", &ours));
        let of_d = records
            .all()
            .iter()
            .filter(|record| matches!(record, Record::Ratio(ratio) if ratio.case == "d"));
        assert_eq!(of_d.count(), 1);
        record_added(&mut records, "f", ("ours", &ours), ("peer", &runs(&[4.0, 5.0, 4.0], 50.0)));
        let added = records.find("f", "ours", ADDED).unwrap();
        assert_eq!(
            (added.value, &added.params["min"], &added.params["max"]),
            (-125e6, &(-1e9 / 6.0).into(), &250e6.into())
        );
        assert_eq!(
            (ours.line_ns(), (BANDWIDTH.value)(&ours.all()[0].result, &work)),
            (51.0, 8192.0)
        );
    }
}
