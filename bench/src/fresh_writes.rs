//! The experiment `fresh-writes`: the cost of the log of answered changes for a write to blocks
//! that a volume does not have yet.
//!
//! Two controllers in this process serve stores in memory, one of them with a log. No ring and no
//! daemon is on the path, because they would hide the difference: such a write is allocated,
//! written, mapped, logged and answered. The two controllers take turns. Between two runs the
//! volume is emptied and committed, outside of the measurement.

mod volume;

use anyhow::Result;

use crate::against;
use crate::bounds::{Bound, Limit, Of};
use crate::cores;
use crate::experiment::{Common, Outcome, Report, Scale};
use crate::process::watched;
use crate::record::{OURS, Ratio, Records, params};
use crate::turns::Turns;
use volume::Volume;

const NAME: &str = "fresh-writes";
/// The controller without a log.
const WITHOUT: &str = "without-log";
const METRIC: &str = "write";

/// The options of this experiment.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The options that all experiments have.
    #[command(flatten)]
    pub common: Common,
}

/// The lengths and numbers of runs.
struct Plan {
    /// Writes of a run.
    writes: u64,
    pairs: usize,
    /// The most repetitions of disturbed pairs in a case.
    repeats: usize,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        match scale {
            Scale::Full => Self { writes: 4_000, pairs: 101, repeats: 50 },
            Scale::Quick => Self { writes: 2_000, pairs: 41, repeats: 20 },
            Scale::Tiny => Self { writes: 200, pairs: 1, repeats: 0 },
        }
    }
}

const CASES: [(&str, usize); 2] = [("write/4k/qd1", 1), ("write/4k/qd32", 32)];

const BOUNDS: [Bound<'static>; 2] = [
    Bound { case: CASES[0].0, of: Of::Ratio(METRIC, WITHOUT), limit: Limit::AtMost(1.03) },
    Bound { case: CASES[1].0, of: Of::Ratio(METRIC, WITHOUT), limit: Limit::AtMost(1.03) },
];

/// Runs the experiment. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// The machine has too few cores or not enough memory; an interrupt.
pub fn run(options: &Options) -> Result<bool> {
    if let Some(daemon) = &options.common.against {
        return against::children(NAME, &options.common, daemon);
    }
    let begin = options.common.begin()?;
    let scale = options.common.scale();
    let plan = Plan::of(scale);
    let mut records = Records::new(NAME);
    eprintln!("{NAME}, {}", scale.name());
    let mut disturbed = 0;
    for (case, depth) in CASES {
        disturbed += measure(&mut records, case, depth, &plan, scale)?;
    }
    let headlines = BOUNDS.map(|bound| (bound.case, bound.of));
    let outcome = Outcome {
        records: &records,
        report: Report::new(table(&records), (OURS, &BOUNDS), &headlines),
        disturbed: format!("{disturbed} pairs were disturbed"),
    };
    options.common.conclude(begin, &outcome)
}

/// Measures pairs of runs. Returns the number of disturbed pairs.
fn measure(
    records: &mut Records,
    case: &str,
    depth: usize,
    plan: &Plan,
    scale: Scale,
) -> Result<usize> {
    // The controllers' threads inherit the core of the thread that makes the controllers.
    cores::pin(cores::SERVER)?;
    let mut volumes =
        [Volume::new(true, depth, plan.writes)?, Volume::new(false, depth, plan.writes)?];
    cores::pin(cores::CLIENT)?;
    let turns = Turns::take(plan.pairs, plan.repeats, |order| {
        let mut ns = [0.0; 2];
        let ((), waited) = watched(|| {
            for index in order {
                ns[index] = volumes[index].run()?;
            }
            Ok(())
        })?;
        Ok((ns, waited))
    })?;
    let params = params([
        ("plan", scale.name().into()),
        ("depth", depth.into()),
        ("writes", plan.writes.into()),
    ]);
    let [with, without] = turns.medians();
    let ratio = turns.record(records, case, [OURS, WITHOUT], (METRIC, "ns"), params);
    eprintln!("  {case:<16} {with:>8.0} ns with the log, {without:>8.0} ns without: {ratio:.3}");
    Ok(turns.repeated)
}

/// All results, in Markdown.
fn table(records: &Records) -> String {
    let mut page = String::from(
        "| a write to fresh blocks | with the log, median | without, median | with the log : \
         without |\n| --- | --- | --- | --- |\n",
    );
    for (case, _) in CASES {
        let ns = |system| records.find(case, system, METRIC).map_or(0.0, |measure| measure.value);
        let pair = records.find_ratio(case, METRIC, WITHOUT).and_then(Ratio::pair);
        let pair = pair.map_or(String::new(), |(with, without)| {
            format!("{with:.0} ns : {without:.0} ns = {:.3}", with / without)
        });
        page.push_str(&format!(
            "| {case} | {:.0} ns | {:.0} ns | {pair} |\n",
            ns(OURS),
            ns(WITHOUT)
        ));
    }
    page
}
