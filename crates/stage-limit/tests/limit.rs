//! Rate limits of a port of a switch.
#![forbid(unsafe_code)]

use std::sync::Arc;

use sidecore_net::contract::{NIC, Station};
use sidecore_net::{FrameStage, PortConfig, PortStats, StagePlace, Switch, SwitchOptions};
use sidecore_stage_limit::{LimitStage, PortLimits};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

/// The frames of 1000 bytes that pass from the first station to the second one, which has the
/// limits, and back, in each of ten tenths of a second with 100 frames each way.
fn passed(limits: &[&str]) -> (Vec<[usize; 2]>, [u64; 2]) {
    let mut switch = Switch::new(SwitchOptions::new(7));
    let mut now = Nanos::from_millis(1_000);
    let mut add = || {
        let config = PortConfig { floods: None, ..PortConfig::station() };
        let stats = Arc::new(PortStats::default());
        let (station, queue) = Station::new(NIC, true);
        let port = switch.add_port(now, "p", config, Arc::clone(&stats)).unwrap();
        switch.attach(port, Box::new(queue)).unwrap();
        (station, port, stats)
    };
    let [(one, ..), (two, port, stats)] = [add(), add()];
    let limits = PortLimits::parse(limits).unwrap();
    let stage: Box<dyn FrameStage> = Box::new(LimitStage::new(&limits));
    drop(switch.set_stage(port, StagePlace::Limit, Some(stage)).unwrap());
    let mac = |station| [2, 0, 0, 0, 0, station];
    let frame = |to, from| {
        let mut frame = [&mac(to)[..], &mac(from), &[0x88, 0xb5]].concat();
        frame.resize(1_000, 0);
        frame
    };
    let mut all = Vec::new();
    for _ in 0..10 {
        let mut counts = [0; 2];
        for _ in 0..100 {
            for station in [&one, &two] {
                station.post(1, 2048);
            }
            one.send(&frame(2, 1));
            two.send(&frame(1, 2));
            now = now.after(Nanos::from_millis(1));
            switch.turn(now, 32);
            counts[0] += two.received().len();
            counts[1] += one.received().len();
        }
        all.push(counts);
    }
    let counts = stats.counts();
    (all, [counts.dropped_limit_out, counts.dropped_limit])
}

#[test]
fn frames_and_bytes_are_limited_in_each_direction() {
    let (counts, dropped) = passed(&["to 200 frames/s burst 10", "from 500000/s burst 2000"]);
    assert!((29..=31).contains(&counts[0][0]), "20 frames and a burst of 10: {counts:?}");
    assert!((50..=54).contains(&counts[0][1]), "50000 bytes and a burst of 2000: {counts:?}");
    assert!(
        counts[1..].iter().all(|[to, from]| (19..=21).contains(to) && (49..=51).contains(from))
    );
    let sum = |way: usize| counts.iter().map(|counts| counts[way] as u64).sum::<u64>();
    assert_eq!(dropped, [1_000 - sum(0), 1_000 - sum(1)]);
}

#[test]
fn a_direction_without_a_limit_has_none() {
    let (counts, dropped) = passed(&["from 10 frames/s"]);
    assert!(counts.iter().all(|[to, _]| *to == 100));
    assert!(counts.iter().map(|[_, from]| from).sum::<usize>() <= 11);
    assert_eq!(dropped[0], 0);
}
