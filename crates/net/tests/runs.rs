//! Frames that are forwarded in runs have the fates of frames that are forwarded one by one.
#![forbid(unsafe_code)]

mod harness;

use std::sync::{Arc, Mutex};

use harness::{BROADCAST, Lan, Place, Random, frame, guard, mac, partial, plain, tagged};
use sidecore_net::contract::{NIC, Received, WIRE};
use sidecore_net::{
    DropCause, FrameStage, PortConfig, PortCounts, Properties, StageFrame, StagePlace, Verdict,
    VlanSet, Vlans, Way,
};
use sidecore_spec_virtio::net::PacketHeader;
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

const SEEDS: u64 = 30;
const STEPS: usize = 400;

/// A frame that a station sends.
#[derive(Clone)]
struct Sending {
    header: PacketHeader,
    frame: Vec<u8>,
    piece_bytes: usize,
}

/// Receive buffers offered in a step.
type Offer = (usize, usize);

/// The frames that a stage was asked about: way, size and sum of their bytes.
type Asked = Arc<Mutex<Vec<(Way, u16, usize, u64)>>>;

/// A stage that drops some frames, which depends on their bytes and on how many came before.
struct Picky {
    asked: Asked,
    count: u64,
}

impl FrameStage for Picky {
    fn frame(&mut self, _: Nanos, frame: &StageFrame<'_>) -> Verdict {
        let mut bytes = vec![0; frame.len_bytes()];
        frame.copy(&mut bytes);
        let sum = bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        let seen = (frame.way(), frame.vlan(), frame.payload().len(), sum);
        self.asked.lock().unwrap().push(seen);
        self.count += 1;
        match (sum + self.count) % 9 {
            0 => Verdict::Drop(DropCause::Limit),
            1 => Verdict::Drop(DropCause::Headers),
            _ => Verdict::Pass,
        }
    }

    fn look(&mut self, _: Nanos) {}

    fn inherit(&mut self, _: &mut dyn FrameStage) {}
}

/// A capture that shows nothing: frames of its port do not run.
struct Idle;

impl FrameStage for Idle {
    fn frame(&mut self, _: Nanos, _: &StageFrame<'_>) -> Verdict {
        Verdict::Pass
    }

    fn look(&mut self, _: Nanos) {}

    fn inherit(&mut self, _: &mut dyn FrameStage) {}
}

/// Gives some ports stages, in most of the seeds. Returns what these are asked.
fn add_stages(lan: &mut Lan, places: &[Place], runs: bool, seed: u64) -> Vec<Asked> {
    let mut all = Vec::new();
    for (number, place) in places.iter().enumerate() {
        let stages = [StagePlace::Limit, StagePlace::Firewall];
        for (bit, at) in (2 * number..).zip(stages) {
            if seed.wrapping_mul(0x9e37_79b9) >> bit & 3 == 0 {
                let asked = Asked::default();
                let stage = Picky { asked: Arc::clone(&asked), count: 0 };
                lan.switch.set_stage(place.port, at, Some(Box::new(stage))).unwrap();
                all.push(asked);
            }
        }
        if !runs {
            lan.switch.set_stage(place.port, StagePlace::Capture, Some(Box::new(Idle))).unwrap();
        }
    }
    all
}

fn lan(lends_each: bool, seed: u64) -> (Lan, Vec<Place>, Vec<Asked>) {
    let mut lan = Lan::new();
    let station = || PortConfig { floods: None, ..PortConfig::station() };
    let trunk = Vlans::Trunk { native: Some(1), allowed: [1, 5].into_iter().collect::<VlanSet>() };
    let configs = [
        (PortConfig { guard: Some(guard(1)), ..station() }, NIC),
        (PortConfig { is_isolated: seed.is_multiple_of(3), ..station() }, NIC),
        (PortConfig { vlans: trunk, is_isolated: true, ..station() }, NIC),
        (station(), if seed.is_multiple_of(2) { WIRE } else { NIC }),
        (station(), Properties { frame_bytes: 600, ..NIC }),
        (PortConfig { vlans: Vlans::Access(5), ..station() }, NIC),
    ];
    let places = configs.map(|(config, of)| lan.add_with(config, of, seed % 5 != 4));
    for place in &places {
        place.station.take_buffers();
        place.station.set_lends_each(lends_each);
    }
    let asked = add_stages(&mut lan, &places, lends_each, seed);
    (lan, places.into(), asked)
}

fn sending(random: &mut Random, from: u8) -> Sending {
    let to = match random.below(12) {
        0 => BROADCAST,
        1 => mac(9),
        2 => mac(from),
        3 | 4 => mac(6),
        // Mostly one receiver, as in runs.
        _ => mac(from % 6 + 1),
    };
    let source = if random.below(20) == 0 { mac(1 + random.below(5) as u8) } else { mac(from) };
    let len_bytes = random.of(&[0, 46, 46, 46, 300, 590, 1_000, 1_500, 1_510]);
    let mut sent = match random.below(15) {
        0 => frame(to, source, 0x0806, &[0; 28]),
        1 => frame(to, source, 0x8100, &[0; 40]),
        2 => tagged(&plain(to, source, len_bytes), random.of(&[0, 1, 5, 7])),
        _ => plain(to, source, len_bytes),
    };
    if random.below(40) == 0 {
        sent.truncate(random.below(16));
    }
    let header = match random.below(12) {
        0 => partial(14, 6),
        1 => PacketHeader { flags: 2, num_buffers: 7, ..PacketHeader::default() },
        2 => PacketHeader { hdr_len: 3, csum_start: 9, ..PacketHeader::default() },
        _ => PacketHeader::default(),
    };
    Sending { header, frame: sent, piece_bytes: random.of(&[1 << 20, 1 << 20, 1 << 20, 100]) }
}

/// All that the stations see, and the counters.
fn outcome(places: &[Place]) -> Vec<(Vec<Received>, usize, PortCounts)> {
    let all = places.iter();
    all.map(|place| (place.station.received(), place.station.completed(), place.stats.counts()))
        .collect()
}

#[test]
fn a_run_changes_no_fate() {
    let (mut delivered, mut in_runs, mut asked) = (0, 0, 0);
    for seed in 1..=SEEDS {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (mut runs, run_places, run_asked) = lan(true, seed);
        let (mut singles, single_places, single_asked) = lan(false, seed);
        for step in 0..STEPS {
            let from = random.below(run_places.len());
            let count = random.of(&[0, 1, 3, 20, 50]);
            let batch: Vec<_> = (0..count).map(|_| sending(&mut random, from as u8 + 1)).collect();
            let offers: Vec<Offer> = (0..run_places.len())
                .map(|_| (random.of(&[0, 10, 30, 64]), random.of(&[2048, 2048, 700, 64])))
                .collect();
            for places in [&run_places, &single_places] {
                for (place, (count, len_bytes)) in places.iter().zip(&offers) {
                    if place.station.free_buffers() < 200 {
                        place.station.post(*count, *len_bytes);
                    }
                }
                for sent in &batch {
                    let station = &places[from].station;
                    station.send_with(sent.header, &sent.frame, sent.piece_bytes);
                }
            }
            for _ in 0..random.below(4) {
                assert_eq!(runs.turn(), singles.turn(), "seed {seed}, step {step}");
                let (run, single) = (outcome(&run_places), outcome(&single_places));
                assert_eq!(run, single, "seed {seed}, step {step}");
                for (run, single) in run_asked.iter().zip(&single_asked) {
                    let (run, single) = (run.lock().unwrap(), single.lock().unwrap());
                    assert_eq!(*run, *single, "seed {seed}, step {step}");
                }
                delivered += run.iter().map(|(received, ..)| received.len()).sum::<usize>();
            }
        }
        asked += run_asked.iter().map(|asked| asked.lock().unwrap().len()).sum::<usize>();
        in_runs += run_places.iter().map(|place| place.station.received_each()).sum::<usize>();
        assert!(single_places.iter().all(|place| place.station.received_each() == 0));
    }
    assert!(delivered > 40_000, "{delivered} frames were delivered");
    assert!(asked > 20_000, "stages were asked about {asked}");
    assert!(in_runs > delivered / 8 && in_runs < delivered, "{in_runs} of {delivered} in runs");
}

/// A frame that needs two buffers waits for the second one: short frames of others, which would
/// need only the first one, wait behind it.
#[test]
fn a_run_overtakes_no_frame_that_waits() {
    let mut lan = Lan::new();
    let [a, b, c] = lan.stations();
    lan.learn(&[&a, &b, &c]);
    let (large, small) = (plain(mac(3), mac(1), 1_500), plain(mac(3), mac(2), 50));
    b.station.send(&small);
    lan.turn();
    assert_eq!(c.frames(), std::slice::from_ref(&small));
    c.station.take_buffers();
    c.station.post(1, 1_024);
    a.station.send(&large);
    lan.turn();
    b.station.send(&small);
    lan.turn();
    assert!(c.frames().is_empty());
    c.station.post(2, 1_024);
    lan.turns(2);
    assert_eq!(c.frames(), [large, small]);
}
