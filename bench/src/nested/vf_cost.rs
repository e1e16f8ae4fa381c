//! The experiment `vf-cost`: the cost of a virtual function over the physical one.
//!
//! Both functions belong to one controller on the store in memory and are measured in pairs, on the
//! same blocks, through one client. The difference is the cost of the function's own path:
//! translation, the second tag, and the accounting of requests in flight. The daemon is started
//! again after some pairs: where the memory of the two queues lies also makes a difference, which
//! is another one at each start.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Result;

use super::servers::{self, PF, VF};
use super::{Bench, Medium, Plan, case, depths};
use crate::bounds::{Bound, Limit, Of};
use crate::cells;
use crate::experiment::{Programs, Report, Scale};
use crate::publish::Headline;
use crate::record::Records;
use crate::runs::ADDED;

const NAME: &str = "vf-cost";

const SIZES: [u32; 5] = [512, 4 << 10, 8 << 10, 16 << 10, 32 << 10];

/// Below this size the bound is in nanoseconds: a copy takes hardly longer than the path.
const RATIO_FROM_BYTES: u32 = 4 << 10;

/// The options of this experiment.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Options {
    /// The options of experiments that measure programs.
    #[command(flatten)]
    pub programs: Programs,
    /// Measure only requests of these sizes in bytes.
    #[arg(long, value_delimiter = ',', value_name = "BYTES")]
    pub sizes: Vec<u32>,
    /// Connect the queue of another virtual function on the same sidecore, which stays idle.
    #[arg(long)]
    pub beside: bool,
}

fn plan(scale: Scale) -> Plan {
    let ms = Duration::from_millis;
    let plan = Plan {
        sizes: &SIZES,
        rounds: 20,
        starts_again: true,
        volume_bytes: 256 << 20,
        ..Plan::of(scale)
    };
    match scale {
        Scale::Full => Plan { run: ms(100), warm_up: ms(20), ..plan },
        Scale::Quick => Plan { run: ms(20), warm_up: ms(4), ..plan },
        Scale::Tiny => Plan { rounds: 1, volume_bytes: 16 << 20, ..plan },
    }
}

const HEADLINES: &[Headline] = &[
    ("ram/randread/512B/qd1", Of::Ours(ADDED, " ns")),
    ("ram/randread/512B/qd32", Of::Ours(ADDED, " ns")),
    ("ram/randread/4KiB/qd1", Of::Ratio("iops", PF)),
    ("ram/randread/4KiB/qd32", Of::Ratio("iops", PF)),
    ("ram/randwrite/4KiB/qd1", Of::Ratio("iops", PF)),
    ("ram/randwrite/4KiB/qd32", Of::Ratio("iops", PF)),
];

/// Runs the experiment. Returns false if a bound that is to be enforced does not hold.
///
/// # Errors
/// A program does not start, or a measurement fails; an interrupt.
pub fn run(options: &Options) -> Result<bool> {
    let Options { programs, sizes, beside } = options.clone();
    let plan = plan(programs.common.scale());
    let options = super::Options { programs, sizes, ..super::Options::default() };
    let mut bench = Bench::start(NAME, &options, plan)?;
    let _huge_pages = bench.reserve_huge_pages();
    bench.measure_on(Medium::Ram, |bench, start| servers::on_ram(bench, start, beside))?;
    let cases = cases(&bench.sizes(Medium::Ram));
    let records = &bench.experiment.records;
    bench.experiment.conclude(Report {
        note: "Medians of 20 pairs. ".to_owned(),
        ..Report::new(table(records), (VF, &bounds(&cases)), HEADLINES)
    })
}

/// Sizes and names of all cases.
fn cases(sizes: &[u32]) -> Vec<(u32, String)> {
    let mut cases = Vec::new();
    for bytes in sizes {
        for write in [false, true] {
            cases.extend(
                depths(*bytes).map(|depth| (*bytes, case(Medium::Ram, write, *bytes, depth))),
            );
        }
    }
    cases
}

fn bounds(cases: &[(u32, String)]) -> Vec<Bound<'_>> {
    let mut bounds = Vec::new();
    for (bytes, case) in cases {
        let (of, limit) = if *bytes < RATIO_FROM_BYTES {
            (Of::Ours(ADDED, " ns"), Limit::AtMost(6.0))
        } else {
            (Of::Ratio("iops", PF), Limit::AtLeast(0.97))
        };
        bounds.push(Bound { case, of, limit });
    }
    bounds
}

/// All results, in Markdown.
fn table(records: &Records) -> String {
    let mut page = String::from("| case | vf : pf | ns more a request | least to most |\n");
    page.push_str("| --- | --- | --- | --- |\n");
    for (_, case) in cases(&super::SIZES) {
        let Some(added) = records.find(&case, VF, ADDED) else { continue };
        let ratio = cells::ratio(records, &case, PF);
        let [least, most] =
            ["min", "max"].map(|name| added.params.get(name).and_then(serde_json::Value::as_f64));
        let spread = format!("{:.0} to {:.0}", least.unwrap_or(0.0), most.unwrap_or(0.0));
        let _ = writeln!(page, "| {case} | {ratio} | {:.1} | {spread} |", added.value);
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_requests_have_a_bound_in_nanoseconds_and_others_a_ratio() {
        let cases = cases(&[512, 4096]);
        let bounds = bounds(&cases);
        assert_eq!(bounds.len(), 8);
        let of =
            |case: &str| bounds.iter().find(|bound| bound.case == case).map(|bound| bound.limit);
        assert_eq!(of("ram/randread/512B/qd32"), Some(Limit::AtMost(6.0)));
        assert_eq!(of("ram/randwrite/4KiB/qd1"), Some(Limit::AtLeast(0.97)));
    }
}
