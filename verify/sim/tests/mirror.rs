//! Mirrors on bad days, from many seeds. `SIDECORE_SEED=N` replays one; `SIDECORE_SEEDS=N` runs
//! that many.

mod common;

use std::io::Write as _;

use sidecore_mirror::Rule;
use sidecore_sim::mirror::{Options, Outcome, run};
use sidecore_sim::run_many;

/// More than enough for `CUT_POINTS`.
const SEEDS: u64 = 20;
/// Fewer cuts would prove little.
const CUT_POINTS: u64 = 20_000;
/// Histories within which every neglected rule shows.
const SEEDS_PER_RULE: u64 = 200;

#[test]
fn no_power_cut_or_failed_leg_loses_or_shows_what_it_must_not() {
    let seeds = common::seeds(SEEDS);
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &|seed| run(seed, &Options::default()), &|_, _| ());
    let total = total.unwrap_or_else(|violation| panic!("{violation}"));
    // Not by a macro: the harness would capture the line.
    let _ =
        writeln!(std::io::stderr(), "power cuts in {histories} histories of mirrors: {total:?}");
    // A simulation without events would pass as well.
    if histories >= SEEDS {
        let Outcome { cut_points, waits, alone, failed_legs, attached_legs, .. } = total;
        assert!(cut_points >= CUT_POINTS && waits > 1_000 && alone > 1_000, "{total:?}");
        assert!(failed_legs > 20 && attached_legs > 20, "{total:?}");
        assert!(total.copied_regions > 100 && total.closed > 10, "{total:?}");
        assert!(total.added_legs > 2 && total.removed_legs > 5 && total.repairs > 5, "{total:?}");
        assert!(total.seconds > 200, "{total:?}");
        assert!(total.requests > 2_000 && total.permits > 5, "{total:?}");
    }
}

#[test]
fn a_neglected_rule_of_mirrors_is_noticed() {
    common::assert_noticed(&Rule::ALL, SEEDS_PER_RULE, &|seed, neglect| {
        run(seed, &Options { neglect, ..Options::default() })
    });
}

#[test]
fn a_seed_gives_the_same_history_of_a_mirror_again() {
    let outcome =
        |seed| run(seed, &Options::default()).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(outcome(42), outcome(42));
    assert_ne!(outcome(42), outcome(43));
}
