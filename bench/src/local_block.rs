//! The experiment `local-block`: disks for guests on this host.
//!
//! A client on one core drives a disk whose server polls on the other, at several depths, on
//! several stores. The same load drives qemu-storage-daemon, and floors show what the machine can
//! do at all. Smaller experiments measure the cost of idle neighbours and of an idle daemon, the
//! time in which a sleeping daemon wakes, and the parts of the time of one request.

mod breakdown;
mod contended;
mod idle;
mod matrix;
mod report;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::against;
use crate::bounds::{Bound, Limit, Of};
use crate::cores::{self, Gated, Partner};
use crate::experiment::{Experiment, Programs, Report, Scale};
use crate::floors::{self, CopyFloor};
use crate::huge_pages::{self, HugePages};
use crate::peer;
use crate::process::watched;
use crate::publish::Headline;
use crate::record::{FLOOR, OURS, Params};

const NAME: &str = "local-block";

/// The options of this experiment.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The options of experiments that measure programs.
    #[command(flatten)]
    pub programs: Programs,
    /// Touch the data: the client reads each byte that it got and writes each byte that it sends.
    #[arg(long)]
    pub touch: bool,
    /// Run only these parts.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    pub only: Vec<Part>,
}

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The floors of the machine.
    Floors,
    /// Stores, operations and depths, beside the peer.
    Matrix,
    /// The cost of 256 idle devices for a busy one.
    IdleNeighbours,
    /// The CPU time of an idle daemon.
    IdleCpu,
    /// The time in which a sleeping daemon wakes.
    WakeLatency,
    /// The latency of a polled disk while other work uses both cores.
    Contended,
    /// The parts of the time of one request.
    Breakdown,
}

/// The lengths and numbers of runs.
#[derive(Clone, Copy, Debug)]
struct Plan {
    run: Duration,
    warm_up: Duration,
    rounds: usize,
    trial: Duration,
    /// The time, over all runs, to wait for near and free cores.
    patience: Duration,
    /// After this time, on a busy machine, the matrix runs one round for each case.
    budget: Duration,
    store_bytes: u64,
    idle_cpu: Duration,
    wakes: usize,
    eventfd_rounds: u32,
    neighbours: usize,
    stages: usize,
    contended: Duration,
    /// Whether runs are long enough for a sidecore to notice that its core is lost.
    is_contention_noticed: bool,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        let full = Self {
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
            contended: ms(700),
            is_contention_noticed: true,
        };
        match scale {
            Scale::Full => full,
            Scale::Quick => Self {
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
                contended: ms(400),
                ..full
            },
            Scale::Tiny => Self {
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
                contended: ms(3),
                is_contention_noticed: false,
                ..full
            },
        }
    }
}

const NO_SLOWER_THAN_INTERRUPTS: Of<'static> = Of::Ratio("latency_p50", contended::INTERRUPT);

const BOUNDS: &[Bound<'static>] = &[
    Bound {
        case: "null/randread/qd1",
        of: Of::Ratio("latency_p50", peer::NAME),
        limit: Limit::AtMost(0.2),
    },
    Bound {
        case: "null/randread/qd32",
        of: Of::Ratio("iops", peer::NAME),
        limit: Limit::AtLeast(3.5),
    },
    Bound { case: "ram/randread/qd32", of: Of::FloorRatio("iops"), limit: Limit::AtLeast(0.75) },
    Bound { case: "ram/randwrite/qd32", of: Of::FloorRatio("iops"), limit: Limit::AtLeast(0.75) },
    Bound {
        case: "file/randread/qd32",
        of: Of::Ratio("iops", peer::NAME),
        limit: Limit::AtLeast(1.5),
    },
    Bound {
        case: "file/randwrite/qd32",
        of: Of::Ratio("iops", peer::NAME),
        limit: Limit::AtLeast(1.5),
    },
    Bound {
        case: idle::NEIGHBOURS,
        of: Of::Ours("added_latency", " ns"),
        limit: Limit::AtMost(6000.0),
    },
    Bound { case: idle::CPU, of: Of::Ours("cpu_share", " %"), limit: Limit::AtMost(1.0) },
    Bound { case: contended::CASES[0], of: NO_SLOWER_THAN_INTERRUPTS, limit: Limit::AtMost(1.0) },
    Bound { case: contended::CASES[1], of: NO_SLOWER_THAN_INTERRUPTS, limit: Limit::AtMost(1.0) },
    Bound { case: contended::CASES[2], of: NO_SLOWER_THAN_INTERRUPTS, limit: Limit::AtMost(1.0) },
    Bound { case: idle::WAKE, of: Of::Ours("latency_p50", " us"), limit: Limit::AtMost(100.0) },
];

const HEADLINES: &[Headline] = &[
    ("null/randread/qd1", Of::Ratio("latency_p50", peer::NAME)),
    ("null/randread/qd32", Of::Ratio("iops", peer::NAME)),
    ("ram/randread/qd32", Of::FloorRatio("iops")),
    ("ram/randwrite/qd32", Of::FloorRatio("iops")),
    ("file/randread/qd32", Of::Ratio("iops", peer::NAME)),
    ("file/randwrite/qd32", Of::Ratio("iops", peer::NAME)),
];

/// The state that all parts share.
struct Bench {
    experiment: Experiment,
    options: Options,
    plan: Plan,
    on_huge_pages: bool,
    /// Half a GiB, made at its first use.
    copy_floor: Option<Arc<Mutex<CopyFloor>>>,
}

/// Runs the experiment and reports. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// A program does not start or fails, or the experiment was interrupted. All started programs have
/// ended then.
pub fn run(options: &Options) -> Result<bool> {
    let common = &options.programs.common;
    let mut plan = Plan::of(common.scale());
    (plan.run, plan.rounds) = against::runs(common, plan.run, plan.rounds);
    if common.against.is_some() {
        plan.budget = Duration::MAX;
    }
    raise_file_limit();
    let experiment = Experiment::start(NAME, &options.programs, plan.patience)?;
    // For the arenas of the store and of the floor and the floor's shared memory (with two builds,
    // the arenas of two stores and none of a floor), and some pages for the clients.
    let huge_pages = HugePages::reserve(3 * plan.store_bytes / huge_pages::BYTES + 32);
    let on_huge_pages = huge_pages::free() * huge_pages::BYTES >= 3 * plan.store_bytes;
    let mut bench =
        Bench { experiment, options: options.clone(), plan, on_huge_pages, copy_floor: None };
    if bench.wants(Part::Floors) {
        bench.floors()?;
    }
    if bench.wants(Part::Matrix) {
        let peer = bench.experiment.find_peer();
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
    if bench.wants(Part::Contended) {
        contended::run(&mut bench)?;
    }
    if bench.wants(Part::Breakdown) {
        breakdown::run(&mut bench)?;
    }
    drop(huge_pages);
    let records = &bench.experiment.records;
    bench.experiment.conclude(Report {
        note: report::note(records),
        draw: report::draw,
        ..Report::new(report::table(records), (OURS, BOUNDS), HEADLINES)
    })
}

impl Bench {
    fn wants(&self, part: Part) -> bool {
        match (&self.options.only[..], &self.options.programs.common.against) {
            ([], Some(_)) => part == Part::Matrix,
            ([], None) => true,
            (only, _) => only.contains(&part),
        }
    }

    /// The parameters of every measurement.
    fn common_params(&self) -> Params {
        let mut params = self.experiment.params();
        params.insert("huge_pages".to_owned(), self.on_huge_pages.into());
        params
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
            self.round_trip(case, |partner| cores::round_trip_ns(partner, two_lines))?;
        }
        for (case, blocking) in
            [("floor/eventfd-spinning", false), ("floor/eventfd-blocking", true)]
        {
            self.round_trip(case, |partner| {
                floors::eventfd_round_trip_ns(partner, blocking, rounds)
            })?;
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
                self.experiment.records.measure(case, FLOOR, metric, ns, "ns", params);
                eprintln!("  {case:<28} {ns:>10.0} ns  ({how})");
            }
        }
        Ok(())
    }

    fn round_trip(&mut self, case: &str, measure: impl Fn(&Partner) -> Result<f64>) -> Result<()> {
        let gated = self.experiment.gate.run(|partner| watched(|| measure(partner)))?;
        let mut params = self.common_params();
        params.insert("counts".to_owned(), gated.counts().into());
        self.experiment.records.measure(case, FLOOR, "round_trip", gated.result, "ns", params);
        eprintln!("  {case:<28} {:>10.0} ns", gated.result);
        Ok(())
    }

    /// Measures the copy floor once, on the server's core: nanoseconds, and the name of the way.
    fn copy_once(&mut self, write: bool, by_store: bool) -> Result<Gated<(f64, &'static str)>> {
        let (floor, duration) = (self.copy_floor()?, self.plan.run);
        self.experiment.gate.run(|partner| {
            let floor = Arc::clone(&floor);
            let copy = move || match floor.lock() {
                Ok(floor) if by_store => floor.store_copy_ns(write, duration),
                Ok(mut floor) => floor.copy_ns(write, duration),
                Err(_) => bail!("an earlier measurement died"),
            };
            partner.run(move || watched(copy))?.recv().context("the partner thread died")?
        })
    }
}

/// Raises the limit of open files: hundreds of clients have thousands of them.
fn raise_file_limit() {
    let resource = rustix::process::Resource::Nofile;
    let mut limit = rustix::process::getrlimit(resource);
    limit.current = limit.maximum;
    let _ = rustix::process::setrlimit(resource, limit);
}
