//! Packets of tests.

use std::net::{Ipv4Addr, Ipv6Addr};

use sidecore_net::MacAddress;

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const ACK: u8 = 16;

/// The address of station `number`.
pub fn mac(number: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, number])
}

fn ethernet(from: u8, to: u8, ether_type: u16, payload: &[u8]) -> Vec<u8> {
    [&mac(to).0[..], &mac(from).0, &ether_type.to_be_bytes(), payload].concat()
}

pub fn arp(from: u8, to: u8) -> Vec<u8> {
    let own = mac(from).0;
    let payload =
        [&[0, 1, 8, 0, 6, 4, 0, 1][..], &own, &[10, 0, 0, from], &[0; 6], &[10, 0, 0, to]];
    ethernet(from, to, 0x0806, &payload.concat())
}

pub fn lldp(from: u8, to: u8) -> Vec<u8> {
    ethernet(from, to, 0x88cc, &[0; 40])
}

/// A packet, and the type of its frames.
#[derive(Clone, Debug)]
pub struct Ip(pub Vec<u8>, pub u16);

impl Ip {
    pub fn v4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, payload: &[u8]) -> Self {
        let total = (20 + payload.len() as u16).to_be_bytes();
        let front = [0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, protocol, 0, 0];
        Self([&front, &from.octets()[..], &to.octets(), payload].concat(), 0x0800)
    }

    pub fn v6(from: Ipv6Addr, to: Ipv6Addr, next: u8, payload: &[u8]) -> Self {
        let len = (payload.len() as u16).to_be_bytes();
        let front = [0x60, 0, 0, 0, len[0], len[1], next, 64];
        Self([&front, &from.octets()[..], &to.octets(), payload].concat(), 0x86dd)
    }

    /// The same IPv6 packet behind extension headers of these types, each of which names the next
    /// one in its first byte.
    pub fn behind(&self, headers: &[(u8, Vec<u8>)]) -> Self {
        let mut packet = self.0[..40].to_vec();
        packet[6] = headers[0].0;
        headers.iter().for_each(|(_, header)| packet.extend(header));
        if let Some(last) = headers.last() {
            let at = packet.len() - last.1.len();
            packet[at] = self.0[6];
        }
        packet.extend(&self.0[40..]);
        let len = (packet.len() - 40) as u16;
        packet[4..6].copy_from_slice(&len.to_be_bytes());
        Self(packet, 0x86dd)
    }

    /// As a fragment of packet `id` of IPv4, with the whole payload, at `offset` times 8 bytes.
    pub fn fragment(&self, id: u16, offset: u16, more: bool) -> Self {
        let mut packet = self.clone();
        packet.0[4..6].copy_from_slice(&id.to_be_bytes());
        let part = offset | if more { 0x2000 } else { 0 };
        packet.0[6..8].copy_from_slice(&part.to_be_bytes());
        packet
    }

    pub fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }

    pub fn frame(&self, from: u8, to: u8) -> Vec<u8> {
        ethernet(from, to, self.1, &self.0)
    }
}

fn ports(from: u16, to: u16) -> Vec<u8> {
    [from.to_be_bytes(), to.to_be_bytes()].concat()
}

pub fn udp(from: Ipv4Addr, to: Ipv4Addr, from_port: u16, to_port: u16) -> Ip {
    Ip::v4(from, to, 17, &[&ports(from_port, to_port)[..], &[0, 18, 0, 0], &[7; 10]].concat())
}

pub fn udp6(from: Ipv6Addr, to: Ipv6Addr, from_port: u16, to_port: u16) -> Ip {
    Ip::v6(from, to, 17, &[&ports(from_port, to_port)[..], &[0, 18, 0, 0], &[7; 10]].concat())
}

pub fn tcp(from: Ipv4Addr, to: Ipv4Addr, from_port: u16, to_port: u16, flags: u8) -> Ip {
    let rest = [0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 1, 0, 0, 0, 0, 0];
    Ip::v4(from, to, 6, &[&ports(from_port, to_port)[..], &rest].concat())
}

/// A message of ICMP with this type and identifier.
pub fn echo(from: Ipv4Addr, to: Ipv4Addr, of_type: u8, id: u8) -> Ip {
    Ip::v4(from, to, 1, &[of_type, 0, 0, 0, 0, id, 0, 1, 0, 0])
}

/// The error that a packet could not be delivered.
pub fn unreachable(from: Ipv4Addr, to: Ipv4Addr, packet: &Ip) -> Ip {
    Ip::v4(from, to, 1, &[&[3, 1, 0, 0, 0, 0, 0, 0], &packet.0[..28]].concat())
}
