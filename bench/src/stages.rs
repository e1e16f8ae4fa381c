//! The experiment `stages`: the cost of stages of disks, each alone and in pairs.
//!
//! One thread drives two queues of the same store in turn, with stages in front of it and without.
//! It makes the requests, as a sidecore does, so that no ring and no client hides a difference. The
//! time between them is the cost of the stages with the layers that contain them. A stage whose
//! work a library does is compared with that library as well: the floor is the library's own speed
//! on the same bytes at the same places.
//!
//! Encrypted disks are also measured as guests use them, over vhost-user, beside those of
//! qemu-storage-daemon.

mod cases;
mod disk;
mod library;
mod path;

use std::time::Duration;

use anyhow::{Context, Result};

use crate::against;
use crate::bounds::{Bound, Limit, Of};
use crate::cells;
use crate::experiment::{Experiment, Report, Scale};
use crate::peer;
use crate::process::watched;
use crate::record::{OURS, Records, params};
use crate::runs::ADDED;
use crate::turns::Turns;
use cases::{Case, Chain, Medium, all};
use library::Library;
use path::Path;

const NAME: &str = "stages";
/// The store without stages.
const NONE: &str = "none";
/// The library that does the work of a stage.
const LIBRARY: &str = "library";
const IOPS: &str = "iops";
/// The size of each store, most of which is in no cache.
const STORE_BYTES: u64 = 128 << 20;
/// Both queues are made so many times in each case: where their memory lies changes their speed by
/// some percent.
const LAYOUTS: usize = 5;

pub use crate::experiment::CaseOptions as Options;

/// The lengths and numbers of runs.
struct Plan {
    warm_up: Duration,
    measured: Duration,
    pairs: usize,
    /// The most repetitions of disturbed pairs in a case.
    repeats: usize,
    /// Runs of each disk that is measured as guests use it.
    rounds: usize,
    /// The time to try out each setting of the peer.
    trial: Duration,
    /// The time, over all runs, to wait for near and free cores.
    patience: Duration,
    store_bytes: u64,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        let full = Self {
            warm_up: ms(5),
            measured: ms(50),
            pairs: 31,
            repeats: 30,
            rounds: 15,
            trial: ms(200),
            patience: Duration::from_secs(10 * 60),
            store_bytes: STORE_BYTES,
        };
        match scale {
            Scale::Full => full,
            Scale::Quick => Self {
                warm_up: ms(2),
                measured: ms(10),
                pairs: 21,
                repeats: 20,
                rounds: 5,
                trial: ms(40),
                patience: Duration::from_secs(30),
                ..full
            },
            Scale::Tiny => Self {
                warm_up: Duration::ZERO,
                measured: ms(1),
                pairs: 1,
                repeats: 0,
                rounds: 1,
                patience: Duration::ZERO,
                store_bytes: STORE_BYTES / 16,
                ..full
            },
        }
    }
}

/// A stage that only counts adds at most 15 ns to a request; encryption has at least 0.9 of the
/// speed of its library, and reads that are checked at least 0.7 of those of memory, and 0.85 of
/// those of a file.
const BOUNDS: [Bound<'static>; 16] = {
    const fn counts(case: &'static str) -> Bound<'static> {
        Bound { case, of: Of::Ours(ADDED, " ns"), limit: Limit::AtMost(15.0) }
    }
    const fn encrypts(case: &'static str) -> Bound<'static> {
        Bound { case, of: Of::Ratio(IOPS, LIBRARY), limit: Limit::AtLeast(0.9) }
    }
    const fn checks(case: &'static str, least: f64) -> Bound<'static> {
        Bound { case, of: Of::Ratio(IOPS, NONE), limit: Limit::AtLeast(least) }
    }
    [
        counts("meter/null/randread512/qd1"),
        counts("meter/null/randread512/qd32"),
        counts("meter/null/randwrite/qd1"),
        counts("meter/null/randwrite/qd32"),
        counts("meter/ram/randread512/qd1"),
        counts("meter/ram/randread512/qd32"),
        counts("meter/ram/randwrite/qd1"),
        counts("meter/ram/randwrite/qd32"),
        encrypts("encrypt/ram/randread/qd1"),
        encrypts("encrypt/ram/randread/qd32"),
        encrypts("encrypt/ram/randwrite/qd1"),
        encrypts("encrypt/ram/randwrite/qd32"),
        checks("integrity/ram/randread/qd1", 0.7),
        checks("integrity/ram/randread/qd32", 0.7),
        checks("integrity/file/randread/qd1", 0.85),
        checks("integrity/file/randread/qd32", 0.85),
    ]
};

/// Runs the experiment. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// There is not enough memory; an interrupt.
pub fn run(options: &Options) -> Result<bool> {
    let common = &options.programs.common;
    if let Some(daemon) = &common.against {
        return against::children(NAME, common, daemon);
    }
    if let Some(hold) = options.report_files(NAME, |records| report(records, &BOUNDS))? {
        return Ok(hold);
    }
    let plan = Plan::of(common.scale());
    let mut experiment = Experiment::start(NAME, &options.programs, plan.patience)?;
    for medium in Medium::ALL {
        let (store, _directory) = medium.open(plan.store_bytes)?;
        let cases = all().filter(|case| case.medium == medium);
        for case in cases.filter(|case| options.wants(&case.to_string())) {
            measure(&mut experiment, case, &store, &plan)?;
        }
    }
    disk::measure(&mut experiment, &plan, |case| options.wants(case))?;
    let bounds: Vec<_> = BOUNDS.into_iter().filter(|bound| options.wants(bound.case)).collect();
    experiment.conclude(report(&experiment.records, &bounds))
}

fn report<'a>(records: &Records, bounds: &'a [Bound<'a>]) -> Report<'a> {
    Report::new(table(records), (OURS, bounds), &[])
}

/// Measures pairs of runs: with stages and without, and with stages and the library alone.
fn measure(
    experiment: &mut Experiment,
    case: Case,
    store: &cases::Store,
    plan: &Plan,
) -> Result<()> {
    let name = case.to_string();
    let mut params = experiment.params();
    params.extend(self::params([
        ("depth", case.depth.into()),
        ("request_bytes", case.load.bytes.into()),
    ]));
    let records = &mut experiment.records;
    let open = |chain| Path::open(case, chain, store);
    let mut paths = Layouts::new(plan.pairs, || Ok([open(case.chain)?, open(Chain::None)?]));
    let turns = Turns::take(plan.pairs, plan.repeats, |order| {
        paths.run(order, |index, paths| paths[index].run(plan))
    })?;
    let ratio = turns.record(records, &name, [OURS, NONE], (IOPS, "1/s"), params.clone());
    let added_ns = turns.record_added(records, &name, OURS, params.clone());
    let [ours, none] = turns.medians();
    eprintln!("  {name:<36} {ours:>12.0}/s, {none:>12.0}/s without: {ratio:.3}, {added_ns:.1} ns");
    if case.has_floor() {
        let mut floors = Layouts::new(plan.pairs, || {
            Ok((open(case.chain)?, Library::new(case, plan.store_bytes)?))
        });
        let turns = Turns::take(plan.pairs, plan.repeats, |order| {
            floors.run(order, |index, (path, library)| match index {
                0 => path.run(plan),
                _ => library.run(plan),
            })
        })?;
        let ratio = turns.record(records, &name, [OURS, LIBRARY], (IOPS, "1/s"), params);
        eprintln!("  {name:<36} {:>12.0}/s of the library: {ratio:.3}", turns.medians()[1]);
    }
    Ok(())
}

/// Systems that are made again after some pairs.
struct Layouts<T, F> {
    make: F,
    made: Option<T>,
    pairs: usize,
    pairs_each: usize,
}

impl<T, F: FnMut() -> Result<T>> Layouts<T, F> {
    fn new(pairs: usize, make: F) -> Self {
        Self { make, made: None, pairs: 0, pairs_each: pairs.div_ceil(LAYOUTS) }
    }

    /// Runs the systems of these indexes in their order. Returns their numbers, and the share of
    /// the time for which this thread waited for its core.
    fn run(
        &mut self,
        order: [usize; 2],
        mut run: impl FnMut(usize, &mut T) -> Result<f64>,
    ) -> Result<([f64; 2], f64)> {
        if self.pairs.is_multiple_of(self.pairs_each) {
            // The memory of those before is free by then.
            drop(self.made.take());
            self.made = Some((self.make)()?);
        }
        self.pairs += 1;
        let made = self.made.as_mut().context("nothing is made")?;
        let mut per_s = [0.0; 2];
        let ((), waited_share) = watched(|| {
            for index in order {
                per_s[index] = run(index, made)?;
            }
            Ok(())
        })?;
        Ok((per_s, waited_share))
    }
}

/// All results, in Markdown.
fn table(records: &Records) -> String {
    let mut page = String::from(
        "| requests a second | with stages : without | added to a request | with stages : the \
         library alone |\n| --- | --- | --- | --- |\n",
    );
    for case in all().map(|case| case.to_string()) {
        let Some(added) = records.find(&case, OURS, ADDED) else { continue };
        let [none, library] = [NONE, LIBRARY].map(|peer| cells::ratio(records, &case, peer));
        page.push_str(&format!("| {case} | {none} | {:.1} ns | {library} |\n", added.value));
    }
    let of_disks = disk::CASES.map(|(case, ..)| case);
    let mut measured =
        of_disks.iter().filter(|case| records.find(case, OURS, IOPS).is_some()).peekable();
    if measured.peek().is_some() {
        page.push_str(&format!(
            "\n| an encrypted disk, requests a second | {OURS} : {} | latency |\n\
             | --- | --- | --- |\n",
            peer::NAME
        ));
    }
    for case in measured {
        let latency = records.find_ratio(case, "latency_p50", peer::NAME);
        let latency = latency.map_or(String::new(), |ratio| format!("{:.2}", ratio.value));
        let ratio = cells::ratio(records, case, peer::NAME);
        page.push_str(&format!("| {case} | {ratio} | {latency} |\n"));
    }
    page
}
