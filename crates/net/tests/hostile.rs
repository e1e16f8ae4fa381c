//! A station that changes its frames while the switch copies them.
#![forbid(unsafe_code)]

mod harness;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness::{Lan, frame, guard, mac, partial, plain};
use sidecore_memory::{GuestAddress, RegionHint};
use sidecore_net::contract::{NIC, QueueRig, Station, WIRE, check_queue};
use sidecore_net::{Offloads, PortConfig, Properties};

/// The first station toggles the receiver, the sender, the VLAN's type and the checksum's place of
/// a frame all the time. Each copy must be one that the switch may deliver there: the switch reads
/// the head once, and what it has checked is what it writes.
#[test]
fn a_frame_that_changes_is_delivered_as_it_was_decided_on() {
    let mut lan = Lan::new();
    let guarded = PortConfig { guard: Some(guard(1)), floods: None, ..PortConfig::station() };
    let a = lan.add(guarded);
    let b = lan.add(PortConfig::station());
    let takes_none = Properties { takes: Offloads::NONE, ..NIC };
    let c = lan.add_with(PortConfig::station(), takes_none, true);
    b.station.send(&plain(mac(1), mac(2), 60));
    c.station.send(&plain(mac(1), mac(3), 60));
    lan.turn();
    // A type that one byte makes a tag's.
    let sent = frame(mac(2), mac(1), 0x8800, &[7; 1000]);
    let at = a.station.send_with(partial(14, 16), &sent, 500);
    lan.turn();
    let stop = Arc::new(AtomicBool::new(false));
    let (memory, stopping) = (a.station.memory(), Arc::clone(&stop));
    let flipper = std::thread::spawn(move || {
        let mut hint = RegionHint::default();
        let mut set = |offset: u64, byte: u8| {
            memory.write_slice(GuestAddress(at + offset), &[byte], &mut hint).unwrap();
        };
        let mut round = 0_u32;
        while !stopping.load(Ordering::Relaxed) {
            round = round.wrapping_add(1);
            // The last bytes of both addresses, the type, and the high byte of csum_start.
            set(12 + 5, 2 + (round & 1) as u8);
            set(12 + 11, 1 + (round >> 1 & 1) as u8);
            set(12 + 12, if round & 4 == 0 { 0x88 } else { 0x81 });
            set(7, if round & 8 == 0 { 0 } else { 0x7f });
        }
    });
    let (mut delivered, mut turns) = ([0_u64; 2], 0_u64);
    while turns < 20_000 || (delivered.contains(&0) && turns < 50_000_000) {
        turns += 1;
        a.station.resend(at, sent.len());
        lan.turn();
        for (which, place) in [&b, &c].into_iter().enumerate() {
            for received in place.station.received() {
                assert_eq!(received.frame[..6], mac(2 + which as u8).0, "it is the receiver's");
                assert_eq!(received.frame[6..12], mac(1).0, "from the sender that was checked");
                assert_eq!(received.frame[12], 0x88);
                let place_of_sum = received.header.csum_start + received.header.csum_offset;
                assert!(usize::from(place_of_sum) + 2 <= received.frame.len());
                assert_eq!(received.header.flags, u8::from(which == 0));
                delivered[which] += 1;
            }
            place.station.post(2, 2048);
        }
    }
    stop.store(true, Ordering::Relaxed);
    flipper.join().unwrap();
    assert!(delivered.iter().all(|count| *count > 0), "{delivered:?}");
    let counts = a.counts();
    let dropped = counts.in_discards();
    assert_eq!(counts.in_frames, turns + 1);
    assert_eq!(counts.in_copies + dropped, turns + 1, "every frame is delivered or counted");
}

#[test]
fn the_station_of_these_tests_keeps_the_contract_of_queues() {
    for (properties, merges) in [(NIC, true), (NIC, false), (WIRE, true)] {
        check_queue(&|| {
            let (station, queue) = Station::new(properties, merges);
            QueueRig { queue: Box::new(queue), driver: Box::new(station) }
        });
    }
}
