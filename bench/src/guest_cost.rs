//! The experiment `guest-cost`: the cost of a disk for the client that uses it.
//!
//! A sidecore that polls a ring takes cache lines from the client that writes the ring. The client
//! pays for them, and a guest with work of its own feels the loss more than the sidecore does. The
//! client therefore works for a fixed time before each request, writes its descriptors, and
//! publishes each request at once, as a kernel's driver does. Its time for a request beyond its own
//! work is compared with the time that the same client needs with a responder that only answers and
//! polls the ring at the best of several fixed intervals.

mod client;
mod floor;
mod report;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_driver::{BlkClient, ClientOptions, NvmeClient, NvmeOptions, NvmeQueue, features};

use crate::against::{self, Kept, Part};
use crate::bounds::{Bound, Limit, Of};
use crate::cores::Gated;
use crate::experiment::{Experiment, Programs, Report, Scale, wants};
use crate::load::BLOCK_BYTES;
use crate::process::Watch;
use crate::publish::Headline;
use crate::record::{FLOOR, OURS, Params, Records};
use crate::rounds::{Pairs, Rounds};
use crate::sidecored::{Device, FrontEnd, Sidecored, Store};
use client::{Cost, Guest, OwnWork};
use floor::Floor;

const NAME: &str = "guest-cost";

const DISK_BYTES: u64 = 64 << 20;
const DEPTHS: [u16; 3] = [1, 32, 128];
const OWN_WORK_NS: [u64; 5] = [0, 100, 250, 500, 1000];
/// Intervals between two polls of the floor's responder.
const INTERVALS_NS: [u64; 8] = [0, 250, 500, 1000, 2000, 4000, 8000, 16_000];

/// The options of this experiment.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The options of experiments that measure programs.
    #[command(flatten)]
    pub programs: Programs,
    /// Measure only these queues.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "QUEUES")]
    pub only: Vec<Format>,
    /// Measure only these depths.
    #[arg(long, value_delimiter = ',', value_name = "COUNT")]
    pub depths: Vec<u16>,
    /// Measure only these times of the client's own work.
    #[arg(long, value_delimiter = ',', value_name = "NANOSECONDS")]
    pub own_work: Vec<u64>,
}

/// The format of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A split virtqueue, three descriptors a request.
    Split,
    /// A split virtqueue, a table of descriptors for each request.
    SplitIndirect,
    /// A packed virtqueue, three descriptors a request.
    Packed,
    /// A packed virtqueue, a table of descriptors for each request.
    PackedIndirect,
    /// An NVMe queue pair.
    Nvme,
}

impl Format {
    const ALL: [Self; 5] =
        [Self::Split, Self::SplitIndirect, Self::Packed, Self::PackedIndirect, Self::Nvme];

    fn name(self) -> &'static str {
        match self {
            Self::Split => "split/plain",
            Self::SplitIndirect => "split/indirect",
            Self::Packed => "packed/plain",
            Self::PackedIndirect => "packed/indirect",
            Self::Nvme => "nvme",
        }
    }

    fn virtio(self, depth: u16) -> ClientOptions {
        ClientOptions {
            slots: depth,
            slot_bytes: BLOCK_BYTES,
            packed: matches!(self, Self::Packed | Self::PackedIndirect),
            indirect: matches!(self, Self::SplitIndirect | Self::PackedIndirect),
            like_kernel: true,
            ..ClientOptions::default()
        }
    }

    fn nvme(depth: u16) -> NvmeOptions {
        NvmeOptions { slots: depth, slot_bytes: BLOCK_BYTES, ..NvmeOptions::default() }
    }
}

fn case(format: Format, depth: u16, own_work_ns: u64) -> String {
    format!("{}/qd{depth}/{own_work_ns}ns", format.name())
}

/// Trial runs for each interval, which choose the floor's best interval.
const TRIALS: usize = 3;

/// The lengths and numbers of runs.
#[derive(Clone, Copy, Debug)]
struct Plan {
    run: Duration,
    warm_up: Duration,
    /// The length of a trial run of one interval.
    trial: Duration,
    rounds: usize,
    /// The time, over all runs, to wait for near and free cores.
    patience: Duration,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        match scale {
            Scale::Full => {
                let patience = Duration::from_secs(20 * 60);
                Self { run: ms(100), warm_up: ms(20), trial: ms(20), rounds: 11, patience }
            }
            Scale::Quick => {
                let patience = Duration::from_secs(20);
                Self { run: ms(12), warm_up: ms(5), trial: ms(3), rounds: 7, patience }
            }
            Scale::Tiny => Self {
                run: ms(2),
                warm_up: ms(1),
                trial: ms(1),
                rounds: 1,
                patience: Duration::ZERO,
            },
        }
    }
}

/// The cases that must reach a share of the floor.
fn bounded_cases() -> Vec<String> {
    let mut cases = Vec::new();
    for format in Format::ALL {
        for depth in DEPTHS.into_iter().filter(|depth| *depth > 1) {
            cases.extend(
                OWN_WORK_NS.into_iter().filter(|ns| *ns <= 500).map(|ns| case(format, depth, ns)),
            );
        }
    }
    cases
}

/// A daemon with its runs in the current case.
struct Daemon {
    name: String,
    sidecored: Sidecored,
    runs: Costs,
}

/// A run for each round.
type Costs = Vec<Gated<Cost>>;

/// A connection with one queue.
enum Client {
    Blk(Box<BlkClient>),
    /// The client must live as long as its queue is used.
    Nvme(#[allow(dead_code)] Box<NvmeClient>, Box<NvmeQueue>),
}

impl Client {
    fn connect(daemon: &Daemon, format: Format, depth: u16) -> Result<Self> {
        if format == Format::Nvme {
            let socket = daemon.sidecored.socket("nvme");
            let mut client = NvmeClient::connect(socket, &Format::nvme(depth))?;
            let queue = client.take_queue(0).context("no queue")?;
            ensure!(queue.has_mapped_doorbells(), "the doorbells are messages");
            return Ok(Self::Nvme(Box::new(client), Box::new(queue)));
        }
        let options = format.virtio(depth);
        let client = BlkClient::connect(daemon.sidecored.socket("virtio"), &options)?;
        // A client that is refused a format falls back to another one without an error.
        for (wanted, feature) in
            [(options.packed, features::RING_PACKED), (options.indirect, features::INDIRECT_DESC)]
        {
            let name = format.name();
            ensure!(wanted == (client.features() & feature != 0), "the daemon has no {name} rings");
        }
        Ok(Self::Blk(Box::new(client)))
    }

    fn run(&mut self, guest: &Guest, clock: &Clock) -> Result<Cost> {
        match self {
            Self::Blk(client) => client::run(client.queue(0).context("no queue")?, guest, clock),
            Self::Nvme(_, queue) => client::run(queue.as_mut(), guest, clock),
        }
    }
}

struct Bench {
    experiment: Experiment,
    options: Options,
    plan: Plan,
    daemons: Vec<Daemon>,
}

const HEADLINES: &[Headline] = &[
    ("split/plain/qd32/0ns", Of::FloorRatio("iops")),
    ("split/plain/qd32/500ns", Of::FloorRatio("iops")),
    ("split/indirect/qd32/100ns", Of::FloorRatio("iops")),
    ("packed/plain/qd32/500ns", Of::FloorRatio("iops")),
    ("nvme/qd32/0ns", Of::FloorRatio("iops")),
    ("nvme/qd32/500ns", Of::FloorRatio("iops")),
];

/// Runs the experiment and reports. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// A program does not start or fails, or the experiment was interrupted. All started programs have
/// ended then.
pub fn run(options: &Options) -> Result<bool> {
    let common = &options.programs.common;
    let mut plan = Plan::of(common.scale());
    (plan.run, plan.rounds) = against::runs(common, plan.run, plan.rounds);
    let experiment = Experiment::start(NAME, &options.programs, plan.patience)?;
    let mut bench = Bench { experiment, options: options.clone(), plan, daemons: Vec::new() };
    let mut kept = Kept::default();
    for part in against::parts(common, plan.rounds) {
        bench.start_daemons(part.start)?;
        for format in Format::ALL.into_iter().filter(|format| wants(&options.only, format)) {
            for depth in DEPTHS.into_iter().filter(|depth| wants(&options.depths, depth)) {
                bench.queue(format, depth, (&part, &mut kept))?;
            }
        }
        for daemon in bench.daemons.drain(..) {
            daemon.sidecored.process.end()?;
        }
    }
    let cases = bounded_cases();
    let bound = |case| Bound { case, of: Of::FloorRatio("iops"), limit: Limit::AtLeast(0.95) };
    let bounds: Vec<Bound<'_>> = cases.iter().map(|case| bound(case)).collect();
    let records = &bench.experiment.records;
    bench.experiment.conclude(Report::new(report::table(records), (OURS, &bounds), HEADLINES))
}

impl Bench {
    fn start_daemons(&mut self, start: usize) -> Result<()> {
        let store = Store::Null { bytes: DISK_BYTES };
        let devices = [
            Device { packed: true, ..Device::new("virtio", store) },
            Device {
                front_end: FrontEnd::Nvme,
                ..Device::new("nvme", Store::Shared { with: "virtio" })
            },
        ];
        let of_builds = [&devices[..], &devices];
        let (ours, before) = self.experiment.start_builds(OURS, start, &[], of_builds)?;
        let mut daemons = vec![(OURS.to_owned(), ours)];
        daemons.extend(before.map(|daemon| (against::before(OURS), daemon)));
        for (name, mut sidecored) in daemons {
            sidecored.process.freeze()?;
            self.daemons.push(Daemon { name, sidecored, runs: Vec::new() });
        }
        Ok(())
    }

    /// Runs all cases of one kind of queue at one depth, over the same connections.
    fn queue(
        &mut self,
        format: Format,
        depth: u16,
        (part, kept): (&Part, &mut Kept<Costs>),
    ) -> Result<()> {
        // A comparison of builds has no floor.
        let mut floor = match format {
            _ if self.daemons.len() > 1 => None,
            Format::Nvme => Some(Floor::nvme(&Format::nvme(depth))?),
            _ => Some(Floor::virtio(&format.virtio(depth))?),
        };
        let mut clients = Vec::new();
        for daemon in &mut self.daemons {
            daemon.sidecored.process.thaw()?;
            clients.push(Client::connect(daemon, format, depth)?);
            daemon.sidecored.process.freeze()?;
        }
        for own_work_ns in OWN_WORK_NS {
            if wants(&self.options.own_work, &own_work_ns) {
                let case = case(format, depth, own_work_ns);
                let guest = self.guest(depth, own_work_ns);
                let systems = (&mut clients[..], floor.as_mut());
                self.case(&case, &guest, systems, (part, kept))?;
            }
        }
        for (daemon, client) in self.daemons.iter_mut().zip(clients) {
            daemon.sidecored.process.thaw()?;
            drop(client);
            daemon.sidecored.process.freeze()?;
        }
        Ok(())
    }

    fn guest(&self, depth: u16, own_work_ns: u64) -> Guest {
        let own_work = OwnWork::of(own_work_ns, &self.experiment.clock);
        let blocks = DISK_BYTES / u64::from(BLOCK_BYTES);
        Guest { depth, own_work, blocks, duration: self.plan.run }
    }

    fn case(
        &mut self,
        case: &str,
        guest: &Guest,
        (clients, mut floor): (&mut [Client], Option<&mut Floor>),
        (part, kept): (&Part, &mut Kept<Costs>),
    ) -> Result<()> {
        let interval_ns = match &mut floor {
            Some(floor) => self.best_interval(floor, guest)?,
            None => 0,
        };
        let mut floor_runs = Costs::new();
        let builds = self.daemons.len() > 1;
        let runs = kept.take(case, self.daemons.len());
        self.daemons.iter_mut().zip(runs).for_each(|(daemon, runs)| daemon.runs = runs);
        for number in part.rounds.clone() {
            if let Some(floor) = &mut floor {
                let Experiment { gate, clock, .. } = &mut self.experiment;
                floor_runs.push(floor.run(gate, guest, interval_ns, clock)?);
            }
            for turn in 0..self.daemons.len() {
                let index = if builds { against::index(turn, number) } else { turn };
                let (Some(daemon), Some(client)) =
                    (self.daemons.get_mut(index), clients.get_mut(index))
                else {
                    continue;
                };
                let run = round(&mut self.experiment, &self.plan, daemon, client, guest)?;
                daemon.runs.push(run);
            }
        }
        if part.is_last {
            let mut params = self.experiment.params();
            params.insert("depth".to_owned(), guest.depth.into());
            params.insert("own_work_ns".to_owned(), guest.own_work.ns.into());
            let floor = floor.map(|_| (interval_ns, &floor_runs[..]));
            self.record(case, &params, floor);
        } else {
            kept.keep(case, self.daemons.iter_mut().map(|daemon| std::mem::take(&mut daemon.runs)));
        }
        Ok(())
    }

    /// Finds the interval at which the responder serves this client best.
    fn best_interval(&mut self, floor: &mut Floor, guest: &Guest) -> Result<u64> {
        let trial = Guest { duration: self.plan.trial, ..*guest };
        // With one request in flight, each pause of the responder delays the client.
        let intervals = if guest.depth == 1 { 1 } else { INTERVALS_NS.len() };
        let mut iops = [0.0; INTERVALS_NS.len()];
        for _ in 0..TRIALS {
            for (iops, interval_ns) in iops.iter_mut().zip(INTERVALS_NS).take(intervals) {
                let clock = &self.experiment.clock;
                *iops +=
                    floor.run(&mut self.experiment.gate, &trial, interval_ns, clock)?.result.iops;
            }
        }
        let best =
            iops.iter().zip(INTERVALS_NS).max_by(|(one, _), (other, _)| one.total_cmp(other));
        Ok(best.map_or(0, |(_, interval_ns)| interval_ns))
    }

    /// Records the runs of the daemons, and of the floor with the interval of its polls.
    fn record(&mut self, case: &str, params: &Params, floor: Option<(u64, &[Gated<Cost>])>) {
        let records = &mut self.experiment.records;
        let mut line = format!("  {case:<28}");
        if let Some((interval_ns, runs)) = floor {
            let mut params = params.clone();
            params.insert("interval_ns".to_owned(), interval_ns.into());
            record_costs(records, case, FLOOR, &params, runs);
            let ns = median(runs);
            line.push_str(&format!(" floor {ns:>4.0} ns (polls every {interval_ns} ns)"));
        }
        for daemon in &self.daemons {
            record_costs(records, case, &daemon.name, params, &daemon.runs);
            line.push_str(&format!("  {} {:.0} ns", daemon.name, median(&daemon.runs)));
        }
        let Some((ours, before)) = self.daemons.split_first() else { return };
        if let Some((_, runs)) = floor {
            record_ratios(records, case, &["iops"], &ours.runs, (FLOOR, runs));
        }
        for before in before {
            let all = ["iops", "latency_p50", "latency_p99"];
            record_ratios(records, case, &all, &ours.runs, (&before.name, &before.runs));
        }
        for peer in [FLOOR, &against::before(OURS)] {
            if let Some(ratio) = records.find_ratio(case, "iops", peer) {
                line.push_str(&format!("  {:.2} of {peer}", ratio.value));
            }
        }
        eprintln!("{line}");
        self.daemons.iter_mut().for_each(|daemon| daemon.runs.clear());
    }
}

/// Runs the client on a daemon that is frozen before and after.
fn round(
    experiment: &mut Experiment,
    plan: &Plan,
    daemon: &mut Daemon,
    client: &mut Client,
    guest: &Guest,
) -> Result<Gated<Cost>> {
    let Experiment { gate, clock, .. } = experiment;
    let process = &mut daemon.sidecored.process;
    gate.run(|_| {
        let watch = Watch::start(Some(process))?;
        process.thaw()?;
        client.run(&Guest { duration: plan.warm_up, ..*guest }, clock)?;
        let cost = client.run(guest, clock)?;
        process.freeze()?;
        Ok((cost, watch.share(Some(process))?))
    })
}

type Value = fn(&Cost) -> f64;

/// The numbers of a cost, with their names and units.
const METRICS: [(&str, &str, Value); 4] = [
    ("client_ns", "ns", |cost| cost.client_ns),
    ("iops", "1/s", |cost| cost.iops),
    ("latency_p50", "ns", |cost| cost.latency_p50_ns),
    ("latency_p99", "ns", |cost| cost.latency_p99_ns),
];

fn rounds(runs: &[Gated<Cost>], value: Value) -> Rounds {
    let mut rounds = Rounds::new();
    runs.iter().for_each(|run| rounds.add(value(&run.result), run.counts()));
    rounds
}

fn median(runs: &[Gated<Cost>]) -> f64 {
    rounds(runs, |cost| cost.client_ns).median()
}

fn record_costs(
    records: &mut Records,
    case: &str,
    system: &str,
    params: &Params,
    runs: &[Gated<Cost>],
) {
    for (metric, unit, value) in METRICS {
        let (median, params) = rounds(runs, value).settle(params.clone());
        records.measure(case, system, metric, median, unit, params);
    }
}

/// Records the ratios of `metrics` to a peer's, round by round.
fn record_ratios(
    records: &mut Records,
    case: &str,
    metrics: &[&str],
    ours: &[Gated<Cost>],
    (peer, theirs): (&str, &[Gated<Cost>]),
) {
    for (metric, _, value) in METRICS.iter().filter(|(metric, ..)| metrics.contains(metric)) {
        let mut pairs = Pairs::default();
        for (ours, theirs) in ours.iter().zip(theirs) {
            pairs.add(value(&ours.result), value(&theirs.result), ours.counts() && theirs.counts());
        }
        // The bound between builds is on requests a second.
        let is_bounded = peer != FLOOR && *metric == "iops";
        let (median, params) = match is_bounded {
            true => pairs.ratios().settle_with_interval(Params::new()),
            false => pairs.settle(Params::new()),
        };
        records.ratio(case, metric, OURS, peer, median, params);
    }
}
