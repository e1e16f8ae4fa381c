//! `sidecore top`: rates per second.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Result;
use sidecore_control::Client;
use sidecore_control::report::{
    DeviceReport, MeterReport, QueueCounters, SidecoreReport, StageStats, Stats,
};

use crate::print;
use crate::table::Table;
use crate::terminal::Terminal;
use crate::units::{bytes, micros, short};

pub(crate) fn run(client: &Client, interval: Duration) -> Result<()> {
    // The first request comes before the screen is taken, so that an error without a daemon stays
    // readable.
    let mut before = client.stats()?;
    let Some(terminal) = Terminal::take()? else {
        std::thread::sleep(interval);
        let text = render(&before, &client.stats()?, &client.devices()?);
        return Ok(print(&text)?);
    };
    terminal.draw("sidecore top: measuring, q quits\n")?;
    while !terminal.quits_within(interval)? {
        let now = client.stats()?;
        let text = render(&before, &now, &client.devices()?);
        terminal.draw(&format!(
            "sidecore top: every {} s, q quits\n\n{text}",
            interval.as_secs_f64()
        ))?;
        before = now;
    }
    Ok(())
}

/// Formats the rates between two measurements.
fn render(before: &Stats, now: &Stats, devices: &[DeviceReport]) -> String {
    let elapsed_ns = now.uptime_ns.saturating_sub(before.uptime_ns);
    let mut text = sidecores(&before.sidecores, &now.sidecores, elapsed_ns).render();
    text.push('\n');
    text.push_str(&disks(before, now, devices, elapsed_ns).render());
    if !now.meters.is_empty() {
        text.push('\n');
        text.push_str(&meters(&before.meters, &now.meters, elapsed_ns).render());
    }
    if !now.stages.is_empty() {
        text.push('\n');
        text.push_str(&stages(&before.stages, &now.stages, elapsed_ns).render());
    }
    text
}

fn sidecores(before: &[SidecoreReport], now: &[SidecoreReport], elapsed_ns: u64) -> Table {
    let mut table =
        Table::new(&["SIDECORE", ">CPU", ">QUEUES", ">UTIL%", ">ASLEEP%", ">TURNS/s", ">SLEEPS/s"]);
    let before: HashMap<&str, &SidecoreReport> =
        before.iter().map(|sidecore| (sidecore.name.as_str(), sidecore)).collect();
    for sidecore in now {
        let fresh = SidecoreReport::default();
        let old = before.get(sidecore.name.as_str()).copied().unwrap_or(&fresh);
        let turns = sidecore.turns.saturating_sub(old.turns);
        // A sidecore counts a sleep when it wakes: a sidecore without a turn slept all the time.
        let asleep = match turns {
            0 => 1.0,
            _ => share(sidecore.asleep_ns.saturating_sub(old.asleep_ns), elapsed_ns),
        };
        table.row([
            sidecore.name.clone(),
            sidecore.cpu.map_or_else(|| "any".to_owned(), |cpu| cpu.to_string()),
            sidecore.queues.to_string(),
            format!("{:.1}", sidecore.utilisation_since(Some(old), elapsed_ns) * 100.0),
            format!("{:.1}", asleep * 100.0),
            short(per_second(turns, elapsed_ns)),
            short(per_second(sidecore.sleeps.saturating_sub(old.sleeps), elapsed_ns)),
        ]);
    }
    table
}

fn disks(before: &Stats, now: &Stats, devices: &[DeviceReport], elapsed_ns: u64) -> Table {
    let mut table = Table::new(&[
        "DEVICE", "STATE", ">REQ/s", ">READ/s", ">WRITE/s", ">RD MB/s", ">WR MB/s", ">KICKS/s",
        ">INTR/s", ">P50 us", ">P99 us", ">ERRORS",
    ]);
    let before: HashMap<&str, QueueCounters> =
        before.devices.iter().map(|device| (device.name.as_str(), device.total())).collect();
    let states: HashMap<&str, &str> =
        devices.iter().map(|device| (device.name.as_str(), device.state.word())).collect();
    for device in &now.devices {
        let (total, name) = (device.total(), device.name.as_str());
        let old = before.get(name).cloned().unwrap_or_default();
        let latency = total.latency_ns.since(&old.latency_ns);
        let rate = |counter: fn(&QueueCounters) -> u64| {
            per_second(counter(&total).saturating_sub(counter(&old)), elapsed_ns)
        };
        table.row([
            name.to_owned(),
            states.get(name).copied().unwrap_or("?").to_owned(),
            short(rate(|q| q.requests)),
            short(rate(|q| q.reads)),
            short(rate(|q| q.writes)),
            format!("{:.1}", rate(|q| q.bytes_read) / 1e6),
            format!("{:.1}", rate(|q| q.bytes_written) / 1e6),
            short(rate(|q| q.kicks)),
            short(rate(|q| q.interrupts)),
            micros(latency.p50 as f64),
            micros(latency.p99 as f64),
            total.errors.to_string(),
        ]);
    }
    table
}

fn meters(before: &[MeterReport], now: &[MeterReport], elapsed_ns: u64) -> Table {
    let mut table = Table::new(&[
        "METER",
        ">READ/s",
        ">WRITE/s",
        ">FLUSH/s",
        ">DISCARD/s",
        ">RD MB/s",
        ">WR MB/s",
        ">READ",
        ">WRITTEN",
        ">ERRORS",
    ]);
    let fresh = MeterReport::default();
    for meter in now {
        let old = before.iter().find(|old| old.name == meter.name).unwrap_or(&fresh);
        let rate = |counter: fn(&MeterReport) -> u64| {
            per_second(counter(meter).saturating_sub(counter(old)), elapsed_ns)
        };
        table.row([
            meter.name.clone(),
            short(rate(|meter| meter.reads)),
            short(rate(|meter| meter.writes)),
            short(rate(|meter| meter.flushes)),
            short(rate(|meter| meter.discards)),
            format!("{:.1}", rate(|meter| meter.bytes_read) / 1e6),
            format!("{:.1}", rate(|meter| meter.bytes_written) / 1e6),
            bytes(meter.bytes_read),
            bytes(meter.bytes_written),
            meter.errors.to_string(),
        ]);
    }
    table
}

/// The cost of stages: the share of a core, and the time of a request, without the stores. For
/// stages with threads of their own also the time for which these run, with that of polling.
fn stages(before: &[StageStats], now: &[StageStats], elapsed_ns: u64) -> Table {
    let mut table = Table::new(&[
        "DEVICE",
        ">POSITION",
        "STAGE",
        ">REQ/s",
        ">CORE%",
        ">NS/REQ",
        ">LONG TURNS",
        ">LONGEST us",
        ">THREADS",
        ">CPU%",
    ]);
    let fresh = StageStats::default();
    let key = |stage: &StageStats| (stage.device.clone(), stage.position, stage.word.clone());
    for stage in now {
        // A stage that was opened again since then counts from zero.
        let is_older = |old: &&StageStats| {
            key(old) == key(stage) && old.counts.requests <= stage.counts.requests
        };
        let old = before.iter().find(is_older).unwrap_or(&fresh);
        let requests = stage.counts.requests.saturating_sub(old.counts.requests);
        let busy_ns = stage.counts.busy_ns.saturating_sub(old.counts.busy_ns);
        let ran_ns = stage.threads_ran_ns.saturating_sub(old.threads_ran_ns);
        let each = match (requests, stage.has_failed) {
            (_, true) => "failed".to_owned(),
            (0, false) => "-".to_owned(),
            _ => format!("{:.0}", share(busy_ns, requests)),
        };
        table.row([
            stage.device.clone(),
            stage.position.to_string(),
            stage.word.clone(),
            short(per_second(requests, elapsed_ns)),
            format!("{:.1}", share(busy_ns, elapsed_ns) * 100.0),
            each,
            stage.counts.long_turns.to_string(),
            micros(stage.longest_turn_ns as f64),
            stage.threads.to_string(),
            format!("{:.1}", share(ran_ns, elapsed_ns) * 100.0),
        ]);
    }
    table
}

fn per_second(count: u64, elapsed_ns: u64) -> f64 {
    share(count, elapsed_ns) * 1e9
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidecore_control::report::{
        DeviceStats, Latency, LatencyCounts, MeterCounts, QueueCounts, ReactorCounts, StageCounts,
    };

    fn sample(uptime_ns: u64, turns: u64, busy_ns: u64, latencies: &[(u64, u64)]) -> Stats {
        let latency_ns = Latency::of(LatencyCounts { buckets: latencies.to_vec(), sum_ns: 0 });
        let counts =
            QueueCounts { requests: latency_ns.count, latency_ns, ..QueueCounts::default() };
        let queue = QueueCounters { counts, ..QueueCounters::default() };
        let counts = ReactorCounts { turns, busy_ns, ..ReactorCounts::default() };
        let sidecore =
            SidecoreReport { name: "sc0".to_owned(), counts, ..SidecoreReport::default() };
        Stats {
            uptime_ns,
            interval_ns: None,
            sidecores: vec![sidecore],
            devices: vec![DeviceStats { name: "vd0".to_owned(), queues: vec![queue] }],
            meters: Vec::new(),
            stages: Vec::new(),
        }
    }

    #[test]
    fn rates_and_latencies_are_of_the_interval_and_not_since_the_start() {
        let before = sample(1_000_000_000, 0, 0, &[(900_000, 500)]);
        let now = sample(3_000_000_000, 1_000_000, 400_000_000, &[(2_000, 4_000), (900_000, 500)]);
        let text = render(&before, &now, &[]);
        let disk: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(disk[..3], ["vd0", "?", "2.00k"], "{text}");
        assert_eq!(disk[9..11], ["2.00", "2.00"], "{text}");
        let sidecore: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(sidecore[..5], ["sc0", "any", "0", "20.0", "0.0"], "{text}");
    }

    #[test]
    fn a_meter_has_its_rates_and_its_bytes_so_far() {
        let with = |uptime_ns, reads, bytes_read| {
            let counts = MeterCounts { reads, bytes_read, ..MeterCounts::default() };
            let meters = vec![MeterReport { name: "disk".to_owned(), counts }];
            Stats { meters, ..sample(uptime_ns, 0, 0, &[]) }
        };
        let (before, now) = (with(0, 10, 1 << 20), with(2_000_000_000, 30, 5 << 20));
        let text = render(&before, &now, &[]);
        let meter: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(meter, ["disk", "10", "0", "0", "0", "2.1", "0.0", "5MiB", "0B", "0"], "{text}");
        assert!(!render(&sample(1, 0, 0, &[]), &sample(2, 0, 0, &[]), &[]).contains("METER"));
    }

    #[test]
    fn a_stage_has_its_cost_in_the_interval() {
        let with = |uptime_ns, requests, busy_ns, has_failed| {
            let counts = StageCounts { requests, busy_ns, long_turns: 3, ..StageCounts::default() };
            let (device, word) = ("vd0".to_owned(), "delay".to_owned());
            let longest_turn_ns = 1_500_000;
            let stage = StageStats {
                device,
                position: 1,
                word,
                has_failed,
                longest_turn_ns,
                threads: 2,
                threads_ran_ns: 2 * busy_ns,
                recording: None,
                findings: None,
                counts,
            };
            Stats { stages: vec![stage], ..sample(uptime_ns, 0, 0, &[]) }
        };
        let row = |before: &Stats, now: &Stats| -> Vec<String> {
            let text = render(before, now, &[]);
            text.lines().last().unwrap().split_whitespace().map(str::to_owned).collect()
        };
        let (before, now) =
            (with(0, 10, 1_000, false), with(2_000_000_000, 4_010, 200_001_000, false));
        let shown = row(&before, &now);
        assert_eq!(
            shown,
            ["vd0", "1", "delay", "2.00k", "10.0", "50000", "3", "1500", "2", "20.0"]
        );
        // Opened again.
        let shown = row(&now, &with(4_000_000_000, 2, 2_000, false));
        assert_eq!(shown[3..6], ["1", "0.0", "1000"]);
        assert_eq!(row(&now, &with(4_000_000_000, 4_010, 200_001_000, true))[5], "failed");
        assert!(!render(&sample(1, 0, 0, &[]), &sample(2, 0, 0, &[]), &[]).contains("STAGE"));
    }

    #[test]
    fn a_sidecore_without_a_turn_slept() {
        let text = render(&sample(1, 7, 7, &[]), &sample(2, 7, 7, &[]), &[]);
        assert!(text.lines().nth(1).unwrap().contains("0.0    100.0"), "{text}");
    }
}
