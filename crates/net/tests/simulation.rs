//! Random frames, ports that come and go, queues that stop, from a seed: `SIDECORE_SEED=N` runs one
//! seed alone.
#![forbid(unsafe_code)]

mod harness;

use std::collections::HashMap;

use harness::{BROADCAST, Lan, Place, Random, frame, mac, tagged};
use sidecore_net::contract::{NIC, WIRE};
use sidecore_net::{Guard, Offloads, PortConfig, PortKind, Properties, QueueState, VlanSet, Vlans};
use sidecore_units::Nanos;

const SEEDS: u64 = 20;
const STEPS: usize = 3_000;
/// The type of the frames, whose payload names their flow and their number in it.
const TYPE: u16 = 0x88b5;

/// A port as the simulation knows it.
struct Node {
    place: Place,
    config: PortConfig,
    number: u8,
}

struct Simulation {
    lan: Lan,
    random: Random,
    nodes: Vec<Node>,
    /// The next number of each flow, and the last one that each receiver has seen of it.
    next: HashMap<(u8, u8, u16), u32>,
    seen: HashMap<(u8, u8, u8, u16), u32>,
    numbers: u8,
    delivered: u64,
    /// Copies made and ended, of ports that are gone.
    gone: [u64; 2],
}

impl Simulation {
    fn new(seed: u64) -> Self {
        Self {
            lan: Lan::new(),
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            nodes: Vec::new(),
            next: HashMap::new(),
            seen: HashMap::new(),
            numbers: 0,
            delivered: 0,
            gone: [0; 2],
        }
    }

    fn config(&mut self, number: u8) -> PortConfig {
        let vlan = 10 + self.random.below(3) as u16;
        let mut config = PortConfig { floods: None, ..PortConfig::station() };
        config.vlans = if self.random.once_in(4) {
            let native = self.random.once_in(2).then_some(vlan);
            let allowed: VlanSet =
                [10, 11, 12].into_iter().take(1 + self.random.below(3)).collect();
            Vlans::Trunk { native, allowed }
        } else {
            Vlans::Access(vlan)
        };
        config.is_isolated = self.random.once_in(3);
        if self.random.once_in(5) {
            config.kind = PortKind::Uplink;
        } else if self.random.once_in(2) {
            config.guard = Some(Guard { mac: mac(number), ipv4: None, ipv6: None, router: false });
        }
        config
    }

    fn add(&mut self) {
        if self.nodes.len() >= 12 {
            return;
        }
        self.numbers = self.numbers % 200 + 1;
        let number = self.numbers;
        if self.nodes.iter().any(|node| node.number == number) {
            return;
        }
        let config = self.config(number);
        let properties = match self.random.below(3) {
            0 => WIRE,
            1 => Properties { takes: Offloads::NONE, ..NIC },
            _ => NIC,
        };
        let merges = self.random.once_in(2);
        let place = self.lan.add_with(config.clone(), properties, merges);
        self.nodes.push(Node { place, config, number });
    }

    fn remove(&mut self, at: usize) {
        let node = self.nodes.swap_remove(at);
        self.receive(&node);
        if self.random.once_in(2) {
            drop(self.lan.switch.detach(node.place.queue).unwrap());
        }
        drop(self.lan.switch.remove_port(node.place.port).unwrap());
        self.receive(&node);
        let counts = node.place.counts();
        assert_eq!(counts.in_frames, node.place.station.completed() as u64);
        self.gone[0] += counts.in_copies;
        self.gone[1] += counts.out_copies + counts.out_discards();
    }

    /// Sends frames of one flow: mostly to a station, sometimes to all.
    fn send(&mut self, at: usize) {
        let (from, vlans) = (self.nodes[at].number, self.nodes[at].config.vlans.clone());
        let to = if self.random.once_in(5) {
            0
        } else {
            self.nodes[self.random.below(self.nodes.len())].number
        };
        let (vlan, is_tagged) = match &vlans {
            Vlans::Access(vlan) => (*vlan, false),
            Vlans::Trunk { native: Some(vlan), .. } if self.random.once_in(2) => (*vlan, false),
            Vlans::Trunk { .. } => (10 + self.random.below(3) as u16, true),
        };
        for _ in 0..1 + self.random.below(20) {
            let next = self.next.entry((from, to, vlan)).or_default();
            *next += 1;
            let mut payload = vec![from, to];
            payload.extend(vlan.to_be_bytes());
            payload.extend(next.to_be_bytes());
            payload.resize(8 + self.random.below(1400), from);
            let address = if to == 0 { BROADCAST } else { mac(to) };
            let whole = frame(address, mac(from), TYPE, &payload);
            let whole = if is_tagged { tagged(&whole, vlan) } else { whole };
            self.nodes[at].place.station.send(&whole);
        }
    }

    /// Checks all frames that a station has received.
    fn receive(&mut self, node: &Node) {
        for whole in node.place.frames() {
            let is_tagged = whole[12..14] == [0x81, 0];
            let payload = &whole[if is_tagged { 18 } else { 14 }..];
            let (from, to) = (payload[0], payload[1]);
            let vlan = u16::from_be_bytes([payload[2], payload[3]]);
            let number = u32::from_be_bytes(payload[4..8].try_into().unwrap());
            assert!(payload[8..].iter().all(|byte| *byte == from), "another frame's bytes");
            assert_eq!(whole[6..12], mac(from).0);
            assert_ne!(from, node.number, "a frame came back");
            assert!(node.config.vlans.have(vlan), "a frame of VLAN {vlan} left its VLAN");
            let tag = (node.config.vlans.untagged() != Some(vlan)).then_some(vlan);
            assert_eq!(is_tagged, tag.is_some());
            if let Some(sender) = self.nodes.iter().find(|node| node.number == from) {
                let isolated = sender.config.is_isolated && node.config.is_isolated;
                let uplinks =
                    sender.config.kind == PortKind::Uplink && node.config.kind == PortKind::Uplink;
                assert!(!isolated && !uplinks, "{from} to {}", node.number);
            }
            let last = self.seen.entry((from, to, node.number, vlan)).or_default();
            assert!(*last < number, "{number} of {from} to {to} came after {last}");
            *last = number;
            self.delivered += 1;
        }
    }

    fn step(&mut self) {
        let count = self.nodes.len();
        match self.random.below(100) {
            0..5 => self.add(),
            5..7 if count > 3 => {
                let at = self.random.below(count);
                self.remove(at);
            }
            7..9 if count > 0 => {
                let at = self.random.below(count);
                let state = match self.random.once_in(2) {
                    true => QueueState::Up,
                    false => QueueState::Down("unplugged"),
                };
                self.nodes[at].place.station.set_state(state);
            }
            9..60 if count > 0 => {
                let at = self.random.below(count);
                self.send(at);
            }
            60..80 if count > 0 => {
                let at = self.random.below(count);
                let buffers = self.random.below(40);
                self.nodes[at].place.station.post(buffers, 2048);
            }
            _ => {
                let skip = [1, 1, 1, 1_100, 700_000][self.random.below(5)];
                self.lan.now = self.lan.now.after(Nanos::from_micros(skip));
                self.lan.turn();
                for at in 0..self.nodes.len() {
                    let node = self.nodes.swap_remove(at);
                    self.receive(&node);
                    self.nodes.push(node);
                    let last = self.nodes.len() - 1;
                    self.nodes.swap(at, last);
                }
            }
        }
    }

    /// Every copy was delivered, or counted with its reason.
    fn settle(&mut self) {
        // All frames are taken, and those that wait end.
        self.lan.turns(4_000);
        assert!(!self.lan.switch.has_frames());
        for node in &self.nodes {
            assert_eq!(node.place.station.unsent(), 0);
            let counts = node.place.counts();
            assert_eq!(counts.in_frames, node.place.station.completed() as u64);
            self.gone[0] += counts.in_copies;
            self.gone[1] += counts.out_copies + counts.out_discards();
        }
        assert_eq!(self.gone[0], self.gone[1], "copies made, and copies delivered or dropped");
    }
}

#[test]
fn frames_keep_their_order_their_vlan_and_their_count() {
    let one = std::env::var("SIDECORE_SEED").ok().map(|seed| seed.parse::<u64>().unwrap());
    let mut delivered = 0;
    for seed in one.map_or(0..SEEDS, |seed| seed..seed + 1) {
        println!("SIDECORE_SEED={seed}");
        let mut simulation = Simulation::new(seed);
        (0..4).for_each(|_| simulation.add());
        (0..STEPS).for_each(|_| simulation.step());
        simulation.settle();
        delivered += simulation.delivered;
    }
    assert!(one.is_some() || delivered > 20_000, "{delivered}");
}
