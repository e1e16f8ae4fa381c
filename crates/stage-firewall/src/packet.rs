//! The facts of a frame that rules and connections are about.

use sidecore_net::{DropCause, PlainFlow};

const TYPE_IPV4: u16 = 0x0800;
const TYPE_ARP: u16 = 0x0806;
const TYPE_IPV6: u16 = 0x86dd;

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMPV6: u8 = 58;

const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const TCP_BYTES: usize = 20;
const UDP_BYTES: usize = 8;
const ICMP_BYTES: usize = 8;

/// IPv6 extension headers that a packet may have.
const EXTENSIONS_MAX: usize = 6;
const NEXT_HOP_BY_HOP: u8 = 0;
const NEXT_ROUTING: u8 = 43;
const NEXT_FRAGMENT: u8 = 44;
const NEXT_AUTHENTICATION: u8 = 51;
const NEXT_DESTINATION: u8 = 60;

/// Kinds of frames, as a set.
pub(crate) mod kind {
    pub(crate) const IPV4: u8 = 1;
    /// Without neighbour discovery.
    pub(crate) const IPV6: u8 = 2;
    pub(crate) const ARP: u8 = 4;
    /// Neighbour discovery (RFC 4861).
    pub(crate) const DISCOVERY: u8 = 8;
    pub(crate) const OTHER: u8 = 16;
}

/// Flags of TCP (RFC 9293, 3.1).
pub(crate) mod tcp {
    pub(crate) const FIN: u8 = 1;
    pub(crate) const SYN: u8 = 2;
    pub(crate) const RST: u8 = 4;
    pub(crate) const ACK: u8 = 16;
}

/// A message of ICMP that does more than carry a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// None: another protocol.
    None,
    EchoRequest,
    EchoReply,
    /// An error about the packet that it quotes from this offset in the payload on.
    Error(usize),
    Other,
}

/// The place of a fragment in its packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fragment {
    /// The packet is whole.
    Whole,
    /// The first one, with the identification.
    First(u32),
    /// A later one.
    Later(u32),
}

/// The facts of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    /// One of [`kind`].
    pub kind: u8,
    pub ether_type: u16,
    pub protocol: u8,
    /// Addresses; IPv4 in the lowest 32 bits.
    pub source: u128,
    pub target: u128,
    /// Ports, or twice the identifier of an echo; zero otherwise.
    pub source_port: u16,
    pub target_port: u16,
    pub has_ports: bool,
    pub tcp_flags: u8,
    /// The type of an ICMP message.
    pub icmp_type: Option<u8>,
    pub message: Message,
    pub fragment: Fragment,
}

/// The bytes of one packet: not behind its end, nor behind the copy.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    #[inline]
    fn array<const N: usize>(self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..)?.first_chunk().copied()
    }

    #[inline]
    fn byte(self, at: usize) -> Option<u8> {
        self.0.get(at).copied()
    }

    #[inline]
    fn be16(self, at: usize) -> Option<u16> {
        self.array(at).map(u16::from_be_bytes)
    }

    #[inline]
    fn be32(self, at: usize) -> Option<u32> {
        self.array(at).map(u32::from_be_bytes)
    }

    /// Whether so many bytes follow.
    fn has(self, at: usize, len_bytes: usize) -> bool {
        at.checked_add(len_bytes).is_some_and(|end| end <= self.0.len())
    }
}

impl Packet {
    pub const fn of_kind(kind: u8, ether_type: u16) -> Self {
        Self {
            kind,
            ether_type,
            protocol: 0,
            source: 0,
            target: 0,
            source_port: 0,
            target_port: 0,
            has_ports: false,
            tcp_flags: 0,
            icmp_type: None,
            message: Message::None,
            fragment: Fragment::Whole,
        }
    }

    /// The facts of a frame with this flow.
    #[inline]
    pub fn plain(flow: &PlainFlow, tcp_flags: u8) -> Self {
        let ether_type = flow.ether_type();
        let kind = if ether_type == TYPE_IPV4 { kind::IPV4 } else { kind::IPV6 };
        let mut packet = Self::of_kind(kind, ether_type);
        packet.protocol = flow.protocol();
        (packet.source, packet.target) = flow.addresses();
        (packet.source_port, packet.target_port) = flow.ports();
        (packet.has_ports, packet.tcp_flags) = (true, tcp_flags);
        packet
    }

    /// Reads the facts of a frame of this type, from its payload.
    ///
    /// # Errors
    /// Headers that are wrong or not whole.
    #[inline]
    pub fn read(ether_type: u16, payload: &[u8]) -> Result<Self, DropCause> {
        match ether_type {
            TYPE_IPV4 => Self::ipv4(payload),
            TYPE_IPV6 => Self::ipv6(payload),
            TYPE_ARP => Ok(Self::of_kind(kind::ARP, TYPE_ARP)),
            other => Ok(Self::of_kind(kind::OTHER, other)),
        }
    }

    #[inline]
    fn ipv4(payload: &[u8]) -> Result<Self, DropCause> {
        let wrong = DropCause::Headers;
        let header: &[u8; IPV4_BYTES] = payload.first_chunk().ok_or(wrong)?;
        let [first, _, long, short, id_high, id_low, part_high, part_low, ..] = *header;
        let header_bytes = usize::from(first & 15).wrapping_mul(4);
        let total_bytes = usize::from(u16::from_be_bytes([long, short]));
        if first >> 4 != 4 || header_bytes < IPV4_BYTES || total_bytes < header_bytes {
            return Err(wrong);
        }
        let bytes = Bytes(payload.get(..total_bytes.min(payload.len())).unwrap_or(payload));
        let [.., a, b, c, d, e, f, g, h] = *header;
        let mut packet = Self::of_kind(kind::IPV4, TYPE_IPV4);
        packet.protocol = bytes.byte(9).ok_or(wrong)?;
        packet.source = u32::from_be_bytes([a, b, c, d]).into();
        packet.target = u32::from_be_bytes([e, f, g, h]).into();
        let part = u16::from_be_bytes([part_high, part_low]);
        if part & 0x3fff != 0 {
            let id = u32::from(u16::from_be_bytes([id_high, id_low]));
            return packet.fragment(bytes, header_bytes, (part & 0x1fff, id));
        }
        packet.transport(bytes, header_bytes).ok_or(wrong)
    }

    fn ipv6(payload: &[u8]) -> Result<Self, DropCause> {
        let wrong = DropCause::Headers;
        let whole = Bytes(payload);
        let len_bytes = usize::from(whole.be16(4).ok_or(wrong)?);
        if whole.byte(0).ok_or(wrong)? >> 4 != 6 || !whole.has(0, IPV6_BYTES) {
            return Err(wrong);
        }
        let end = match len_bytes {
            // A jumbogram, whose length is elsewhere (RFC 2675).
            0 => payload.len(),
            _ => len_bytes.saturating_add(IPV6_BYTES).min(payload.len()),
        };
        let bytes = Bytes(payload.get(..end).unwrap_or(payload));
        let mut packet = Self::of_kind(kind::IPV6, TYPE_IPV6);
        packet.source = u128::from_be_bytes(bytes.array(8).ok_or(wrong)?);
        packet.target = u128::from_be_bytes(bytes.array(24).ok_or(wrong)?);
        let (mut next, mut at) = (bytes.byte(6).ok_or(wrong)?, IPV6_BYTES);
        for _ in 0..EXTENSIONS_MAX {
            let units = || bytes.byte(at.wrapping_add(1)).map(usize::from);
            let header_bytes = match next {
                NEXT_HOP_BY_HOP | NEXT_ROUTING | NEXT_DESTINATION => {
                    units().ok_or(wrong)?.wrapping_add(1).wrapping_mul(8)
                }
                NEXT_AUTHENTICATION => units().ok_or(wrong)?.wrapping_add(2).wrapping_mul(4),
                NEXT_FRAGMENT => 8,
                _ => {
                    packet.protocol = next;
                    return packet.transport(bytes, at).ok_or(wrong);
                }
            };
            let header_at = at;
            at = at.wrapping_add(header_bytes);
            if !bytes.has(0, at) {
                return Err(wrong);
            }
            let is_fragment = next == NEXT_FRAGMENT;
            next = bytes.byte(header_at).ok_or(wrong)?;
            if is_fragment {
                let part = bytes.be16(header_at.wrapping_add(2)).ok_or(wrong)?;
                let id = bytes.be32(header_at.wrapping_add(4)).ok_or(wrong)?;
                // A packet in one fragment is whole (RFC 6946).
                if part & 0xfff9 != 0 {
                    packet.protocol = next;
                    return packet.fragment(bytes, at, (part >> 3, id));
                }
            }
        }
        Err(wrong)
    }

    /// A fragment whose data begin at `at`; its offset is in units of 8 bytes.
    fn fragment(
        mut self,
        bytes: Bytes<'_>,
        at: usize,
        (offset, id): (u16, u32),
    ) -> Result<Self, DropCause> {
        if offset == 0 {
            // The first fragment has all headers (RFC 1858, RFC 7112).
            let mut first = self.transport(bytes, at).ok_or(DropCause::Headers)?;
            first.fragment = Fragment::First(id);
            return Ok(first);
        }
        let overwrites = self.protocol == TCP && usize::from(offset).wrapping_mul(8) < TCP_BYTES;
        if overwrites {
            return Err(DropCause::Fragment);
        }
        self.fragment = Fragment::Later(id);
        Ok(self)
    }

    /// Reads the transport header at `at`.
    #[inline]
    fn transport(mut self, bytes: Bytes<'_>, at: usize) -> Option<Self> {
        match self.protocol {
            TCP | UDP => {
                let header_bytes = if self.protocol == TCP { TCP_BYTES } else { UDP_BYTES };
                if !bytes.has(at, header_bytes) {
                    return None;
                }
                let ports = bytes.be32(at)?;
                (self.source_port, self.target_port) = ((ports >> 16) as u16, ports as u16);
                self.has_ports = true;
                if self.protocol == TCP {
                    self.tcp_flags = bytes.byte(at.wrapping_add(13))?;
                }
            }
            ICMP if self.kind == kind::IPV4 => self.icmp(bytes, at, (8, 0), &[3, 11, 12])?,
            ICMPV6 if self.kind == kind::IPV6 => {
                self.icmp(bytes, at, (128, 129), &[1, 2, 3, 4])?;
                if matches!(self.icmp_type, Some(133..=137)) {
                    self.kind = kind::DISCOVERY;
                }
            }
            _ => {}
        }
        Some(self)
    }

    fn icmp(
        &mut self,
        bytes: Bytes<'_>,
        at: usize,
        (request, reply): (u8, u8),
        errors: &[u8],
    ) -> Option<()> {
        if !bytes.has(at, ICMP_BYTES) {
            return None;
        }
        let icmp_type = bytes.byte(at)?;
        self.icmp_type = Some(icmp_type);
        if icmp_type == request || icmp_type == reply {
            let id = bytes.be16(at.wrapping_add(4))?;
            (self.source_port, self.target_port) = (id, id);
        }
        self.message = match icmp_type {
            _ if icmp_type == request => Message::EchoRequest,
            _ if icmp_type == reply => Message::EchoReply,
            _ if errors.contains(&icmp_type) => Message::Error(at.wrapping_add(ICMP_BYTES)),
            _ => Message::Other,
        };
        Some(())
    }

    /// The packet that an error quotes: its addresses and ports. `None` if the quotation is too
    /// short, a later fragment, or itself an error.
    pub fn quoted(&self, payload: &[u8]) -> Option<Self> {
        let Message::Error(at) = self.message else { return None };
        let quotation = payload.get(at..)?;
        let bytes = Bytes(quotation);
        let mut inner = Self::of_kind(self.kind, self.ether_type);
        let at = if self.kind == kind::IPV4 {
            let first = bytes.byte(0)?;
            let is_first = bytes.be16(6)? & 0x1fff == 0;
            if first >> 4 != 4 || first & 15 < 5 || !is_first {
                return None;
            }
            inner.protocol = bytes.byte(9)?;
            inner.source = bytes.be32(12)?.into();
            inner.target = bytes.be32(16)?.into();
            usize::from(first & 15).wrapping_mul(4)
        } else {
            if bytes.byte(0)? >> 4 != 6 {
                return None;
            }
            inner.protocol = bytes.byte(6)?;
            inner.source = u128::from_be_bytes(bytes.array(8)?);
            inner.target = u128::from_be_bytes(bytes.array(24)?);
            IPV6_BYTES
        };
        match inner.protocol {
            // Eight bytes of the transport header are in every error (RFC 792).
            TCP | UDP => {
                let ports = bytes.be32(at)?;
                (inner.source_port, inner.target_port) = ((ports >> 16) as u16, ports as u16);
            }
            ICMP | ICMPV6 => {
                let is_request = bytes.byte(at)? == if self.kind == kind::IPV4 { 8 } else { 128 };
                if !is_request {
                    return None;
                }
                let id = bytes.be16(at.wrapping_add(4))?;
                (inner.source_port, inner.target_port) = (id, id);
            }
            _ => {}
        }
        Some(inner)
    }
}
