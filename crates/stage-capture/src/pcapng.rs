//! Blocks of a pcapng file (draft-ietf-opsawg-pcapng): one section with one Ethernet interface, in
//! little endian.

#[cfg(feature = "contract")]
mod read;

#[cfg(feature = "contract")]
pub use read::{File, Malformed, ReadPacket, read};

/// Types of blocks (section 4).
const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;

/// The word by which readers find out the byte order (4.1).
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const LINKTYPE_ETHERNET: u16 = 1;

/// Options of all blocks (3.5), and of blocks of a type.
const END: u16 = 0;
const COMMENT: u16 = 1;
const SECTION_APPLICATION: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_RESOLUTION: u16 = 9;
const PACKET_FLAGS: u16 = 2;
const PACKET_DROPS: u16 = 4;
const STATISTICS_RECEIVED: u16 = 4;
const STATISTICS_DROPPED: u16 = 5;

/// Times are in units of 10 to the power of minus this: nanoseconds.
const RESOLUTION: u8 = 9;

/// The way of a packet through the interface (4.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Received by the interface.
    Inbound = 1,
    /// Sent by it.
    Outbound = 2,
}

/// A packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Nanoseconds since 1970.
    pub at_ns: u64,
    /// Its way.
    pub direction: Direction,
    /// Its size on the wire in bytes.
    pub len_bytes: u32,
    /// Its first bytes.
    pub bytes: &'a [u8],
    /// Packets between the one before and this one that are missing in the file.
    pub lost: u64,
    /// A text for people.
    pub comment: Option<&'a str>,
}

/// Appends the beginning of a file: the section and its interface.
pub fn start(out: &mut Vec<u8>, application: &str, interface: &str, snaplen: u32) {
    block(out, SECTION, |out| {
        word(out, BYTE_ORDER);
        // Version 1.0, and a section whose length is unknown.
        out.extend_from_slice(&[1, 0, 0, 0]);
        out.extend_from_slice(&u64::MAX.to_le_bytes());
        option(out, SECTION_APPLICATION, application.as_bytes());
        option(out, END, &[]);
    });
    block(out, INTERFACE, |out| {
        out.extend_from_slice(&LINKTYPE_ETHERNET.to_le_bytes());
        out.extend_from_slice(&[0, 0]);
        word(out, snaplen);
        option(out, INTERFACE_NAME, interface.as_bytes());
        option(out, INTERFACE_RESOLUTION, &[RESOLUTION]);
        option(out, END, &[]);
    });
}

/// Appends a packet.
pub fn packet(out: &mut Vec<u8>, packet: &Packet<'_>) {
    block(out, PACKET, |out| {
        word(out, 0);
        time(out, packet.at_ns);
        word(out, u32::try_from(packet.bytes.len()).unwrap_or(u32::MAX));
        word(out, packet.len_bytes);
        out.extend_from_slice(packet.bytes);
        pad(out, packet.bytes.len());
        option(out, PACKET_FLAGS, &(packet.direction as u32).to_le_bytes());
        if packet.lost > 0 {
            option(out, PACKET_DROPS, &packet.lost.to_le_bytes());
        }
        if let Some(comment) = packet.comment {
            option(out, COMMENT, comment.as_bytes());
        }
        option(out, END, &[]);
    });
}

/// Appends the end of a file: how many packets there were, and how many of them are missing.
pub fn statistics(out: &mut Vec<u8>, at_ns: u64, received: u64, lost: u64) {
    block(out, STATISTICS, |out| {
        word(out, 0);
        time(out, at_ns);
        option(out, STATISTICS_RECEIVED, &received.to_le_bytes());
        option(out, STATISTICS_DROPPED, &lost.to_le_bytes());
        option(out, END, &[]);
    });
}

/// Appends a block, whose length is at its beginning and at its end (3.1).
fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    word(out, kind);
    let len_at = out.len();
    word(out, 0);
    body(out);
    let len_bytes = out.len().saturating_add(4).saturating_sub(start);
    let len_bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX).to_le_bytes();
    if let Some(place) = out.get_mut(len_at..).and_then(<[u8]>::first_chunk_mut::<4>) {
        *place = len_bytes;
    }
    out.extend_from_slice(&len_bytes);
}

fn word(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// Appends a time: the upper half comes first (4.3).
fn time(out: &mut Vec<u8>, at_ns: u64) {
    let [a, b, c, d, e, f, g, h] = at_ns.to_le_bytes();
    out.extend_from_slice(&[e, f, g, h, a, b, c, d]);
}

/// Appends an option. What does not fit into its 16 bits of length is cut off.
fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let len_bytes = u16::try_from(value.len()).unwrap_or(u16::MAX);
    let value = value.get(..len_bytes.into()).unwrap_or(value);
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&len_bytes.to_le_bytes());
    out.extend_from_slice(value);
    pad(out, value.len());
}

/// Appends zeros up to a multiple of 4 bytes.
fn pad(out: &mut Vec<u8>, len_bytes: usize) {
    let zeros = len_bytes.next_multiple_of(4).saturating_sub(len_bytes);
    out.extend(std::iter::repeat_n(0, zeros));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_has_the_bytes_of_the_standard() {
        let mut out = Vec::new();
        packet(
            &mut out,
            &Packet {
                at_ns: 0x0102_0304_0506_0708,
                direction: Direction::Outbound,
                len_bytes: 60,
                bytes: &[0xaa; 5],
                lost: 2,
                comment: Some("why"),
            },
        );
        let words: [&[u8]; 17] = [
            &[6, 0, 0, 0],
            &[72, 0, 0, 0],
            &[0; 4],
            &[4, 3, 2, 1],
            &[8, 7, 6, 5],
            &[5, 0, 0, 0],
            &[60, 0, 0, 0],
            &[0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0, 0, 0],
            &[2, 0, 4, 0],
            &[2, 0, 0, 0],
            &[4, 0, 8, 0],
            &[2, 0, 0, 0, 0, 0, 0, 0],
            &[1, 0, 3, 0],
            b"why\0",
            &[0; 4],
            &[72, 0, 0, 0],
            &[],
        ];
        assert_eq!(out, words.concat());
    }

    /// A reader finds the next block for all lengths.
    #[test]
    fn blocks_end_where_their_lengths_say() {
        let long = "x".repeat(70_000);
        for len_bytes in [0, 1, 2, 3, 4, 65_553] {
            let mut out = Vec::new();
            start(&mut out, "test", "nic", 65_553);
            let bytes = vec![1; len_bytes];
            let comment = (len_bytes % 2 == 1).then_some(long.as_str());
            let direction = Direction::Inbound;
            let len = 65_553;
            let some =
                Packet { at_ns: 1, direction, len_bytes: len, bytes: &bytes, lost: 0, comment };
            packet(&mut out, &some);
            statistics(&mut out, 2, 1, 0);
            let (mut rest, mut kinds) = (out.as_slice(), Vec::new());
            while !rest.is_empty() {
                let field = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
                let len_bytes = field(4) as usize;
                assert_eq!((field(len_bytes - 4) as usize, len_bytes % 4), (len_bytes, 0));
                kinds.push(field(0));
                rest = &rest[len_bytes..];
            }
            assert_eq!(kinds, [SECTION, INTERFACE, PACKET, STATISTICS]);
        }
    }
}
