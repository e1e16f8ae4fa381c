//! Checksums and large frames between stations with and without offloads.
#![forbid(unsafe_code)]

mod harness;

use harness::{Lan, Place, frame, mac, partial, tagged};
use sidecore_net::contract::{NIC, Received};
use sidecore_net::{DropReason, Offloads, PortConfig, Properties, VlanSet, Vlans};
use sidecore_spec_virtio::net::PacketHeader;

const TCP: u8 = 6;
const UDP: u8 = 17;

/// The sum of RFC 1071, written as simply as can be: the one of the switch is checked against it.
fn sum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A packet of TCP or UDP, with a partial checksum.
struct Packet {
    is_ipv6: bool,
    protocol: u8,
    /// Options of TCP.
    options: usize,
    flags: u8,
    data: usize,
}

impl Packet {
    const fn new(is_ipv6: bool, protocol: u8, data: usize) -> Self {
        Self { is_ipv6, protocol, options: 12, flags: 0x18, data }
    }

    fn ip_bytes(&self) -> usize {
        if self.is_ipv6 { 40 } else { 20 }
    }

    fn transport_bytes(&self) -> usize {
        if self.protocol == TCP { 20 + self.options } else { 8 }
    }

    fn checksum_at(&self) -> usize {
        if self.protocol == TCP { 16 } else { 6 }
    }

    fn data(&self) -> Vec<u8> {
        (0..self.data).map(|at| (at * 11 + at / 253) as u8).collect()
    }

    /// The frame, and its header for this size of a segment.
    fn make(&self, gso_size: usize) -> (Vec<u8>, PacketHeader) {
        let mut transport = vec![0; self.transport_bytes()];
        transport[..4].copy_from_slice(&[0x30, 0x39, 0, 80]);
        let len_bytes = self.transport_bytes() + self.data;
        if self.protocol == TCP {
            transport[4..8].copy_from_slice(&0xffff_ff00_u32.to_be_bytes());
            transport[12] = (((20 + self.options) / 4) << 4) as u8;
            transport[13] = self.flags;
            transport[20..].fill(1);
        } else {
            transport[4..6].copy_from_slice(&(len_bytes as u16).to_be_bytes());
        }
        let mut ip = vec![0; self.ip_bytes()];
        if self.is_ipv6 {
            ip[0] = 0x60;
            ip[4..6].copy_from_slice(&(len_bytes as u16).to_be_bytes());
            ip[6..8].copy_from_slice(&[self.protocol, 64]);
            (8..40).for_each(|at| ip[at] = at as u8);
        } else {
            ip[..2].copy_from_slice(&[0x45, 0]);
            ip[2..4].copy_from_slice(&((20 + len_bytes) as u16).to_be_bytes());
            ip[4..6].copy_from_slice(&[0xff, 0xff]);
            ip[8..10].copy_from_slice(&[64, self.protocol]);
            ip[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
            let checksum = !sum(&ip);
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        let at = self.checksum_at();
        transport[at..at + 2].copy_from_slice(&sum(&pseudo(&ip, len_bytes)).to_be_bytes());
        let ether_type = if self.is_ipv6 { 0x86dd } else { 0x0800 };
        let payload = [&ip[..], &transport, &self.data()].concat();
        let mut header = partial(14 + self.ip_bytes(), at);
        if gso_size > 0 {
            header.gso_type = match (self.protocol, self.is_ipv6) {
                (TCP, false) => 1,
                (TCP, true) => 4,
                _ => 5,
            };
            header.gso_size = gso_size as u16;
            // A hint, which the switch replaces.
            header.hdr_len = 1;
        }
        (frame(mac(2), mac(1), ether_type, &payload), header)
    }

    /// Checks a received packet, and returns its data, sequence number and flags. `is_partial` says
    /// that the receiver is to complete the checksum.
    fn check(&self, frame: &[u8], is_partial: bool) -> (Vec<u8>, u32, u8) {
        let ip = &frame[14..14 + self.ip_bytes()];
        let behind = &frame[14 + self.ip_bytes()..];
        if self.is_ipv6 {
            assert_eq!(usize::from(u16::from_be_bytes([ip[4], ip[5]])), behind.len());
        } else {
            assert_eq!(sum(ip), 0xffff, "the checksum of the IP header");
            assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), 20 + behind.len());
        }
        if self.protocol == UDP {
            assert_eq!(usize::from(u16::from_be_bytes([behind[4], behind[5]])), behind.len());
        }
        let pseudo = pseudo(ip, behind.len());
        if is_partial {
            let at = self.checksum_at();
            assert_eq!(u16::from_be_bytes([behind[at], behind[at + 1]]), sum(&pseudo));
        } else {
            assert_eq!(sum(&[&pseudo[..], behind].concat()), 0xffff, "the transport's checksum");
        }
        let sequence = u32::from_be_bytes([behind[4], behind[5], behind[6], behind[7]]);
        (behind[self.transport_bytes()..].to_vec(), sequence, behind[13.min(behind.len() - 1)])
    }
}

fn pseudo(ip: &[u8], len_bytes: usize) -> Vec<u8> {
    let (addresses, protocol) =
        if ip[0] >> 4 == 6 { (&ip[8..40], ip[6]) } else { (&ip[12..20], ip[9]) };
    [addresses, &[0, protocol], &(len_bytes as u16).to_be_bytes()].concat()
}

/// A sender that knows all offloads, and a receiver that knows these.
fn lan(takes: Offloads) -> (Lan, Place, Place) {
    let mut lan = Lan::new();
    let a = lan.add(PortConfig::station());
    let b = lan.add_with(PortConfig::station(), Properties { takes, ..NIC }, true);
    lan.learn(&[&a, &b]);
    (lan, a, b)
}

const PACKETS: [(bool, u8); 4] = [(false, TCP), (true, TCP), (false, UDP), (true, UDP)];

#[test]
fn a_partial_checksum_is_completed_for_a_receiver_that_cannot() {
    for (is_ipv6, protocol) in PACKETS {
        for data in [1, 2, 3, 64, 333, 1400] {
            let (mut lan, a, b) = lan(Offloads::NONE);
            let packet = Packet::new(is_ipv6, protocol, data);
            let (sent, header) = packet.make(0);
            a.station.send_with(header, &sent, 97);
            lan.turn();
            let Received { header, frame } = b.only();
            assert_eq!(header, PacketHeader { num_buffers: 1, ..PacketHeader::default() });
            assert_eq!(packet.check(&frame, false).0, packet.data());
            assert_eq!((b.counts().out_checksums, b.counts().out_copies), (1, 2));
        }
    }
}

#[test]
fn a_receiver_that_can_gets_frames_as_they_are() {
    for (is_ipv6, protocol) in PACKETS {
        let (mut lan, a, b) = lan(Offloads::ALL);
        let packet = Packet::new(is_ipv6, protocol, 40_000);
        let (sent, header) = packet.make(1400);
        a.station.send_with(header, &sent, 4096);
        lan.turn();
        let received = b.only();
        assert!(received.frame == sent);
        let headers = 14 + packet.ip_bytes() + packet.transport_bytes();
        let expected = PacketHeader {
            hdr_len: headers as u16,
            num_buffers: received.header.num_buffers,
            ..header
        };
        assert_eq!(received.header, expected);
        assert_eq!(b.counts().out_cuts, 0);
    }
}

#[test]
fn a_large_frame_is_cut_for_a_receiver_that_takes_none() {
    for (is_ipv6, protocol) in PACKETS {
        for takes in [Offloads::NONE, Offloads::CHECKSUM] {
            for (data, size) in [(40_000, 1400), (2801, 1400), (2800, 1400), (5, 1400), (9, 2)] {
                let (mut lan, a, b) = lan(takes);
                let mut packet = Packet::new(is_ipv6, protocol, data);
                packet.flags = 0x80 | 0x19;
                let (sent, header) = packet.make(size);
                a.station.send_with(header, &sent, 1999);
                lan.turn();
                let is_partial = takes == Offloads::CHECKSUM;
                let received = b.station.received();
                let parts = received.iter().map(|part| packet.check(&part.frame, is_partial));
                let parts: Vec<_> = parts.collect();
                let whole: Vec<u8> = parts.iter().flat_map(|part| part.0.clone()).collect();
                assert!(whole == packet.data(), "{data} bytes in parts of {size}");
                assert_eq!(parts.len(), data.div_ceil(size));
                let is_flagged = |part: &Received| part.header.flags == u8::from(is_partial);
                assert!(received.iter().all(|part| is_flagged(part) && part.header.gso_type == 0));
                assert_eq!((b.counts().out_cuts, b.counts().out_copies), (1, 2));
                if protocol == TCP {
                    for (number, (_, sequence, flags)) in parts.iter().enumerate() {
                        let skip = (number * size) as u32;
                        assert_eq!(*sequence, 0xffff_ff00_u32.wrapping_add(skip));
                        let is_last = number + 1 == parts.len();
                        let cwr = if number == 0 { 0x80 } else { 0 };
                        assert_eq!(*flags, 0x10 | cwr | if is_last { 9 } else { 0 });
                    }
                }
                if !is_ipv6 {
                    let ids = received
                        .iter()
                        .map(|part| u16::from_be_bytes([part.frame[18], part.frame[19]]));
                    assert!(
                        ids.eq((0..parts.len()).map(|part| 0xffff_u16.wrapping_add(part as u16)))
                    );
                }
            }
        }
    }
}

#[test]
fn tags_move_what_a_header_points_to() {
    let mut lan = Lan::new();
    let a = lan.add(PortConfig::station());
    let vlans = Vlans::Trunk { native: None, allowed: VlanSet::all() };
    let trunk = PortConfig { vlans, ..PortConfig::station() };
    let t = lan.add(trunk.clone());
    let packet = Packet::new(true, TCP, 9000);
    let (sent, header) = packet.make(1000);
    let down = lan.add_with(trunk, Properties { takes: Offloads::NONE, ..NIC }, true);
    a.station.send_with(header, &sent, 5000);
    lan.turn();
    let whole = t.only();
    assert!(whole.frame == tagged(&sent, 1));
    assert_eq!((whole.header.csum_start, whole.header.hdr_len), (58, 14 + 4 + 40 + 32));
    let parts = down.station.received();
    assert_eq!(parts.len(), 9);
    for part in &parts {
        assert_eq!(part.frame[12..16], [0x81, 0, 0, 1]);
        packet.check(&[&part.frame[..12], &part.frame[16..]].concat(), false);
    }
    // And back, from the trunk to a port without tags.
    let mut back = tagged(&sent, 1);
    back[..12].copy_from_slice(&[mac(1).0, mac(2).0].concat());
    t.station.send_with(PacketHeader { csum_start: 58, ..header }, &back, 5000);
    lan.turn();
    let received = a.only();
    assert_eq!((received.header.csum_start, received.frame.len()), (54, sent.len()));
    assert!(received.frame[12..] == sent[12..]);
}

#[test]
fn offload_headers_that_lie_are_dropped() {
    let (mut lan, a, b) = lan(Offloads::NONE);
    let (sent, good) = Packet::new(false, TCP, 4000).make(1000);
    let bad = [
        PacketHeader { gso_size: 0, ..good },
        PacketHeader { flags: 0, ..good },
        PacketHeader { gso_type: 3, ..good },
        PacketHeader { gso_type: 0x80, ..good },
        PacketHeader { gso_type: 77, ..good },
        PacketHeader { gso_type: 4, ..good },
        PacketHeader { gso_type: 5, ..good },
        PacketHeader { csum_start: 33, ..good },
        PacketHeader { csum_start: 13, ..good },
        PacketHeader { csum_start: 65_535, ..good },
        PacketHeader { csum_offset: 65_535, ..good },
        PacketHeader { csum_offset: 6, ..good },
        PacketHeader { csum_start: (sent.len() - 17) as u16, ..good },
    ];
    for header in bad {
        a.station.send_with(header, &sent, 1 << 20);
        lan.turn();
    }
    // Headers that are not those of TCP.
    for (at, byte) in [(14, 0x46), (14, 0x65), (20, 0x20), (23, 17), (46, 0x10), (46, 0xf0)] {
        let mut wrong = sent.clone();
        wrong[at] = byte;
        if at == 46 && byte == 0xf0 {
            wrong.truncate(60);
        }
        a.station.send_with(good, &wrong, 1 << 20);
        lan.turn();
    }
    assert_eq!(a.drops(), [(DropReason::BadOffload, bad.len() as u64 + 6)]);
    assert!(b.frames().is_empty());
    a.station.send_with(good, &sent, 1 << 20);
    lan.turn();
    assert_eq!(b.frames().len(), 4, "the port lives on");
    // Offloads that were not negotiated.
    let plain = Properties { sends: Offloads::NONE, ..NIC };
    let c = lan.add_with(PortConfig::station(), plain, true);
    c.station.send_with(good, &sent, 1 << 20);
    lan.turn();
    assert_eq!(c.drops(), [(DropReason::BadOffload, 1)]);
}

#[test]
fn a_cut_frame_that_waits_is_delivered_whole_and_one_that_outgrows_the_buffers_is_counted() {
    let (mut lan, a, b) = lan(Offloads::NONE);
    let (sent, header) = Packet::new(false, TCP, 8000).make(1000);
    b.station.take_buffers();
    a.station.send_with(header, &sent, 1 << 20);
    lan.turn();
    assert_eq!(a.station.completed(), 1);
    b.station.post(8, 2048);
    lan.turn();
    assert_eq!((a.station.completed(), b.frames().len()), (2, 8));
    b.station.post(3, 2048);
    a.station.send_with(header, &sent, 1 << 20);
    lan.turn();
    assert_eq!((b.frames().len(), b.counts().out_cut_losses), (3, 5));
}
