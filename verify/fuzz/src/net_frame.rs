//! Frames and virtio headers that are the input, from a guarded NIC and from a trunk, to stations
//! with and without offloads: the parser, the guard, checksums and cuts.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_net::contract::{NIC, Station, WIRE};
use sidecore_net::{
    Guard, MacAddress, Offloads, PortConfig, PortStats, Properties, Switch, SwitchOptions, VlanSet,
    Vlans,
};
use sidecore_spec_virtio::net::PacketHeader;
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

const OWN: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

fuzz_target!(|input: &[u8]| {
    let mut switch = Switch::new(SwitchOptions::new(1));
    let guard = Guard {
        mac: OWN,
        ipv4: Some(vec![[10, 0, 0, 1].into()]),
        ipv6: Some(vec![([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0].into(), 32)]),
        router: false,
    };
    let station = || PortConfig { floods: None, ..PortConfig::station() };
    let trunk = Vlans::Trunk { native: Some(1), allowed: VlanSet::all() };
    let ports = [
        (PortConfig { guard: Some(guard), ..station() }, NIC),
        (PortConfig { vlans: trunk, ..station() }, NIC),
        (station(), Properties { takes: Offloads::NONE, ..NIC }),
        (station(), Properties { takes: Offloads::CHECKSUM, header_bytes: 10, ..NIC }),
        (station(), WIRE),
    ];
    let mut all = Vec::new();
    for (config, properties) in ports {
        let stats = Arc::new(PortStats::default());
        let (station, queue) = Station::new(properties, true);
        let port = switch.add_port(Nanos(1), "port", config, Arc::clone(&stats));
        let Ok(port) = port else { return };
        if switch.attach(port, Box::new(queue)).is_err() {
            return;
        }
        // The parts of a large frame may be many.
        station.post(200, 2048);
        all.push((station, stats));
    }
    let mut rest = input;
    let mut now = 1;
    while let Some((head, behind)) = rest.split_first_chunk::<3>() {
        let [setup, low, high] = *head;
        let len_bytes = usize::from(u16::from_le_bytes([low, high])).min(behind.len());
        let (bytes, after) = behind.split_at(len_bytes);
        rest = after;
        let (header, frame) = bytes.split_at(bytes.len().min(PacketHeader::BYTES));
        let mut whole = [0; PacketHeader::BYTES];
        whole[..header.len()].copy_from_slice(header);
        let piece_bytes = if setup & 2 == 0 { 1 << 20 } else { 64 };
        let from = usize::from(setup & 1);
        // Some frames are longer than an input should be.
        let padded = [frame, &vec![setup; usize::from(setup >> 2) * 600]].concat();
        all[from].0.send_with(PacketHeader::decode(&whole), &padded, piece_bytes);
        now += 1;
        switch.turn(Nanos(now), 32);
        for (station, _) in &all {
            drop(station.received());
            station.post(200 - station.free_buffers().min(200), 2048);
        }
    }
    for _ in 0..20 {
        now += 1;
        switch.turn(Nanos(now), 32);
    }
    assert!(!switch.has_frames());
    let counts: Vec<_> = all.iter().map(|(_, stats)| stats.counts()).collect();
    let copies: u64 = counts.iter().map(|counts| counts.in_copies).sum();
    let ends: u64 = counts.iter().map(|counts| counts.out_copies + counts.out_discards()).sum();
    assert_eq!(copies, ends, "every copy is delivered or counted");
});
