//! Power cuts, from many seeds. `SIDECORE_SEED=N` replays one; `SIDECORE_SEEDS=N` runs that many.

mod common;

use std::io::Write as _;

use sidecore_sim::run_many;
use sidecore_sim::volumes::{Bug, Options, Outcome, run};

/// More than enough for `CUT_POINTS`.
const SEEDS: u64 = 18;
/// Fewer cuts would prove little.
const CUT_POINTS: u64 = 10_000;
/// Histories within which every neglected duty shows.
const SEEDS_PER_BUG: u64 = 20;
/// Short histories suffice for that.
const SHORT: Options = Options { runs: 2, steps: 200, bug: None };

#[test]
fn no_power_cut_loses_or_shows_what_it_must_not() {
    let seeds = common::seeds(SEEDS);
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &|seed| run(seed, &Options::default()), &|_, _| ());
    let total = total.unwrap_or_else(|violation| panic!("{violation}"));
    // Not by a macro: the harness would capture the line.
    let _ =
        writeln!(std::io::stderr(), "power cuts in {histories} histories of volumes: {total:?}");
    // A simulation without events would pass as well.
    if histories >= SEEDS {
        let Outcome {
            cut_points,
            fell_back,
            went_ahead,
            refusals,
            most_extents,
            deaths,
            replays,
            remaps,
            ..
        } = total;
        assert!(cut_points >= CUT_POINTS && fell_back > 500 && went_ahead > 500, "{total:?}");
        assert!(deaths > 500 && replays > 200 && remaps > 40, "{total:?}");
        // Full disks, and trees of more than one level.
        assert!(refusals > 100 && most_extents > 400, "{total:?}");
    }
}

#[test]
fn a_neglected_duty_is_noticed() {
    common::assert_noticed(&Bug::ALL, SEEDS_PER_BUG, &|seed, bug| {
        run(seed, &Options { bug, ..SHORT })
    });
}

#[test]
fn a_seed_gives_the_same_history_again() {
    let options = Options { runs: 2, steps: 100, bug: None };
    let outcome = |seed| run(seed, &options).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(outcome(42), outcome(42));
    assert_ne!(outcome(42), outcome(43));
}
