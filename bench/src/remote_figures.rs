//! The experiment `remote-figures`: the figures of vRIO's evaluation (section 5) that concern block
//! devices, and whether this system's have the same shape.
//!
//! A figure needs more cores than a small machine has: each client and each sidecore takes one.
//! Where two threads would share a core nothing is timed. Instead the nanoseconds that a request
//! takes at its client and at its IOhost are counted on one core (`costs`), and the simulation of
//! `sidecore-plan` with these costs gives throughput, latency and waits. One client and one
//! sidecore are timed on any machine: their latency gives the simulation the time of the way
//! between two cores, their other cases show how far the simulation is off. A machine with more
//! cores times as many clients and sidecores as it has cores for (`timed`).

mod consolidation;
mod costs;
mod local_rig;
mod page;
mod scaling;
mod storage;
mod timed;

use std::time::Duration;

use anyhow::Result;

use crate::experiment::{Experiment, Programs, Report, Scale};
use crate::record::{OURS, params};
use costs::{Costed, Disk, Library};
use page::Page;
use sidecore_plan::simulation::{self, Costs, Outcome, System};
use timed::{Place, Rack, Setting};

const NAME: &str = "remote-figures";
/// The name of the simulation in records.
const SIMULATED: &str = "simulation";
/// The size of requests, but for the webserver's: the paper's.
const BYTES: u32 = 4096;
/// Requests in flight of a client that streams.
const STREAM_DEPTH: u16 = 32;
const MAX_DEPTH: u16 = STREAM_DEPTH;
/// The delay of the slower store, about that of a fast SSD.
const STORE_DELAY_US: u64 = 80;
/// Of all runs of the simulation.
const SEED: u64 = 1;

/// The options of this experiment.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The options of experiments that measure programs.
    #[command(flatten)]
    pub programs: Programs,
    /// The work of a simulated guest for each request of its stream, in microseconds (figure 13).
    #[arg(long, default_value_t = 5.0, value_name = "US")]
    pub guest_us: f64,
}

/// The lengths and numbers of runs.
#[derive(Clone, Copy, Debug)]
struct Plan {
    run: Duration,
    warm_up: Duration,
    rounds: usize,
    /// Requests of 4 KiB in each round of the count of nanoseconds.
    stages: usize,
    /// The size of each device.
    disk_bytes: u64,
    /// The time, over all runs, to wait for near and free cores.
    patience: Duration,
    /// The simulated time of short requests; that of the webserver is ten times as long.
    simulated_ns: f64,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        let full = Self {
            disk_bytes: 64 << 20,
            rounds: 7,
            stages: 50_000,
            simulated_ns: 50e6,
            run: Duration::from_millis(200),
            warm_up: Duration::from_millis(30),
            patience: Duration::from_secs(60),
        };
        match scale {
            Scale::Full => full,
            Scale::Quick => Self {
                rounds: 5,
                stages: 10_000,
                run: Duration::from_millis(40),
                warm_up: Duration::from_millis(10),
                simulated_ns: 20e6,
                patience: Duration::from_secs(20),
                ..full
            },
            Scale::Tiny => Self {
                disk_bytes: 16 << 20,
                rounds: 1,
                stages: 320,
                simulated_ns: 0.5e6,
                run: Duration::from_millis(3),
                warm_up: Duration::from_millis(1),
                patience: Duration::ZERO,
            },
        }
    }
}

/// The state that all figures share.
struct Bench {
    experiment: Experiment,
    plan: Plan,
    /// Of this machine.
    cores: usize,
    guest_ns: f64,
    page: Page,
}

/// The constants of the simulation.
struct Model {
    ram: Costed,
    encrypted: Costed,
    library: Library,
    /// From a client's core to an IOhost's sidecore, and to a local sidecore.
    remote_wire_ns: f64,
    local_wire_ns: f64,
    /// From a sidecore to another one.
    crossing_ns: f64,
}

/// Runs the experiment and reports. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// A program does not start or fails, or the experiment was interrupted. All started programs have
/// ended then.
pub fn run(options: &Options) -> Result<bool> {
    let common = &options.programs.common;
    if common.against.is_some() {
        eprintln!("{NAME} is left out: it does not compare builds, remote-block does");
        return Ok(true);
    }
    let plan = Plan::of(common.scale());
    // Before this thread is pinned to one of them.
    let cores = timed::machine_cores();
    let experiment = Experiment::start(NAME, &options.programs, plan.patience)?;
    let guest_ns = options.guest_us * 1e3;
    let mut bench = Bench { experiment, plan, cores, guest_ns, page: Page::default() };
    let ram = bench.costs(Disk::Ram)?;
    let encrypted = bench.costs(Disk::Encrypted)?;
    let library = bench.library()?;
    let (remote, local) = bench.single(&ram)?;
    let model = Model {
        ram,
        encrypted,
        library,
        remote_wire_ns: remote.0,
        local_wire_ns: local.0,
        crossing_ns: remote.1 / 2.0,
    };
    bench.page.costs(&model);
    bench.events()?;
    bench.scaling(&model)?;
    bench.storage(&model)?;
    bench.consolidation(&model)?;
    let report = Report::new(bench.page.to_markdown(), (OURS, &[]), &[]);
    bench.experiment.conclude(report)
}

impl Model {
    /// The system of an IOhost.
    fn remote(&self, costs: Costs, sidecores: usize) -> System {
        let (wire_ns, crossing_ns) = (self.remote_wire_ns, self.crossing_ns);
        System { wire_ns, crossing_ns, ..System::new(costs, sidecores) }
    }

    /// The system of a host with a sidecore.
    fn local(&self, costs: Costs) -> System {
        System { wire_ns: self.local_wire_ns, ..System::new(costs, 1) }
    }
}

/// The time of the way between two cores that explains a latency: what is left of it without the
/// work at both ends.
fn wire_ns(latency_ns: f64, costs: &Costs) -> f64 {
    let path = &costs.read;
    let work_ns = path.client.in_batch(BYTES, 1.0) + path.here.in_batch(BYTES, 1.0);
    ((latency_ns - work_ns) / 2.0).max(0.0)
}

impl Bench {
    /// Times one request in flight. Returns the time of the way and the round trip of a cache line,
    /// of a remote disk and of a local one.
    fn single(&mut self, ram: &Costed) -> Result<((f64, f64), (f64, f64))> {
        let mut ways = [(0.0, 0.0); 2];
        let places = [(Place::Remote, ram.remote), (Place::Local, ram.local)];
        for (way, (place, costs)) in ways.iter_mut().zip(places) {
            let setting = Setting { place, clients: 1, sidecores: 1, delay_us: 0 };
            let mut rack = Rack::start(&self.experiment, setting, self.plan.disk_bytes)?;
            let work = self.work(1, false);
            let runs = self.time(&mut [&mut rack], &work)?;
            rack.end()?;
            for runs in runs {
                let latency = runs.rounds(|sample| sample.latency_p50_ns).median();
                *way = (wire_ns(latency, &costs), runs.line_ns());
            }
        }
        let [remote, local] = ways;
        Ok((remote, local))
    }

    /// Simulates a system for `scale` times the plan's time, and records its results.
    fn simulate(&mut self, case: &str, system: &System, scale: f64) -> Outcome {
        let measured_ns = self.plan.simulated_ns * scale;
        let outcome = simulation::run(system, measured_ns / 10.0, measured_ns, SEED);
        let threads = system.clients.iter().map(|client| client.threads.len()).sum::<usize>();
        let guest_ns = system.clients.first().map_or(0.0, |client| client.guest_ns);
        let how = params([
            ("how", "simulated with counted costs".into()),
            ("clients", system.clients.len().into()),
            ("sidecores", system.sidecores.into()),
            ("threads", threads.into()),
            ("guest_ns", guest_ns.into()),
            ("wire_ns", system.wire_ns.into()),
            ("store_ns", system.store_ns.into()),
            ("seed", SEED.into()),
        ]);
        let sidecores = system.sidecores as f64;
        let metrics = [
            ("iops", outcome.requests_per_s, "1/s"),
            ("operations", outcome.operations_per_s, "1/s"),
            ("bandwidth", outcome.bytes_per_s, "B/s"),
            ("latency_mean", outcome.latency_ns, "ns"),
            ("waited", outcome.waited, "1"),
            ("handed_over", outcome.handed_over, "1"),
            ("useful", outcome.useful.iter().sum::<f64>() / sidecores, "1"),
        ];
        for (metric, value, unit) in metrics {
            let records = &mut self.experiment.records;
            records.measure(case, SIMULATED, metric, value, unit, how.clone());
        }
        outcome
    }
}
