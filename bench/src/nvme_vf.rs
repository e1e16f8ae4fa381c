//! The experiment `nvme-vf`: NVMe controllers over vfio-user, beside virtio disks of the same
//! daemon and qemu-storage-daemon's.
//!
//! One client in user space, the same loop for all, runs on one core; the servers take turns on the
//! other. Both front ends of this daemon are in one process, on the same store, and only the
//! measured one is connected.

mod report;
mod run;

use std::time::Duration;

use anyhow::Result;

use crate::against;
use crate::bounds::{Bound, Limit, Of};
use crate::experiment::{Experiment, Programs, Report, Scale};
use crate::huge_pages::{self, HugePages};
use crate::peer;
use crate::publish::Headline;
use crate::record::Params;
use crate::sidecored::FrontEnd;

const NAME: &str = "nvme-vf";
/// The system that is measured.
const NVME: &str = "nvme";
/// The system to keep up with: the same daemon's other front end.
const VIRTIO: &str = "virtio-blk";

/// The options of this experiment.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The options of experiments that measure programs.
    #[command(flatten)]
    pub programs: Programs,
    /// Measure only on these stores.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "STORE")]
    pub only: Vec<Medium>,
    /// Measure only these numbers of queues.
    #[arg(long, value_delimiter = ',', value_name = "COUNT")]
    pub queues: Vec<u16>,
    /// Measure only these numbers of requests in flight in each queue.
    #[arg(long, value_delimiter = ',', value_name = "COUNT")]
    pub depths: Vec<u16>,
    /// Measure only these disks of this program.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FRONT_END")]
    pub front_ends: Vec<FrontEnd>,
}

/// The medium below the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Medium {
    /// A store that keeps no data.
    Null,
    /// A store in memory.
    Ram,
    /// A volume for each disk, of a controller in memory: virtual functions.
    Volume,
}

impl Medium {
    const ALL: [Self; 3] = [Self::Null, Self::Ram, Self::Volume];

    fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Ram => "ram",
            Self::Volume => "volume",
        }
    }
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
    /// The size of each disk.
    disk_bytes: u64,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        let full = Self {
            run: ms(300),
            warm_up: ms(40),
            rounds: 7,
            trial: ms(200),
            patience: Duration::from_secs(20 * 60),
            disk_bytes: 256 << 20,
        };
        match scale {
            Scale::Full => full,
            Scale::Quick => {
                let (run, warm_up, trial) = (ms(50), ms(10), ms(40));
                Self { run, warm_up, trial, rounds: 3, patience: Duration::from_secs(30), ..full }
            }
            Scale::Tiny => {
                let (run, warm_up) = (ms(3), ms(1));
                Self {
                    run,
                    warm_up,
                    rounds: 1,
                    patience: Duration::ZERO,
                    disk_bytes: 16 << 20,
                    ..full
                }
            }
        }
    }
}

/// The bounds: an NVMe function is at least as fast as the virtio disk on the same store, and a
/// command costs neither a message nor, with a client that polls, an interrupt.
const BOUNDS: [Bound<'static>; 12] = {
    const fn bound(case: &'static str, of: Of<'static>, limit: Limit) -> Bound<'static> {
        Bound { case, of, limit }
    }
    const IOPS: Of<'static> = Of::Ratio("iops", VIRTIO);
    const LATENCY: Of<'static> = Of::Ratio("latency_p50", VIRTIO);
    const MESSAGES: Of<'static> = Of::Ours("kicks_per_request", "");
    const INTERRUPTS: Of<'static> = Of::Ours("interrupts_per_request", "");
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

const HEADLINES: &[Headline] = &[
    ("null/randread/qd1/q1", Of::Ratio("latency_p50", VIRTIO)),
    ("null/randread/qd32/q1", Of::Ratio("iops", VIRTIO)),
    ("null/randread/qd32/q1", Of::Ratio("iops", peer::NAME)),
    ("ram/randread/qd32/q1", Of::Ratio("iops", VIRTIO)),
    ("ram/randwrite/qd32/q1", Of::Ratio("iops", VIRTIO)),
    ("volume/randread/qd32/q1", Of::Ratio("iops", VIRTIO)),
];

/// The state that all cases share.
struct Bench {
    experiment: Experiment,
    options: Options,
    plan: Plan,
    on_huge_pages: bool,
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
    let experiment = Experiment::start(NAME, &options.programs, plan.patience)?;
    let daemons = if common.against.is_some() { 2 } else { 1 };
    let server_bytes = daemons * (plan.disk_bytes + run::controller_bytes(plan.disk_bytes));
    let huge_pages = HugePages::reserve(server_bytes / huge_pages::BYTES + 32);
    let on_huge_pages = huge_pages::free() * huge_pages::BYTES >= server_bytes;
    let mut bench = Bench { experiment, options: options.clone(), plan, on_huge_pages };
    bench.measure()?;
    drop(huge_pages);
    let records = &bench.experiment.records;
    bench.experiment.conclude(Report::new(report::table(records), (NVME, &BOUNDS), HEADLINES))
}

impl Bench {
    /// The parameters of every measurement.
    fn common_params(&self) -> Params {
        let mut params = self.experiment.params();
        params.insert("huge_pages".to_owned(), self.on_huge_pages.into());
        params
    }
}
