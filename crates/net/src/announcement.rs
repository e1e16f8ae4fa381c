//! Frames by which the rest of the network learns where a station is and has an address, and those
//! that ask the network for an answer.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::MacAddress;
use crate::bytes::{array, byte, put};
use crate::head::{Head, TYPE_ARP, TYPE_IPV6, TYPE_RARP};
use crate::offload::{complete_checksum, fold, sum};

/// The size of an ARP or RARP message for Ethernet and IPv4 (RFC 826).
const ARP_BYTES: usize = 28;
/// How one begins, before its operation: Ethernet, IPv4, six and four bytes for an address.
const ARP_START: [u8; 7] = [0, 1, 8, 0, 6, 4, 0];

/// Asks for the Ethernet address of the target.
const REQUEST: u8 = 1;

/// The size of an IPv6 header, and of a neighbor advertisement with the option that has the
/// station's Ethernet address (RFC 4861, 4.4 and 4.6.1).
const IPV6_BYTES: usize = 40;
const ADVERTISEMENT_BYTES: usize = 32;
const ICMPV6: u8 = 58;
/// All nodes of the link (RFC 4291, 2.7.1), and their Ethernet address (RFC 2464, 7).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: MacAddress = MacAddress([0x33, 0x33, 0, 0, 0, 1]);

/// A station asks for its own address (RFC 903), as QEMU announces a guest that has moved.
pub fn rarp(station: MacAddress) -> Head {
    const REVERSE_REQUEST: u8 = 3;
    // The sender is the target, and neither has an IPv4 address.
    let none = Ipv4Addr::UNSPECIFIED;
    let message = arp_message(REVERSE_REQUEST, (station, none), (station, none));
    Head::own(MacAddress::BROADCAST, station, TYPE_RARP, &message)
}

/// A station announces that it has an IPv4 address (RFC 5227, 2.3).
pub fn arp(station: MacAddress, address: Ipv4Addr) -> Head {
    // The address is that of the sender and of the target, whose Ethernet address is zero.
    let target = (MacAddress([0; 6]), address);
    let message = arp_message(REQUEST, (station, address), target);
    Head::own(MacAddress::BROADCAST, station, TYPE_ARP, &message)
}

/// A station without an IPv4 address asks for the Ethernet address of another one, which answers
/// and notes nothing (RFC 5227, 2.1.1).
pub fn probe(station: MacAddress, target: Ipv4Addr) -> Head {
    let sender = (station, Ipv4Addr::UNSPECIFIED);
    let message = arp_message(REQUEST, sender, (MacAddress([0; 6]), target));
    Head::own(MacAddress::BROADCAST, station, TYPE_ARP, &message)
}

/// The station whose answer to a [`probe`] this frame is, if it is one.
pub fn probe_answer(head: &Head) -> Option<Ipv4Addr> {
    const REPLY: u8 = 2;
    let message: [u8; ARP_BYTES] = array(head.payload(), 0)?;
    let is_reply = message.starts_with(&ARP_START) && byte(&message, 7)? == REPLY;
    (is_reply && head.ether_type == TYPE_ARP).then_some(Ipv4Addr::from(array::<4>(&message, 14)?))
}

/// A station announces that it has an IPv6 address: an unsolicited neighbor advertisement, which
/// overrides what others know (RFC 4861, 7.2.6). Others forget a router that does not say that it
/// is one (7.2.5).
pub fn neighbor(station: MacAddress, address: Ipv6Addr, is_router: bool) -> Head {
    /// Version 6, no more: traffic class and flow label are zero.
    const VERSION: u8 = 0x60;
    /// Of all messages of neighbor discovery (7.1.2): none came over a router.
    const HOPS: u8 = 255;
    const NEIGHBOR_ADVERTISEMENT: u8 = 136;
    const ROUTER: u8 = 0x80;
    const OVERRIDE: u8 = 0x20;
    /// The option with the Ethernet address of the target, in units of eight bytes.
    const TARGET_ADDRESS: [u8; 2] = [2, 1];
    let mut packet = [0; IPV6_BYTES.saturating_add(ADVERTISEMENT_BYTES)];
    let addresses = [address.octets(), ALL_NODES.octets()];
    let flags = if is_router { ROUTER | OVERRIDE } else { OVERRIDE };
    put(&mut packet, 0, &[VERSION, 0, 0, 0, 0, ADVERTISEMENT_BYTES as u8, ICMPV6, HOPS]);
    put(&mut packet, 8, addresses.as_flattened());
    put(&mut packet, IPV6_BYTES, &[NEIGHBOR_ADVERTISEMENT, 0, 0, 0, flags]);
    put(&mut packet, 48, &address.octets());
    put(&mut packet, 64, &TARGET_ADDRESS);
    put(&mut packet, 66, &station.0);
    // The pseudo-header (RFC 8200, 8.1) stands in the place of the checksum that covers it.
    let pseudo_header = sum(addresses.as_flattened())
        .saturating_add(ADVERTISEMENT_BYTES as u64)
        .saturating_add(u64::from(ICMPV6));
    put(&mut packet, 42, &fold(pseudo_header).to_be_bytes());
    complete_checksum(&mut packet, IPV6_BYTES, 2);
    Head::own(ALL_NODES_MAC, station, TYPE_IPV6, &packet)
}

type Party = (MacAddress, Ipv4Addr);

fn arp_message(operation: u8, sender: Party, target: Party) -> [u8; ARP_BYTES] {
    let mut message = [0; ARP_BYTES];
    put(&mut message, 0, &ARP_START);
    put(&mut message, 7, &[operation]);
    put(&mut message, 8, &sender.0.0);
    put(&mut message, 14, &sender.1.octets());
    put(&mut message, 18, &target.0.0);
    put(&mut message, 24, &target.1.octets());
    message
}
