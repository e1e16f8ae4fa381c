//! Stores with checksums on bad days, from many seeds. `SIDECORE_SEED=N` replays one;
//! `SIDECORE_SEEDS=N` runs that many.

mod common;

use std::io::Write as _;

use sidecore_sim::integrity::{Options, Outcome, run};
use sidecore_sim::run_many;
use sidecore_stage_integrity::Rule;

/// More than enough for `CUT_POINTS`.
const SEEDS: u64 = 70;
/// Fewer cuts would prove little.
const CUT_POINTS: u64 = 20_000;
/// Histories within which every neglected rule shows.
const SEEDS_PER_RULE: u64 = 200;

#[test]
fn no_power_cut_makes_a_good_block_bad_or_shows_a_bad_one() {
    let seeds = common::seeds(SEEDS);
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &|seed| run(seed, &Options::default()), &|_, _| ());
    let total = total.unwrap_or_else(|violation| panic!("{violation}"));
    // Not by a macro: the harness would capture the line.
    let _ =
        writeln!(std::io::stderr(), "power cuts in {histories} histories of checksums: {total:?}");
    // A simulation without events would pass as well.
    if histories >= SEEDS {
        let Outcome { cut_points, torn, lost, deaths, kills, requests, .. } = total;
        assert!(cut_points >= CUT_POINTS && torn > 1_000 && lost > 50, "{total:?}");
        assert!(deaths > 20 && kills > 20 && requests > 2_000, "{total:?}");
    }
}

#[test]
fn a_neglected_rule_of_checksums_is_noticed() {
    common::assert_noticed(&Rule::ALL, SEEDS_PER_RULE, &|seed, neglect| {
        run(seed, &Options { neglect, ..Options::default() })
    });
}

#[test]
fn a_seed_gives_the_same_history_of_checksums_again() {
    let outcome =
        |seed| run(seed, &Options::default()).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(outcome(42), outcome(42));
    assert_ne!(outcome(42), outcome(43));
}
