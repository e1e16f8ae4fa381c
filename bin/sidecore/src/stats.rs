//! `sidecore stats`.

use std::time::Duration;

use anyhow::{Result, bail};
use sidecore_control::Client;
use sidecore_control::report::{Counts, DeviceStats, Latency, QueueCounts, SidecoreReport, Stats};

use crate::print;
use crate::table::Table;
use crate::units::micros;

/// The arguments of `sidecore stats`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print JSON in the form of the control API.
    #[arg(long)]
    json: bool,
    /// Also show each queue that the guest has used.
    #[arg(long)]
    queues: bool,
    /// Seconds over which latencies and utilisation are measured, 0.1 to 60.
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = crate::interval)]
    interval: Duration,
    /// Show latencies and utilisation since the daemon's start, without waiting.
    #[arg(long, conflicts_with = "interval")]
    since_start: bool,
    /// Show only this disk.
    device: Option<String>,
}

pub(crate) fn run(client: &Client, arguments: &Arguments) -> Result<()> {
    let mut stats = client.stats()?;
    if let Some(wanted) = &arguments.device {
        let names: Vec<String> = stats.devices.iter().map(|device| device.name.clone()).collect();
        if !names.contains(wanted) {
            bail!("there is no device \"{wanted}\"; there are {}", names.join(", "));
        }
    }
    if !arguments.since_start {
        std::thread::sleep(arguments.interval);
        stats = client.stats()?.of_interval(&stats);
    }
    if let Some(wanted) = &arguments.device {
        stats.devices.retain(|device| device.name == *wanted);
    }
    if arguments.json {
        return crate::print_json(&stats);
    }
    Ok(print(&render(&stats, arguments.queues))?)
}

fn render(stats: &Stats, each_queue: bool) -> String {
    let mut text = match stats.interval_ns {
        Some(ns) => {
            format!(
                "Latencies and UTIL% are of the last {:.1} s, the rest is since the start.\n\n",
                ns as f64 / 1e9
            )
        }
        None => "All since the start.\n\n".to_owned(),
    };
    text.push_str(&sidecores(&stats.sidecores).render());
    for device in &stats.devices {
        text.push('\n');
        text.push_str(&counters(device, each_queue).render());
    }
    text
}

fn sidecores(sidecores: &[SidecoreReport]) -> Table {
    let mut table = Table::new(&[
        "SIDECORE",
        ">CPU",
        ">QUEUES",
        ">UTIL%",
        ">TURNS",
        ">BUSY",
        ">SLEEPS",
        ">MESSAGES",
    ]);
    for sidecore in sidecores {
        table.row([
            sidecore.name.clone(),
            sidecore.cpu.map_or_else(|| "any".to_owned(), |cpu| cpu.to_string()),
            sidecore.queues.to_string(),
            format!("{:.1}", sidecore.utilisation * 100.0),
            sidecore.turns.to_string(),
            sidecore.busy_turns.to_string(),
            sidecore.sleeps.to_string(),
            sidecore.messages.to_string(),
        ]);
    }
    table
}

/// A line for each counter, with a column for the device and, with `each_queue`, for each of its
/// queues.
fn counters(device: &DeviceStats, each_queue: bool) -> Table {
    let mut headings = vec![device.name.clone(), ">total".to_owned()];
    let mut columns = vec![device.total()];
    if each_queue {
        headings.extend(device.queues.iter().map(|queue| format!(">queue {}", queue.index)));
        columns.extend(device.queues.iter().cloned());
    }
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    for metric in QueueCounts::METRICS {
        let values = columns.iter().map(|queue| (metric.value)(&queue.counts).to_string());
        table.row(std::iter::once(metric.field.replace('_', " ")).chain(values));
    }
    for (name, value) in LATENCIES {
        table.row(
            std::iter::once((*name).to_owned())
                .chain(columns.iter().map(|queue| micros(value(&queue.latency_ns)))),
        );
    }
    table
}

/// The name of a line, and its number in nanoseconds.
type Row = (&'static str, fn(&Latency) -> f64);

const LATENCIES: &[Row] = &[
    ("latency mean us", |l| l.mean),
    ("latency p50 us", |l| l.p50 as f64),
    ("latency p90 us", |l| l.p90 as f64),
    ("latency p99 us", |l| l.p99 as f64),
    ("latency p99.9 us", |l| l.p99_9 as f64),
    ("latency p99.99 us", |l| l.p99_99 as f64),
    ("latency max us", |l| l.max as f64),
];

#[cfg(test)]
mod tests {
    use sidecore_control::report::QueueCounters;

    use super::*;

    #[test]
    fn the_interval_of_latencies_is_shown() {
        let of = |interval_ns| render(&Stats { interval_ns, ..Stats::default() }, false);
        assert!(
            of(Some(1_000_000_000)).starts_with("Latencies and UTIL% are of the last 1.0 s"),
            "{}",
            of(Some(1))
        );
        assert!(of(None).starts_with("All since the start."), "{}", of(None));
    }

    #[test]
    fn each_queue_has_a_column_on_request() {
        let counts = QueueCounts { requests: 7, ..QueueCounts::default() };
        let queue = |index| QueueCounters { index, counts: counts.clone(), bytes: 0 };
        let device = DeviceStats { name: "vd0".to_owned(), queues: vec![queue(0), queue(1)] };
        let one = counters(&device, false).render();
        let each = counters(&device, true).render();
        assert!(one.starts_with("vd0                total\nrequests              14\n"), "{one}");
        assert!(each.lines().next().unwrap().ends_with("queue 0  queue 1"), "{each}");
    }
}
