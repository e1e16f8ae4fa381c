//! Ownership of a store on bad days, from many seeds. `SIDECORE_SEED=N` replays one;
//! `SIDECORE_SEEDS=N` runs that many.

mod common;

use std::io::Write as _;

use sidecore_ownership::Rule;
use sidecore_sim::ownership::{Options, Outcome, run};
use sidecore_sim::run_many;

const SEEDS: u64 = 10_000;
/// Histories in which every neglected rule shows.
const SEEDS_PER_RULE: u64 = 10_000;

#[test]
fn never_do_two_daemons_serve_and_answered_writes_survive_a_failover() {
    let seeds = common::seeds(SEEDS);
    let histories = seeds.end - seeds.start;
    let total = run_many(seeds, &|seed| run(seed, &Options::default()), &|_, _| ());
    let total = total.unwrap_or_else(|violation| panic!("{violation}"));
    // Not by a macro: the harness would keep it to itself.
    let _ = writeln!(std::io::stderr(), "{histories} histories of ownership: {total:?}");
    // A simulation in which nothing happens would pass as well.
    if histories >= SEEDS {
        let Outcome { openings, hand_overs, fences, failed_fences, restores, refusals, .. } = total;
        assert!(openings > 30_000 && hand_overs > 5_000 && fences > 20_000, "{total:?}");
        assert!(failed_fences > 10_000 && restores > 2_000 && refusals > 200, "{total:?}");
        let Outcome {
            ends_after_check,
            resent_in_flight,
            orphans,
            deposed_renewals,
            early_ends,
            cut_records,
            ..
        } = total;
        assert!(ends_after_check > 300 && resent_in_flight > 100_000, "{total:?}");
        assert!(orphans > 2_000 && deposed_renewals > 100_000 && early_ends > 4_000, "{total:?}");
        assert!(cut_records > 100, "{total:?}");
    }
}

#[test]
fn a_neglected_rule_of_ownership_is_noticed() {
    common::assert_noticed(&Rule::ALL, SEEDS_PER_RULE, &|seed, neglect| {
        run(seed, &Options { neglect, ..Options::default() })
    });
}

#[test]
fn a_seed_gives_the_same_history_of_ownership_again() {
    let outcome =
        |seed| run(seed, &Options::default()).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(outcome(42), outcome(42));
    assert_ne!(outcome(42), outcome(43));
}
