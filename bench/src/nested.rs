//! The experiment `nested`: virtual functions beside what they are an alternative to, in the shape of NeSC's Figures
//! 8.1 and 8.2.
//!
//! Requests of 512 bytes to 2 MiB at random places, one at a time and many at a time, to a thin volume that was
//! written before (`vf`); to the same blocks without translation and protection (`pf`); to the same bytes in a file on
//! the host's filesystem (`file`); and to such a file through qemu-storage-daemon. All of it on loop devices of one
//! kind, and once more on the store in memory, where nothing but the path itself is left. What such a device can do at
//! most, with no guest, no function and no filesystem on the way, is the `floor`.

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
use crate::experiment::{Common, Experiment, Programs, Report, Scale};
use crate::host_disk::{HostDisk, Kind};
use crate::huge_pages::{self, HugePages};
use crate::publish::Headline;
use crate::record::Params;
use crate::workers::Confined;
use servers::{PF, VF};

const NAME: &str = "nested";

/// The same bytes as a file on the host's filesystem.
const FILE: &str = "file";

/// What to run.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// What every experiment can be told.
    #[command(flatten)]
    pub common: Common,
    /// What is measured.
    #[command(flatten)]
    pub programs: Programs,
    /// The client reads what it has read and writes what it writes.
    #[arg(long)]
    pub touch: bool,
    /// Only on these stores.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "STORE")]
    pub only: Vec<Ground>,
    /// Only requests of these sizes in bytes.
    #[arg(long, value_delimiter = ',', value_name = "BYTES")]
    pub sizes: Vec<u32>,
}

/// What everything is built on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Ground {
    /// The store in the daemon's memory.
    Ram,
    /// Loop devices over files in memory.
    Loop,
    /// zram disks.
    Zram,
}

impl Ground {
    fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Loop => "loop",
            Self::Zram => "zram",
        }
    }

    /// The smallest requests that there may be.
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

    /// Whether the kernel's workers carry the requests out, who then need a core.
    fn has_workers(self) -> bool {
        self == Self::Loop
    }
}

const GROUNDS: [Ground; 3] = [Ground::Ram, Ground::Loop, Ground::Zram];

/// How long everything takes.
#[derive(Clone, Copy, Debug)]
struct Plan {
    sizes: &'static [u32],
    run: Duration,
    warm_up: Duration,
    rounds: usize,
    trial: Duration,
    /// How long, in all, to wait for near and free cores.
    patience: Duration,
    /// After this long, on a machine that is busy, one round for each case has to do.
    budget: Duration,
    volume_bytes: u64,
}

/// The sizes of Figures 8.1 and 8.2, and on to where they say that all converge.
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
    /// The same for pairs of builds.
    fn against(self, scale: Scale) -> Self {
        Self { run: against::run_time(self.run), rounds: against::pairs(scale), budget: Duration::MAX, ..self }
    }

    fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        let full = Self {
            sizes: &SIZES,
            run: ms(250),
            warm_up: ms(30),
            rounds: 7,
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

/// Requests in flight: one, whose latency is measured; and as many as fill the path.
fn depths(bytes: u32) -> [u16; 2] {
    [1, if bytes < 256 << 10 { 32 } else { 8 }]
}

/// The name of a case.
fn case(ground: Ground, write: bool, bytes: u32, depth: u16) -> String {
    format!("{}/{}/{}/qd{depth}", ground.name(), operation(write), size_name(bytes))
}

fn operation(write: bool) -> &'static str {
    if write { "randwrite" } else { "randread" }
}

/// `4KiB`.
fn size_name(bytes: u32) -> String {
    match bytes {
        0x10_0000.. => format!("{}MiB", bytes >> 20),
        0x400.. => format!("{}KiB", bytes >> 10),
        _ => format!("{bytes}B"),
    }
}

/// All that is shared.
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

/// Runs the experiment; whether all bounds hold, or nobody asked.
///
/// # Errors
/// Something cannot be started or measured; an interrupt.
pub fn run(options: &Options) -> Result<bool> {
    let plan = Plan::of(options.common.scale());
    let mut bench = Bench::start(NAME, options, plan)?;
    let _huge_pages = bench.reserve_huge_pages();
    for ground in GROUNDS {
        if options.only.is_empty() || options.only.contains(&ground) {
            bench.on(ground)?;
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
    fn start(name: &str, options: &Options, plan: Plan) -> Result<Self> {
        let Options { common, programs, .. } = options;
        let plan = if common.against.is_some() { plan.against(common.scale()) } else { plan };
        let experiment = Experiment::start(name, common, programs, plan.patience)?;
        Ok(Self { experiment, options: options.clone(), plan })
    }

    fn builds(&self) -> bool {
        self.options.common.against.is_some()
    }

    /// For the stores in memory, and for each client the buffers of its largest requests.
    fn reserve_huge_pages(&self) -> HugePages {
        let daemons = if self.builds() { 2 } else { 1 };
        HugePages::reserve(daemons * (servers::ram_bytes(self.plan.volume_bytes) / huge_pages::BYTES + 64))
    }

    fn on(&mut self, ground: Ground) -> Result<()> {
        let Some(kind) = ground.disk() else {
            let mut servers = servers::on_ram(self, true)?;
            self.cases(ground, &mut servers)?;
            return servers.end();
        };
        if !rustix::process::geteuid().is_root() {
            eprintln!("  only root can set up disks: nothing is measured on {}", ground.name());
            return Ok(());
        }
        // Containers often have none, and zram may not be built.
        if let Err(error) = HostDisk::new(kind, self.experiment.directory(), 1 << 20) {
            eprintln!("  nothing is measured on {}: {error:#}", ground.name());
            return Ok(());
        }
        let peer = self.experiment.find_peer();
        // Ends after the servers that are started under it.
        let _confined = ground.has_workers().then(|| Confined::to(cores::CLIENT));
        let mut servers = servers::on_disks(self, ground, kind, peer.as_ref())?;
        self.cases(ground, &mut servers)?;
        servers.end()
    }

    fn sizes(&self, ground: Ground) -> Vec<u32> {
        let wanted = &self.options.sizes;
        let all = if wanted.is_empty() { self.plan.sizes } else { &SIZES };
        let is_wanted = |bytes: &u32| *bytes >= ground.block_bytes() && (wanted.is_empty() || wanted.contains(bytes));
        all.iter().copied().filter(is_wanted).collect()
    }

    /// Parameters that all measurements have.
    fn common_params(&self) -> Params {
        let mut params = self.experiment.params();
        params.insert("span_bytes".to_owned(), self.plan.volume_bytes.into());
        params.insert("touch".to_owned(), self.options.touch.into());
        params
    }
}

/// The cases that bounds are about: all on loop devices, by name.
struct BoundCases(Vec<(u32, u16, String)>);

impl BoundCases {
    fn of(bench: &Bench) -> Self {
        let mut cases = Vec::new();
        for bytes in bench.sizes(Ground::Loop) {
            for write in [false, true] {
                cases.extend(depths(bytes).map(|depth| (bytes, depth, case(Ground::Loop, write, bytes, depth))));
            }
        }
        Self(cases)
    }

    /// What must hold: translation costs next to nothing, and a virtual function is ahead of a file everywhere, and far
    /// ahead at 4 KiB.
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
            bound(Of::Ratio("iops", FILE), if at_4k { Limit::AtLeast(2.0) } else { Limit::MoreThan(1.0) });
        }
        bounds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_names_that_say_everything() {
        assert_eq!(case(Ground::Loop, true, 512, 1), "loop/randwrite/512B/qd1");
        assert_eq!(case(Ground::Ram, false, 4096, 32), "ram/randread/4KiB/qd32");
        assert_eq!(size_name(2 << 20), "2MiB");
        assert_eq!((depths(128 << 10), depths(256 << 10)), ([1, 32], [1, 8]));
    }

    #[test]
    fn every_cell_has_its_bound_and_4_kib_has_more() {
        let cases = BoundCases(vec![(512, 1, "a".into()), (4096, 1, "b".into()), (4096, 32, "c".into())]);
        let bounds: Vec<(&str, Limit)> = cases.bounds().iter().map(|bound| (bound.case, bound.limit)).collect();
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
