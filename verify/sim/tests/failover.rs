//! Failovers of remote devices, from many seeds. `SIDECORE_SEED=N` replays one; `SIDECORE_SEEDS=N`
//! runs that many.

mod common;

use std::io::Write as _;

use sidecore_sim::remote::failover::{Options, Outcome, Rule, run};
use sidecore_sim::run_many;

const SEEDS: u64 = 300;
/// Histories in which every neglected rule shows.
const SEEDS_PER_RULE: u64 = 300;

#[test]
fn no_owner_loses_what_another_has_answered_and_no_fenced_one_is_seen() {
    let seeds = common::seeds(SEEDS);
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &|seed| run(seed, &Options::default()), &|_, _| ());
    let total = total.unwrap_or_else(|violation| panic!("{violation}"));
    // Not by a macro: the harness would keep it to itself.
    let _ = writeln!(std::io::stderr(), "{histories} histories of failovers: {total:?}");
    // A simulation in which nothing happens would pass as well.
    if histories >= SEEDS {
        let Outcome { failovers, hand_overs, replayed, link_changes, .. } = total;
        assert!(failovers > 300 && hand_overs > 200, "{total:?}");
        assert!(replayed > 5_000 && link_changes > 200, "{total:?}");
        let Outcome {
            resends_with_overlap,
            ends_before_write,
            late_answers,
            cuts_before_flush,
            ..
        } = total;
        assert!(resends_with_overlap > 0 && ends_before_write > 0, "{total:?}");
        assert!(late_answers > 0 && cuts_before_flush > 0, "{total:?}");
    }
}

#[test]
fn a_neglected_rule_of_a_failover_is_noticed() {
    common::assert_noticed(&Rule::ALL, SEEDS_PER_RULE, &|seed, neglect| {
        run(seed, &Options { neglect, ..Options::default() })
    });
}

#[test]
fn a_seed_gives_the_same_failovers_again() {
    let outcome =
        |seed| run(seed, &Options::default()).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(outcome(42), outcome(42));
    assert_ne!(outcome(42), outcome(43));
}
