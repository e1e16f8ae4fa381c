//! A switch with stations of tests.

#![allow(dead_code)] // each test file uses a part of it

use std::sync::Arc;

use sidecore_net::contract::{NIC, Received, Station};
use sidecore_net::{
    DropReason, Guard, MacAddress, PortConfig, PortCounts, PortId, PortStats, Properties, QueueId,
    Switch, SwitchOptions,
};
use sidecore_spec_virtio::net::PacketHeader;
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

pub const BROADCAST: MacAddress = MacAddress::BROADCAST;

/// The address of station `number`.
pub fn mac(number: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, number])
}

/// A frame with this payload.
pub fn frame(to: MacAddress, from: MacAddress, ether_type: u16, payload: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &ether_type.to_be_bytes(), payload].concat()
}

/// A frame whose payload is this many bytes of a pattern.
pub fn plain(to: MacAddress, from: MacAddress, len_bytes: usize) -> Vec<u8> {
    let payload: Vec<u8> = (0..len_bytes).map(|at| (at * 7 + at / 251) as u8).collect();
    frame(to, from, 0x88b5, &payload)
}

/// The frame with a tag.
pub fn tagged(frame: &[u8], tag: u16) -> Vec<u8> {
    [&frame[..12], &[0x81, 0], &tag.to_be_bytes(), &frame[12..]].concat()
}

/// The guard of a station that may claim its Ethernet address alone.
pub fn guard(number: u8) -> Guard {
    Guard { mac: mac(number), ipv4: None, ipv6: None, router: false }
}

/// A port with a station behind it.
pub struct Place {
    pub station: Station,
    pub port: PortId,
    pub queue: QueueId,
    pub stats: Arc<PortStats>,
}

impl Place {
    pub fn counts(&self) -> PortCounts {
        self.stats.counts()
    }

    pub fn frames(&self) -> Vec<Vec<u8>> {
        self.station.received().into_iter().map(|received| received.frame).collect()
    }

    pub fn only(&self) -> Received {
        let mut received = self.station.received();
        assert_eq!(received.len(), 1, "{received:?}");
        received.remove(0)
    }

    /// The drops, by reason.
    pub fn drops(&self) -> Vec<(DropReason, u64)> {
        let counts = self.counts();
        let reasons = DropReason::ALL.iter().map(|reason| (*reason, counts.drops(*reason)));
        reasons.filter(|(_, count)| *count > 0).collect()
    }
}

pub struct Lan {
    pub switch: Switch,
    pub now: Nanos,
}

impl Lan {
    pub fn new() -> Self {
        Self { switch: Switch::new(SwitchOptions::new(7)), now: Nanos::from_millis(1_000) }
    }

    pub fn add(&mut self, config: PortConfig) -> Place {
        self.add_with(config, NIC, true)
    }

    pub fn add_with(&mut self, config: PortConfig, of: Properties, merges: bool) -> Place {
        let stats = Arc::new(PortStats::default());
        let (station, queue) = Station::new(of, merges);
        let port = self.switch.add_port(self.now, "p", config, Arc::clone(&stats)).unwrap();
        let queue = self.switch.attach(port, Box::new(queue)).unwrap();
        station.post(256, 2048);
        Place { station, port, queue, stats }
    }

    /// `count` stations on ports of the default configuration.
    pub fn stations<const N: usize>(&mut self) -> [Place; N] {
        std::array::from_fn(|_| self.add(PortConfig::station()))
    }

    pub fn turn(&mut self) -> usize {
        self.now = self.now.after(Nanos::from_micros(1));
        self.switch.turn(self.now, 32)
    }

    pub fn turns(&mut self, count: usize) {
        for _ in 0..count {
            self.turn();
        }
    }

    /// Has the switch learn the stations `numbers` on these ports.
    pub fn learn(&mut self, places: &[&Place]) {
        for (number, place) in (1..).zip(places) {
            place.station.send(&plain(BROADCAST, mac(number), 50));
        }
        self.turns(2);
        places.iter().for_each(|place| drop(place.frames()));
    }
}

/// The header of a frame with a partial checksum.
pub fn partial(start: usize, offset: usize) -> PacketHeader {
    PacketHeader {
        flags: 1,
        csum_start: start as u16,
        csum_offset: offset as u16,
        ..PacketHeader::default()
    }
}

/// A generator of random numbers (xorshift64*).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }

    pub fn once_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}
