//! Weights hold for functions, with any number of queues, where a resource is scarce; and no
//! function is slowed where resources suffice. `SIDECORE_SEED=N` replays one seed.

mod common;

use sidecore_sim::fairness::{Case, Placement, Served, Store, run};

const WEIGHTS: [(u32, u32); 4] = [(100, 100), (100, 400), (400, 100), (100, 101)];
const QUEUES: [(usize, usize); 4] = [(1, 1), (4, 1), (1, 4), (8, 1)];

/// The tolerated difference between the ratio of requests and the ratio of weights.
const TOLERANCE: f64 = 0.05;

/// The tolerated difference between queues of a function besides, in requests.
const LEAD: f64 = 130.0;

fn cases(store: Store, placement: Placement, depth: u16) -> impl Iterator<Item = Case> {
    let of = move |weights: (u32, u32), queues| {
        let weights = (weights.0, Some(weights.1));
        Case { weights, queues, depths: (depth, depth), store, placement }
    };
    WEIGHTS
        .into_iter()
        .flat_map(move |weights| QUEUES.into_iter().map(move |queues| of(weights, queues)))
}

/// Checks that weights hold within the tolerance, that a function's queues are served alike, and
/// that all together get all of the resource.
fn check(store: Store, placement: Placement, depth: u16, total_per_s: f64) {
    let mut wrong = Vec::new();
    for seed in common::seeds(1) {
        for case in cases(store, placement, depth) {
            let served = run(&case, seed);
            let wanted = f64::from(case.weights.0) / f64::from(case.weights.1.expect("two"));
            let off = served.ratio() / wanted - 1.0;
            let Served { first_queues: (least, most), .. } = served;
            let is_right = off.abs() <= TOLERANCE
                && served.total() >= 0.97 * total_per_s
                && least as f64 >= 0.9 * most as f64 - LEAD;
            let (weights, queues) = (case.weights, case.queues);
            let line = format!(
                "{weights:?} {queues:?}: {:.3} for {wanted:.3}, {served:?}, seed {seed}",
                served.ratio()
            );
            println!("{line}");
            if !is_right {
                wrong.push(line);
            }
        }
    }
    assert!(wrong.is_empty(), "{store:?} {placement:?}: {wrong:#?}");
}

/// The service of a function that is alone.
fn alone(store: Store, queues: usize, depth: u16) -> f64 {
    let case = Case {
        weights: (100, None),
        queues: (queues, 0),
        depths: (depth, 0),
        store,
        placement: Placement::Together,
    };
    run(&case, 0).total()
}

#[test]
fn weights_divide_a_sidecores_time_among_functions() {
    check(Store::Ram, Placement::Together, 128, alone(Store::Ram, 1, 128) * 0.98);
}

#[test]
fn weights_divide_a_stores_slots_on_one_sidecore() {
    check(Store::Slots(64), Placement::Together, 128, 64_000.0);
}

#[test]
fn weights_divide_a_stores_slots_between_two_sidecores() {
    check(Store::Slots(64), Placement::Apart, 128, 64_000.0);
}

#[test]
fn weights_divide_a_stores_slots_among_functions_on_both_of_two_sidecores() {
    check(Store::Slots(64), Placement::Spread, 128, 64_000.0);
}

#[test]
fn two_sidecores_with_one_function_each_lose_nothing() {
    let each = alone(Store::Ram, 4, 128);
    for weights in [(100, 100), (100, 400), (1, 1000)] {
        let weights = (weights.0, Some(weights.1));
        let case = Case {
            weights,
            queues: (4, 4),
            depths: (128, 128),
            store: Store::Ram,
            placement: Placement::Apart,
        };
        let served = run(&case, 0);
        assert!(
            served.per_s.iter().all(|per_s| *per_s >= 0.99 * each),
            "{weights:?}: {served:?}, alone {each}"
        );
    }
}

#[test]
fn no_queue_waits_for_a_store_that_answers_at_once() {
    for placement in [Placement::Together, Placement::Apart, Placement::Spread] {
        for depth in [32, 128] {
            let weights = (100, Some(400));
            let (queues, depths) = ((4, 4), (depth, depth));
            let served = run(&Case { weights, queues, depths, store: Store::Ram, placement }, 0);
            assert_eq!(served.store_waits, 0, "{placement:?}, depth {depth}: {served:?}");
        }
    }
}

#[test]
fn no_function_is_slowed_while_the_store_has_free_slots() {
    // Together the functions have no more requests in flight than the store has slots.
    for placement in [Placement::Together, Placement::Apart] {
        let weights = (1, Some(1000));
        let case =
            Case { weights, queues: (1, 1), depths: (24, 24), store: Store::Slots(64), placement };
        let served = run(&case, 0);
        let each = alone(Store::Slots(64), 1, 24);
        assert!(
            served.per_s.iter().all(|per_s| *per_s >= 0.97 * each),
            "{placement:?}: {served:?}, alone {each}"
        );
    }
}

#[test]
fn a_function_that_wants_little_keeps_no_slot_from_the_others() {
    // The second function needs a few slots, far fewer than its weight would give it: the first
    // function gets all others.
    let weights = (100, Some(1000));
    let little = Case {
        weights,
        queues: (8, 1),
        depths: (4, 4),
        store: Store::Slots(16),
        placement: Placement::Apart,
    };
    let served = run(&little, 0);
    assert!(served.total() >= 0.97 * 16_000.0, "{served:?}");
}

#[test]
fn a_function_that_wants_little_gets_most_of_it() {
    // The second function's share is more than it needs; the first function takes all that is left.
    let cases = [(16, (1, 1), (32, 4)), (16, (8, 1), (4, 4)), (64, (4, 1), (128, 8))];
    for seed in common::seeds(1) {
        for ((slots, queues, depths), placement) in cases.into_iter().flat_map(|case| {
            [Placement::Together, Placement::Apart].map(|placement| (case, placement))
        }) {
            let store = Store::Slots(slots);
            let served =
                run(&Case { weights: (100, Some(100)), queues, depths, store, placement }, seed);
            let part = served.per_s[1] / alone(store, queues.1, depths.1);
            let case = format!(
                "{slots} slots, {queues:?} queues of {depths:?}, {placement:?}: {part:.3}, \
                 {served:?}"
            );
            println!("{case}");
            assert!(part >= 0.6, "{case}, seed {seed}");
            assert!(served.total() >= 0.97 * 1_000.0 * slots as f64, "{case}, seed {seed}");
        }
    }
}

#[test]
fn a_seed_gives_the_same_history_again() {
    let weights = (100, Some(400));
    let case = Case {
        weights,
        queues: (4, 1),
        depths: (64, 64),
        store: Store::Slots(64),
        placement: Placement::Apart,
    };
    assert_eq!(run(&case, 42), run(&case, 42));
}
