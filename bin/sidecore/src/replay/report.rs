//! Reports of recordings and replays.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;
use sidecore_recording::EndReason;

use super::runner::{Difference, Results};
use super::steps::{Kind, Skipped, Step, Steps};
use crate::table::Table;
use crate::units::{bytes, micros, time};

/// Two percentiles and the largest of some times, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Times {
    pub(super) p50: u64,
    pub(super) p99: u64,
    pub(super) max: u64,
}

impl Times {
    fn of(mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        let at = |percent: usize| {
            let last = times.len().saturating_sub(1);
            times.get((times.len() * percent / 100).min(last)).copied().unwrap_or(0)
        };
        Self { p50: at(50), p99: at(99), max: times.last().copied().unwrap_or(0) }
    }
}

/// A recording, and its replay if there was one.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    recording: String,
    /// The name of the disk or its store.
    name: String,
    data: &'static str,
    capacity_bytes: u64,
    block_bytes: u32,
    started_unix_ns: u64,
    /// From the first arrival to the last end.
    duration_ns: u64,
    requests: BTreeMap<&'static str, Kind>,
    missing: u64,
    latency_ns: Times,
    /// Why it ended; nothing without an end.
    end: Option<&'static str>,
    /// The fault of the file, if there is one.
    pub(super) fault: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) replay: Option<Replay>,
}

impl Report {
    /// Of a recording alone.
    pub(super) fn of(file: &Path, steps: &Steps) -> Self {
        Self {
            recording: file.display().to_string(),
            name: steps.header.name.clone(),
            data: steps.header.data.word(),
            capacity_bytes: steps.header.capacity_bytes,
            block_bytes: steps.header.block_bytes,
            started_unix_ns: steps.header.started_unix_ns,
            duration_ns: duration_ns(steps),
            requests: steps.kinds(|_| true),
            missing: steps.missing,
            latency_ns: latencies(steps, |_| true),
            end: steps.end.map(|end| match end {
                EndReason::Closed => "closed",
                EndReason::Limit => "limit",
                EndReason::Failed => "failed",
            }),
            fault: steps.fault.clone(),
            replay: None,
        }
    }

    /// Whether the file has a fault, or the replay has shown a difference.
    pub(super) fn has_faults(&self) -> bool {
        let differences = |it: &Replay| it.data_differences + it.result_differences;
        self.fault.is_some() || self.replay.as_ref().map_or(0, differences) > 0
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let (size, block) = (bytes(self.capacity_bytes), self.block_bytes);
        let (name, data) = (printable(&self.name), self.data);
        let started = time(self.started_unix_ns / 1_000_000_000);
        let seconds = seconds(self.duration_ns);
        let _ = write!(
            text,
            "{}: \"{name}\", {size} in blocks of {block} bytes, data: {data}\n\
             recorded {started} UTC, for {seconds}\n\n{}",
            self.recording,
            kinds(&self.requests)
        );
        if self.missing > 0 {
            let _ = writeln!(
                text,
                "\n{} requests are missing: the file was slower than the disk. Differences may \
                 come from that.",
                self.missing
            );
        }
        match &self.replay {
            Some(replay) => replay.write_to(&mut text, replay.recorded_latency_ns),
            None => {
                let mut table = Table::new(&["LATENCY us", ">p50", ">p99", ">MAX"]);
                table.row(row("recorded", &self.latency_ns));
                text.push('\n');
                text.push_str(&table.render());
            }
        }
        text
    }
}

/// The device of a replay, and the manner.
#[derive(Debug, Serialize)]
pub(super) struct Device {
    pub(super) socket: String,
    pub(super) depth: u16,
    /// The pace of a replay in time.
    pub(super) speed: Option<f64>,
    pub(super) writes: bool,
}

/// A replay.
#[derive(Debug, Serialize)]
pub(super) struct Replay {
    #[serde(flatten)]
    device: Device,
    requests: BTreeMap<&'static str, Kind>,
    skipped: Skipped,
    /// Writes whose data the recording has not, and was made up.
    made_up_writes: u64,
    /// Reads whose data was compared.
    compared_reads: u64,
    /// Reads whose data is not known.
    not_compared_reads: u64,
    pub(super) data_differences: u64,
    pub(super) result_differences: u64,
    /// The first of them.
    differences: Vec<Difference>,
    elapsed_ns: u64,
    /// Of the requests that were replayed.
    recorded_latency_ns: Times,
    latency_ns: Times,
    #[serde(skip_serializing_if = "Option::is_none")]
    lateness_ns: Option<Times>,
}

impl Replay {
    pub(super) fn of(device: Device, steps: &Steps, skipped: Skipped, results: Results) -> Self {
        let requests = steps.kinds(|step| step.replays);
        let reads = requests.get("read").map_or(0, |kind| kind.requests);
        Self {
            lateness_ns: device.speed.map(|_| Times::of(results.lateness_ns)),
            device,
            requests,
            skipped,
            made_up_writes: results.made_up,
            compared_reads: results.compared,
            not_compared_reads: reads.saturating_sub(results.compared),
            data_differences: results.data_differences,
            result_differences: results.result_differences,
            differences: results.shown,
            elapsed_ns: u64::try_from(results.elapsed.as_nanos()).unwrap_or(u64::MAX),
            recorded_latency_ns: latencies(steps, |step| step.replays),
            latency_ns: Times::of(results.latencies_ns),
        }
    }

    fn write_to(&self, text: &mut String, recorded: Times) {
        let Device { socket, depth, speed, .. } = &self.device;
        let manner = match speed {
            Some(speed) => format!("in time, {speed} times as fast"),
            None => "at full speed".to_owned(),
        };
        let elapsed = seconds(self.elapsed_ns);
        let _ = write!(
            text,
            "\nreplayed on {socket} {manner}, at most {depth} in flight, in {elapsed}\n\n{}",
            kinds(&self.requests)
        );
        text.push('\n');
        let mut table = Table::new(&["us", ">p50", ">p99", ">MAX"]);
        table.row(row("latency, recorded", &recorded));
        table.row(row("latency, replayed", &self.latency_ns));
        if let Some(lateness) = &self.lateness_ns {
            table.row(row("submitted late", lateness));
        }
        text.push_str(&table.render());
        text.push('\n');
        self.notes(text);
        for difference in &self.differences {
            let Difference { kind, offset_bytes, len_bytes, recorded, replayed, arrival_ns } =
                difference;
            let at = seconds(*arrival_ns);
            let _ = writeln!(
                text,
                "  {kind} of bytes {offset_bytes}+{len_bytes} at {at}: recorded {recorded}, \
                 replayed {replayed}"
            );
        }
    }

    /// The parts of the recording that were not replayed or compared, and the differences.
    fn notes(&self, text: &mut String) {
        let Skipped { writes, unfit, unsupported } = self.skipped;
        let notes = [
            (writes, "requests that change the disk were not replayed: --write does"),
            (unfit, "requests do not fit the device, and were not replayed"),
            (unsupported, "requests are of kinds that the device has not, and were not replayed"),
            (self.made_up_writes, "writes had no recorded data, and wrote a pattern"),
            (self.not_compared_reads, "reads were not compared: their data is not known"),
            (self.compared_reads, "reads were compared"),
        ];
        for (count, note) in notes.iter().filter(|(count, _)| *count > 0) {
            let _ = writeln!(text, "{count} {note}");
        }
        let _ = writeln!(
            text,
            "differences: {} in results, {} in data",
            self.result_differences, self.data_differences
        );
    }
}

fn row(what: &str, times: &Times) -> [String; 4] {
    let us = |ns: u64| micros(ns as f64);
    [what.to_owned(), us(times.p50), us(times.p99), us(times.max)]
}

fn kinds(kinds: &BTreeMap<&'static str, Kind>) -> String {
    let mut table = Table::new(&["KIND", ">REQUESTS", ">BYTES", ">RECORDED AS FAILED"]);
    for (word, kind) in kinds {
        let numbers = [kind.requests.to_string(), bytes(kind.bytes), kind.failed.to_string()];
        table.row([(*word).to_owned()].into_iter().chain(numbers));
    }
    table.render()
}

fn latencies(steps: &Steps, counts: impl Fn(&Step) -> bool) -> Times {
    let steps = steps.steps.iter().filter(|step| counts(step));
    Times::of(steps.map(|step| step.request.latency_ns).collect())
}

fn duration_ns(steps: &Steps) -> u64 {
    let first = steps.steps.first().map_or(0, |step| step.request.arrival_ns);
    steps.steps.iter().map(Step::ended_ns).max().unwrap_or(0).saturating_sub(first)
}

fn seconds(ns: u64) -> String {
    format!("{:.3} s", ns as f64 / 1e9)
}

/// A name of a file that others may have made.
fn printable(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        assert_eq!(Times::of(Vec::new()), Times::default());
        assert_eq!(Times::of(vec![7]), Times { p50: 7, p99: 7, max: 7 });
        let times = Times::of((0..1000).rev().collect());
        assert_eq!(times, Times { p50: 500, p99: 990, max: 999 });
        assert_eq!(printable("a\u{1b}[2J"), "a [2J");
    }
}
