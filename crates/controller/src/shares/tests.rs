use std::sync::Arc;

use sidecore_units::Nanos;

use super::*;

const CONTROLLER: u64 = 1;

/// Simulates a sidecore whose turns give each function all that it may start, out of an endless
/// demand, on a store that completes at once. Returns the units served to each function.
fn serve(weights: &[u32], turns: u64) -> Vec<i64> {
    let shares = Turns::default();
    let places: Vec<_> =
        (0..).zip(weights).map(|(id, weight)| shares.join((CONTROLLER, id), *weight)).collect();
    let mut served = vec![0; weights.len()];
    for turn in 1..=turns {
        for step in 0..places.len() {
            let index = (step + turn as usize) % places.len();
            // Two batches, as a queue submits them.
            for _ in 0..2 {
                let Ok(units) = shares.allowance(places[index], Nanos(turn)) else { break };
                let units = units.min(16);
                shares.charge(places[index], units);
                // In the first turns no function has used its part up.
                served[index] += if turn > 10 { units } else { 0 };
            }
        }
    }
    served
}

#[test]
fn weights_divide_a_turn() {
    for weights in [[100, 100], [100, 400], [400, 100], [100, 101], [1, 1000]] {
        let served = serve(&weights, 20_000);
        let wanted = f64::from(weights[0]) / f64::from(weights[1]);
        let off = served[0] as f64 / served[1] as f64 / wanted - 1.0;
        assert!(off.abs() < 0.01, "{weights:?}: {served:?}");
    }
}

#[test]
fn a_function_whose_neighbours_rest_is_not_held_back() {
    let turns = Turns::default();
    let (busy, resting) = (turns.join((CONTROLLER, 1), 1), turns.join((CONTROLLER, 2), 1000));
    for now in 3..1_000 {
        assert_eq!(turns.allowance(busy, Nanos(now)), Ok(i64::MAX));
        turns.charge(busy, 1_000_000);
    }
    // The busy function has no debt when its neighbour returns.
    assert!(turns.allowance(resting, Nanos(1_000)).is_ok());
    assert!(turns.allowance(busy, Nanos(1_000)).is_ok());
}

#[test]
fn unused_time_is_every_functions() {
    let turns = Turns::default();
    let (light, heavy) = (turns.join((CONTROLLER, 1), 1), turns.join((CONTROLLER, 2), 1000));
    for now in 3..1_000 {
        for (place, units) in [(light, 100), (heavy, 31)] {
            assert_eq!(
                turns.allowance(place, Nanos(now)).map(|allowed| allowed >= units),
                Ok(true),
                "turn {now}"
            );
            turns.charge(place, units);
        }
    }
    turns.charge(heavy, 1);
    assert_eq!(turns.allowance(light, Nanos(1_000)), Ok(1));
    turns.charge(light, 1);
    assert_eq!(turns.allowance(light, Nanos(1_000)), Err(QueuedBy::Turn));
}

#[test]
fn functions_of_several_controllers_share_a_turn() {
    let turns = Turns::default();
    let (one, other) = (turns.join((1, 1), 100), turns.join((2, 1), 100));
    let again = turns.join((1, 1), 100);
    assert_eq!(one, again, "two queues of a function have one share");
    let _ = (turns.allowance(one, Nanos(1)), turns.allowance(other, Nanos(1)));
    turns.charge(other, 32);
    assert_eq!(turns.allowance(one, Nanos(2)), Ok(32));
    turns.charge(one, 32);
    assert_eq!(turns.allowance(again, Nanos(2)), Err(QueuedBy::Turn));
    turns.leave(other);
    assert_eq!(turns.allowance(again, Nanos(2)), Ok(i64::MAX));
}

/// Two sidecores, each with a function that has `in_flight` requests in the store.
fn two_sidecores(in_flight: usize) -> [(StoreShares, Place); 2] {
    let boards = Arc::new(Boards::default());
    let mut sidecores = [1, 2].map(|function| {
        let mut shares = StoreShares::new(&boards);
        let place = shares.join(function, 100);
        (shares, place)
    });
    for now in [1, 1_000_000] {
        for (shares, place) in &mut sidecores {
            if now == 1 {
                shares.moved(*place, 0, in_flight);
            }
            shares.look(Nanos(now));
        }
    }
    sidecores
}

#[test]
fn a_function_alone_is_never_held_back() {
    let boards = Arc::new(Boards::default());
    let mut shares = StoreShares::new(&boards);
    let place = shares.join(1, 1);
    assert!(!shares.is_shared());
    shares.moved(place, 0, 1_000_000);
    shares.look(Nanos(1));
    assert_eq!(shares.allowance(place), Ok(i64::MAX));
}

#[test]
fn sidecores_see_each_others_requests() {
    let mut sidecores = two_sidecores(100);
    for (shares, place) in &mut sidecores {
        assert!(shares.is_shared());
        assert_eq!(shares.allowance(*place), Ok(256 - 200));
    }
    let mut full = two_sidecores(1_000);
    for (shares, place) in &mut full {
        assert_eq!(shares.allowance(*place), Err(QueuedBy::Store));
    }
}

#[test]
fn what_waits_for_an_empty_store_does_not_keep_it_contended() {
    let mut sidecores = two_sidecores(1_000);
    for (shares, place) in &mut sidecores {
        assert_eq!(shares.allowance(*place), Err(QueuedBy::Store));
        shares.set_waiting(*place, true, true);
        shares.moved(*place, 1_000, 0);
    }
    for now in [2_000_000, 4_000_000] {
        sidecores.iter_mut().for_each(|(shares, _)| shares.look(Nanos(now)));
    }
    for (shares, place) in &mut sidecores {
        assert_eq!(shares.allowance(*place), Ok(i64::MAX));
    }
}

#[test]
fn a_function_with_nothing_in_the_store_may_always_start_one() {
    let mut full = two_sidecores(1_000);
    let (shares, place) = &mut full[0];
    let third = shares.join(3, 1);
    assert_eq!(shares.allowance(*place), Err(QueuedBy::Store));
    assert_eq!(shares.allowance(third), Ok(1));
}

/// Each of two functions is ahead of its part on another sidecore: neither waits there for the
/// other's credit.
#[test]
fn functions_that_are_ahead_on_one_sidecore_each_do_not_stop_each_other() {
    let boards = Arc::new(Boards::default());
    let mut sidecores = [StoreShares::new(&boards), StoreShares::new(&boards)];
    let places = sidecores.each_mut().map(|shares| [shares.join(1, 100), shares.join(2, 100)]);
    let wait = |shares: &mut StoreShares, places: [Place; 2]| {
        places.iter().for_each(|place| shares.set_waiting(*place, true, true));
    };
    for (shares, places) in sidecores.iter_mut().zip(places) {
        places.iter().for_each(|place| shares.moved(*place, 0, 1));
        shares.look(Nanos(1));
    }
    let [first, second] = &mut sidecores;
    // As long as no function waits, units started are no debt.
    assert!(first.allowance(places[0][1]).is_ok() && second.allowance(places[1][0]).is_ok());
    wait(second, places[1]);
    second.look(Nanos(100_000));
    first.charge(places[0][1], 300);
    wait(first, places[0]);
    first.look(Nanos(200_000));
    second.charge(places[1][0], 300);
    second.look(Nanos(300_000));
    let mut started = [[0; 2]; 2];
    for step in 0..1_000 {
        for (sidecore, shares) in sidecores.iter_mut().enumerate() {
            for (function, place) in places[sidecore].into_iter().enumerate() {
                let units = shares.allowance(place).map_or(0, |units| units.min(8));
                shares.charge(place, units);
                started[sidecore][function] += units;
            }
            shares.look(Nanos(400_000 + step * 100_000));
        }
    }
    assert!(started.as_flattened().iter().all(|units| *units > 1_000), "{started:?}");
}

#[test]
fn no_function_waits_for_a_sidecore_that_is_gone() {
    let [(mut shares, place), (mut gone, other)] = two_sidecores(200);
    gone.set_waiting(other, true, true);
    gone.look(Nanos(2_000_000));
    gone.leave(other, 200);
    drop(gone);
    shares.look(Nanos(3_000_000));
    assert!(!shares.is_shared());
    assert_eq!(shares.allowance(place), Ok(i64::MAX));
}

#[test]
fn a_board_is_used_again() {
    let boards = Arc::new(Boards::default());
    drop(StoreShares::new(&boards));
    let shares = StoreShares::new(&boards);
    assert_eq!(boards.used().count(), 1);
    drop(shares);
    assert_eq!(boards.used().count(), 0);
}

#[test]
fn queues_of_a_function_are_served_alike() {
    let mut queues = queues::Queues::default();
    let numbers: Vec<_> = (0..4).map(|_| queues.add()).collect();
    let mut served = [0; 4];
    for turn in 0..1_000 {
        // The first queue polled takes all of the turn.
        let mut left = 32;
        for step in 0..4 {
            let index = if turn % 3 == 0 { step } else { (step + 1) % 4 };
            let units = queues.lead(numbers[index]).clamp(0, left);
            queues.charge(numbers[index], units);
            queues.set_waiting(numbers[index], true, false);
            served[index] += units;
            left -= units;
        }
    }
    assert_eq!(served.iter().sum::<i64>(), 32_000, "a turn's units are used");
    assert!(served.iter().all(|units| (7_900..8_100).contains(units)), "{served:?}");
}
