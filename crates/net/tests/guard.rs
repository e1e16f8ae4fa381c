//! Stations that claim addresses of others.
#![forbid(unsafe_code)]

mod harness;

use std::net::Ipv6Addr;

use harness::{BROADCAST, Lan, Place, frame, mac};
use sidecore_net::{DropReason, Guard, PortConfig};

fn guarded() -> (Lan, Place, Place) {
    let mut lan = Lan::new();
    let guard = Guard {
        mac: mac(1),
        ipv4: Some(vec![[10, 0, 0, 1].into()]),
        ipv6: Some(vec![("2001:db8:1::".parse().unwrap(), 64)]),
        router: false,
    };
    let a = lan.add(PortConfig { guard: Some(guard), ..PortConfig::station() });
    let b = lan.add(PortConfig::station());
    (lan, a, b)
}

/// Sends packets of this type, and returns the drops.
fn drops(ether_type: u16, packets: &[Vec<u8>]) -> Vec<(DropReason, u64)> {
    let (mut lan, a, b) = guarded();
    for packet in packets {
        a.station.send(&frame(BROADCAST, mac(1), ether_type, packet));
    }
    lan.turn();
    let arrived = b.frames().len() as u64;
    let drops = a.drops();
    assert_eq!(arrived + drops.iter().map(|drop| drop.1).sum::<u64>(), packets.len() as u64);
    drops
}

fn arp_of(sender: u8, address: [u8; 4]) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4, 0, 1][..], &mac(sender).0, &address, &[0; 6], &[10, 0, 0, 9]].concat()
}

#[test]
fn arp() {
    assert_eq!(drops(0x0806, &[arp_of(1, [10, 0, 0, 1]), arp_of(1, [0; 4])]), []);
    let mut foreign = arp_of(1, [10, 0, 0, 1]);
    foreign[5] = 16;
    let wrong = [arp_of(2, [10, 0, 0, 1]), arp_of(1, [10, 0, 0, 2]), foreign, vec![0, 1, 8, 0]];
    assert_eq!(drops(0x0806, &wrong), [(DropReason::SpoofedArp, 4)]);
}

fn ipv4_of(source: [u8; 4], protocol: u8, behind: &[u8]) -> Vec<u8> {
    let ip = [0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0];
    [&ip[..], &source, &[255; 4], behind].concat()
}

#[test]
fn ipv4() {
    let dhcp = |from: u16, to: u16| [from.to_be_bytes(), to.to_be_bytes(), [0, 8], [0; 2]].concat();
    let right = [ipv4_of([10, 0, 0, 1], 6, &[0; 20]), ipv4_of([0; 4], 17, &dhcp(68, 67))];
    assert_eq!(drops(0x0800, &right), []);
    let mut version = right[0].clone();
    version[0] = 0x55;
    let mut fragment = right[1].clone();
    fragment[7] = 1;
    let wrong = [
        ipv4_of([10, 0, 0, 2], 6, &[0; 20]),
        ipv4_of([0; 4], 17, &dhcp(67, 68)),
        ipv4_of([0; 4], 6, &dhcp(68, 67)),
        version,
        fragment,
        vec![0x45; 15],
    ];
    assert_eq!(drops(0x0800, &wrong), [(DropReason::SpoofedIpv4, 6)]);
}

fn ipv6(source: &str, next: u8, behind: &[u8]) -> Vec<u8> {
    let source: Ipv6Addr = source.parse().unwrap();
    [&[0x60, 0, 0, 0, 0, 8, next, 255][..], &source.octets(), &[0xff; 16], behind].concat()
}

/// A message of neighbour discovery for this target, with an option of this kind for station
/// `number`.
fn discovery(kind: u8, target: &str, option: u8, number: u8) -> Vec<u8> {
    let target: Ipv6Addr = target.parse().unwrap();
    let fixed = match kind {
        133 => vec![kind, 0, 0, 0, 0, 0, 0, 0],
        134 => [&[kind][..], &[0; 15]].concat(),
        137 => [&[kind][..], &[0; 39]].concat(),
        _ => [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat(),
    };
    if option == 0 { fixed } else { [&fixed[..], &[option, 1], &mac(number).0].concat() }
}

const OWN: &str = "2001:db8:1::7";
const OTHER: &str = "2001:db8:2::7";
/// The link-local address of 02:00:00:00:00:01.
const LINK_LOCAL: &str = "fe80::ff:fe00:1";

#[test]
fn ipv6_sources() {
    let right = [ipv6(OWN, 6, &[0; 20]), ipv6(LINK_LOCAL, 17, &[0; 8])];
    assert_eq!(drops(0x86dd, &right), []);
    let long = |count: usize| [[60, 0, 0, 0, 0, 0, 0, 0].repeat(count), vec![0; 8]].concat();
    let wrong = [
        ipv6(OTHER, 6, &[0; 20]),
        ipv6("fe80::ff:fe00:2", 17, &[0; 8]),
        ipv6("::", 17, &[0; 8]),
        // Headers without end hide what the packet is.
        ipv6(OWN, 60, &long(20)),
        ipv6(OWN, 60, &[]),
        vec![0x60; 30],
        vec![],
    ];
    assert_eq!(drops(0x86dd, &wrong), [(DropReason::SpoofedIpv6, 7)]);
}

#[test]
fn neighbour_discovery() {
    let solicit = |source, kind, target, option, number| {
        ipv6(source, 58, &discovery(kind, target, option, number))
    };
    // The report of a group has a header in front (RFC 3810, 5).
    let report = ipv6("::", 0, &[58, 0, 5, 2, 0, 0, 1, 0, 143, 0, 0, 0]);
    let right = [
        solicit(OWN, 135, OTHER, 1, 1),
        solicit("::", 135, OWN, 0, 0),
        solicit(OWN, 136, OWN, 2, 1),
        solicit(LINK_LOCAL, 133, OTHER, 1, 1),
        ipv6(OWN, 58, &[128, 0, 0, 0, 0, 0, 0, 0]),
        report,
    ];
    assert_eq!(drops(0x86dd, &right), []);
    let hidden =
        ipv6(OWN, 44, &[&[58, 0, 0, 0, 0, 0, 0, 1][..], &discovery(136, OTHER, 2, 1)].concat());
    let wrong = [
        solicit(OWN, 136, OTHER, 2, 1),
        solicit(OWN, 136, OWN, 2, 2),
        solicit(OWN, 135, OTHER, 1, 2),
        solicit(LINK_LOCAL, 134, OTHER, 1, 1),
        solicit(LINK_LOCAL, 137, OTHER, 0, 1),
        hidden,
        // An option of no size.
        ipv6(OWN, 58, &[&discovery(135, OTHER, 0, 0)[..], &[1, 0, 2, 0, 0, 0, 0, 1]].concat()),
    ];
    assert_eq!(drops(0x86dd, &wrong), [(DropReason::SpoofedNd, 7)]);
}
