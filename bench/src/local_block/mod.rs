//! The experiment `local-block`: disks for guests on this host.
//!
//! A client on one core drives a disk whose server polls on the other, at several depths, on several stores; beside our
//! daemon runs qemu-storage-daemon, and beside both what the machine can do at all. Smaller experiments look at what
//! idle neighbours cost, what an idle daemon costs, how fast a sleeping one wakes, and where the time of one request
//! goes.

mod breakdown;
mod idle;
mod matrix;
mod report;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use quanta::Clock;

use crate::bounds::{Bound, Limit, Of};
use crate::cores::{self, Gate, Gated, Partner};
use crate::floors::{self, CopyFloor};
use crate::huge_pages::{self, HugePages};
use crate::peer::{self, Program};
use crate::process::watched;
use crate::record::{FLOOR, OURS, Params, Records, params};
use crate::{bounds, sidecored, stop};

const NAME: &str = "local-block";

/// What to run.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// All of it, within a minute.
    #[arg(long)]
    pub quick: bool,
    /// Only a few milliseconds each, without peers: does it work at all?
    #[arg(long, conflicts_with = "quick")]
    pub tiny: bool,
    /// Append the records to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Fail if one of the bounds does not hold.
    #[arg(long)]
    pub enforce: bool,
    /// Write the table into README.md and the plot to docs/bench/local-block.svg.
    #[arg(long)]
    pub update_readme: bool,
    /// The client reads what it has read and writes what it writes.
    #[arg(long)]
    pub touch: bool,
    /// Without the peer.
    #[arg(long)]
    pub no_peer: bool,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    pub only: Vec<Part>,
    /// The daemon to measure; by default the one that was built with this program.
    #[arg(long, value_name = "PROGRAM")]
    pub daemon: Option<PathBuf>,
}

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// What the machine can do.
    Floors,
    /// Stores, operations and depths, beside the peer.
    Matrix,
    /// What 256 idle devices cost a busy one.
    IdleNeighbours,
    /// What an idle daemon costs.
    IdleCpu,
    /// How fast a sleeping daemon wakes.
    WakeLatency,
    /// Where the time of one request goes.
    Breakdown,
}

/// How long everything takes.
#[derive(Clone, Copy, Debug)]
struct Plan {
    name: &'static str,
    run: Duration,
    warm_up: Duration,
    rounds: usize,
    trial: Duration,
    /// How long, in all, to wait for near and free cores.
    patience: Duration,
    /// After this long, on a machine that is busy, the matrix makes do with one round for each case.
    budget: Duration,
    store_bytes: u64,
    idle_cpu: Duration,
    wakes: usize,
    eventfd_rounds: u32,
    neighbours: usize,
    stages: usize,
}

impl Plan {
    fn of(options: &Options) -> Self {
        let ms = Duration::from_millis;
        let full = Self {
            name: "full",
            run: ms(400),
            warm_up: ms(40),
            rounds: 7,
            trial: ms(200),
            patience: Duration::from_secs(20 * 60),
            budget: Duration::from_secs(40 * 60),
            store_bytes: 512 << 20,
            idle_cpu: Duration::from_secs(5),
            wakes: 300,
            eventfd_rounds: 3000,
            neighbours: 256,
            stages: 200_000,
        };
        if options.tiny {
            return Self {
                name: "tiny",
                run: ms(3),
                warm_up: ms(1),
                rounds: 1,
                patience: Duration::ZERO,
                store_bytes: 16 << 20,
                idle_cpu: ms(100),
                wakes: 5,
                eventfd_rounds: 50,
                neighbours: 16,
                stages: 2000,
                ..full
            };
        }
        if options.quick {
            return Self {
                name: "quick",
                run: ms(60),
                warm_up: ms(10),
                rounds: 5,
                trial: ms(40),
                patience: Duration::from_secs(15),
                budget: Duration::from_secs(30),
                idle_cpu: Duration::from_secs(2),
                wakes: 60,
                eventfd_rounds: 500,
                stages: 50_000,
                ..full
            };
        }
        full
    }
}

/// What must hold.
const BOUNDS: &[Bound<'static>] = &[
    Bound { case: "null/randread/qd1", of: Of::Ratio("latency_p50", peer::NAME), limit: Limit::AtMost(0.2) },
    Bound { case: "null/randread/qd32", of: Of::Ratio("iops", peer::NAME), limit: Limit::AtLeast(3.5) },
    Bound { case: "ram/randread/qd32", of: Of::FloorRatio("iops"), limit: Limit::AtLeast(0.75) },
    Bound { case: "ram/randwrite/qd32", of: Of::FloorRatio("iops"), limit: Limit::AtLeast(0.75) },
    Bound { case: "file/randread/qd32", of: Of::Ratio("iops", peer::NAME), limit: Limit::AtLeast(1.5) },
    Bound { case: "file/randwrite/qd32", of: Of::Ratio("iops", peer::NAME), limit: Limit::AtLeast(1.5) },
    Bound { case: idle::NEIGHBOURS, of: Of::Ours("added_latency", " ns"), limit: Limit::AtMost(6000.0) },
    Bound { case: idle::CPU, of: Of::Ours("cpu_share", " %"), limit: Limit::AtMost(1.0) },
    Bound { case: idle::WAKE, of: Of::Ours("latency_p50", " us"), limit: Limit::AtMost(100.0) },
];

/// All that the parts share.
struct Bench {
    begin: Instant,
    options: Options,
    plan: Plan,
    daemon: PathBuf,
    clock: Clock,
    gate: Gate,
    directory: tempfile::TempDir,
    records: Records,
    on_huge_pages: bool,
    /// Made when it is first needed: half a GiB.
    copy_floor: Option<Arc<Mutex<CopyFloor>>>,
}

/// Runs the experiment and reports; false if a bound was to be enforced and does not hold.
///
/// # Errors
/// Something does not start or fails, or the experiment was interrupted. Everything that was started has ended then.
pub fn run(options: &Options) -> Result<bool> {
    let begin = Instant::now();
    let plan = Plan::of(options);
    stop::listen()?;
    raise_file_limit();
    // Ahead of whatever else the machine does; what we start inherits it, all of it alike. It is a privilege.
    let _ = rustix::process::nice(-10);
    cores::pin(cores::CLIENT).context("the experiment needs two cores")?;
    let gate = Gate::new(Partner::start(cores::SERVER).context("the experiment needs two cores")?, plan.patience);
    // The store's and the floor's arenas, the floor's shared one, and some for the clients.
    let huge_pages = HugePages::reserve(3 * plan.store_bytes / huge_pages::BYTES + 32);
    let on_huge_pages = huge_pages::free() * huge_pages::BYTES >= 3 * plan.store_bytes;
    let daemon = options.daemon.clone().map_or_else(sidecored::beside_us, Ok)?;
    let directory = tempfile::Builder::new().prefix("sidecore-bench").tempdir()?;
    let mut bench = Bench {
        begin,
        options: options.clone(),
        plan,
        daemon,
        clock: Clock::new(),
        gate,
        directory,
        records: Records::new(NAME),
        on_huge_pages,
        copy_floor: None,
    };
    eprintln!("{NAME}, {}: client on core {}, server on core {}", plan.name, cores::CLIENT, cores::SERVER);
    if bench.wants(Part::Floors) {
        bench.floors()?;
    }
    if bench.wants(Part::Matrix) {
        let peer = bench.find_peer();
        matrix::run(&mut bench, peer.as_ref())?;
    }
    bench.copy_floor = None;
    if bench.wants(Part::IdleNeighbours) {
        idle::neighbours(&mut bench)?;
    }
    if bench.wants(Part::WakeLatency) {
        idle::wake_latency(&mut bench)?;
    }
    if bench.wants(Part::IdleCpu) {
        idle::cpu(&mut bench)?;
    }
    if bench.wants(Part::Breakdown) {
        breakdown::run(&mut bench)?;
    }
    drop(huge_pages);
    bench.report()
}

impl Bench {
    fn wants(&self, part: Part) -> bool {
        self.options.only.is_empty() || self.options.only.contains(&part)
    }

    fn find_peer(&self) -> Option<Program> {
        if self.options.tiny || self.options.no_peer {
            return None;
        }
        Program::find_beside(&self.daemon, !self.options.quick)
    }

    /// Parameters that all measurements have.
    fn common_params(&self) -> Params {
        params([
            ("plan", self.plan.name.into()),
            ("client_core", cores::CLIENT.0.into()),
            ("server_core", cores::SERVER.0.into()),
            ("huge_pages", self.on_huge_pages.into()),
        ])
    }

    fn copy_floor(&mut self) -> Result<Arc<Mutex<CopyFloor>>> {
        if self.copy_floor.is_none() {
            let floor = CopyFloor::new(self.plan.store_bytes)?;
            self.on_huge_pages &= floor.is_on_huge_pages();
            self.copy_floor = Some(Arc::new(Mutex::new(floor)));
        }
        self.copy_floor.clone().context("no floor")
    }

    fn floors(&mut self) -> Result<()> {
        let rounds = self.plan.eventfd_rounds;
        for (case, two_lines) in [("floor/one-line", false), ("floor/two-lines", true)] {
            let gated = self.gate.run(|partner| watched(|| cores::round_trip_ns(partner, two_lines)))?;
            let mut params = self.common_params();
            params.insert("counts".to_owned(), gated.counts().into());
            self.records.measure(case, FLOOR, "round_trip", gated.result, "ns", params);
            eprintln!("  {case:<28} {:>10.0} ns", gated.result);
        }
        for (case, blocking) in [("floor/eventfd-spinning", false), ("floor/eventfd-blocking", true)] {
            let gated =
                self.gate.run(|partner| watched(|| floors::eventfd_round_trip_ns(partner, blocking, rounds)))?;
            let mut params = self.common_params();
            params.insert("counts".to_owned(), gated.counts().into());
            self.records.measure(case, FLOOR, "round_trip", gated.result, "ns", params);
            eprintln!("  {case:<28} {:>10.0} ns", gated.result);
        }
        for (case, write) in [("floor/copy-out-of-arena", false), ("floor/copy-into-arena", true)] {
            for by_store in [false, true] {
                let gated = self.copy_once(write, by_store)?;
                let (ns, how) = gated.result;
                let mut params = self.common_params();
                params.insert("counts".to_owned(), gated.counts().into());
                params.insert("how".to_owned(), how.into());
                params.insert("arena_bytes".to_owned(), self.plan.store_bytes.into());
                params.insert("block_bytes".to_owned(), crate::load::BLOCK_BYTES.into());
                let metric = if by_store { "store_copy" } else { "copy" };
                self.records.measure(case, FLOOR, metric, ns, "ns", params);
                eprintln!("  {case:<28} {ns:>10.0} ns  ({how})");
            }
        }
        Ok(())
    }

    /// One measurement of the copy floor, on the server's core: nanoseconds, and how.
    fn copy_once(&mut self, write: bool, by_store: bool) -> Result<Gated<(f64, &'static str)>> {
        let (floor, duration) = (self.copy_floor()?, self.plan.run);
        self.gate.run(|partner| {
            let floor = Arc::clone(&floor);
            let copy = move || match floor.lock() {
                Ok(floor) if by_store => floor.store_copy_ns(write, duration),
                Ok(mut floor) => floor.copy_ns(write, duration),
                Err(_) => bail!("an earlier measurement died"),
            };
            partner.run(move || watched(copy))?.recv().context("the partner thread died")?
        })
    }

    fn report(&self) -> Result<bool> {
        // A tiny run is over before anything has settled.
        let bounds = if self.options.tiny { &[] } else { BOUNDS };
        let checked: Vec<_> = bounds::check(bounds, &self.records, OURS);
        println!("\n{}", report::table(&self.records));
        let hold = bounds::print(&checked);
        println!(
            "took {:.0} s; {} runs waited for near and free cores or were repeated",
            self.begin.elapsed().as_secs_f64(),
            self.gate.retries()
        );
        if let Some(file) = &self.options.json {
            self.records.append_to(file)?;
        }
        if self.options.update_readme {
            report::publish(&self.records)?;
        }
        Ok(!self.options.enforce || hold)
    }
}

/// Hundreds of clients have some thousands of files.
fn raise_file_limit() {
    let resource = rustix::process::Resource::Nofile;
    let mut limit = rustix::process::getrlimit(resource);
    limit.current = limit.maximum;
    let _ = rustix::process::setrlimit(resource, limit);
}
