//! The counters in Prometheus' text format. docs/metrics.md lists them for people; a test compares the two.

mod controllers;

use std::fmt::{self, Write as _};

use sidecore_assembly::report::{ControllerReport, DeviceReport, DeviceState, QueueCounters, SidecoreReport, Stats};

/// What Prometheus expects to be told.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

enum Kind {
    Counter,
    Gauge,
}

enum Value {
    Whole(u64),
    Real(f64),
}

/// A number that is read off a `T`.
struct Metric<T> {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    value: fn(&T) -> Value,
}

const fn counter<T>(name: &'static str, help: &'static str, value: fn(&T) -> Value) -> Metric<T> {
    Metric { name, kind: Kind::Counter, help, value }
}

const fn gauge<T>(name: &'static str, help: &'static str, value: fn(&T) -> Value) -> Metric<T> {
    Metric { name, kind: Kind::Gauge, help, value }
}

const SIDECORES: &[Metric<SidecoreReport>] = &[
    counter("sidecore_reactor_turns_total", "Rounds of the polling loop.", |s| Value::Whole(s.turns)),
    counter("sidecore_reactor_busy_turns_total", "Rounds in which something was done.", |s| Value::Whole(s.busy_turns)),
    counter("sidecore_reactor_busy_seconds_total", "Time of rounds in which something was done.", |s| {
        seconds(s.busy_ns)
    }),
    counter("sidecore_reactor_sleeps_total", "Times that the sidecore went to sleep.", |s| Value::Whole(s.sleeps)),
    counter("sidecore_reactor_asleep_seconds_total", "Time slept.", |s| seconds(s.asleep_ns)),
    counter("sidecore_reactor_yields_total", "Times that the sidecore gave way to those it waited for.", |s| {
        Value::Whole(s.yields)
    }),
    counter("sidecore_reactor_mails_total", "Messages from the control path.", |s| Value::Whole(s.mails)),
    gauge("sidecore_reactor_queues", "Queues polled right now.", |s| Value::Whole(s.queues)),
    gauge("sidecore_reactor_without_core", "1 while its core is lost to other work.", |s| {
        Value::Whole(s.warning.is_some().into())
    }),
    gauge("sidecore_reactor_utilisation_ratio", "Share of its life that it worked.", |s| Value::Real(s.utilisation)),
];

const DEVICES: &[Metric<DeviceReport>] = &[
    gauge("sidecore_device_capacity_bytes", "Size of the disk.", |d| Value::Whole(d.capacity_bytes)),
    gauge("sidecore_device_queues_running", "Request queues that the guest has started.", |d| {
        Value::Whole(d.queues_running.into())
    }),
    gauge("sidecore_device_warnings", "How many warnings `sidecore list` shows for the disk.", |d| {
        Value::Whole(d.warnings.len() as u64)
    }),
    gauge("sidecore_device_needs_reset", "1 while nothing is served until the driver resets the device.", |d| {
        Value::Whole(d.needs_reset.into())
    }),
];

/// Counters of a device, or of a queue: what follows `sidecore_device_` or `sidecore_queue_` in the name.
const COUNTERS: &[Metric<QueueCounters>] = &[
    counter("kicks_total", "Kicks by the guest that arrived.", |q| Value::Whole(q.kicks)),
    counter("calls_total", "Calls to the guest that were sent.", |q| Value::Whole(q.calls)),
    counter("polls_total", "Looks at the ring.", |q| Value::Whole(q.polls)),
    counter("empty_polls_total", "Looks at the ring that found nothing.", |q| Value::Whole(q.empty_polls)),
    counter("batches_total", "Batches given to the store.", |q| Value::Whole(q.batches)),
    counter("requests_total", "Requests completed.", |q| Value::Whole(q.requests)),
    counter("reads_total", "Reads completed.", |q| Value::Whole(q.reads)),
    counter("writes_total", "Writes completed.", |q| Value::Whole(q.writes)),
    counter("flushes_total", "Flushes completed.", |q| Value::Whole(q.flushes)),
    counter("discards_total", "Discards completed.", |q| Value::Whole(q.discards)),
    counter("write_zeroes_total", "Writes of zeros completed.", |q| Value::Whole(q.write_zeroes)),
    counter("errors_total", "Requests that the store failed.", |q| Value::Whole(q.errors)),
    counter("rejected_total", "Requests refused before the store.", |q| Value::Whole(q.rejected)),
    counter("read_bytes_total", "Bytes read by the guest.", |q| Value::Whole(q.bytes_read)),
    counter("written_bytes_total", "Bytes written by the guest.", |q| Value::Whole(q.bytes_written)),
    gauge("latency_max_seconds", "The longest that a request took.", |q| seconds(q.latency_ns.max)),
];

/// The upper ends of the latency histogram's buckets, as exponents of two: from 255 ns to 17 s. One nanosecond less than
/// the power of two, where buckets of the sidecores' own histograms end as well.
const LATENCY_BOUNDS: std::ops::RangeInclusive<u32> = 8..=34;

/// All metrics of this moment; with `per_queue` also those of each queue that its guest has used.
pub(crate) fn render(
    stats: &Stats,
    devices: &[DeviceReport],
    controllers: &[ControllerReport],
    per_queue: bool,
) -> String {
    let mut page = Page(String::new());
    page.family("sidecore_build_info", "gauge", "Always 1; the version is the label.");
    page.sample("sidecore_build_info", &[("version", env!("CARGO_PKG_VERSION"))], Value::Whole(1));
    page.family("sidecore_uptime_seconds", "gauge", "Time since the daemon was started.");
    page.sample("sidecore_uptime_seconds", &[], seconds(stats.uptime_ns));
    for metric in SIDECORES {
        page.metric(
            "",
            metric,
            stats.sidecores.iter().map(|sidecore| (vec![("sidecore", sidecore.name.as_str())], sidecore)),
        );
    }
    page.devices(devices);
    page.counters(stats);
    if per_queue {
        page.queues(stats);
    }
    page.controllers(controllers);
    page.0
}

/// The text as it grows. Writing to a string cannot fail.
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: Value) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let _ = write!(self.0, "{}{label}=\"{}\"", if index == 0 { '{' } else { ',' }, Escaped(text));
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    fn metric<'a, T: 'a>(
        &mut self,
        prefix: &str,
        metric: &Metric<T>,
        things: impl Iterator<Item = (Vec<(&'a str, &'a str)>, &'a T)>,
    ) {
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let name = format!("{prefix}{}", metric.name);
        self.family(&name, kind, metric.help);
        for (labels, thing) in things {
            self.sample(&name, &labels, (metric.value)(thing));
        }
    }

    fn devices(&mut self, devices: &[DeviceReport]) {
        self.family("sidecore_device_info", "gauge", "Always 1; what the disk is, in labels.");
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
        self.family("sidecore_device_state", "gauge", "1 for the state that the disk is in, 0 for the others.");
        for device in devices {
            for state in DeviceState::ALL {
                let labels = [("device", device.name.as_str()), ("state", state.word())];
                self.sample("sidecore_device_state", &labels, Value::Whole((device.state == state).into()));
            }
        }
        for metric in DEVICES {
            self.metric("", metric, devices.iter().map(|device| (vec![("device", device.name.as_str())], device)));
        }
    }

    fn counters(&mut self, stats: &Stats) {
        let totals: Vec<(&str, QueueCounters)> =
            stats.devices.iter().map(|device| (device.name.as_str(), device.total())).collect();
        let labelled = || totals.iter().map(|(device, total)| (vec![("device", *device)], total));
        for metric in COUNTERS {
            self.metric("sidecore_device_", metric, labelled());
        }
        self.latencies("sidecore_device_latency_seconds", labelled());
    }

    fn queues(&mut self, stats: &Stats) {
        let queues: Vec<(&str, String, &QueueCounters)> = stats
            .devices
            .iter()
            .flat_map(|device| device.queues.iter().map(|queue| (device.name.as_str(), queue.index.to_string(), queue)))
            .collect();
        let labelled =
            || queues.iter().map(|(device, index, queue)| (vec![("device", *device), ("queue", index)], *queue));
        for metric in COUNTERS {
            self.metric("sidecore_queue_", metric, labelled());
        }
        self.latencies("sidecore_queue_latency_seconds", labelled());
    }

    /// A histogram of latencies for each of `things`.
    fn latencies<'a>(
        &mut self,
        name: &str,
        things: impl Iterator<Item = (Vec<(&'a str, &'a str)>, &'a QueueCounters)>,
    ) {
        self.family(name, "histogram", "From taking a request off the ring to completing it.");
        for (mut labels, counters) in things {
            let counts = counters.latency_ns.counts();
            let bucket = format!("{name}_bucket");
            for exponent in LATENCY_BOUNDS {
                let bound_ns = (1_u64 << exponent).saturating_sub(1);
                let bound = seconds(bound_ns).to_string();
                let mut labels = labels.clone();
                labels.push(("le", &bound));
                self.sample(&bucket, &labels, Value::Whole(counts.at_most(bound_ns)));
            }
            labels.push(("le", "+Inf"));
            self.sample(&bucket, &labels, Value::Whole(counts.count()));
            labels.pop();
            self.sample(&format!("{name}_sum"), &labels, seconds(counts.sum_ns));
            self.sample(&format!("{name}_count"), &labels, Value::Whole(counts.count()));
        }
    }
}

fn seconds(ns: u64) -> Value {
    Value::Real(ns as f64 / 1e9)
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(number) => number.fmt(f),
            Self::Real(number) => number.fmt(f),
        }
    }
}

/// A label's value as the format wants it.
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
