//! Remote devices on a bad network, from many seeds. `SIDECORE_SEED=N` replays one;
//! `SIDECORE_SEEDS=N` runs that many.

mod common;

use std::io::Write as _;

use sidecore_sim::remote::{Options, Outcome, moves, run};
use sidecore_sim::run_many;
use sidecore_vrio::Rule;

const SEEDS: u64 = 10_000;
/// Histories of moves, of which each takes a tenth of a second.
const SEEDS_OF_MOVES: u64 = 200;
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

#[test]
fn a_killed_guest_that_starts_elsewhere_loses_nothing_that_was_flushed_or_that_it_has_read() {
    let seeds = common::seeds(SEEDS_OF_MOVES);
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &|seed| moves::run(seed, None), &|_, _| ());
    let total = total.unwrap_or_else(|violation| panic!("{violation}"));
    let _ = writeln!(std::io::stderr(), "{histories} histories of moves: {total:?}");
    if histories >= SEEDS_OF_MOVES {
        let moves::Outcome { kills, kills_while_away, moves, replayed, abandoned, .. } = total;
        assert!(kills > 5 * histories && kills_while_away > 2 * histories, "{total:?}");
        assert!(moves > 2 * histories, "{total:?}");
        assert!(replayed > 3 * histories && abandoned > 5 * histories, "{total:?}");
    }
}

/// The rule is noticed when it is neglected, and it is the rule that is noticed.
fn is_noticed(rule: Rule) -> bool {
    if rule == Rule::GoneUsers {
        let neglecting = |seed| moves::run(seed, Some(rule));
        let Err(noticed) = run_many(0..SEEDS_PER_RULE, &neglecting, &|_, _| ()) else {
            return false;
        };
        println!("{rule:?}, seed {}: {}", noticed.seed, noticed.what);
        let without = moves::run(noticed.seed, None);
        assert!(without.is_ok(), "what was noticed is not {rule:?}: {without:?}");
        return true;
    }
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
