//! Bad wires of ports of a switch.
#![forbid(unsafe_code)]

use std::sync::Arc;

use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_net::contract::{NIC, Received, Station};
use sidecore_net::{
    FrameStage, Offloads, PortConfig, PortId, PortStats, Properties, StagePlace, Switch,
    SwitchOptions,
};
use sidecore_stage_wire::{Wire, WireStage, WireStats};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Two stations, the second of which has a bad wire.
struct Net {
    switch: Switch,
    now: Nanos,
    stations: [Station; 2],
    ports: [PortId; 2],
    stats: [Arc<PortStats>; 2],
    wire: Arc<WireStats>,
}

impl Net {
    fn new(faults: &str) -> Self {
        Self::with(faults, NIC)
    }

    fn with(faults: &str, properties: Properties) -> Self {
        let now = Nanos::from_millis(1_000);
        let mut switch = Switch::new(SwitchOptions::new(7));
        let mut add = |properties| {
            let config = PortConfig { floods: None, ..PortConfig::station() };
            let stats = Arc::new(PortStats::default());
            let (station, queue) = Station::new(properties, true);
            let port = switch.add_port(now, "p", config, Arc::clone(&stats)).unwrap();
            switch.attach(port, Box::new(queue)).unwrap();
            station.post(2048, 2048);
            (station, port, stats)
        };
        let [a, b] = [add(NIC), add(properties)];
        let mut net = Self {
            switch,
            now,
            stations: [a.0, b.0],
            ports: [a.1, b.1],
            stats: [a.2, b.2],
            wire: Arc::default(),
        };
        net.set(Some(faults));
        net
    }

    fn set(&mut self, faults: Option<&str>) {
        let stage = faults.map(|faults| {
            let stage = WireStage::new(&Wire::parse(faults).unwrap()).unwrap();
            self.wire = Arc::clone(stage.stats());
            Box::new(stage) as Box<dyn FrameStage>
        });
        drop(self.switch.set_stage(self.ports[1], StagePlace::Wire, stage).unwrap());
    }

    fn turn(&mut self) {
        self.switch.turn(self.now, 32);
    }

    fn wait(&mut self, time: Nanos) {
        self.now = self.now.after(time);
        self.turn();
    }

    fn send(&mut self, from: usize, number: u16, len_bytes: usize) {
        self.stations[from].send(&frame(from, number, len_bytes));
        self.now = self.now.after(Nanos(100));
        self.turn();
    }

    fn received(&self, at: usize) -> Vec<Received> {
        let received = self.stations[at].received();
        self.stations[at].post(2048 - self.stations[at].free_buffers(), 2048);
        received
    }

    fn numbers(&self, at: usize) -> Vec<u16> {
        let number = |got: &Received| u16::from_be_bytes([got.frame[14], got.frame[15]]);
        self.received(at).iter().map(number).collect()
    }
}

/// A frame from one station to the other.
fn frame(from: usize, number: u16, len_bytes: usize) -> Vec<u8> {
    let mac = |station: usize| [2, 0, 0, 0, 0, station as u8 + 1];
    let mut frame = [&mac(1 - from)[..], &mac(from), &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.extend((frame.len()..len_bytes).map(|at| at as u8));
    frame
}

#[test]
fn a_perfect_wire_passes_frames_at_once() {
    let mut net = Net::new("seed 3");
    for number in 0..100 {
        net.send(0, number, 60);
        assert_eq!(net.numbers(1), [number]);
    }
    assert_eq!(net.switch.deadline(), None);
}

#[test]
fn losses_are_counted_each_way_and_only_the_way_that_was_asked_for() {
    let mut net = Net::new("loss 20% seed 5");
    for number in 0..1_000 {
        net.send(0, number, 60);
        net.send(1, number, 60);
    }
    let (to, from) = (net.numbers(1).len() as u64, net.numbers(0).len() as u64);
    assert!((750..850).contains(&to) && (750..850).contains(&from), "{to} {from}");
    let counts = net.stats[1].counts();
    assert_eq!((counts.dropped_lost, counts.dropped_lost_out), (1_000 - from, 1_000 - to));
    assert_eq!(net.wire.lost.get(), 2_000 - from - to);
    net.set(Some("from loss 100%"));
    for number in 0..10 {
        net.send(0, number, 60);
        net.send(1, number, 60);
    }
    assert_eq!((net.numbers(1).len(), net.numbers(0).len()), (10, 0));
}

#[test]
fn a_delay_keeps_the_order_and_the_contents() {
    let mut net = Net::new("delay 1ms 500us");
    for number in 0..100 {
        net.send(0, number, 60 + usize::from(number) * 14);
        net.send(1, number, 60);
    }
    assert!(net.received(1).is_empty() && net.received(0).is_empty());
    let deadline = net.switch.deadline().unwrap();
    assert!(deadline > net.now && deadline < net.now.after(Nanos::from_micros(1_500)));
    // A turn lets a batch of them go on.
    for _ in 0..20 {
        net.wait(Nanos::from_micros(200));
    }
    let got = net.received(1);
    assert_eq!(got.len(), 100);
    for (number, got) in (0_u16..).zip(&got) {
        assert_eq!(got.frame, frame(0, number, 60 + usize::from(number) * 14));
    }
    assert_eq!(net.numbers(0), (0..100).collect::<Vec<_>>());
    assert_eq!(net.switch.deadline(), None);
    let counts = net.stats[1].counts();
    assert_eq!((counts.in_frames, counts.in_copies, counts.out_frames), (100, 100, 100));
}

#[test]
fn frames_come_twice_and_are_overtaken() {
    let mut net = Net::new("duplicate 50% reorder 30% delay 10us");
    (0..200).for_each(|number| net.send(0, number, 60));
    net.wait(Nanos::from_millis(1));
    net.turn();
    net.turn();
    (0..10).for_each(|_| net.turn());
    let numbers = net.numbers(1);
    let doubled = net.wire.doubled.get();
    assert!((60..140).contains(&doubled), "{doubled}");
    assert_eq!(numbers.len() as u64, 200 + doubled);
    assert!(!numbers.is_sorted() && net.wire.overtaken.get() > 30);
    let mut all = numbers;
    all.sort_unstable();
    all.dedup();
    assert_eq!(all, (0..200).collect::<Vec<_>>());
}

#[test]
fn a_wrong_bit_and_a_missing_end_are_in_the_payload() {
    for len_bytes in [60, 1514] {
        let mut net = Net::new("corrupt 100%");
        for number in 0..50 {
            net.send(0, number, len_bytes);
            net.wait(Nanos(1));
            let got = net.received(1);
            let sent = frame(0, number, len_bytes);
            let wrong = got[0].frame.iter().zip(&sent).map(|(got, sent)| (got ^ sent).count_ones());
            assert_eq!(wrong.sum::<u32>(), 1, "one bit");
            assert_eq!((got.len(), &got[0].frame[..14]), (1, &sent[..14]));
        }
        net.set(Some("truncate 100%"));
        net.send(0, 9, len_bytes);
        net.wait(Nanos(1));
        let got = net.received(1);
        assert!(got[0].frame.len() < len_bytes && got[0].frame.len() > 14);
        assert_eq!(got[0].frame, frame(0, 9, len_bytes)[..got[0].frame.len()]);
    }
}

#[test]
fn a_change_keeps_frames_on_their_way_and_the_end_of_the_wire_delivers_them() {
    let mut net = Net::new("delay 1ms");
    net.send(0, 1, 60);
    net.set(Some("delay 10ms"));
    net.send(0, 2, 60);
    net.wait(Nanos::from_millis(1));
    assert_eq!(net.numbers(1), [1]);
    net.set(None);
    assert_eq!((net.numbers(1), net.switch.deadline()), (vec![2], None));
}

/// The port may be in another VLAN afterwards, or there may be another one in its place.
#[test]
fn frames_on_their_way_are_dropped_when_their_port_changes_or_goes() {
    let mut net = Net::new("delay 1ms");
    for round in 1..=2 {
        net.send(0, 3, 60);
        net.send(1, 4, 60);
        if round == 1 {
            net.switch.change_port(net.now, net.ports[1], PortConfig::station()).unwrap();
        } else {
            drop(net.switch.remove_port(net.ports[1]).unwrap());
        }
        assert_eq!(net.switch.deadline(), None);
        let counts = net.stats[1].counts();
        assert_eq!((counts.dropped_port_down, counts.dropped_detached), (round, round));
    }
    net.wait(Nanos::from_millis(2));
    assert!(net.received(0).is_empty() && net.received(1).is_empty());
}

#[test]
fn more_frames_than_there_is_room_for_are_lost_and_none_takes_memory() {
    let mut net = Net::with("delay 1s", Properties { takes: Offloads::NONE, ..NIC });
    (0..1_020).for_each(|number| net.send(0, number, 60));
    let bytes = frame(0, 7, 60);
    let before = allocations();
    for _ in 0..10 {
        net.stations[0].send(&bytes);
    }
    let sent = allocations();
    net.turn();
    let (in_send, in_turn) = (sent - before, allocations() - sent);
    assert!(in_send > 0 && in_turn == 0, "{in_turn} allocations");
    assert_eq!(net.wire.crowded_out.get(), 6);
    assert_eq!(net.stats[1].counts().dropped_lost_out, 6);
}
