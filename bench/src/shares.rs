//! The experiment `shares`: the cost of weights where the store is no bottleneck.
//!
//! Two sidecores serve two functions from stores in memory, as fast as they can. If both functions
//! belong to one controller, the sidecores account for them and read each other's accounts; if each
//! function has a controller of its own, no accounting is needed. The two arrangements take turns,
//! and are made again after some pairs.
//! Each sidecore makes its own requests, so that two cores are enough, and no ring or client hides
//! a difference.

mod arrangement;
mod sidecore;

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::against;
use crate::bounds::{Bound, Limit, Of};
use crate::cells;
use crate::cores::{self, Partner};
use crate::experiment::{self, Common, Outcome, Report, Scale};
use crate::record::{OURS, Records, params};
use crate::turns::Turns;
use arrangement::Arrangement;

const NAME: &str = "shares";
/// The arrangement in which each function has a controller of its own.
const APART: &str = "two-controllers";
const METRIC: &str = "iops";
/// Both arrangements are made so many times in each case: where their memory lies changes their
/// speed by some percent, more than the difference that is to be found.
const LAYOUTS: usize = 5;
/// Requests in flight in each queue.
const DEPTH: usize = 32;

/// The options of this experiment.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The options that all experiments have.
    #[command(flatten)]
    pub common: Common,
    /// Measure only the cases whose name contains one of these texts.
    #[arg(long, value_delimiter = ',', value_name = "CASES")]
    pub only: Vec<String>,
}

/// The assignment of functions to sidecores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    /// Each sidecore serves one of the functions.
    Apart,
    /// Each sidecore serves half of the queues of both functions.
    Spread,
    /// As [`Placement::Apart`], but only the first function has requests.
    Resting,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    placement: Placement,
    /// The queues of each function.
    queues: usize,
    /// The size of each request.
    bytes: u64,
}

const fn case(name: &'static str, placement: Placement, queues: usize, bytes: u64) -> Case {
    Case { name, placement, queues, bytes }
}

static CASES: [Case; 5] = [
    case("apart/4KiB/q1", Placement::Apart, 1, 4096),
    case("apart/4KiB/q4", Placement::Apart, 4, 4096),
    case("apart/512B/q4", Placement::Apart, 4, 512),
    case("spread/4KiB/q4", Placement::Spread, 4, 4096),
    case("resting/4KiB/q4", Placement::Resting, 4, 4096),
];

/// The lengths and numbers of runs.
struct Plan {
    warm_up: Duration,
    /// Long enough in a full run that the store's window is measured again within it (every two
    /// seconds).
    measured: Duration,
    pairs: usize,
    /// The most repetitions of disturbed pairs in a case.
    repeats: usize,
}

impl Plan {
    fn of(scale: Scale) -> Self {
        let (warm_up, measured, pairs, repeats) = match scale {
            Scale::Full => (20, 2_500, 15, 15),
            Scale::Quick => (10, 50, 61, 30),
            Scale::Tiny => (1, 5, 1, 0),
        };
        let (warm_up, measured) = (Duration::from_millis(warm_up), Duration::from_millis(measured));
        Self { warm_up, measured, pairs, repeats }
    }
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
    let scale = options.common.scale();
    let plan = Plan::of(scale);
    cores::pin(cores::CLIENT).context("the experiment needs two cores")?;
    let partner = Partner::start(cores::SERVER).context("the experiment needs two cores")?;
    let mut records = Records::new(NAME);
    eprintln!(
        "{NAME}, {}: a sidecore on core {}, another on core {}",
        scale.name(),
        cores::CLIENT,
        cores::SERVER
    );
    let mut disturbed = 0;
    let wanted = |case: &&Case| experiment::is_named(&options.only, case.name);
    for case in CASES.iter().filter(wanted) {
        disturbed += measure(&mut records, *case, &partner, &plan, scale)?;
    }
    let bound = |case: &'static Case| Bound {
        case: case.name,
        of: Of::Ratio(METRIC, APART),
        limit: Limit::AtLeast(0.97),
    };
    let bounds: Vec<_> = CASES.iter().filter(wanted).map(bound).collect();
    let headlines = CASES.map(|case| (case.name, Of::Ratio(METRIC, APART)));
    let outcome = Outcome {
        records: &records,
        report: Report::new(table(&records), (OURS, &bounds), &headlines),
        disturbed: format!("{disturbed} pairs were disturbed"),
    };
    options.common.conclude(begin, &outcome)
}

/// Measures pairs of runs. Returns the number of disturbed pairs.
fn measure(
    records: &mut Records,
    case: Case,
    partner: &Partner,
    plan: &Plan,
    scale: Scale,
) -> Result<usize> {
    let (mut arrangements, mut pairs) = (None, 0_usize);
    let turns = Turns::take(plan.pairs, plan.repeats, |order| {
        if pairs.is_multiple_of(plan.pairs.div_ceil(LAYOUTS)) {
            // The memory of those before is free by then.
            drop(arrangements.take());
            arrangements = Some(Arrangement::both(order[0] == 0)?);
        }
        pairs += 1;
        let arrangements = arrangements.as_ref().context("no arrangements")?;
        let (mut per_s, mut waited) = ([0.0; 2], 0.0_f64);
        for index in order {
            let run = arrangements[index].run(case, partner, plan)?;
            per_s[index] = run.per_s;
            waited = waited.max(run.waited_share);
        }
        Ok((per_s, waited))
    })?;
    let params = params([
        ("plan", scale.name().into()),
        ("depth", DEPTH.into()),
        ("queues", case.queues.into()),
        ("request_bytes", case.bytes.into()),
    ]);
    let [ours, theirs] = turns.medians();
    let ratio = turns.record(records, case.name, [OURS, APART], (METRIC, "1/s"), params);
    eprintln!(
        "  {:<16} {ours:>12.0}/s on one controller, {theirs:>12.0}/s on two: {ratio:.3}",
        case.name
    );
    Ok(turns.repeated)
}

/// All results, in Markdown.
fn table(records: &Records) -> String {
    let mut page = String::from(
        "| requests a second | one controller : two controllers | least to greatest |\n\
         | --- | --- | --- |\n",
    );
    for Case { name, .. } in CASES {
        let Some(ratio) = records.find_ratio(name, METRIC, APART) else { continue };
        let [least, greatest] =
            ["min", "max"].map(|end| ratio.params.get(end).and_then(Value::as_f64).unwrap_or(0.0));
        let pair = cells::ratio(records, name, APART);
        page.push_str(&format!("| {name} | {pair} | {least:.3} to {greatest:.3} |\n"));
    }
    page
}
