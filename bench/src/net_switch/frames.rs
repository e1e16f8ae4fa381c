//! The frames: UDP datagrams, or TCP segments that the receiver takes uncut, with a sequence number
//! and words that follow from it in each cache line.
//!
//! Offsets are those of a buffer that begins with the virtio header.

use sidecore_driver::FrameBuffer;

/// Size of the virtio header.
pub(super) const HEADER_BYTES: usize = 12;
/// The most words in front of the sequence number.
const WORDS_MAX: usize = 9;
/// The word that has the end of the receiver's address and the sender's.
const STATIONS_AT: usize = 16;
/// The word that ends with UDP's source port, and the one that begins with its destination port.
const PORT_WORDS: [usize; 2] = [5, 6];
/// The bytes for each of which the payload has a word.
const LINE_BYTES: usize = 64;
const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// The largest segment that fits in an MTU of 1500.
const SEGMENT_BYTES: u16 = 1448;

/// The address of the station of this number.
pub(super) fn station(number: usize) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, number as u8 + 1]
}

/// Frames of one size from one station to another one.
#[derive(Clone, Debug)]
pub(super) struct Frames {
    /// The headers, as words in front of the sequence number.
    words: [u64; WORDS_MAX],
    /// The place of the sequence number.
    sequence_at: usize,
    /// The place of the first word that follows from it.
    lines_at: usize,
    len_bytes: usize,
    flows: u64,
}

impl Frames {
    /// Frames of `bytes` without the virtio header, all of one flow. Frames that are `large` are to
    /// be cut if their receiver cannot take them.
    pub(super) fn new(from: usize, to: usize, bytes: u32, large: bool) -> Self {
        let mut head = [0; 8 * WORDS_MAX];
        let bytes = bytes as usize;
        if large {
            head[..HEADER_BYTES].copy_from_slice(&gso_header());
        }
        let ip_at = HEADER_BYTES + ETHERNET_BYTES;
        let transport_at = ip_at + IPV4_BYTES;
        let ip_bytes = (bytes - ETHERNET_BYTES) as u16;
        let transport_bytes = ip_bytes - IPV4_BYTES as u16;
        head[HEADER_BYTES..][..6].copy_from_slice(&station(to));
        head[HEADER_BYTES + 6..][..6].copy_from_slice(&station(from));
        head[ip_at - 2..ip_at].copy_from_slice(&[8, 0]);
        let protocol = if large { TCP } else { UDP };
        let ip = &mut head[ip_at..transport_at];
        (ip[0], ip[8], ip[9]) = (0x45, 64, protocol);
        ip[2..4].copy_from_slice(&ip_bytes.to_be_bytes());
        ip[12..16].copy_from_slice(&[10, 0, 0, from as u8 + 1]);
        ip[16..20].copy_from_slice(&[10, 0, 0, to as u8 + 1]);
        let checksum = !sum(ip);
        let mut pseudo_header = [0; 12];
        pseudo_header[..8].copy_from_slice(&ip[12..20]);
        pseudo_header[9] = protocol;
        pseudo_header[10..].copy_from_slice(&transport_bytes.to_be_bytes());
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        let transport = &mut head[transport_at..];
        transport[..4].copy_from_slice(&[0x10, 0, 0x20, 0]);
        if large {
            // Five words of header, ACK; the sum that the checksum begins with.
            (transport[12], transport[13]) = (0x50, 0x10);
            transport[16..18].copy_from_slice(&sum(&pseudo_header).to_be_bytes());
        } else {
            // UDP's checksum is zero: there is none.
            transport[4..6].copy_from_slice(&transport_bytes.to_be_bytes());
        }
        let mut words = [0; WORDS_MAX];
        for (word, bytes) in words.iter_mut().zip(head.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let (sequence_at, lines_at) = if large { (72, 128) } else { (56, 64) };
        Self { words, sequence_at, lines_at, len_bytes: HEADER_BYTES + bytes, flows: 1 }
    }

    /// The same with UDP's ports exchanged: answers to frames of the other direction.
    pub(super) fn answering(mut self) -> Self {
        let [from, to] = PORT_WORDS;
        let (source, target) = (self.words[from] >> 48, self.words[to] & 0xffff);
        self.words[from] ^= (source ^ target) << 48;
        self.words[to] ^= source ^ target;
        self
    }

    /// Has UDP's ports take turns as those of `flows` flows.
    pub(super) fn set_flows(&mut self, flows: u32) {
        self.flows = flows.max(1).into();
    }

    /// The size with the virtio header.
    pub(super) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Writes the frame of this number.
    #[inline]
    pub(super) fn write(&self, number: u64, buffer: FrameBuffer<'_>) {
        let mut words = self.words;
        if self.flows > 1 {
            let flow = number % self.flows;
            words[PORT_WORDS[0]] ^= (flow & 0xffff) << 48;
            words[PORT_WORDS[1]] ^= flow >> 16;
        }
        for (index, word) in words.into_iter().take(self.sequence_at / 8).enumerate() {
            buffer.set_word(8 * index, word);
        }
        buffer.set_word(self.sequence_at, number);
        for at in self.lines(0, self.len_bytes) {
            buffer.set_word(at, check_word(number, at));
        }
    }

    /// Reads the part of a frame that begins at `offset` and has `len_bytes`, and checks all words.
    /// `number` is that of the frame once its first part was read.
    #[inline]
    pub(super) fn check(
        &self,
        number: &mut Option<u64>,
        (buffer, offset, len_bytes): (FrameBuffer<'_>, usize, usize),
    ) -> bool {
        if offset == 0 {
            *number = Some(buffer.word(self.sequence_at));
        }
        let Some(number) = *number else { return false };
        let stations = offset > 0 || buffer.word(STATIONS_AT) == self.words[STATIONS_AT / 8];
        stations
            && offset.is_multiple_of(LINE_BYTES)
            && self
                .lines(offset, offset + len_bytes)
                .all(|at| buffer.word(at - offset) == check_word(number, at))
    }

    /// The places of the words of the payload between two offsets, the first of which begins a
    /// line.
    #[inline]
    fn lines(&self, from: usize, to: usize) -> impl Iterator<Item = usize> + use<> {
        (from.max(self.lines_at)..to.saturating_sub(7)).step_by(LINE_BYTES)
    }
}

#[inline]
fn check_word(number: u64, at: usize) -> u64 {
    (number ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The virtio header of a TCP segment over IPv4 that is to be cut (virtio 1.2, 5.1.6).
fn gso_header() -> [u8; HEADER_BYTES] {
    const NEEDS_CHECKSUM: u8 = 1;
    const TCP_V4: u8 = 1;
    const TCP_BYTES: u16 = 20;
    const CHECKSUM_OF_TCP: u16 = 16;
    let transport_at = (ETHERNET_BYTES + IPV4_BYTES) as u16;
    let fields = [transport_at + TCP_BYTES, SEGMENT_BYTES, transport_at, CHECKSUM_OF_TCP];
    let mut header = [0; HEADER_BYTES];
    header[..2].copy_from_slice(&[NEEDS_CHECKSUM, TCP_V4]);
    for (index, field) in fields.into_iter().enumerate() {
        header[2 + 2 * index..][..2].copy_from_slice(&field.to_le_bytes());
    }
    header
}

/// The sum of the 16-bit words in ones' complement (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(frames: &Frames) -> Vec<u8> {
        frames.words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// The offsets of Ethernet, IPv4 (RFC 791) and UDP (RFC 768) behind the virtio header.
    #[test]
    fn a_frame_is_a_datagram_between_its_stations() {
        let head = head(&Frames::new(0, 1, 64, false));
        assert_eq!(head[..12], [0; 12]);
        assert_eq!(head[12..24], [0x52, 0x54, 0, 0, 0, 2, 0x52, 0x54, 0, 0, 0, 1]);
        assert_eq!((&head[24..28], &head[28..30]), (&[8, 0, 0x45, 0][..], &[0, 50][..]));
        assert_eq!((head[35], &head[38..46]), (17, &[10, 0, 0, 1, 10, 0, 0, 2][..]));
        assert_eq!(sum(&head[26..46]), 0xffff, "IPv4's checksum");
        assert_eq!(head[46..54], [0x10, 0, 0x20, 0, 0, 30, 0, 0]);
        let answer = self::head(&Frames::new(0, 1, 64, false).answering());
        assert_eq!(answer[46..50], [0x20, 0, 0x10, 0]);
        assert_eq!((&answer[..46], &answer[50..]), (&head[..46], &head[50..]));
    }

    /// The fields of `virtio_net_hdr` (virtio 1.2, 5.1.6).
    #[test]
    fn a_large_frame_says_how_it_is_cut() {
        let head = head(&Frames::new(0, 1, 65_536, true));
        assert_eq!(head[..12], [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0]);
        assert_eq!((head[35], &head[28..30]), (6, &65_522_u16.to_be_bytes()[..]));
        assert_eq!(head[58..60], [0x50, 0x10], "the length and the flags of TCP's header");
        // 10.0.0.1, 10.0.0.2, TCP, 65502 bytes (RFC 9293, 3.1).
        let sum = 0x0a00 + 1 + 0x0a00 + 2 + 6 + 65_502_u32;
        assert_eq!(head[62..64], ((sum & 0xffff) as u16 + 1).to_be_bytes());
    }

    #[test]
    fn each_line_of_a_frame_has_a_word_behind_the_headers() {
        let lines = |bytes, large, from, to| {
            Frames::new(0, 1, bytes, large).lines(from, to).collect::<Vec<_>>()
        };
        assert_eq!(lines(64, false, 0, 76), [64]);
        assert_eq!(lines(64, false, 0, 71), [0; 0]);
        assert_eq!(lines(1500, false, 0, 1512).len(), 23);
        assert_eq!(lines(65_536, true, 0, 4096)[..2], [128, 192]);
        assert_eq!(lines(65_536, true, 4096, 8192).len(), 64);
    }
}
