//! The flow of a frame, for people: read from its first bytes, as far as they go. A frame with
//! wrong headers has a flow, too: the reader gives up where the headers do.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const TYPE_IPV4: u16 = 0x0800;
const TYPE_ARP: u16 = 0x0806;
const TYPE_IPV6: u16 = 0x86dd;
/// The types of VLAN tags (IEEE 802.1Q).
const TYPES_TAG: [u16; 2] = [0x8100, 0x88a8];

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

const IPV6_BYTES: usize = 40;
/// IPv6 extension headers that are read.
const EXTENSIONS_MAX: usize = 6;

/// The addresses of a frame, and what is behind them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The Ethernet address of the sender.
    pub source_mac: [u8; 6],
    /// That of the receiver.
    pub target_mac: [u8; 6],
    /// The VLAN of the (outer) tag, if the frame has a tag with one.
    pub vlan: Option<u16>,
    /// The type of the payload, behind a tag.
    pub ether_type: u16,
    /// Of IP and ARP: the addresses of sender and receiver.
    pub addresses: Option<(IpAddr, IpAddr)>,
    /// Of IP: the protocol.
    pub protocol: Option<u8>,
    /// The ports of sender and receiver; later fragments have none.
    pub ports: Option<(u16, u16)>,
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

impl Flow {
    /// Reads the first bytes of a frame; `None` if they are not even Ethernet addresses and a type.
    #[must_use]
    pub fn read(frame: &[u8]) -> Option<Self> {
        let (target_mac, source_mac) = (array(frame, 0)?, array(frame, 6)?);
        let mut flow =
            Self { source_mac, target_mac, ether_type: be16(frame, 12)?, ..Self::default() };
        let mut payload_at = 14_usize;
        if TYPES_TAG.contains(&flow.ether_type)
            && let (Some(tag), Some(ether_type)) = (be16(frame, 14), be16(frame, 16))
        {
            flow.vlan = Some(tag & 0x0fff).filter(|vlan| *vlan != 0);
            flow.ether_type = ether_type;
            payload_at = 18;
        }
        let payload = frame.get(payload_at..).unwrap_or(&[]);
        // Facts that were read before the bytes end stay.
        let _ = match flow.ether_type {
            TYPE_IPV4 => flow.ipv4(payload),
            TYPE_IPV6 => flow.ipv6(payload),
            TYPE_ARP => flow.arp(payload),
            _ => None,
        };
        Some(flow)
    }

    /// The addresses of an ARP packet for IPv4 (RFC 826).
    fn arp(&mut self, payload: &[u8]) -> Option<()> {
        let [_, _, 8, 0, 6, 4] = array(payload, 0)? else { return None };
        let (source, target) = (array::<4>(payload, 14)?, array::<4>(payload, 24)?);
        self.addresses = Some((Ipv4Addr::from(source).into(), Ipv4Addr::from(target).into()));
        Some(())
    }

    fn ipv4(&mut self, payload: &[u8]) -> Option<()> {
        let (source, target) = (array::<4>(payload, 12)?, array::<4>(payload, 16)?);
        self.addresses = Some((Ipv4Addr::from(source).into(), Ipv4Addr::from(target).into()));
        self.protocol = payload.get(9).copied();
        let header_bytes = usize::from(payload.first()? & 15).checked_mul(4)?;
        let is_later_fragment = be16(payload, 6)? & 0x1fff != 0;
        if !is_later_fragment && header_bytes >= 20 {
            self.ports(payload, header_bytes);
        }
        Some(())
    }

    fn ipv6(&mut self, payload: &[u8]) -> Option<()> {
        let (source, target) = (array::<16>(payload, 8)?, array::<16>(payload, 24)?);
        self.addresses = Some((Ipv6Addr::from(source).into(), Ipv6Addr::from(target).into()));
        let (mut next, mut at) = (*payload.get(6)?, IPV6_BYTES);
        for _ in 0..EXTENSIONS_MAX {
            self.protocol = Some(next);
            let [following, units] = match next {
                // Hop by hop, routing, destination options, authentication, fragment.
                0 | 43 | 60 | 51 | 44 => array(payload, at)?,
                _ => {
                    self.ports(payload, at);
                    return Some(());
                }
            };
            if next == 44 && be16(payload, at.checked_add(2)?)? & 0xfff8 != 0 {
                self.protocol = Some(following);
                return Some(());
            }
            let header_bytes = match next {
                44 => 8,
                51 => usize::from(units).checked_add(2)?.checked_mul(4)?,
                _ => usize::from(units).checked_add(1)?.checked_mul(8)?,
            };
            (next, at) = (following, at.checked_add(header_bytes)?);
        }
        Some(())
    }

    fn ports(&mut self, payload: &[u8], at: usize) {
        let ports = || Some((be16(payload, at)?, be16(payload, at.checked_add(2)?)?));
        if matches!(self.protocol, Some(TCP | UDP | SCTP)) {
            self.ports = ports();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETHERNET: [u8; 12] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];

    fn ipv4(protocol: u8, fragment: u16, transport: &[u8]) -> Vec<u8> {
        let [high, low] = fragment.to_be_bytes();
        let header =
            [0x45, 0, 0, 40, 0, 1, high, low, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        [&[8, 0], &header[..], transport].concat()
    }

    fn read(rest: &[u8]) -> Flow {
        Flow::read(&[&ETHERNET, rest].concat()).unwrap()
    }

    #[test]
    fn tcp_of_ipv4_has_addresses_and_ports_with_a_tag_or_without() {
        let rest = ipv4(6, 0x4000, &[0x10, 0x92, 0, 80, 0, 0]);
        let flow = read(&rest);
        assert_eq!((flow.source_mac[5], flow.target_mac[5], flow.ether_type), (1, 2, 0x800));
        assert_eq!(flow.addresses, Some(([10, 0, 0, 1].into(), [10, 0, 0, 2].into())));
        assert_eq!((flow.protocol, flow.ports, flow.vlan), (Some(6), Some((4242, 80)), None));
        let tagged = read(&[&[0x81, 0, 0xa0, 7], &rest[..]].concat());
        assert_eq!(tagged, Flow { vlan: Some(7), ..flow });
        assert_eq!(read(&[&[0x81, 0, 0xa0, 0], &rest[..]].concat()), flow, "a priority");
        // Later fragments, other protocols, and ends of the bytes.
        assert_eq!(read(&ipv4(6, 5, &[1; 20])), Flow { ports: None, ..flow });
        let gre = Flow { ports: None, protocol: Some(47), ..flow };
        assert_eq!(read(&ipv4(47, 0, &[1; 20])), gre);
        assert_eq!(read(&ipv4(6, 0, &[1, 2, 3])), Flow { ports: None, ..flow });
        assert_eq!(read(&rest[..15]).addresses, None);
        assert_eq!(Flow::read(&ETHERNET), None);
    }

    #[test]
    fn ports_are_behind_the_extension_headers_of_ipv6() {
        let mut header = [0; 40];
        (header[0], header[6], header[23], header[39]) = (0x60, 0, 1, 2);
        let hop_by_hop = [60, 0, 0, 0, 0, 0, 0, 0];
        let options = [44, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let fragment = |offset: u8| [17, 0, 0, offset << 3 | 1, 0, 0, 0, 9];
        let udp = [0, 53, 1, 0, 0, 8, 0, 0];
        let with = |fragment: [u8; 8]| {
            read(&[&[0x86, 0xdd], &header[..], &hop_by_hop, &options, &fragment, &udp].concat())
        };
        let flow = with(fragment(0));
        let addresses = [1, 2].map(|last| IpAddr::from(Ipv6Addr::from(last)));
        assert_eq!(flow.addresses, Some((addresses[0], addresses[1])));
        assert_eq!((flow.protocol, flow.ports), (Some(17), Some((53, 256))));
        assert_eq!(with(fragment(1)), Flow { ports: None, ..flow });
    }

    #[test]
    fn arp_has_the_addresses_that_it_is_about() {
        let mut arp = vec![8, 6, 0, 1, 8, 0, 6, 4, 0, 1];
        arp.extend([2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 10, 0, 0, 9]);
        let flow = read(&arp);
        assert_eq!(flow.addresses, Some(([10, 0, 0, 1].into(), [10, 0, 0, 9].into())));
        assert_eq!((flow.protocol, flow.ports), (None, None));
    }
}
