//! Offloads in software: checksums, and the cutting of large frames. All of it works on a private
//! copy of the frame, because a station can change its own memory at any time.

use sidecore_spec_virtio::net::gso;

use crate::bytes::{array, be16, be32, byte, put};
use crate::guard::last_header;
use crate::head::{HEAD_BYTES, Head, PACKET_BYTES_MAX, TYPE_IPV4, TYPE_IPV6};

const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const TCP_CHECKSUM_AT: usize = 16;
const UDP_CHECKSUM_AT: usize = 6;
const UDP_BYTES: usize = 8;
const TCP_FLAGS_AT: usize = 13;
const TCP_FIN_PSH: u8 = 9;
const TCP_CWR: u8 = 0x80;

/// Room for a private copy of the largest frame.
pub(crate) const COPY_BYTES: usize = PACKET_BYTES_MAX + 18;

/// The size of all headers of a frame that is to be cut, from the Ethernet header on; `None` if the
/// frame is not what its virtio header says.
pub(crate) fn headers(head: &Head) -> Option<usize> {
    let payload = head.payload();
    let is_udp = head.packet.gso_type == gso::UDP_L4;
    let protocol = if is_udp { PROTOCOL_UDP } else { PROTOCOL_TCP };
    let is_ipv4 = head.ether_type == TYPE_IPV4;
    let is_right = match head.packet.gso_type & !gso::ECN {
        gso::TCPV4 => is_ipv4,
        gso::TCPV6 => !is_ipv4,
        _ => true,
    };
    if !is_right {
        return None;
    }
    let transport_at = if is_ipv4 {
        ipv4_transport(payload, protocol)?
    } else if head.ether_type == TYPE_IPV6 && byte(payload, 0)? >> 4 == 6 {
        last_header(payload).filter(|(next, _)| *next == protocol)?.1
    } else {
        return None;
    };
    let (checksum_at, transport_bytes) = if is_udp {
        (UDP_CHECKSUM_AT, UDP_BYTES)
    } else {
        let offset = byte(payload, transport_at.checked_add(12)?)? >> 4;
        (TCP_CHECKSUM_AT, usize::from(offset).checked_mul(4).filter(|bytes| *bytes >= 20)?)
    };
    let start = head.payload_at.checked_add(transport_at)?;
    let end = start.checked_add(transport_bytes)?;
    let is_there = end <= head.frame().len() && end < head.len_bytes();
    let is_named = usize::from(head.packet.csum_start) == start
        && usize::from(head.packet.csum_offset) == checksum_at;
    (is_there && is_named).then_some(end)
}

/// Where the transport header of an IPv4 packet begins, which is not a fragment.
fn ipv4_transport(payload: &[u8], protocol: u8) -> Option<usize> {
    let first = byte(payload, 0)?;
    let header_bytes = usize::from(first & 15).checked_mul(4)?;
    let is_whole = be16(payload, 6)? & 0x3fff == 0;
    let is_right = first >> 4 == 4 && header_bytes >= 20 && byte(payload, 9)? == protocol;
    (is_whole && is_right).then_some(header_bytes)
}

/// The sum of 16-bit words in ones' complement, not folded (RFC 1071). An odd byte at the end is
/// padded.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    // The order of bytes makes no difference for the sum, only for its result (RFC 1071, 2B).
    let mut sum = words
        .iter()
        .fold(0_u64, |sum, word| sum.wrapping_add(u64::from(u32::from_ne_bytes(*word))));
    let mut last = [0; 4];
    put(&mut last, 0, rest);
    sum = sum.wrapping_add(u64::from(u32::from_ne_bytes(last)));
    u64::from(fold(sum).to_be())
}

/// The sum in 16 bits.
pub(crate) const fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff).wrapping_add(sum >> 16);
    }
    sum as u16
}

/// The checksum for a sum: zero is written as its other form, because a UDP checksum of zero is
/// none.
const fn complement(sum: u64) -> u16 {
    match !fold(sum) {
        0 => 0xffff,
        checksum => checksum,
    }
}

/// Completes the partial checksum of a whole frame. False if it is not inside of the frame.
pub(crate) fn complete_checksum(frame: &mut [u8], start: usize, offset: usize) -> bool {
    let Some(covered) = frame.get(start..) else {
        return false;
    };
    let checksum = complement(sum(covered));
    put(frame, start.saturating_add(offset), &checksum.to_be_bytes())
}

/// How a frame is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    payload_at: usize,
    transport_at: usize,
    /// Size of all headers.
    headers: usize,
    is_ipv4: bool,
    is_udp: bool,
    /// Bytes of data in each part.
    size: usize,
    /// Bytes of data in all.
    data: usize,
    /// The receiver computes the checksums of the parts.
    leaves_checksum: bool,
}

/// One of the parts of a frame.
pub(crate) struct CutPart {
    /// Its headers.
    pub headers: [u8; HEAD_BYTES],
    /// Their size.
    pub headers_bytes: usize,
    /// Where its data is in the whole frame.
    pub data: std::ops::Range<usize>,
}

impl Cut {
    /// The cut of a frame whose headers were checked.
    pub fn new(head: &Head, leaves_checksum: bool) -> Option<Self> {
        let headers = headers(head)?;
        Some(Self {
            payload_at: head.payload_at,
            transport_at: head.packet.csum_start.into(),
            headers,
            is_ipv4: head.ether_type == TYPE_IPV4,
            is_udp: head.packet.gso_type == gso::UDP_L4,
            size: usize::from(head.packet.gso_size).max(1),
            data: head.len_bytes().checked_sub(headers)?,
            leaves_checksum,
        })
    }

    /// The number of parts.
    pub const fn parts(&self) -> usize {
        self.data.div_ceil(self.size)
    }

    /// Size of the longest part.
    pub const fn longest(&self) -> usize {
        let data = if self.data < self.size { self.data } else { self.size };
        self.headers.saturating_add(data)
    }

    /// The part of this number of the private copy of a frame.
    pub fn part(&self, frame: &[u8], number: usize) -> Option<CutPart> {
        let skip = number.checked_mul(self.size).filter(|skip| *skip < self.data)?;
        let start = self.headers.checked_add(skip)?;
        let len_bytes = self.size.min(self.data.checked_sub(skip)?);
        let data = start..start.checked_add(len_bytes)?;
        let mut headers = [0; HEAD_BYTES];
        headers.get_mut(..self.headers)?.copy_from_slice(frame.get(..self.headers)?);
        let part = headers.get_mut(..self.headers)?;
        let is_last = skip.checked_add(self.size)? >= self.data;
        self.set_network(part, number, len_bytes)?;
        self.set_transport(part, number, skip, is_last, len_bytes)?;
        self.set_checksum(part, frame.get(data.clone())?)?;
        Some(CutPart { headers, headers_bytes: self.headers, data })
    }

    /// Sets length, identification and checksum of the IP header.
    fn set_network(&self, part: &mut [u8], number: usize, len_bytes: usize) -> Option<()> {
        let packet_bytes = self.headers.checked_sub(self.payload_at)?.checked_add(len_bytes)?;
        let ip = part.get_mut(self.payload_at..)?;
        if !self.is_ipv4 {
            let behind = u16::try_from(packet_bytes.checked_sub(40)?).ok()?;
            return put(ip, 4, &behind.to_be_bytes()).then_some(());
        }
        let id = be16(ip, 4)?.wrapping_add(number as u16);
        put(ip, 2, &u16::try_from(packet_bytes).ok()?.to_be_bytes());
        put(ip, 4, &id.to_be_bytes());
        put(ip, 10, &[0, 0]);
        let header_bytes = self.transport_at.checked_sub(self.payload_at)?;
        let checksum = !fold(sum(ip.get(..header_bytes)?));
        put(ip, 10, &checksum.to_be_bytes()).then_some(())
    }

    /// Sets sequence number and flags of TCP, or the length of UDP.
    fn set_transport(
        &self,
        part: &mut [u8],
        number: usize,
        skip: usize,
        is_last: bool,
        len_bytes: usize,
    ) -> Option<()> {
        let transport = part.get_mut(self.transport_at..)?;
        if self.is_udp {
            let datagram = u16::try_from(len_bytes.checked_add(UDP_BYTES)?).ok()?;
            return put(transport, 4, &datagram.to_be_bytes()).then_some(());
        }
        let sequence = be32(transport, 4)?.wrapping_add(u32::try_from(skip).ok()?);
        put(transport, 4, &sequence.to_be_bytes());
        let flags = transport.get_mut(TCP_FLAGS_AT)?;
        if !is_last {
            *flags &= !TCP_FIN_PSH;
        }
        if number > 0 {
            // One segment tells the peer that the window was reduced (RFC 3168, 6.1.2).
            *flags &= !TCP_CWR;
        }
        Some(())
    }

    /// Sets the checksum of the transport, or the part of it that the receiver completes.
    fn set_checksum(&self, part: &mut [u8], data: &[u8]) -> Option<()> {
        let transport_bytes = self.headers.checked_sub(self.transport_at)?;
        let len_bytes = transport_bytes.checked_add(data.len())?;
        let checksum_at = if self.is_udp { UDP_CHECKSUM_AT } else { TCP_CHECKSUM_AT };
        let pseudo = self.pseudo_header(part, len_bytes)?;
        let transport = part.get_mut(self.transport_at..)?;
        put(transport, checksum_at, &[0, 0]);
        let checksum = if self.leaves_checksum {
            fold(pseudo)
        } else {
            // Headers of TCP and UDP have an even size, so that the data begins a word.
            let all = pseudo.wrapping_add(sum(transport)).wrapping_add(sum(data));
            complement(all)
        };
        put(transport, checksum_at, &checksum.to_be_bytes()).then_some(())
    }

    /// The sum of the pseudo header (RFC 9293, 3.1; RFC 8200, 8.1).
    fn pseudo_header(&self, part: &[u8], len_bytes: usize) -> Option<u64> {
        let ip = part.get(self.payload_at..)?;
        let addresses =
            if self.is_ipv4 { sum(&array::<8>(ip, 12)?) } else { sum(&array::<32>(ip, 8)?) };
        let protocol = if self.is_udp { PROTOCOL_UDP } else { PROTOCOL_TCP };
        Some(addresses.wrapping_add(protocol.into()).wrapping_add(len_bytes as u64))
    }
}
