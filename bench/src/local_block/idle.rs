//! The cost of idleness: of idle neighbours, of an idle daemon, and of waking a sleeping one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_driver::{BlkClient, ClientOptions};
use sidecore_units::Sector;

use super::Bench;
use crate::cores::Gated;
use crate::load::{self, BLOCK_BYTES, Sample, Work};
use crate::record::{OURS, params};
use crate::rounds::Rounds;
use crate::sidecored::{Device, Sidecored, Store};
use crate::{stats, stop};

pub(super) const NEIGHBOURS: &str = "idle-neighbours";
pub(super) const CPU: &str = "idle-cpu";
pub(super) const WAKE: &str = "wake-latency";

const DISK_BYTES: u64 = 64 << 20;

/// A pause far longer than an adaptive device spins before it sleeps.
const ASLEEP: Duration = Duration::from_millis(5);

fn null(name: &str, idle: &'static str) -> Device {
    Device { idle, ..Device::new(name, Store::Null { bytes: DISK_BYTES }) }
}

/// Measures the latency of a busy device with many connected, idle devices on its sidecore, less
/// its latency alone.
pub(super) fn neighbours(bench: &mut Bench) -> Result<()> {
    let count = bench.plan.neighbours;
    let mut alone = bench.experiment.start_ours("alone", &[], &[null("busy", "poll")])?;
    let mut one = BlkClient::connect(alone.socket("busy"), &ClientOptions::default())?;
    alone.process.freeze()?;
    let names: Vec<String> = (0..count).map(|number| format!("idle{number}")).collect();
    let devices: Vec<Device> = std::iter::once(null("busy", "poll"))
        .chain(names.iter().map(|name| null(name, "poll")))
        .collect();
    let mut crowd = bench.experiment.start_ours("crowd", &[], &devices)?;
    let small = ClientOptions { slots: 1, huge_pages: false, ..ClientOptions::default() };
    let idle = names.iter().map(|name| BlkClient::connect(crowd.socket(name), &small));
    let idle: Vec<BlkClient> =
        idle.collect::<Result<_, _>>().context("connecting the idle devices")?;
    let mut among = BlkClient::connect(crowd.socket("busy"), &ClientOptions::default())?;
    crowd.process.freeze()?;

    let work = Work {
        blocks: DISK_BYTES / u64::from(BLOCK_BYTES),
        duration: bench.plan.run,
        ..Work::default()
    };
    let (mut added, mut before, mut after) = (Rounds::new(), Rounds::new(), Rounds::new());
    for _ in 0..bench.plan.rounds {
        let quiet = one_run(bench, &mut alone, &mut one, &work)?;
        let crowded = one_run(bench, &mut crowd, &mut among, &work)?;
        let counts = quiet.counts() && crowded.counts();
        let (quiet_ns, crowded_ns) = (quiet.result.latency_p50_ns, crowded.result.latency_p50_ns);
        before.add(quiet_ns, counts);
        after.add(crowded_ns, counts);
        added.add(crowded_ns - quiet_ns, counts);
    }
    drop(idle);
    let metrics = [
        ("added_latency", &added),
        ("latency_p50_alone", &before),
        ("latency_p50_crowded", &after),
    ];
    for (metric, rounds) in metrics {
        let mut params = bench.common_params();
        params.insert("neighbours".to_owned(), count.into());
        let (median, params) = rounds.settle(params);
        bench.experiment.records.measure(NEIGHBOURS, OURS, metric, median, "ns", params);
    }
    eprintln!(
        "  {NEIGHBOURS:<20}  {count} of them add {:.0} ns to {:.0} ns",
        added.median(),
        before.median()
    );
    Ok(())
}

fn one_run(
    bench: &mut Bench,
    daemon: &mut Sidecored,
    client: &mut BlkClient,
    work: &Work,
) -> Result<Gated<Sample>> {
    let load =
        |work: &Work, clock: &Clock| load::run(client.queue(0).context("no queue")?, work, clock);
    bench.experiment.round(&mut daemon.process, bench.plan.warm_up, work, load)
}

/// Measures the share of one core that a daemon takes whose connected adaptive devices are idle.
pub(super) fn cpu(bench: &mut Bench) -> Result<()> {
    let devices = [null("first", "adaptive"), null("second", "adaptive")];
    let daemon = bench.experiment.start_ours("idle", &[], &devices)?;
    let options = ClientOptions::default();
    let clients =
        devices.iter().map(|device| BlkClient::connect(daemon.socket(&device.name), &options));
    let mut clients: Vec<BlkClient> = clients.collect::<Result<_, _>>()?;
    for client in &mut clients {
        // A short load, because a daemon that never worked may idle in another way.
        let work = Work { duration: bench.plan.warm_up, ..Work::default() };
        load::run(client.queue(0).context("no queue")?, &work, &bench.experiment.clock)?;
    }
    std::thread::sleep(bench.plan.idle_cpu / 10);
    let (before, start) = (daemon.process.cpu_time()?, Instant::now());
    while start.elapsed() < bench.plan.idle_cpu {
        stop::check()?;
        std::thread::sleep(Duration::from_millis(20));
    }
    let share =
        (daemon.process.cpu_time()? - before).as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
    let params = params([
        ("seconds", bench.plan.idle_cpu.as_secs_f64().into()),
        ("devices", clients.len().into()),
    ]);
    bench.experiment.records.measure(CPU, OURS, "cpu_share", share, "%", params);
    eprintln!("  {CPU:<20}  {share:.3} % of a core");
    Ok(())
}

/// Measures the latency of the first request after a pause far longer than the daemon spins.
pub(super) fn wake_latency(bench: &mut Bench) -> Result<()> {
    let daemon = bench.experiment.start_ours("wake", &[], &[null("disk", "adaptive")])?;
    let mut client = BlkClient::connect(daemon.socket("disk"), &ClientOptions::default())?;
    let queue = client.queue(0).context("no queue")?;
    let slot = queue.take_slot().context("no slot")?;
    let mut completions = Vec::new();
    let mut latencies = Vec::new();
    for _ in 0..bench.plan.wakes {
        stop::check()?;
        std::thread::sleep(ASLEEP);
        let start = Instant::now();
        queue.submit_read(slot, Sector(0), BLOCK_BYTES)?;
        queue.publish()?;
        completions.clear();
        while queue.poll_completions(&mut completions)? == 0 {
            ensure!(start.elapsed() < Duration::from_secs(5), "the daemon does not wake");
        }
        latencies.push(start.elapsed().as_nanos() as f64 / 1e3);
    }
    let median = stats::median(&latencies);
    let (min, max) = stats::spread(&latencies);
    let kicks = queue.counters().kicks as f64 / bench.plan.wakes as f64;
    let params = params([
        ("wakes", bench.plan.wakes.into()),
        ("asleep_us", (ASLEEP.as_micros() as u64).into()),
        ("min", min.into()),
        ("max", max.into()),
        ("kicks_per_wake", kicks.into()),
    ]);
    bench.experiment.records.measure(WAKE, OURS, "latency_p50", median, "us", params);
    eprintln!("  {WAKE:<20}  {median:.1} us, {kicks:.2} kicks each");
    Ok(())
}
