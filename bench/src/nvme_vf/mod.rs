//! The experiment `nvme-vf`: NVMe controllers over vfio-user, beside our own virtio disks and qemu-storage-daemon's.
//!
//! One client in user space, the same loop for all, on one core; the servers take the other one in turn. Both of our
//! front ends are in one daemon, on the same store, and only the one that is measured is connected.

mod report;
mod run;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use quanta::Clock;

use crate::bounds::{self, Bound, Limit, Of};
use crate::cores::{self, Gate, Partner};
use crate::huge_pages::{self, HugePages};
use crate::record::{Params, Records, params};
use crate::{sidecored, stop};

const NAME: &str = "nvme-vf";
/// The system that it is about.
const NVME: &str = "nvme";
/// What it is to keep up with: the same daemon's other front end.
const VIRTIO: &str = "virtio-blk";

/// What to run.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// All of it, within some minutes.
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
    /// Write the table into README.md.
    #[arg(long)]
    pub update_readme: bool,
    /// Without the peer.
    #[arg(long)]
    pub no_peer: bool,
    /// Only these stores.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "STORE")]
    pub only: Vec<Ground>,
    /// Only so many queues.
    #[arg(long, value_delimiter = ',', value_name = "COUNT")]
    pub queues: Vec<u16>,
    /// The daemon to measure; by default the one that was built with this program.
    #[arg(long, value_name = "PROGRAM")]
    pub daemon: Option<PathBuf>,
}

/// What the disks are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Ground {
    /// Nothing is kept.
    Null,
    /// Memory.
    Ram,
    /// A volume each of a controller in memory: virtual functions.
    Volume,
}

impl Ground {
    const ALL: [Self; 3] = [Self::Null, Self::Ram, Self::Volume];

    fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Ram => "ram",
            Self::Volume => "volume",
        }
    }
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
    /// The size of each disk.
    disk_bytes: u64,
}

impl Plan {
    fn of(options: &Options) -> Self {
        let ms = Duration::from_millis;
        let full = Self {
            name: "full",
            run: ms(300),
            warm_up: ms(40),
            rounds: 7,
            trial: ms(200),
            patience: Duration::from_secs(20 * 60),
            disk_bytes: 256 << 20,
        };
        if options.tiny {
            let (run, warm_up) = (ms(3), ms(1));
            return Self {
                name: "tiny",
                run,
                warm_up,
                rounds: 1,
                patience: Duration::ZERO,
                disk_bytes: 16 << 20,
                ..full
            };
        }
        if options.quick {
            let (run, warm_up, trial) = (ms(50), ms(10), ms(40));
            return Self { name: "quick", run, warm_up, trial, rounds: 3, patience: Duration::from_secs(30), ..full };
        }
        full
    }
}

/// What must hold: an NVMe function is at least as fast as the virtio disk on the same store, and a command costs
/// neither a message nor, with a client that polls, an interrupt.
const BOUNDS: [Bound<'static>; 12] = {
    const fn bound(case: &'static str, of: Of, limit: Limit) -> Bound<'static> {
        Bound { case, of, limit }
    }
    const IOPS: Of = Of::Ratio("iops", VIRTIO);
    const LATENCY: Of = Of::Ratio("latency_p50", VIRTIO);
    const MESSAGES: Of = Of::Ours("kicks_per_request", "");
    const INTERRUPTS: Of = Of::Ours("calls_per_request", "");
    [
        bound("null/randread/qd1/q1", LATENCY, Limit::AtMost(1.0)),
        bound("null/randwrite/qd1/q1", LATENCY, Limit::AtMost(1.0)),
        bound("ram/randread/qd1/q1", LATENCY, Limit::AtMost(1.0)),
        bound("ram/randwrite/qd1/q1", LATENCY, Limit::AtMost(1.0)),
        bound("null/randread/qd32/q1", IOPS, Limit::AtLeast(1.0)),
        bound("null/randwrite/qd32/q1", IOPS, Limit::AtLeast(1.0)),
        bound("ram/randread/qd32/q1", IOPS, Limit::AtLeast(1.0)),
        bound("ram/randwrite/qd32/q1", IOPS, Limit::AtLeast(1.0)),
        bound("ram/randread/qd32/q1", MESSAGES, Limit::AtMost(0.0)),
        bound("ram/randwrite/qd32/q1", MESSAGES, Limit::AtMost(0.0)),
        bound("ram/randread/qd32/q1", INTERRUPTS, Limit::AtMost(0.0)),
        bound("ram/randwrite/qd32/q1", INTERRUPTS, Limit::AtMost(0.0)),
    ]
};

/// All that the cases share.
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
}

/// Runs the experiment and reports; false if a bound was to be enforced and does not hold.
///
/// # Errors
/// Something does not start or fails, or the experiment was interrupted. Everything that was started has ended then.
pub fn run(options: &Options) -> Result<bool> {
    let plan = Plan::of(options);
    stop::listen()?;
    // Ahead of whatever else the machine does; what we start inherits it, all of it alike. It is a privilege.
    let _ = rustix::process::nice(-10);
    cores::pin(cores::CLIENT).context("the experiment needs two cores")?;
    let gate = Gate::new(Partner::start(cores::SERVER).context("the experiment needs two cores")?, plan.patience);
    let server_bytes = plan.disk_bytes + run::controller_bytes(plan.disk_bytes);
    let huge_pages = HugePages::reserve(server_bytes / huge_pages::BYTES + 32);
    let mut bench = Bench {
        begin: Instant::now(),
        options: options.clone(),
        plan,
        daemon: options.daemon.clone().map_or_else(sidecored::beside_us, Ok)?,
        clock: Clock::new(),
        gate,
        directory: tempfile::Builder::new().prefix("sidecore-bench").tempdir()?,
        records: Records::new(NAME),
        on_huge_pages: huge_pages::free() * huge_pages::BYTES >= server_bytes,
    };
    eprintln!("{NAME}, {}: client on core {}, server on core {}", plan.name, cores::CLIENT, cores::SERVER);
    bench.measure()?;
    drop(huge_pages);
    bench.report()
}

impl Bench {
    /// Parameters that all measurements have.
    fn common_params(&self) -> Params {
        params([
            ("plan", self.plan.name.into()),
            ("client_core", cores::CLIENT.0.into()),
            ("server_core", cores::SERVER.0.into()),
            ("huge_pages", self.on_huge_pages.into()),
        ])
    }

    fn report(&self) -> Result<bool> {
        // A tiny run is over before anything has settled.
        let bounds: &[Bound<'_>] = if self.options.tiny { &[] } else { &BOUNDS };
        let checked = bounds::check(bounds, &self.records, NVME);
        println!("\n{}", report::table(&self.records));
        let hold = bounds::print(&checked);
        let seconds = self.begin.elapsed().as_secs_f64();
        let retries = self.gate.retries();
        println!("took {seconds:.0} s; {retries} runs waited for near and free cores or were repeated");
        if let Some(file) = &self.options.json {
            self.records.append_to(file)?;
        }
        if self.options.update_readme {
            report::publish(&self.records)?;
        }
        Ok(!self.options.enforce || hold)
    }
}
