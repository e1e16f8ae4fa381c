//! Power cuts, from many seeds. `SIDECORE_SEED=N` replays one; `SIDECORE_SEEDS=N` runs that many.

use std::io::Write as _;

use sidecore_sim::volumes::{Bug, Options, Outcome, run, run_many};

/// More than enough for `CUT_POINTS`.
const SEEDS: u64 = 12;
/// What must have been tried, to say something.
const CUT_POINTS: u64 = 10_000;
/// Histories in which every neglected duty shows.
const SEEDS_PER_BUG: u64 = 20;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a whole number, not {text}")))
}

#[test]
fn no_power_cut_loses_or_shows_what_it_must_not() {
    let seeds = match (number("SIDECORE_SEED"), number("SIDECORE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(SEEDS),
    };
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &Options::default(), &|_, _| ()).unwrap_or_else(|violation| panic!("{violation}"));
    // Not by a macro: the harness would keep it to itself.
    let _ = writeln!(std::io::stderr(), "power cuts in {histories} histories of volumes: {total:?}");
    // A simulation in which nothing happens would pass as well.
    if histories >= SEEDS {
        let Outcome { cut_points, fell_back, went_ahead, refusals, most_extents, .. } = total;
        assert!(cut_points >= CUT_POINTS && fell_back > 500 && went_ahead > 500, "{total:?}");
        // Full disks, and trees of more than one level.
        assert!(refusals > 100 && most_extents > 400, "{total:?}");
    }
}

#[test]
fn a_neglected_duty_is_noticed() {
    for bug in Bug::ALL {
        let options = Options { bug: Some(bug), ..Options::default() };
        let noticed = (0..SEEDS_PER_BUG).find_map(|seed| run(seed, &options).err());
        let noticed = noticed.unwrap_or_else(|| panic!("{bug:?}, and nobody notices in {SEEDS_PER_BUG} histories"));
        println!("{bug:?}: {noticed}");
        let without = run(noticed.seed, &Options::default());
        assert!(without.is_ok(), "what was noticed is not {bug:?}: {without:?}");
    }
}

#[test]
fn a_seed_gives_the_same_history_again() {
    let options = Options { runs: 2, steps: 100, bug: None };
    let outcome = |seed| run(seed, &options).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(outcome(42), outcome(42));
    assert_ne!(outcome(42), outcome(43));
}
