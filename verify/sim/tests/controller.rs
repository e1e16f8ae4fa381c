//! Power cuts under a whole controller, from many seeds. `SIDECORE_SEED=N` replays one;
//! `SIDECORE_SEEDS=N` runs that many.

mod common;

use std::io::Write as _;

use sidecore_sim::controller::{Bug, Options, Outcome, run};
use sidecore_sim::run_many;

/// More than enough for `CUT_POINTS`.
const SEEDS: u64 = 24;
/// Fewer cuts would prove little.
const CUT_POINTS: u64 = 3_000;
/// Histories within which every neglected duty shows.
const SEEDS_PER_BUG: u64 = 20;
/// Short histories suffice for that.
const SHORT: Options = Options { runs: 2, steps: 600, bug: None };

#[test]
fn no_power_cut_takes_what_a_guest_was_promised() {
    let seeds = common::seeds(SEEDS);
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &|seed| run(seed, &Options::default()), &|_, _| ());
    let total = total.unwrap_or_else(|violation| panic!("{violation}"));
    // Not by a macro: the harness would capture the line.
    let _ = writeln!(
        std::io::stderr(),
        "power cuts in {histories} histories of a controller: {total:?}"
    );
    // A simulation without events would pass as well.
    if histories >= SEEDS {
        let Outcome { cut_points, requests, failures, refusals, deaths, replays, remaps, .. } =
            total;
        assert!(cut_points >= CUT_POINTS && requests > 3_000, "{total:?}");
        assert!(failures > 0 && refusals > 0, "{total:?}");
        assert!(deaths > 100 && replays > 30 && remaps > 80, "{total:?}");
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
    let options = Options { runs: 2, steps: 300, bug: None };
    let outcome = |seed| run(seed, &options).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(outcome(42), outcome(42));
    assert_ne!(outcome(42), outcome(43));
}
