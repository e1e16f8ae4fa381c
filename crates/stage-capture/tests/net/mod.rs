//! A switch with stations of tests.

#![allow(dead_code)] // each test file uses a part of it

use std::sync::Arc;

use sidecore_net::contract::{NIC, Station};
use sidecore_net::{
    DropCause, FrameStage, Guard, MacAddress, PortConfig, PortId, PortStats, Properties,
    StageFrame, StagePlace, Switch, SwitchOptions, Verdict, Vlans, Way,
};
use sidecore_units::Nanos;

/// A filter that drops frames to its station whose first byte of payload is 0xee.
pub struct Filter;

impl FrameStage for Filter {
    fn frame(&mut self, _: Nanos, frame: &StageFrame<'_>) -> Verdict {
        let is_bad = frame.way() == Way::ToStation && frame.payload().first() == Some(&0xee);
        if is_bad { Verdict::Drop(DropCause::Rule(0)) } else { Verdict::Pass }
    }

    fn look(&mut self, _: Nanos) {}

    fn inherit(&mut self, _: &mut dyn FrameStage) {}
}

pub struct Net {
    pub switch: Switch,
    pub now: Nanos,
    pub stations: Vec<Station>,
    pub ports: Vec<PortId>,
}

pub fn mac(station: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, station as u8 + 1]
}

pub fn frame(to: [u8; 6], from: usize, payload: &[u8]) -> Vec<u8> {
    [&to[..], &mac(from), &[0x88, 0xb5], payload].concat()
}

impl Net {
    /// Stations on ports with these VLANs.
    pub fn new(vlans: &[Vlans]) -> Self {
        let now = Nanos::from_millis(1_000);
        let switch = Switch::new(SwitchOptions::new(7));
        let mut net = Self { switch, now, stations: Vec::new(), ports: Vec::new() };
        vlans.iter().for_each(|vlans| net.add(vlans.clone(), NIC, 2048));
        net
    }

    /// Adds a station with so many receive buffers.
    pub fn add(&mut self, vlans: Vlans, properties: Properties, buffers: usize) {
        let mac = MacAddress(mac(self.stations.len()));
        let guard = Guard { mac, ipv4: None, ipv6: None, router: false };
        let guard = matches!(vlans, Vlans::Access(_)).then_some(guard);
        let config = PortConfig { guard, vlans, floods: None, ..PortConfig::station() };
        let (station, queue) = Station::new(properties, true);
        let stats = Arc::<PortStats>::default();
        let port = self.switch.add_port(self.now, "p", config, stats).unwrap();
        self.switch.attach(port, Box::new(queue)).unwrap();
        station.post(buffers, 2048);
        self.stations.push(station);
        self.ports.push(port);
    }

    pub fn set(&mut self, at: usize, place: StagePlace, stage: Option<Box<dyn FrameStage>>) {
        drop(self.switch.set_stage(self.ports[at], place, stage).unwrap());
    }

    pub fn send(&mut self, from: usize, frame: &[u8]) {
        self.stations[from].send(frame);
        self.turn();
    }

    pub fn turn(&mut self) {
        self.now = self.now.after(Nanos(1_000));
        self.switch.turn(self.now, 32);
    }

    pub fn received(&self, at: usize) -> Vec<Vec<u8>> {
        self.stations[at].received().into_iter().map(|received| received.frame).collect()
    }
}
