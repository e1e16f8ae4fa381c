//! Sessions over a wire that loses frames: how long requests take, in round trips.

mod common;

use common::{Rig, request};
use sidecore_block::Operation;
use sidecore_units::Nanos;
use sidecore_vrio::{ClientOptions, OnDisconnect, ServerOptions};

/// Requests of a run that are counted.
const REQUESTS: usize = 4_000;
/// The age of a session from which on its requests are counted.
const AGE: Nanos = Nanos::from_millis(2);

/// A closed loop over a lossy wire.
#[derive(Clone, Copy, Debug)]
struct Load {
    operation: Operation,
    bytes: u64,
    depth: u64,
    /// Frames of each direction that are lost, of 100.
    loss_percent: u64,
    /// The round trip of the path.
    round_trip: Nanos,
}

/// The quantiles of a run.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    p99: Nanos,
    mean: Nanos,
}

/// A wire that loses frames by a seed.
struct Losses {
    random: u64,
    percent: u64,
}

impl Losses {
    fn loses(&mut self) -> bool {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % 100 < self.percent
    }

    /// One hop of what passes.
    fn step(&mut self, rig: &mut Rig) {
        rig.poll_client();
        rig.poll_host();
        for wire in [&mut rig.to_host, &mut rig.to_client] {
            wire.frames.retain(|_| !self.loses());
        }
        rig.step();
    }
}

/// A session that has just begun with an IOhost that slept: its first round trip was much longer
/// than the path's.
fn young(round_trip: Nanos) -> Rig {
    let options = ClientOptions { on_disconnect: OnDisconnect::Stall, ..ClientOptions::default() };
    let mut rig = Rig::new(options, ServerOptions::default());
    rig.hop = Nanos(round_trip.0 * 25).min(Nanos::from_millis(1));
    rig.run_until(Nanos::from_millis(200), |rig| rig.client.is_ready(0));
    assert!(rig.client.is_ready(0));
    rig.hop = Nanos(round_trip.0 / 2);
    rig
}

/// Runs the load in a young session.
fn run(load: Load) -> (Outcome, Rig) {
    let mut rig = young(load.round_trip);
    let mut losses = Losses { random: 0x9e37_79b9_7f4a_7c15, percent: load.loss_percent };
    let begin = rig.now.after(AGE);
    let mut submitted = vec![None; load.depth as usize];
    let mut latencies = Vec::new();
    while latencies.len() < REQUESTS {
        for (tag, submitted) in (0..).zip(&mut submitted) {
            if submitted.is_none() {
                *submitted = Some(rig.now);
                // No two of them overlap.
                rig.submit(tag, request(load.operation, tag * load.bytes, load.bytes));
            }
        }
        losses.step(&mut rig);
        for (tag, result) in std::mem::take(&mut rig.completed) {
            assert_eq!(result, Ok(()));
            let submitted = submitted[tag as usize].take().unwrap();
            if submitted >= begin {
                latencies.push(rig.now.since(submitted));
            }
        }
        assert!(rig.now < Nanos::from_millis(60_000), "a request does not complete: {load:?}");
    }
    latencies.sort_unstable();
    let (count, sum) = (latencies.len(), latencies.iter().map(|latency| latency.0).sum::<u64>());
    (Outcome { p99: latencies[count * 99 / 100], mean: Nanos(sum / count as u64) }, rig)
}

/// The wire takes no time for bytes: 64 KiB have the round trips that they can have on a link.
fn loads(loss_percent: u64) -> impl Iterator<Item = Load> {
    let (small, large) = (4 << 10, 64 << 10);
    let all = [
        (6, small, 1),
        (6, small, 32),
        (40, small, 1),
        (40, small, 32),
        (40, large, 1),
        (40, large, 8),
        (1_000, small, 32),
        (1_000, large, 1),
    ];
    all.into_iter().flat_map(move |(round_trip_us, bytes, depth)| {
        let round_trip = Nanos::from_micros(round_trip_us);
        [Operation::Read, Operation::Write].map(|operation| Load {
            operation,
            bytes,
            depth,
            loss_percent,
            round_trip,
        })
    })
}

#[test]
fn with_one_frame_of_100_lost_a_young_session_takes_few_round_trips() {
    for load in loads(1) {
        let (outcome, rig) = run(load);
        let round_trips = outcome.p99.0 as f64 / load.round_trip.0 as f64;
        assert!(round_trips <= 10.0, "{load:?}: 99 % within {round_trips} round trips");
        // Alone, a request takes a round trip.
        let goodput = load.round_trip.0 as f64 / outcome.mean.0 as f64;
        assert!(goodput >= 0.7, "{load:?}: {goodput} of the requests of a wire without losses");
        assert!(rig.client_counts().retransmissions > 0);
    }
}

#[test]
fn with_one_frame_of_10_lost_every_request_completes() {
    for load in loads(10) {
        let (_, rig) = run(load);
        assert!(rig.client_counts().retransmissions > 0);
    }
}

#[test]
fn without_losses_nothing_is_sent_again() {
    for load in loads(0) {
        let (outcome, rig) = run(load);
        let counts = rig.client_counts();
        assert_eq!((counts.retransmissions, counts.asks), (0, 0), "{load:?}");
        // A write may wait for a flush of the full replay log.
        assert!(outcome.p99 <= Nanos(load.round_trip.0 * 2), "{load:?}: {outcome:?}");
    }
}

#[test]
fn a_store_that_is_slow_from_the_first_request_on_causes_no_retransmission() {
    let mut rig = young(Nanos::from_micros(40));
    for round in 0..20 {
        rig.holds = true;
        rig.write(round, 0, &[1; 512]);
        rig.run_for(Nanos::from_millis(50));
        assert!(rig.completed.is_empty());
        rig.holds = false;
        assert_eq!(rig.wait(round), Ok(()));
    }
    let counts = rig.client_counts();
    assert_eq!((counts.retransmissions, counts.asks), (0, 0));
    assert_eq!(rig.host_counts().acknowledged, 20);
}
