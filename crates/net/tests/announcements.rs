//! Stations that the switch announces when their ports come up.
#![forbid(unsafe_code)]

mod harness;

use std::net::Ipv4Addr;

use harness::{BROADCAST, Lan, Place, frame, guard, mac, plain, tagged};
use sidecore_net::{Guard, PortConfig, QueueState, SwitchError, Vlans};
use sidecore_units::Nanos;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);

fn announced(vlan: u16) -> PortConfig {
    let guard = Guard { ipv4: Some(vec![ADDRESS]), ..guard(9) };
    let (vlans, announces) = (Vlans::Access(vlan), Some(mac(9)));
    PortConfig { vlans, guard: Some(guard), announces, ..PortConfig::station() }
}

/// The RARP and the ARP that announce the station, in frames of the least size.
fn announcements() -> [Vec<u8>; 2] {
    let (own, none, address) = (mac(9).0, [0; 6], ADDRESS.octets());
    let rarp = [&[0, 1, 8, 0, 6, 4, 0, 3], &own[..], &[0; 4], &own, &[0; 4]].concat();
    let arp = [&[0, 1, 8, 0, 6, 4, 0, 1], &own[..], &address, &none, &address].concat();
    [(0x8035, rarp), (0x0806, arp)].map(|(ether_type, payload)| {
        let mut frame = frame(BROADCAST, mac(9), ether_type, &payload);
        frame.resize(60, 0);
        frame
    })
}

/// Lets time pass, and has the switch look at its ports.
fn after(lan: &mut Lan, micros: u64) {
    lan.now = lan.now.after(Nanos::from_micros(micros));
    lan.turn();
}

fn set_state(lan: &mut Lan, place: &Place, state: QueueState) {
    place.station.set_state(state);
    after(lan, 2_000);
}

#[test]
fn a_station_is_announced_four_times_when_its_port_comes_up() {
    let mut lan = Lan::new();
    let trunk = Vlans::Trunk { native: None, allowed: [7].into_iter().collect() };
    let uplink = lan.add(PortConfig { vlans: trunk, ..PortConfig::uplink() });
    let other = lan.add(PortConfig::station());
    let place = lan.add(announced(7));
    set_state(&mut lan, &place, QueueState::Down("away"));
    assert_eq!((uplink.frames().len(), lan.switch.deadline()), (0, None));
    set_state(&mut lan, &place, QueueState::Up);
    let expected = announcements().map(|frame| tagged(&frame, 7));
    assert_eq!(uplink.frames(), expected);
    for millis in [100, 200, 400] {
        let due = lan.switch.deadline().unwrap();
        assert_eq!(due, lan.now.after(Nanos::from_millis(millis)), "{millis}");
        after(&mut lan, millis * 1_000 - 10);
        assert!(uplink.frames().is_empty(), "not before its time");
        lan.now = due;
        after(&mut lan, 2_000);
        assert_eq!(uplink.frames(), expected);
    }
    assert_eq!(lan.switch.deadline(), None);
    after(&mut lan, 5_000_000);
    assert!(uplink.frames().is_empty() && other.frames().is_empty() && place.frames().is_empty());
    uplink.station.send(&tagged(&plain(mac(9), mac(1), 60), 7));
    lan.turn();
    assert_eq!(place.frames().len(), 1);
}

#[test]
fn a_station_whose_port_is_down_or_has_no_queue_is_not_announced() {
    let mut lan = Lan::new();
    let [other] = lan.stations();
    let place = lan.add(announced(1));
    after(&mut lan, 2_000);
    assert_eq!(other.frames(), announcements());
    set_state(&mut lan, &place, QueueState::Down("away"));
    after(&mut lan, 1_000_000);
    assert!(other.frames().is_empty());
    set_state(&mut lan, &place, QueueState::Up);
    assert_eq!(other.frames().len(), 2);
    drop(lan.switch.detach(place.queue).unwrap());
    after(&mut lan, 1_000_000);
    assert!(other.frames().is_empty());
    let group = PortConfig { announces: Some(BROADCAST), ..PortConfig::station() };
    let refused = lan.switch.change_port(lan.now, place.port, group);
    assert_eq!(refused, Err(SwitchError::Mac { mac: BROADCAST }));
}
