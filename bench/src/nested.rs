//! The experiment `nested`: virtual functions beside their alternatives, in the shape of NeSC's
//! Figures 8.1 and 8.2.
//!
//! Requests of 512 bytes to 2 MiB at random places, one at a time and many at a time, go to a thin
//! volume that was written before (`vf`); to the same blocks without translation and protection
//! (`pf`); to the same bytes in a file on the host's filesystem (`file`); and to such a file
//! through qemu-storage-daemon. The disks below are all loop devices or all zram disks. Another
//! pass is on the store in memory, where the path itself is the only cost. The `floor` is the most
//! that such a disk can do, with no guest, no function and no filesystem on the way.

mod alone;
mod report;
mod run;
mod servers;
pub mod vf_cost;

use std::time::Duration;

use anyhow::Result;

use crate::against;
use crate::bounds::{Bound, Limit, Of};
use crate::cores;
use crate::experiment::{Experiment, Programs, Report, Scale, wants};
use crate::host_disk::{HostDisk, Kind};
use crate::huge_pages::{self, HugePages};
use crate::publish::Headline;
use crate::record::Params;
use crate::workers::Confined;
use servers::{PF, VF};

const NAME: &str = "nested";

/// The same bytes as a file on the host's filesystem.
const FILE: &str = "file";

/// The options of this experiment.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The options of experiments that measure programs.
    #[command(flatten)]
    pub programs: Programs,
    /// Touch the data: the client reads each byte that it got and writes each byte that it sends.
    #[arg(long)]
    pub touch: bool,
    /// Measure only on these stores.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "STORE")]
    pub only: Vec<Medium>,
    /// Measure only requests of these sizes in bytes.
    #[arg(long, value_delimiter = ',', value_name = "BYTES")]
    pub sizes: Vec<u32>,
}

/// The medium below all systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Medium {
    /// The store in the daemon's memory.
    Ram,
    /// Loop devices over files in memory.
    Loop,
    /// zram disks.
    Zram,
}

impl Medium {
    fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Loop => "loop",
            Self::Zram => "zram",
        }
    }

    /// The size of the smallest request.
    fn block_bytes(self) -> u32 {
        match self {
            Self::Ram | Self::Loop => 512,
            Self::Zram => 4096,
        }
    }

    fn disk(self) -> Option<Kind> {
        match self {
            Self::Ram => None,
            Self::Loop => Some(Kind::Loop),
            Self::Zram => Some(Kind::Zram),
        }
    }

    /// Whether threads of the kernel carry the requests out, and then need a core.
    fn has_workers(self) -> bool {
        self == Self::Loop
    }
}

const MEDIA: [Medium; 3] = [Medium::Ram, Medium::Loop, Medium::Zram];

/// The lengths and numbers of runs.
#[derive(Clone, Copy, Debug)]
struct Plan {
    sizes: &'static [u32],
    run: Duration,
    warm_up: Duration,
    rounds: usize,
    /// The programs are started again after some rounds, as those of two builds are.
    starts_again: bool,
    trial: Duration,
    /// The time, over all runs, to wait for near and free cores.
    patience: Duration,
    /// After this time, on a busy machine, each case runs one round.
    budget: Duration,
    volume_bytes: u64,
}

/// The sizes of Figures 8.1 and 8.2, and larger ones, up to where all systems are said to converge.
const SIZES: [u32; 13] = [
    512,
    1 << 10,
    2 << 10,
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
];

impl Plan {
    fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        let full = Self {
            sizes: &SIZES,
            run: ms(250),
            warm_up: ms(30),
            rounds: 7,
            starts_again: false,
            trial: ms(200),
            patience: Duration::from_secs(20 * 60),
            budget: Duration::from_secs(40 * 60),
            volume_bytes: 512 << 20,
        };
        match scale {
            Scale::Full => full,
            Scale::Quick => Self {
                sizes: &[512, 4 << 10, 32 << 10, 256 << 10, 2 << 20],
                run: ms(60),
                warm_up: ms(10),
                rounds: 5,
                trial: ms(40),
                starts_again: false,
                patience: Duration::from_secs(20),
                budget: Duration::from_secs(60),
                volume_bytes: 256 << 20,
            },
            Scale::Tiny => Self {
                sizes: &[512, 4 << 10, 128 << 10, 2 << 20],
                run: ms(3),
                warm_up: ms(1),
                rounds: 1,
                patience: Duration::ZERO,
                volume_bytes: 16 << 20,
                ..full
            },
        }
    }
}

/// Requests in flight: one, for the latency; and as many as fill the path.
fn depths(bytes: u32) -> [u16; 2] {
    [1, if bytes < 256 << 10 { 32 } else { 8 }]
}

fn case(medium: Medium, write: bool, bytes: u32, depth: u16) -> String {
    format!("{}/{}/{}/qd{depth}", medium.name(), operation(write), size_name(bytes))
}

fn operation(write: bool) -> &'static str {
    if write { "randwrite" } else { "randread" }
}

/// Formats a size, for instance as `4KiB`.
fn size_name(bytes: u32) -> String {
    match bytes {
        0x10_0000.. => format!("{}MiB", bytes >> 20),
        0x400.. => format!("{}KiB", bytes >> 10),
        _ => format!("{bytes}B"),
    }
}

/// The state that all cases share.
struct Bench {
    experiment: Experiment,
    options: Options,
    plan: Plan,
}

const HEADLINES: &[Headline] = &[
    ("loop/randread/4KiB/qd1", Of::Ratio("latency_p50", PF)),
    ("loop/randread/4KiB/qd1", Of::Ratio("iops", FILE)),
    ("loop/randread/4KiB/qd32", Of::Ratio("iops", PF)),
    ("loop/randread/4KiB/qd32", Of::Ratio("iops", FILE)),
    ("loop/randwrite/4KiB/qd32", Of::Ratio("iops", PF)),
    ("loop/randwrite/4KiB/qd32", Of::Ratio("iops", FILE)),
];

/// Runs the experiment. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// A program does not start, or a measurement fails; an interrupt.
pub fn run(options: &Options) -> Result<bool> {
    let plan = Plan::of(options.programs.common.scale());
    let mut bench = Bench::start(NAME, options, plan)?;
    let _huge_pages = bench.reserve_huge_pages();
    for medium in MEDIA {
        if wants(&options.only, &medium) {
            bench.on(medium)?;
        }
    }
    let cases = BoundCases::of(&bench);
    let records = &bench.experiment.records;
    bench.experiment.conclude(Report {
        note: report::NOTE.to_owned(),
        draw: report::draw,
        ..Report::new(report::table(records), (VF, &cases.bounds()), HEADLINES)
    })
}

impl Bench {
    fn start(name: &str, options: &Options, mut plan: Plan) -> Result<Self> {
        let Programs { common, .. } = &options.programs;
        (plan.run, plan.rounds) = against::runs(common, plan.run, plan.rounds);
        if common.against.is_some() {
            plan.budget = Duration::MAX;
        }
        let experiment = Experiment::start(name, &options.programs, plan.patience)?;
        Ok(Self { experiment, options: options.clone(), plan })
    }

    fn builds(&self) -> bool {
        self.options.programs.common.against.is_some()
    }

    /// Reserves pages for the stores in memory, and for the buffers of the largest requests of each
    /// client.
    fn reserve_huge_pages(&self) -> HugePages {
        let daemons = if self.builds() { 2 } else { 1 };
        HugePages::reserve(
            daemons * (servers::ram_bytes(self.plan.volume_bytes) / huge_pages::BYTES + 64),
        )
    }

    fn on(&mut self, medium: Medium) -> Result<()> {
        let Some(kind) = medium.disk() else {
            return self.measure_on(medium, |bench, start| servers::on_ram(bench, start, true));
        };
        if !rustix::process::geteuid().is_root() {
            eprintln!("  only root can set up disks: nothing is measured on {}", medium.name());
            return Ok(());
        }
        // Containers often have no loop devices, and zram may not be built.
        if let Err(error) = HostDisk::new(kind, self.experiment.directory(), 1 << 20) {
            eprintln!("  nothing is measured on {}: {error:#}", medium.name());
            return Ok(());
        }
        let peer = self.experiment.find_peer();
        // Dropped after the servers that are started under it.
        let _confined = medium.has_workers().then(|| Confined::to(cores::CLIENT));
        self.measure_on(medium, |bench, start| {
            servers::on_disks(bench, start, (medium, kind), peer.as_ref())
        })
    }

    fn sizes(&self, medium: Medium) -> Vec<u32> {
        let wanted = &self.options.sizes;
        let all = if wanted.is_empty() { self.plan.sizes } else { &SIZES };
        let is_wanted = |bytes: &u32| *bytes >= medium.block_bytes() && wants(wanted, bytes);
        all.iter().copied().filter(is_wanted).collect()
    }

    /// The parameters of every measurement.
    fn common_params(&self) -> Params {
        let mut params = self.experiment.params();
        params.insert("span_bytes".to_owned(), self.plan.volume_bytes.into());
        params.insert("touch".to_owned(), self.options.touch.into());
        params
    }
}

/// The cases with bounds: all cases on loop devices, by name.
struct BoundCases(Vec<(u32, u16, String)>);

impl BoundCases {
    fn of(bench: &Bench) -> Self {
        let mut cases = Vec::new();
        for bytes in bench.sizes(Medium::Loop) {
            for write in [false, true] {
                cases.extend(
                    depths(bytes)
                        .map(|depth| (bytes, depth, case(Medium::Loop, write, bytes, depth))),
                );
            }
        }
        Self(cases)
    }

    /// The bounds: translation costs next to nothing, and a virtual function is faster than a file
    /// in every case, and much faster at 4 KiB.
    fn bounds(&self) -> Vec<Bound<'_>> {
        let mut bounds = Vec::new();
        for (bytes, depth, case) in &self.0 {
            let mut bound = |of, limit| bounds.push(Bound { case, of, limit });
            let at_4k = *bytes == 4 << 10;
            match depth {
                1 if at_4k => bound(Of::Ratio("latency_p50", PF), Limit::AtMost(1.05)),
                _ if at_4k => bound(Of::Ratio("iops", PF), Limit::AtLeast(0.97)),
                _ => {}
            }
            bound(
                Of::Ratio("iops", FILE),
                if at_4k { Limit::AtLeast(2.0) } else { Limit::MoreThan(1.0) },
            );
        }
        bounds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_case_holds_all_its_parameters() {
        assert_eq!(case(Medium::Loop, true, 512, 1), "loop/randwrite/512B/qd1");
        assert_eq!(case(Medium::Ram, false, 4096, 32), "ram/randread/4KiB/qd32");
        assert_eq!(size_name(2 << 20), "2MiB");
        assert_eq!((depths(128 << 10), depths(256 << 10)), ([1, 32], [1, 8]));
    }

    #[test]
    fn every_cell_has_its_bound_and_4_kib_has_more() {
        let cases =
            BoundCases(vec![(512, 1, "a".into()), (4096, 1, "b".into()), (4096, 32, "c".into())]);
        let bounds: Vec<(&str, Limit)> =
            cases.bounds().iter().map(|bound| (bound.case, bound.limit)).collect();
        let expected = [
            ("a", Limit::MoreThan(1.0)),
            ("b", Limit::AtMost(1.05)),
            ("b", Limit::AtLeast(2.0)),
            ("c", Limit::AtLeast(0.97)),
            ("c", Limit::AtLeast(2.0)),
        ];
        assert_eq!(bounds, expected);
    }
}
