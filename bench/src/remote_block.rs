//! The experiment `remote-block`: remote devices beside local ones, and beside the bare exchange of
//! their bytes (vRIO, section 5).
//!
//! The client is this project's own: a session and the store of a remote device, driven by a loop
//! that takes the place of a front end, on the client's core. The IOhost is a daemon on the other
//! core. The peers take turns with it: the same store as a local disk of another daemon, two cores
//! that hand the data over in shared memory, and the link alone with frames of the same sizes.

mod breakdown;
mod cases;
pub(crate) mod client;
mod exchange;
mod faulty;
mod flood;
mod handover;
pub(crate) mod iohost;
mod matrix;
mod nbd;
mod report;
pub(crate) mod rig;
mod sealing;
mod through;
pub(crate) mod wire;

use std::time::Duration;

use anyhow::Result;

use crate::against;
use crate::bounds::{Bound, Limit, Of};
pub use crate::experiment::CaseOptions as Options;
use crate::experiment::{Experiment, Report, Scale};
use crate::peer;
use crate::publish::Headline;
use crate::record::{OURS, Records};

const NAME: &str = "remote-block";
/// The peer with the same store on this host, behind a virtqueue.
const LOCAL: &str = "local";
/// The peer in which one core writes the data and the other one copies them out.
const HANDOVER: &str = "handover";
/// The peer of a case with several clients: one client with as many requests in flight.
const ONE_CLIENT: &str = "one-client";
/// The peer of a case with sealed frames: the same without the seal.
const PLAIN: &str = "plain";

/// The peer of a case with lost frames: the same without losses.
const LOSSLESS: &str = "lossless";
/// The peer of a case with a client that floods: the same while that client is idle.
const UNFLOODED: &str = "unflooded";
/// The 99th percentile of the latency with losses, in median latencies without.
const P99_ROUND_TRIPS: &str = "p99_round_trips";

/// The lengths and numbers of runs.
#[derive(Clone, Copy, Debug)]
struct Plan {
    run: Duration,
    warm_up: Duration,
    rounds: usize,
    /// Requests of the breakdown, in each round.
    stages: usize,
    /// The time, over all runs, to wait for near and free cores.
    patience: Duration,
    /// The size of each device.
    disk_bytes: u64,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        let full = Self {
            run: ms(200),
            warm_up: ms(30),
            rounds: 7,
            stages: 100_000,
            patience: Duration::from_secs(10 * 60),
            disk_bytes: 256 << 20,
        };
        match scale {
            Scale::Full => full,
            Scale::Quick => {
                let (run, warm_up, patience) = (ms(40), ms(10), Duration::from_secs(30));
                Self { run, warm_up, rounds: 5, stages: 20_000, patience, ..full }
            }
            Scale::Tiny => Self {
                run: ms(3),
                warm_up: ms(1),
                rounds: 1,
                stages: 500,
                patience: Duration::ZERO,
                disk_bytes: 16 << 20,
            },
        }
    }
}

const fn bound(case: &'static str, of: Of<'static>, limit: Limit) -> Bound<'static> {
    Bound { case, of, limit }
}

const BOUNDS: [Bound<'static>; 50] = {
    const LATENCY: Of<'static> = Of::Ratio("latency_p50", LOCAL);
    const IOPS: Of<'static> = Of::Ratio("iops", LOCAL);
    const FLOOR_LATENCY: Of<'static> = Of::FloorRatio("latency_p50");
    const FLOOR_IOPS: Of<'static> = Of::FloorRatio("iops");
    const SEALED_IOPS: Of<'static> = Of::Ratio("iops", PLAIN);
    const SEALING: Of<'static> = Of::Ratio(sealing::METRIC, sealing::LIBRARY);
    const HANDOVER_LATENCY: Of<'static> = Of::Ratio("latency_p50", HANDOVER);
    const HANDOVER_IOPS: Of<'static> = Of::Ratio("iops", HANDOVER);
    const NBDKIT_LATENCY: Of<'static> = Of::Ratio("latency_p50", nbd::NBDKIT);
    const NBDKIT_IOPS: Of<'static> = Of::Ratio("iops", nbd::NBDKIT);
    const QSD_LATENCY: Of<'static> = Of::Ratio("latency_p50", peer::NAME);
    const ROUND_TRIPS: Of<'static> = Of::Ours(P99_ROUND_TRIPS, "");
    const GOODPUT: Of<'static> = Of::Ratio("iops", LOSSLESS);
    const FLOODED: Of<'static> = Of::Ratio("latency_p99", UNFLOODED);
    const QSD_IOPS: Of<'static> = Of::Ratio("iops", peer::NAME);
    [
        bound("memory/null/randread512/qd1", LATENCY, Limit::AtMost(2.5)),
        bound("memory/null/randwrite512/qd1", LATENCY, Limit::AtMost(2.5)),
        bound("memory/null/randread512/qd32", IOPS, Limit::AtLeast(0.35)),
        bound("memory/null/randwrite512/qd32", IOPS, Limit::AtLeast(0.35)),
        bound("memory/null/randread/qd1", HANDOVER_LATENCY, Limit::AtMost(1.5)),
        bound("memory/null/randwrite/qd1", HANDOVER_LATENCY, Limit::AtMost(1.5)),
        bound("memory/null/randread/qd32", HANDOVER_IOPS, Limit::AtLeast(0.6)),
        bound("memory/null/randwrite/qd32", HANDOVER_IOPS, Limit::AtLeast(0.6)),
        bound("memory/null/randread/qd8/c16", Of::Ratio("iops", ONE_CLIENT), Limit::AtLeast(0.9)),
        bound("packet/null/randread/qd1", FLOOR_LATENCY, Limit::AtMost(1.6)),
        bound("packet/null/randwrite/qd1", FLOOR_LATENCY, Limit::AtMost(1.6)),
        bound("packet/null/randread/qd32", FLOOR_IOPS, Limit::AtLeast(0.6)),
        bound("packet/null/randwrite/qd32", FLOOR_IOPS, Limit::AtLeast(0.6)),
        bound("xdp/null/randread/qd1", FLOOR_LATENCY, Limit::AtMost(1.6)),
        bound("xdp/null/randread/qd32", FLOOR_IOPS, Limit::AtLeast(0.6)),
        bound("packet/null/randread/qd32/aead", SEALED_IOPS, Limit::AtLeast(0.65)),
        bound("packet/null/randwrite/qd32/aead", SEALED_IOPS, Limit::AtLeast(0.65)),
        bound("packet/null/randread/qd1/aead", SEALING, Limit::AtMost(1.3)),
        bound("packet/null/randwrite/qd1/aead", SEALING, Limit::AtMost(1.3)),
        bound("packet/null/randread/qd1", NBDKIT_LATENCY, Limit::AtMost(0.1)),
        bound("packet/null/randwrite/qd1", NBDKIT_LATENCY, Limit::AtMost(0.1)),
        bound("packet/null/randread/qd1", QSD_LATENCY, Limit::AtMost(0.1)),
        bound("packet/null/randwrite/qd1", QSD_LATENCY, Limit::AtMost(0.1)),
        bound("packet/null/randread/qd32", NBDKIT_IOPS, Limit::AtLeast(3.0)),
        bound("packet/null/randwrite/qd32", NBDKIT_IOPS, Limit::AtLeast(3.0)),
        bound("packet/null/randread/qd32", QSD_IOPS, Limit::AtLeast(3.0)),
        bound("packet/null/randwrite/qd32", QSD_IOPS, Limit::AtLeast(3.0)),
        bound("packet/null/randread64k/qd32", NBDKIT_IOPS, Limit::AtLeast(1.3)),
        bound("packet/null/randwrite64k/qd32", NBDKIT_IOPS, Limit::AtLeast(1.3)),
        bound("packet/ram/randread64k/qd32", NBDKIT_IOPS, Limit::AtLeast(1.3)),
        bound("packet/ram/randwrite64k/qd32", NBDKIT_IOPS, Limit::AtLeast(1.3)),
        bound("packet/null/randread/qd1/loss1", ROUND_TRIPS, Limit::AtMost(10.0)),
        bound("packet/null/randread/qd1/loss1", GOODPUT, Limit::AtLeast(0.7)),
        bound("packet/null/randread/qd32/loss1", ROUND_TRIPS, Limit::AtMost(10.0)),
        bound("packet/null/randread/qd32/loss1", GOODPUT, Limit::AtLeast(0.7)),
        bound("packet/null/randwrite/qd1/loss1", ROUND_TRIPS, Limit::AtMost(10.0)),
        bound("packet/null/randwrite/qd1/loss1", GOODPUT, Limit::AtLeast(0.7)),
        bound("packet/null/randwrite/qd32/loss1", ROUND_TRIPS, Limit::AtMost(10.0)),
        bound("packet/null/randwrite/qd32/loss1", GOODPUT, Limit::AtLeast(0.7)),
        bound("packet/null/randread64k/qd1/loss1", ROUND_TRIPS, Limit::AtMost(10.0)),
        bound("packet/null/randread64k/qd1/loss1", GOODPUT, Limit::AtLeast(0.7)),
        bound("packet/null/randread64k/qd32/loss1", ROUND_TRIPS, Limit::AtMost(10.0)),
        bound("packet/null/randread64k/qd32/loss1", GOODPUT, Limit::AtLeast(0.7)),
        bound("packet/null/randwrite64k/qd1/loss1", ROUND_TRIPS, Limit::AtMost(10.0)),
        bound("packet/null/randwrite64k/qd1/loss1", GOODPUT, Limit::AtLeast(0.7)),
        bound("packet/null/randwrite64k/qd32/loss1", ROUND_TRIPS, Limit::AtMost(10.0)),
        bound("packet/null/randwrite64k/qd32/loss1", GOODPUT, Limit::AtLeast(0.7)),
        bound("memory/null/randread/qd1/flood", FLOODED, Limit::AtMost(2.0)),
        bound("memory/null/randwrite/qd1/flood", FLOODED, Limit::AtMost(2.0)),
        bound("memory/null/randwrite/qd8/c16", Of::Ratio("iops", ONE_CLIENT), Limit::AtLeast(0.9)),
    ]
};

const HEADLINES: &[Headline] = &[
    ("memory/null/randread512/qd1", Of::Ratio("latency_p50", LOCAL)),
    ("memory/null/randread512/qd32", Of::Ratio("iops", LOCAL)),
    ("memory/null/randread/qd1", Of::Ratio("latency_p50", HANDOVER)),
    ("memory/null/randread/qd32", Of::Ratio("iops", HANDOVER)),
    ("memory/null/randwrite/qd32", Of::Ratio("iops", HANDOVER)),
    ("memory/null/randread/qd8/c16", Of::Ratio("iops", ONE_CLIENT)),
];

/// The state that all cases share.
struct Bench {
    experiment: Experiment,
    options: Options,
    plan: Plan,
}

/// Runs the experiment and reports. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// A program does not start or fails, or the experiment was interrupted. All started programs have
/// ended then.
pub fn run(options: &Options) -> Result<bool> {
    let common = &options.programs.common;
    if let Some(hold) = options.report_files(NAME, report)? {
        return Ok(hold);
    }
    let mut plan = Plan::of(common.scale());
    (plan.run, plan.rounds) = against::runs(common, plan.run, plan.rounds);
    let experiment = Experiment::start(NAME, &options.programs, plan.patience)?;
    let mut bench = Bench { experiment, options: options.clone(), plan };
    bench.measure()?;
    if common.against.is_none() {
        bench.breakdown()?;
    }
    bench.experiment.conclude(report(&bench.experiment.records))
}

fn report(records: &Records) -> Report<'static> {
    Report::new(report::table(records), (OURS, &BOUNDS), HEADLINES)
}
