//! The counters in Prometheus' text format.
//!
//! The tables of docs/metrics.md are made from this page: a test compares them, and
//! `cargo xtask metrics` rewrites them.

mod controllers;
mod mirrors;
mod remote;
mod schedules;
mod switches;

use std::fmt::{self, Write as _};

use sidecore_assembly::report::{
    ControllerReport, DeviceReport, DeviceState, MirrorReport, QueueCounters, RecordingReport,
    RemoteReport, ScheduleReport, SidecoreReport, StageStats, Stats, SwitchReport,
};
use sidecore_telemetry::{Counts, HistogramMetric, Kind, Metric, Value};

/// The content type that Prometheus expects.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Declares a gauge of a report. Counters have their metrics from their declaration.
const fn gauge<T>(name: &'static str, help: &'static str, value: fn(&T) -> Value) -> Metric<T> {
    Metric { field: "", name: Some(name), kind: Kind::Gauge, help, value }
}

const fn counter<T>(name: &'static str, help: &'static str, value: fn(&T) -> Value) -> Metric<T> {
    Metric { field: "", name: Some(name), kind: Kind::Counter, help, value }
}

const SIDECORES: &[Metric<SidecoreReport>] = &[
    gauge(
        "core_contended",
        "1 while other work takes its core: it pauses between polls of its disks, and `sidecore \
         list` says so.",
        |s| Value::Whole(s.warning.is_some().into()),
    ),
    gauge(
        "utilisation_ratio",
        "0 to 1: the share of its lifetime that was spent in rounds in which something was done.",
        |s| Value::Real(s.utilisation),
    ),
];

const DEVICES: &[Metric<DeviceReport>] = &[
    gauge("capacity_bytes", "Size of the disk.", |d| Value::Whole(d.capacity_bytes)),
    gauge("queues_running", "Request queues that the guest has started.", |d| {
        Value::Whole(d.queues_running.into())
    }),
    gauge(
        "warnings",
        "Warnings that `sidecore list` shows for the disk: it is served, but not as it should be.",
        |d| Value::Whole(d.warnings.len() as u64),
    ),
    gauge(
        "needs_reset",
        "1 while nothing is served until the guest's driver resets the device.",
        |d| Value::Whole(d.needs_reset.into()),
    ),
];

const STAGES: &[Metric<StageStats>] = &[
    gauge(
        "failed",
        "1 if the stage has failed, by a panic for instance: all requests of its disk fail.",
        |stage| Value::Whole(stage.has_failed.into()),
    ),
    gauge(
        "longest_turn_seconds",
        "The longest time that the stage took of a turn; 0 if that was never over a millisecond.",
        |stage| Value::seconds(stage.longest_turn_ns),
    ),
    gauge(
        "threads",
        "Threads of its own that the stage runs on; 0 if it runs on sidecores.",
        |stage| Value::Whole(stage.threads as u64),
    ),
    counter(
        "threads_ran_seconds_total",
        "Time for which these threads have run, also without work.",
        |stage| Value::seconds(stage.threads_ran_ns),
    ),
];

const RECORDINGS: &[Metric<RecordingReport>] = &[
    gauge("file_bytes", "Size of the file of the recording.", |it| Value::Whole(it.file_bytes)),
    gauge("full", "1 if the file has its largest size: no more requests are recorded.", |it| {
        Value::Whole(it.is_full.into())
    }),
    gauge("failed", "1 if the file cannot be written: `sidecore list` has the reason.", |it| {
        Value::Whole(it.problem.is_some().into())
    }),
];

const STATE_HELP: &str = "1 for the state that the disk is in, 0 for the others: `waiting` (no \
                          VMM), `connected` (a VMM, and no queue started), `running`, `broken`, \
                          `opening` (its store does not answer yet), `refused` (its store could \
                          not be opened), `starting` (the kernel does not show its block device \
                          yet).";

/// The upper ends of a histogram's buckets, as exponents of two: from 255 ns, doubling, to 17 s.
/// Each end is one nanosecond less than the power of two, where buckets of the sidecores' own
/// histograms end as well.
const LATENCY_BOUNDS: std::ops::RangeInclusive<u32> = 8..=34;

/// Writes all metrics of this moment; with `per_queue` also those of each queue that its guest has
/// used.
pub(crate) fn render(
    stats: &Stats,
    devices: &[DeviceReport],
    controllers: &[ControllerReport],
    remote: &RemoteReport,
    (switches, schedules, mirrors): (&[SwitchReport], &[ScheduleReport], &[MirrorReport]),
    per_queue: bool,
) -> String {
    let mut page = Page(String::new());
    page.family("sidecore_build_info", "gauge", "Always 1; the version is the label.");
    page.sample("sidecore_build_info", &[("version", env!("CARGO_PKG_VERSION"))], Value::Whole(1));
    page.family("sidecore_uptime_seconds", "gauge", "Time since the daemon was started.");
    page.sample("sidecore_uptime_seconds", &[], Value::seconds(stats.uptime_ns));
    let sidecores = || {
        stats
            .sidecores
            .iter()
            .map(|sidecore| (vec![("sidecore", sidecore.name.as_str())], sidecore))
    };
    page.counts(
        "sidecore_reactor_",
        sidecores().map(|(labels, sidecore)| (labels, &sidecore.counts)),
    );
    page.metrics("sidecore_reactor_", SIDECORES, sidecores());
    page.devices(devices);
    page.counters(stats);
    if per_queue {
        page.queues(stats);
    }
    page.meters(stats);
    page.stages(stats);
    page.controllers(controllers);
    page.remote(remote);
    page.switches(switches);
    page.schedules(schedules);
    page.mirrors(mirrors);
    page.0
}

/// The names and texts of a sample's labels.
type Labels<'a> = Vec<(&'a str, &'a str)>;

/// The page under construction. Writing to a string cannot fail.
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: Value) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let _ = write!(
                self.0,
                "{}{label}=\"{}\"",
                if index == 0 { '{' } else { ',' },
                Escaped(text)
            );
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// Writes the metrics of each of `things`, without those that have no name here.
    fn metrics<'a, T: 'a>(
        &mut self,
        prefix: &str,
        metrics: &[Metric<T>],
        things: impl Iterator<Item = (Labels<'a>, &'a T)> + Clone,
    ) {
        for metric in metrics {
            let Some(name) = metric.name else { continue };
            let name = format!("{prefix}{name}");
            self.family(&name, metric.kind.word(), metric.help);
            for (labels, thing) in things.clone() {
                self.sample(&name, &labels, (metric.value)(thing));
            }
        }
    }

    /// Writes the counters and histograms that each of `things` declares.
    fn counts<'a, T: Counts>(
        &mut self,
        prefix: &str,
        things: impl Iterator<Item = (Labels<'a>, &'a T)> + Clone,
    ) {
        self.metrics(prefix, T::METRICS, things.clone());
        for histogram in T::HISTOGRAMS {
            self.latencies(&format!("{prefix}{}", histogram.name), histogram, things.clone());
        }
    }

    fn devices(&mut self, devices: &[DeviceReport]) {
        self.family(
            "sidecore_device_info",
            "gauge",
            "Always 1; join it to the others for its labels.",
        );
        for device in devices {
            let labels = [
                ("device", device.name.as_str()),
                ("front_end", &device.front_end),
                ("store", &device.store),
                ("type", &device.store_type),
                ("idle", &device.idle),
            ];
            self.sample("sidecore_device_info", &labels, Value::Whole(1));
        }
        self.family("sidecore_device_state", "gauge", STATE_HELP);
        for device in devices {
            for state in DeviceState::ALL {
                let labels = [("device", device.name.as_str()), ("state", state.word())];
                self.sample(
                    "sidecore_device_state",
                    &labels,
                    Value::Whole((device.state == state).into()),
                );
            }
        }
        let labelled =
            devices.iter().map(|device| (vec![("device", device.name.as_str())], device));
        self.metrics("sidecore_device_", DEVICES, labelled);
    }

    fn counters(&mut self, stats: &Stats) {
        let totals: Vec<(&str, QueueCounters)> =
            stats.devices.iter().map(|device| (device.name.as_str(), device.total())).collect();
        self.counts(
            "sidecore_device_",
            totals.iter().map(|(device, total)| (vec![("device", *device)], &total.counts)),
        );
    }

    fn queues(&mut self, stats: &Stats) {
        let queues: Vec<(&str, String, &QueueCounters)> = stats
            .devices
            .iter()
            .flat_map(|device| {
                device
                    .queues
                    .iter()
                    .map(|queue| (device.name.as_str(), queue.index.to_string(), queue))
            })
            .collect();
        let labelled = queues.iter().map(|(device, index, queue)| {
            (vec![("device", *device), ("queue", index.as_str())], &queue.counts)
        });
        self.counts("sidecore_queue_", labelled);
    }

    fn meters(&mut self, stats: &Stats) {
        let meters = stats.meters.iter();
        let labelled = meters.map(|meter| (vec![("meter", meter.name.as_str())], &meter.counts));
        self.counts("sidecore_meter_", labelled);
    }

    fn stages(&mut self, stats: &Stats) {
        let positions: Vec<(String, &StageStats)> =
            stats.stages.iter().map(|stage| (stage.position.to_string(), stage)).collect();
        let labelled = positions.iter().map(|(position, stage)| {
            let (device, word) = (stage.device.as_str(), stage.word.as_str());
            (vec![("device", device), ("position", position.as_str()), ("stage", word)], *stage)
        });
        self.metrics("sidecore_stage_", STAGES, labelled.clone());
        let counts = labelled.clone().map(|(labels, stage)| (labels, &stage.counts));
        self.counts("sidecore_stage_", counts);
        let findings = labelled.clone();
        let findings = findings.filter_map(|(labels, stage)| {
            let findings = stage.findings.as_ref()?;
            Some((labels, &findings.counts))
        });
        self.counts("sidecore_integrity_", findings);
        let recordings =
            labelled.filter_map(|(labels, stage)| Some((labels, stage.recording.as_ref()?)));
        self.metrics("sidecore_recording_", RECORDINGS, recordings.clone());
        let counts = recordings.map(|(labels, recording)| (labels, &recording.counts));
        self.counts("sidecore_recording_", counts);
    }

    /// Writes a histogram of latencies, and the longest latency, for each of `things`.
    fn latencies<'a, T: 'a>(
        &mut self,
        prefix: &str,
        histogram: &HistogramMetric<T>,
        things: impl Iterator<Item = (Labels<'a>, &'a T)> + Clone,
    ) {
        let name = format!("{prefix}_seconds");
        let (bucket, sum, count) =
            (format!("{name}_bucket"), format!("{name}_sum"), format!("{name}_count"));
        self.family(&name, "histogram", histogram.help);
        for (mut labels, thing) in things.clone() {
            let counts = (histogram.latency)(thing).counts();
            for exponent in LATENCY_BOUNDS {
                let bound_ns = (1_u64 << exponent).saturating_sub(1);
                let bound = Value::seconds(bound_ns).to_string();
                let mut labels = labels.clone();
                labels.push(("le", &bound));
                self.sample(&bucket, &labels, Value::Whole(counts.at_most(bound_ns)));
            }
            labels.push(("le", "+Inf"));
            self.sample(&bucket, &labels, Value::Whole(counts.count()));
            labels.pop();
            self.sample(&sum, &labels, Value::seconds(counts.sum_ns));
            self.sample(&count, &labels, Value::Whole(counts.count()));
        }
        let name = format!("{prefix}_max_seconds");
        self.family(
            &name,
            "gauge",
            "The longest of these latencies since the daemon was started, to within a sixteenth.",
        );
        for (labels, thing) in things {
            self.sample(&name, &labels, Value::seconds((histogram.latency)(thing).max));
        }
    }
}

/// A label's value with the format's escapes.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
