//! Many seeds. `SIDECORE_SEED=N` replays one; `SIDECORE_SEEDS=N` runs that many.

mod common;

use sidecore_sim::{Outcome, run};

#[test]
fn no_schedule_loses_a_request() {
    let seeds = common::seeds(300);
    let mut total = Outcome::default();
    for seed in seeds.clone() {
        let outcome = std::panic::catch_unwind(|| run(seed, 1 + seed as usize % 4, 200));
        let outcome = outcome.unwrap_or_else(|_| panic!("replay this with SIDECORE_SEED={seed}"));
        total.requests += outcome.requests;
        total.kicks += outcome.kicks;
        total.calls += outcome.calls;
        total.sleeps += outcome.sleeps;
        total.restarts += outcome.restarts;
        total.duration_ns += outcome.duration_ns;
    }
    println!("{total:?}");
    // A simulation without events would pass as well.
    if seeds.count() >= 100 {
        assert!(
            total.kicks > 1_000
                && total.calls > 1_000
                && total.sleeps > 1_000
                && total.restarts > 100,
            "{total:?}"
        );
    }
}

#[test]
fn a_seed_gives_the_same_run_again() {
    assert_eq!(run(42, 3, 100), run(42, 3, 100));
    assert_ne!(run(42, 3, 100), run(43, 3, 100));
}
