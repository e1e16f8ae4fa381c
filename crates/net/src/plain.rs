//! The flow of a frame, of the kinds that most frames are: TCP and UDP, whole, with no headers
//! between those of IP and of the transport.

use crate::head::{TYPE_IPV4, TYPE_IPV6};

const TCP: u8 = 6;
const UDP: u8 = 17;
const IPV4_UDP_BYTES: usize = 28;
const IPV4_TCP_BYTES: usize = 40;
const IPV6_UDP_BYTES: usize = 48;
const IPV6_TCP_BYTES: usize = 60;

/// Flags of TCP that begin, acknowledge or end a connection (RFC 9293, 3.1).
const ACK: u8 = 16;
const CHANGES: u8 = 1 | 2 | 4;

/// The addresses, ports and protocol of a plain frame, in the order of its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlainFlow {
    /// Source and target; those of IPv4 are in the first word.
    addresses: [u64; 4],
    /// Ports, type and protocol: never zero.
    rest: u64,
}

impl PlainFlow {
    /// The flow of a frame of this type and the flags of TCP, from its payload; `None` if the
    /// frame is of another kind, or its headers are wrong.
    #[must_use]
    #[inline]
    pub fn read(ether_type: u16, payload: &[u8]) -> Option<(Self, u8)> {
        match ether_type {
            TYPE_IPV4 => Self::ipv4(payload),
            TYPE_IPV6 => Self::ipv6(payload),
            _ => None,
        }
    }

    #[inline]
    fn ipv4(payload: &[u8]) -> Option<(Self, u8)> {
        let header: &[u8; IPV4_UDP_BYTES] = payload.first_chunk()?;
        let [first, _, long, short, _, _, part, part_low, _, protocol, _, _, rest @ ..] = *header;
        let [a, b, c, d, e, f, g, h, ports @ .., _, _, _, _] = rest;
        let is_whole = part & 0x3f | part_low == 0;
        let total_bytes = usize::from(u16::from_be_bytes([long, short]));
        if first != 0x45 || !is_whole {
            return None;
        }
        let tcp_flags = match protocol {
            UDP if total_bytes >= IPV4_UDP_BYTES => 0,
            TCP if total_bytes >= IPV4_TCP_BYTES => {
                tcp_flags(payload.first_chunk::<IPV4_TCP_BYTES>()?)
            }
            _ => return None,
        };
        let addresses = [u64::from_be_bytes([a, b, c, d, e, f, g, h]), 0, 0, 0];
        Some((Self { addresses, rest: pack(ports, TYPE_IPV4, protocol) }, tcp_flags))
    }

    #[inline]
    fn ipv6(payload: &[u8]) -> Option<(Self, u8)> {
        let header: &[u8; IPV6_UDP_BYTES] = payload.first_chunk()?;
        let [first, _, _, _, long, short, protocol, _, rest @ ..] = header;
        let (addresses, transport) = rest.split_first_chunk::<32>()?;
        let ports: &[u8; 4] = transport.first_chunk()?;
        // Zero is the length of a jumbogram, and less than that of any transport header.
        let total_bytes = usize::from(u16::from_be_bytes([*long, *short])).saturating_add(40);
        if first >> 4 != 6 {
            return None;
        }
        let tcp_flags = match *protocol {
            UDP if total_bytes >= IPV6_UDP_BYTES => 0,
            TCP if total_bytes >= IPV6_TCP_BYTES => {
                tcp_flags(payload.first_chunk::<IPV6_TCP_BYTES>()?)
            }
            _ => return None,
        };
        let (words, _) = addresses.as_chunks::<8>();
        let mut parts = words.iter().map(|word| u64::from_be_bytes(*word));
        let addresses = std::array::from_fn(|_| parts.next().unwrap_or(0));
        Some((Self { addresses, rest: pack(*ports, TYPE_IPV6, *protocol) }, tcp_flags))
    }

    /// Whether a frame of this flow with these flags of TCP is like the ones in the middle of a
    /// connection: it neither begins nor ends one.
    #[must_use]
    #[inline]
    pub const fn is_steady(&self, tcp_flags: u8) -> bool {
        tcp_flags & (CHANGES | ACK) == ACK || self.protocol() == UDP
    }

    /// The flow of a frame that neither begins nor ends a connection.
    #[inline]
    pub(crate) fn steady(ether_type: u16, payload: &[u8]) -> Option<Self> {
        let (flow, tcp_flags) = Self::read(ether_type, payload)?;
        flow.is_steady(tcp_flags).then_some(flow)
    }

    /// The type of the frame.
    #[must_use]
    #[inline]
    pub const fn ether_type(&self) -> u16 {
        (self.rest >> 8) as u16
    }

    /// The protocol: TCP or UDP.
    #[must_use]
    #[inline]
    pub const fn protocol(&self) -> u8 {
        self.rest as u8
    }

    /// The addresses of source and target; those of IPv4 in the lowest 32 bits.
    #[must_use]
    #[inline]
    pub const fn addresses(&self) -> (u128, u128) {
        let [first, second, third, fourth] = self.addresses;
        if self.ether_type() == TYPE_IPV4 {
            ((first >> 32) as u128, (first as u32) as u128)
        } else {
            (wide(first, second), wide(third, fourth))
        }
    }

    /// The ports of source and target.
    #[must_use]
    #[inline]
    pub const fn ports(&self) -> (u16, u16) {
        ((self.rest >> 48) as u16, (self.rest >> 32) as u16)
    }
}

#[inline]
fn tcp_flags<const N: usize>(headers: &[u8; N]) -> u8 {
    // Six bytes follow the flags: window, checksum and urgent pointer.
    headers.get(N.saturating_sub(7)).copied().unwrap_or(0)
}

#[inline]
fn pack(ports: [u8; 4], ether_type: u16, protocol: u8) -> u64 {
    let ports = u64::from(u32::from_be_bytes(ports));
    ports << 32 | u64::from(ether_type) << 8 | u64::from(protocol)
}

#[inline]
const fn wide(high: u64, low: u64) -> u128 {
    (high as u128) << 64 | low as u128
}
