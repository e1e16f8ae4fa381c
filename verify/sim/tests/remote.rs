//! Remote devices on a bad network, from many seeds. `SIDECORE_SEED=N` replays one;
//! `SIDECORE_SEEDS=N` runs that many.

mod common;

use std::io::Write as _;

use sidecore_sim::remote::{Options, Outcome, run};
use sidecore_sim::run_many;
use sidecore_vrio::Rule;

const SEEDS: u64 = 10_000;
/// Histories in which every neglected rule shows.
const SEEDS_PER_RULE: u64 = 3_000;

#[test]
fn no_answered_write_is_lost_and_none_takes_effect_twice() {
    let seeds = common::seeds(SEEDS);
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &|seed| run(seed, &Options::default()), &|_, _| ());
    let total = total.unwrap_or_else(|violation| panic!("{violation}"));
    // Not by a macro: the harness would keep it to itself.
    let _ = writeln!(std::io::stderr(), "{histories} histories of remote devices: {total:?}");
    // A simulation in which nothing happens would pass as well.
    if histories >= SEEDS {
        let Outcome {
            restarts, power_cuts, restarts_with_unanswered, restarts_with_overlap, ..
        } = total;
        assert!(restarts > 10_000 && power_cuts > 5_000, "{total:?}");
        assert!(restarts_with_unanswered > 5_000 && restarts_with_overlap > 1_500, "{total:?}");
        let Outcome {
            replayed, own_flushes, client_deaths, timed_out, seen_before, damaged, ..
        } = total;
        assert!(replayed > 3_000 && own_flushes > 5_000 && client_deaths > 3_000, "{total:?}");
        assert!(timed_out > 5_000 && seen_before > 50_000 && damaged > 50_000, "{total:?}");
        let Outcome {
            restarts_with_several,
            deaths_beside_others,
            beside_others,
            beside_replays,
            ..
        } = total;
        assert!(restarts_with_several > 1_000 && deaths_beside_others > 100, "{total:?}");
        assert!(beside_others > 50_000 && beside_replays > 100, "{total:?}");
        let Outcome {
            restarts_abroad,
            restarts_with_messages,
            deaths_abroad,
            handed_over,
            moves,
            link_changes,
            ..
        } = total;
        assert!(handed_over > 40_000 && moves > 5_000, "{total:?}");
        assert!(link_changes > 1_000, "{total:?}");
        assert!(restarts_abroad > 50 && restarts_with_messages > 10, "{total:?}");
        assert!(deaths_abroad > 10, "{total:?}");
    }
}

/// The rule is noticed when it is neglected, and it is the rule that is noticed.
fn is_noticed(rule: Rule) -> bool {
    let neglecting = Options { neglect: Some(rule), ..Options::default() };
    let Err(noticed) = run_many(0..SEEDS_PER_RULE, &|seed| run(seed, &neglecting), &|_, _| ())
    else {
        return false;
    };
    println!("{rule:?}, seed {}: {}", noticed.seed, noticed.what);
    let without = run(noticed.seed, &Options::default());
    assert!(without.is_ok(), "what was noticed is not {rule:?}: {without:?}");
    true
}

#[test]
fn a_neglected_rule_is_noticed() {
    let missed: Vec<Rule> = Rule::ALL.into_iter().filter(|rule| !is_noticed(*rule)).collect();
    assert!(missed.is_empty(), "in {SEEDS_PER_RULE} histories nothing is wrong without {missed:?}");
}

#[test]
fn a_seed_gives_the_same_history_again() {
    let outcome =
        |seed| run(seed, &Options::default()).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(outcome(42), outcome(42));
    assert_ne!(outcome(42), outcome(43));
}
