//! The switch allocates nothing for a frame.
#![forbid(unsafe_code)]

mod harness;

use harness::{BROADCAST, Lan, mac, partial, plain};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_net::{Offloads, PortConfig, Properties, contract::NIC};
use sidecore_spec_virtio::net::PacketHeader;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_turn_allocates_nothing() {
    let mut lan = Lan::new();
    let a = lan.add(PortConfig { floods: None, ..PortConfig::station() });
    let b = lan.add(PortConfig::station());
    let plain_nic = Properties { takes: Offloads::NONE, ..NIC };
    let c = lan.add_with(PortConfig::station(), plain_nic, true);
    lan.learn(&[&a, &b, &c]);
    let small = plain(mac(2), mac(1), 50);
    let large = plain(mac(2), mac(1), 1500);
    let flooded = plain(BROADCAST, mac(1), 300);
    let summed = plain(mac(3), mac(1), 1000);
    let unknown = plain(mac(9), mac(1), 60);
    // In memory once: the driver's side allocates to make them.
    let sizes = [&small, &large, &flooded, &summed, &unknown];
    let mut places = Vec::new();
    for frame in sizes {
        let header = if frame == &summed { partial(14, 16) } else { PacketHeader::default() };
        places.push((a.station.send_with(header, frame, 1 << 20), frame.len()));
    }
    lan.turn();
    let mut counted = 0;
    for round in 0..200 {
        // Buffers are short now and then, so that frames wait, and some for too long.
        for place in [&b, &c] {
            place.station.discard();
            place.station.post(if round % 5 == 0 { 100 } else { 0 }, 2048);
        }
        for (start, len_bytes) in places.iter().cycle().take(60) {
            a.station.resend(*start, *len_bytes);
        }
        let before = allocations();
        lan.turns(3);
        counted += allocations() - before;
    }
    assert_eq!(counted, 0);
    assert!(b.counts().out_frames > 1000 && c.counts().out_checksums > 100);
    assert!(b.counts().dropped_no_buffers > 100 && b.counts().out_waits > 100);
}
