//! Stations that the switch announces when their ports come up.
#![forbid(unsafe_code)]

mod harness;

use std::net::{Ipv4Addr, Ipv6Addr};

use harness::{BROADCAST, Lan, Place, frame, guard, mac, plain, tagged};
use sidecore_net::{Guard, MacAddress, PortConfig, QueueState, SwitchError, Vlans};
use sidecore_units::Nanos;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);
const IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9);
/// That of 02:00:00:00:00:09.
const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 9);

fn announced(vlan: u16) -> PortConfig {
    // Which addresses the station has of a network is not known.
    let ipv6 = Some(vec![("2001:db8:1::".parse().unwrap(), 64), (IPV6, 128)]);
    let guard = Guard { ipv4: Some(vec![ADDRESS]), ipv6, ..guard(9) };
    let (vlans, announces) = (Vlans::Access(vlan), Some(mac(9)));
    PortConfig { vlans, guard: Some(guard), announces, ..PortConfig::station() }
}

/// The RARP, the ARP and the neighbor advertisements that announce the station.
fn announcements() -> [Vec<u8>; 4] {
    let (own, none, address) = (mac(9).0, [0; 6], ADDRESS.octets());
    let rarp = [&[0, 1, 8, 0, 6, 4, 0, 3], &own[..], &[0; 4], &own, &[0; 4]].concat();
    let arp = [&[0, 1, 8, 0, 6, 4, 0, 1], &own[..], &address, &none, &address].concat();
    let [rarp, arp] = [(0x8035, rarp), (0x0806, arp)].map(|(ether_type, payload)| {
        let mut frame = frame(BROADCAST, mac(9), ether_type, &payload);
        frame.resize(60, 0);
        frame
    });
    let [global, local] = [(IPV6, [0xf9, 0x12]), (LINK_LOCAL, [0x59, 0x83])].map(advertisement);
    [rarp, arp, global, local]
}

/// The neighbor advertisement for an address, with this checksum.
fn advertisement((address, checksum): (Ipv6Addr, [u8; 2])) -> Vec<u8> {
    let (own, address) = (mac(9).0, address.octets());
    let all_nodes = "ff02::1".parse::<Ipv6Addr>().unwrap().octets();
    let header = [&[0x60, 0, 0, 0, 0, 32, 58, 255][..], &address, &all_nodes].concat();
    let icmp = [&[136, 0][..], &checksum, &[0x20, 0, 0, 0], &address, &[2, 1], &own].concat();
    frame(MacAddress([0x33, 0x33, 0, 0, 0, 1]), mac(9), 0x86dd, &[header, icmp].concat())
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
    assert_eq!(other.frames().len(), 4);
    drop(lan.switch.detach(place.queue).unwrap());
    after(&mut lan, 1_000_000);
    assert!(other.frames().is_empty());
    let group = PortConfig { announces: Some(BROADCAST), ..PortConfig::station() };
    let refused = lan.switch.change_port(lan.now, place.port, group);
    assert_eq!(refused, Err(SwitchError::Mac { mac: BROADCAST }));
}
