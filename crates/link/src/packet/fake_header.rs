//! The IPv4 and TCP headers in front of frames that travel as one packet (vRIO, section 4.3).
//!
//! No stack takes part: the headers are there for segmentation offload alone. A network card, or
//! the kernel in front of one that cannot, cuts the packet into segments of one size, each behind a
//! copy of the headers. Here each segment is a frame, so a receiver needs nothing of a segment's
//! neighbours; and receivers that are given segments together, or packets that were never cut, find
//! the size in a field of the header that every segment has a copy of.

use crate::options::QUEUES_MAX;

/// Bytes of both headers.
pub const FAKE_HEADER_BYTES: usize = 40;
/// The longest payload of a packet: with all headers in front it fits into 64 KiB.
pub const OFFLOAD_BYTES_MAX: usize = 65_280;

/// Addresses of "this network" (RFC 1122, 3.2.1.3), which no router forwards and no host accepts.
pub(super) const SOURCE: u32 = 0x88b5;
pub(super) const DESTINATION: u32 = 0x88b6;

/// Version 4, a header of five words.
const VERSION: u8 = 0x45;
const DONT_FRAGMENT: u8 = 0x40;
const HOPS: u8 = 1;
const TCP: u8 = 6;
/// TCP's header of five words.
const DATA_OFFSET: u8 = 0x50;
const ACK_AND_PUSH: u8 = 0x18;

/// The contents of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Frames for this link queue of the receiver.
    Frames {
        /// The queue that the frames name.
        queue: u8,
    },
    /// A message between links.
    Message {
        /// A queue of the receiver, by which the socket is chosen.
        queue: u8,
    },
}

/// The fields of the headers that have a meaning here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeHeader {
    /// Frames, or a message: the source port.
    pub contents: Contents,
    /// Size of a segment, the last one may be shorter: TCP's window, which nothing changes.
    pub segment_bytes: u16,
    /// Counts the bytes of payloads, so that segments of one packet may be put together again:
    /// TCP's sequence number. The receiver ignores it.
    pub sequence: u32,
    /// The protocol's number: the destination port.
    pub port: u16,
}

/// The high bytes of the source ports.
const FRAMES: u8 = 0x88;
const MESSAGE: u8 = 0x89;

impl FakeHeader {
    /// The headers of a packet with so many bytes of payload; `None` if it would be too long. The
    /// field of TCP's checksum has that of the pseudo header, as offloads expect it.
    #[must_use]
    pub fn encode(&self, payload_bytes: usize) -> Option<[u8; FAKE_HEADER_BYTES]> {
        if payload_bytes > OFFLOAD_BYTES_MAX {
            return None;
        }
        let payload_bytes = u16::try_from(payload_bytes).ok()?;
        let length = payload_bytes.checked_add(40)?;
        let transport = payload_bytes.checked_add(20)?;
        let (high, queue) = match self.contents {
            Contents::Frames { queue } => (FRAMES, queue),
            Contents::Message { queue } => (MESSAGE, queue),
        };
        let addresses = [SOURCE.to_be_bytes(), DESTINATION.to_be_bytes()];
        let [length_high, length_low] = length.to_be_bytes();
        let start = [VERSION, 0, length_high, length_low, 0, 0, DONT_FRAGMENT, 0, HOPS, TCP];
        let pseudo = [[0, TCP], transport.to_be_bytes()];
        let in_words = |bytes: &[[u8; 4]; 2]| {
            let [[a, b, c, d], [e, f, g, h]] = *bytes;
            sum(&[a, b, c, d, e, f, g, h])
        };
        let address_sum = in_words(&addresses);
        let header_sum = !fold(sum(&start).saturating_add(address_sum));
        let [pseudo_protocol, pseudo_length] = pseudo.map(|pair| sum(&pair));
        let pseudo_sum =
            fold(address_sum.saturating_add(pseudo_protocol).saturating_add(pseudo_length));
        let bytes = start
            .into_iter()
            .chain(header_sum.to_be_bytes())
            .chain(addresses.into_iter().flatten())
            .chain([high, queue])
            .chain(self.port.to_be_bytes())
            .chain(self.sequence.to_be_bytes())
            .chain([0, 0, 0, 0, DATA_OFFSET, ACK_AND_PUSH])
            .chain(self.segment_bytes.to_be_bytes())
            .chain(pseudo_sum.to_be_bytes())
            .chain([0, 0]);
        let mut header = [0; FAKE_HEADER_BYTES];
        header.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        Some(header)
    }

    /// The headers of a packet that has `after_bytes` behind them in its slot, and the size of its
    /// payload. `None` if it is none of this protocol, has a part of the payload only, or more or
    /// smaller segments than a packet has.
    #[must_use]
    pub fn decode(
        header: &[u8; FAKE_HEADER_BYTES],
        after_bytes: usize,
        port: u16,
    ) -> Option<(Self, usize)> {
        let byte = |at: usize| header.get(at).copied().unwrap_or(0);
        let word = |at: usize| u16::from_be_bytes([byte(at), byte(at.saturating_add(1))]);
        let long = |at: usize| {
            let [high, low] = [word(at), word(at.saturating_add(2))].map(u32::from);
            high.checked_shl(16).unwrap_or(0) | low
        };
        // A fragment has an offset, or is followed by others.
        let is_whole = word(6) & 0x3fff == 0;
        let is_ours = byte(0) == VERSION
            && byte(9) == TCP
            && is_whole
            && (long(12), long(16)) == (SOURCE, DESTINATION)
            && word(22) == port
            && byte(32) == DATA_OFFSET;
        let queue = byte(21);
        let contents = match byte(20) {
            FRAMES => Contents::Frames { queue },
            MESSAGE => Contents::Message { queue },
            _ => return None,
        };
        let payload_bytes = usize::from(word(2)).checked_sub(FAKE_HEADER_BYTES)?;
        let segment_bytes = word(34);
        let is_sound = payload_bytes > 0
            && payload_bytes <= after_bytes
            && usize::from(segment_bytes) >= SEGMENT_BYTES_MIN;
        let header = Self { contents, segment_bytes, sequence: long(24), port };
        (is_ours && is_sound).then_some((header, payload_bytes))
    }
}

/// Shorter frames gain nothing by travelling together, and a packet has 64 segments at most.
pub(super) const SEGMENT_BYTES_MIN: usize = 1024;
const _: () = assert!(QUEUES_MAX <= 255, "a queue is a byte of the source port");

/// The sum of 16-bit words in the byte order of the network (RFC 1071).
fn sum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2).map(|pair| match pair {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        _ => 0,
    });
    words.fold(0, u32::saturating_add)
}

/// The carries added to the low 16 bits.
fn fold(sum: u32) -> u16 {
    let once = (sum & 0xffff).saturating_add(sum.checked_shr(16).unwrap_or(0));
    let twice = (once & 0xffff).saturating_add(once.checked_shr(16).unwrap_or(0));
    u16::try_from(twice).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: u16 = 0x88b5;

    fn header() -> FakeHeader {
        FakeHeader {
            contents: Contents::Frames { queue: 3 },
            segment_bytes: 7762,
            sequence: 0x0102_0304,
            port: PORT,
        }
    }

    #[test]
    fn headers_are_read_as_they_were_written() {
        let message = FakeHeader { contents: Contents::Message { queue: 255 }, ..header() };
        for header in [header(), message] {
            for payload_bytes in [1, 1024, OFFLOAD_BYTES_MAX] {
                let bytes = header.encode(payload_bytes).unwrap();
                let decoded = FakeHeader::decode(&bytes, payload_bytes + 3, PORT);
                assert_eq!(decoded, Some((header, payload_bytes)));
            }
        }
        assert_eq!(header().encode(OFFLOAD_BYTES_MAX + 1), None);
    }

    #[test]
    fn the_checksum_of_the_ip_header_is_right() {
        let bytes = header().encode(5000).unwrap();
        assert_eq!(fold(sum(&bytes[..20])), 0xffff);
        // Of the pseudo header: both addresses, the protocol and the length.
        let pseudo = sum(&bytes[12..20]) + 6 + 5020;
        assert_eq!(bytes[36..38], fold(pseudo).to_be_bytes());
    }

    #[test]
    fn packets_of_others_and_those_that_lie_are_refused() {
        let good = header().encode(20_000).unwrap();
        let decode = |bytes: &[u8; 40], after| FakeHeader::decode(bytes, after, PORT);
        assert!(decode(&good, 20_000).is_some());
        assert_eq!(decode(&good, 19_999), None, "a part of the payload");
        assert_eq!(FakeHeader::decode(&good, 20_000, 1), None, "another port");
        let with = |changes: &[(usize, u8)]| {
            let mut bytes = good;
            changes.iter().for_each(|(at, value)| bytes[*at] = *value);
            decode(&bytes, 65_535)
        };
        for (at, value) in [(0, 0x46), (0, 0x65), (9, 17), (12, 1), (19, 1), (22, 0), (32, 0x60)] {
            assert_eq!(with(&[(at, value)]), None, "byte {at} is {value:#x}");
        }
        assert_eq!(with(&[(6, 0x20)]), None, "a fragment");
        assert_eq!(with(&[(7, 1)]), None, "a fragment behind others");
        assert_eq!(with(&[(20, 0x90)]), None, "unknown contents");
        assert_eq!(with(&[(2, 0), (3, 40)]), None, "no payload");
        assert_eq!(with(&[(2, 0), (3, 0)]), None, "no length");
        assert_eq!(with(&[(34, 0), (35, 0)]), None, "segments of no bytes");
        assert_eq!(with(&[(34, 3), (35, 255)]), None, "too many segments");
        assert!(with(&[(34, 4), (35, 0)]).is_some());
    }
}
