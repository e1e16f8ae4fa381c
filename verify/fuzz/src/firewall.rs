//! Rules that are the input, and frames through a port that has them: the reader of rules, the
//! reader of headers, and the table of connections.
//!
//! The input is a number of bytes, so many of text with a rule in each line, and frames behind it.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_net::contract::{NIC, Station};
use sidecore_net::{FrameStage, PortConfig, PortId, PortStats, StagePlace, Switch, SwitchOptions};
use sidecore_stage_firewall::{Firewall, FirewallStats, Rules};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

struct Net {
    switch: Switch,
    now: Nanos,
    /// The first one has the firewall.
    ports: Vec<(Station, PortId, Arc<PortStats>)>,
    /// Of the rules now, and of those that were replaced.
    stats: Vec<Arc<FirewallStats>>,
    rules: Arc<Rules>,
}

impl Net {
    fn new(rules: Rules) -> Self {
        let now = Nanos::from_millis(1_000_000);
        let mut switch = Switch::new(SwitchOptions::new(1));
        let mut add = || {
            let config = PortConfig { floods: None, ..PortConfig::station() };
            let stats = Arc::new(PortStats::default());
            let (station, queue) = Station::new(NIC, true);
            let port = switch.add_port(now, "port", config, Arc::clone(&stats)).unwrap();
            switch.attach(port, Box::new(queue)).unwrap();
            station.post(64, 2048);
            (station, port, stats)
        };
        let ports = vec![add(), add()];
        let mut net = Self { switch, now, ports, stats: Vec::new(), rules: Arc::new(rules) };
        net.replace();
        net
    }

    /// Replaces the stage; its connections stay.
    fn replace(&mut self) {
        let stage = Firewall::new(Arc::clone(&self.rules), 64, [3, 5]);
        self.stats.push(Arc::clone(stage.stats()));
        let stage: Box<dyn FrameStage> = Box::new(stage);
        let port = self.ports[0].1;
        drop(self.switch.set_stage(port, StagePlace::Firewall, Some(stage)).unwrap());
    }

    /// Sends a frame, whose payload and type are these, through the firewall.
    fn send(&mut self, from: usize, bytes: &[u8], piece_bytes: usize) {
        let frame = [&MACS[1 - from][..], &MACS[from], bytes].concat();
        self.ports[from].0.send_with(Default::default(), &frame, piece_bytes);
        self.switch.turn(self.now, 32);
        for (station, ..) in &self.ports {
            drop(station.received());
            station.post(64 - station.free_buffers().min(64), 2048);
        }
    }

    /// Every frame that reached the firewall is counted, once.
    fn check(&self) {
        let counts: Vec<_> = self.ports.iter().map(|(.., stats)| stats.counts()).collect();
        let decided: u64 = self
            .stats
            .iter()
            .flat_map(|stats| stats.rules.iter().chain([&stats.unmatched]))
            .map(|rule| rule.frames.get())
            .sum();
        let own = &counts[0];
        let [headers, fragments] = [
            own.dropped_headers + own.dropped_headers_out,
            own.dropped_fragment + own.dropped_fragment_out,
        ];
        // A frame from the station has reached it if it was copied, or if the firewall dropped it.
        let from = own.in_copies + own.dropped_rule + own.dropped_headers + own.dropped_fragment;
        let to = counts[1].in_copies;
        assert_eq!(decided + headers + fragments, from + to);
        let copies: u64 = counts.iter().map(|counts| counts.in_copies).sum();
        let ends: u64 = counts.iter().map(|counts| counts.out_copies + counts.out_discards()).sum();
        assert_eq!(copies, ends, "every copy is delivered or counted");
        let table = &self.stats[self.stats.len() - 1].table;
        assert!(table.connections.get() <= 64);
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((head, rest)) = input.split_first_chunk::<2>() else { return };
    let text_bytes = usize::from(u16::from_le_bytes(*head)).min(rest.len());
    let (text, mut rest) = rest.split_at(text_bytes);
    let Ok(text) = std::str::from_utf8(text) else { return };
    let texts: Vec<&str> = text.lines().collect();
    let rules = match Rules::parse(&texts) {
        Ok(rules) => rules,
        Err(error) => {
            assert!(error.index < texts.len() && !error.why.chars().any(char::is_control));
            return;
        }
    };
    assert_eq!(
        Rules::parse(rules.texts()).as_ref(),
        Ok(&rules),
        "rules are read as they are shown"
    );
    let mut net = Net::new(rules);
    while let Some((head, behind)) = rest.split_first_chunk::<2>() {
        let [setup, len_bytes] = *head;
        let (bytes, after) = behind.split_at(usize::from(len_bytes).min(behind.len()));
        rest = after;
        // Milliseconds, or as long as connections of one kind or the other live.
        let wait_ms = [1, 20_000, 200_000, 8_000_000][usize::from(setup >> 6)];
        net.now = net.now.after(Nanos::from_millis(wait_ms));
        if setup & 4 != 0 {
            net.replace();
        }
        let padded = [bytes, &vec![setup; usize::from(setup >> 3 & 3) * 200]].concat();
        net.send(usize::from(setup & 1), &padded, if setup & 2 == 0 { 1 << 20 } else { 64 });
    }
    net.check();
});
