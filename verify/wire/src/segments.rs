//! Packets of several frames: the wire cuts them into segments, as a network card does.

use sidecore_link::{FAKE_HEADER_BYTES, FakeHeader};

/// Cuts a packet of several frames (`segmentation_offload`) into packets of one frame each; `port`
/// is the ethertype of the frames. Other packets have no segments.
pub(crate) fn cut(packet: &[u8], port: u16) -> Vec<Vec<u8>> {
    let Some((header, rest)) = packet.split_first_chunk::<FAKE_HEADER_BYTES>() else {
        return Vec::new();
    };
    let Some((fake, payload_bytes)) = FakeHeader::decode(header, rest.len(), port) else {
        return Vec::new();
    };
    let segment_bytes = usize::from(fake.segment_bytes);
    let segment = |(index, segment): (usize, &[u8])| {
        let sequence = fake.sequence.wrapping_add((index * segment_bytes) as u32);
        let header = FakeHeader { sequence, ..fake }.encode(segment.len())?;
        Some([header.as_slice(), segment].concat())
    };
    rest[..payload_bytes].chunks(segment_bytes).enumerate().filter_map(segment).collect()
}

#[cfg(test)]
mod tests {
    use sidecore_link::Contents;

    use super::*;

    const PORT: u16 = 0x88b5;

    #[test]
    fn segments_have_the_headers_that_a_card_gives_them() {
        let contents = Contents::Frames { queue: 3 };
        let fake = FakeHeader { contents, segment_bytes: 2000, sequence: u32::MAX, port: PORT };
        let payload: Vec<u8> = (0..5000_u32).map(|at| (at / 7) as u8).collect();
        let mut packet = fake.encode(payload.len()).unwrap().to_vec();
        packet.extend(&payload);
        // Padding of the medium.
        packet.extend([0xee; 6]);
        let segments = cut(&packet, PORT);
        let mut together = Vec::new();
        for (segment, sequence) in segments.iter().zip([u32::MAX, 1999, 3999]) {
            let (header, rest) = segment.split_first_chunk().unwrap();
            let decoded = FakeHeader::decode(header, rest.len(), PORT);
            assert_eq!(decoded, Some((FakeHeader { sequence, ..fake }, rest.len())));
            together.extend(rest);
        }
        assert_eq!((segments.len(), together), (3, payload));
        assert!(cut(&packet, 1).is_empty() && cut(&packet[..39], PORT).is_empty());
        assert!(cut(&packet[..5000], PORT).is_empty(), "a part of the payload");
    }
}
