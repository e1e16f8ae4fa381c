//! The experiment `translation`: the cost of turning a virtual function's blocks into its
//! controller's.
//!
//! The translation unit runs alone, in this process: a hit in a queue's last extent, a hit in the
//! BTLB, walks of trees of one, a thousand and a million extents, and ranges that lie in many
//! extents. The experiment also measures the memory of the trees, fresh and after many changes at
//! random places.

mod report;
mod trees;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sidecore_extent::BlockRange;
use sidecore_units::Vlba;

use crate::against;
use crate::bounds::{Bound, Limit, Of};
use crate::experiment::{Common, Outcome, Report, Scale};
use crate::load::Places;
use crate::process::watched;
use crate::publish::Headline;
use crate::record::{OURS, Params, Records, params};
use crate::rounds::Rounds;
use crate::{cores, stop};
use trees::Tree;

const NAME: &str = "translation";

/// The options of this experiment.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The options that all experiments have.
    #[command(flatten)]
    pub common: Common,
}

/// The lengths and numbers of runs.
#[derive(Clone, Copy, Debug)]
struct Plan {
    run: Duration,
    rounds: usize,
    /// The most repetitions of a disturbed run.
    repeats: usize,
    /// The extents of the largest tree.
    large: u64,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        let ms = Duration::from_millis;
        let full = Self { run: ms(200), rounds: 11, repeats: 20, large: MILLION };
        match scale {
            Scale::Full => full,
            Scale::Quick => Self { run: ms(30), rounds: 5, repeats: 5, ..full },
            Scale::Tiny => Self { run: ms(2), rounds: 1, repeats: 0, large: 20_000 },
        }
    }
}

const MILLION: u64 = 1_000_000;

/// The metric of translations that each wait for the result of the one before: the time that a
/// request waits.
const ALONE: &str = "translation";
/// The metric of independent translations: the time that a queue with many requests sees.
const OVERLAPPED: &str = "translation_overlapped";
const BYTES: &str = "bytes_per_extent";

const LAST_EXTENT: &str = "last-extent";
const BTLB: &str = "btlb";
const WALK_LARGE: &str = "walk/1000000";

const BOUNDS: &[Bound<'static>] = &[
    Bound { case: LAST_EXTENT, of: Of::Ours(ALONE, " ns"), limit: Limit::AtMost(10.0) },
    Bound { case: BTLB, of: Of::Ours(ALONE, " ns"), limit: Limit::AtMost(10.0) },
    Bound { case: WALK_LARGE, of: Of::Ours(ALONE, " ns"), limit: Limit::AtMost(200.0) },
    Bound { case: "memory/1000000", of: Of::Ours(BYTES, " bytes"), limit: Limit::AtMost(26.0) },
];

const HEADLINES: &[Headline] = &[
    (LAST_EXTENT, Of::Ours(ALONE, " ns")),
    (BTLB, Of::Ours(ALONE, " ns")),
    ("walk/1000", Of::Ours(ALONE, " ns")),
    (WALK_LARGE, Of::Ours(ALONE, " ns")),
    ("memory/1000000", Of::Ours(BYTES, " bytes")),
];

/// The blocks of each extent of a fresh tree.
const EXTENT_BLOCKS: u64 = 16;

/// The blocks of one request.
const REQUEST_BLOCKS: u64 = 4;

/// The extents that a range request lies in.
const RANGE_EXTENTS: u64 = 16;

/// The extents of the BTLB case: as many as the BTLB holds.
const ROTATION: u64 = sidecore_extent::DEFAULT_BTLB_ENTRIES as u64;

struct Bench {
    scale: Scale,
    plan: Plan,
    records: Records,
    disturbed: usize,
}

/// Runs the experiment. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// The machine has too few cores or not enough memory; an interrupt.
pub fn run(options: &Options) -> Result<bool> {
    if let Some(daemon) = &options.common.against {
        return against::children(NAME, &options.common, daemon);
    }
    let begin = options.common.begin()?;
    cores::pin(cores::SERVER).or_else(|_| cores::pin(cores::CLIENT))?;
    let scale = options.common.scale();
    let mut bench =
        Bench { scale, plan: Plan::of(scale), records: Records::new(NAME), disturbed: 0 };
    eprintln!("{NAME}, {}", scale.name());
    bench.hits()?;
    for extents in [1, 1000] {
        let tree = Tree::fresh(extents)?;
        bench.walks(&tree, &format!("walk/{extents}"))?;
    }
    bench.large()?;
    let outcome = Outcome {
        records: &bench.records,
        report: Report::new(report::table(&bench.records), (OURS, BOUNDS), HEADLINES),
        disturbed: format!("{} runs were disturbed", bench.disturbed),
    };
    options.common.conclude(begin, &outcome)
}

impl Bench {
    fn hits(&mut self) -> Result<()> {
        let tree = Tree::fresh(1)?;
        let mut reader = tree.reader(0);
        let first = BlockRange { first: Vlba(0), count: 1 };
        reader.translate(first).context("nothing is mapped")?;
        let mut places = Places::new(EXTENT_BLOCKS - REQUEST_BLOCKS);
        let params = self.params(&tree);
        self.both(LAST_EXTENT, params, 1, &mut |offset| {
            let at = places.next_block() + offset;
            reader.hit(BlockRange { first: Vlba(at), count: REQUEST_BLOCKS })
        })?;

        let tree = Tree::fresh(ROTATION)?;
        let mut reader = tree.reader(sidecore_extent::DEFAULT_BTLB_ENTRIES);
        for extent in 0..ROTATION {
            reader.translate(BlockRange { first: Vlba(extent * EXTENT_BLOCKS), count: 1 });
        }
        let before = reader.counts();
        let mut places = Places::new(EXTENT_BLOCKS - REQUEST_BLOCKS);
        let mut turn = 0;
        let params = self.params(&tree);
        self.both(BTLB, params, 1, &mut |offset| {
            // The extents take turns, so that the last extent is never the right one.
            turn = (turn + 1) % ROTATION;
            let at = turn * EXTENT_BLOCKS + places.next_block() + offset;
            reader.translate(BlockRange { first: Vlba(at), count: REQUEST_BLOCKS })
        })?;
        let after = reader.counts();
        ensure!(
            (before.walks, before.last_hits) == (after.walks, after.last_hits),
            "the BTLB is missed: {before:?}, {after:?}"
        );
        Ok(())
    }

    /// Measures single blocks all over the tree.
    fn walks(&mut self, tree: &Tree, case: &str) -> Result<()> {
        // In a tree of one extent, both caches would hit.
        let alone = tree.extents() == 1;
        let mut reader = tree.reader(if alone { 0 } else { sidecore_extent::DEFAULT_BTLB_ENTRIES });
        let mut places = Places::new(tree.blocks());
        let params = self.params(tree);
        self.both(case, params, 1, &mut |offset| {
            if alone {
                reader.forget();
            }
            reader.translate(BlockRange { first: Vlba(places.next_block() + offset), count: 1 })
        })
    }

    /// Measures ranges of several extents; the recorded time is that of one piece.
    fn ranges(&mut self, tree: &Tree, case: &str) -> Result<()> {
        let mut reader = tree.reader(sidecore_extent::DEFAULT_BTLB_ENTRIES);
        let mut places = Places::new(tree.blocks() / EXTENT_BLOCKS - RANGE_EXTENTS);
        let params = self.params(tree);
        let pieces = RANGE_EXTENTS;
        self.both(case, params, pieces, &mut |offset| {
            let first = Vlba((places.next_block() + offset) * EXTENT_BLOCKS);
            reader.translate_pieces(
                BlockRange { first, count: RANGE_EXTENTS * EXTENT_BLOCKS },
                pieces,
            )
        })
    }

    /// Measures the largest tree: fresh, and after changes all over it.
    fn large(&mut self) -> Result<()> {
        let extents = self.plan.large;
        let mut tree = Tree::fresh(extents)?;
        self.memory(&tree, &format!("memory/{extents}"));
        self.walks(&tree, &format!("walk/{extents}"))?;
        self.ranges(&tree, &format!("range/{RANGE_EXTENTS}-of-{extents}"))?;
        // As many changes as extents: hardly a leaf stays as it was.
        let (changes, elapsed) = tree.churn(extents)?;
        let case = format!("memory/{extents}-churned");
        self.memory(&tree, &case);
        let ns = elapsed.as_nanos() as f64 / changes as f64;
        let params = self.params(&tree);
        self.records.measure(&case, OURS, "update", ns, "ns", params);
        eprintln!("  {case:<24} {ns:>8.0} ns an update");
        self.walks(&tree, &format!("walk/{extents}-churned"))
    }

    fn memory(&mut self, tree: &Tree, case: &str) {
        let shape = tree.shape();
        let bytes = shape.bytes as f64 / shape.extents as f64;
        let mut params = self.params(tree);
        params.insert("nodes".to_owned(), shape.nodes.into());
        self.records.measure(case, OURS, BYTES, bytes, "bytes", params);
        eprintln!("  {case:<24} {bytes:>8.2} bytes an extent");
    }

    fn params(&self, tree: &Tree) -> Params {
        let shape = tree.shape();
        params([
            ("plan", self.scale.name().into()),
            ("extents", shape.extents.into()),
            ("depth", shape.depth.into()),
            ("huge_page_bytes", trees::huge_page_bytes().into()),
        ])
    }

    /// Measures `one`, which does `pieces` translations, first dependent on each other and then
    /// independent.
    fn both(
        &mut self,
        case: &str,
        params: Params,
        pieces: u64,
        one: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Result<()> {
        for (metric, dependent) in [(ALONE, true), (OVERLAPPED, false)] {
            let mut rounds = Rounds::new();
            for _ in 0..self.plan.rounds {
                let (ns, counts) = self.undisturbed(dependent, one)?;
                rounds.add(ns / pieces as f64, counts);
            }
            let (median, params) = rounds.settle(params.clone());
            eprintln!("  {case:<24} {median:>8.2} ns  {metric}");
            self.records.measure(case, OURS, metric, median, "ns", params);
        }
        Ok(())
    }

    fn undisturbed(
        &mut self,
        dependent: bool,
        one: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Result<(f64, bool)> {
        let mut repeats = 0;
        loop {
            stop::check()?;
            let duration = self.plan.run;
            let (ns, waited_share) = watched(|| {
                if dependent { time::<true>(duration, one) } else { time::<false>(duration, one) }
            })?;
            let counts = waited_share < cores::UNDISTURBED_SHARE;
            if counts || repeats == self.plan.repeats {
                return Ok((ns, counts));
            }
            repeats += 1;
            self.disturbed += 1;
        }
    }
}

/// The calls between two readings of the clock.
const PER_READING: u64 = 2000;

/// Measures nanoseconds for each call of `one`. The argument of `one` is always zero: `one` adds it
/// to the address to translate, and returns the physical address. `DEPENDENT`: the zero is computed
/// from the physical address before, so that the processor has to wait for that.
fn time<const DEPENDENT: bool>(
    duration: Duration,
    one: &mut impl FnMut(u64) -> Option<u64>,
) -> Result<f64> {
    let mut zero = 0;
    let mut batch = || -> Result<()> {
        for _ in 0..PER_READING {
            let physical = one(zero).context("a translation found nothing")?;
            // No physical address has this bit, but the processor and the compiler do not know
            // that.
            let top = std::hint::black_box(physical) >> 63;
            if DEPENDENT {
                zero = top;
            }
        }
        Ok(())
    };
    // Warms up caches and branch predictors.
    let warm_up = Instant::now();
    while warm_up.elapsed() < duration / 5 {
        batch()?;
    }
    let start = Instant::now();
    let mut count = 0;
    loop {
        batch()?;
        count += PER_READING;
        let elapsed = start.elapsed();
        if elapsed >= duration {
            return Ok(elapsed.as_nanos() as f64 / count as f64);
        }
    }
}
