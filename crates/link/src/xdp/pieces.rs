//! Frames in several chunks.

use super::ETHERNET_BYTES;
use crate::frame::{Piece, Pieces};

/// The pieces of a frame so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Partial {
    pub(super) pieces: Pieces,
    /// The frame has more pieces than a frame can have.
    pub(super) overflow: bool,
}

impl Partial {
    /// Appends a piece. False if its chunk goes back at once, because no frame has it: the others
    /// go back with the frame.
    pub(super) fn push(&mut self, piece: Piece) -> bool {
        // Pieces end at the first empty one.
        if piece.len_bytes() == 0 {
            return false;
        }
        let has_room = self.pieces.push(piece);
        self.overflow |= !has_room;
        has_room
    }
}

/// The pieces behind the Ethernet header; `None` if the first one has nothing behind it. No driver
/// splits a frame there, and without that piece its chunk would not be returned with the frame.
pub(super) fn payload(pieces: &Pieces) -> Option<Pieces> {
    let header_bytes = usize::try_from(ETHERNET_BYTES).unwrap_or(0);
    pieces.part(0, usize::MAX).next().filter(|first| first.len_bytes() > header_bytes)?;
    let mut frame = Pieces::default();
    for piece in pieces.part(header_bytes, usize::MAX) {
        frame.push(piece);
    }
    Some(frame)
}

#[cfg(test)]
mod tests {
    use sidecore_linux::CHUNK_BYTES;

    use super::*;

    fn chunks(pieces: &Pieces) -> Vec<u64> {
        let chunk = |piece: Piece| piece.address().0 / u64::from(CHUNK_BYTES);
        pieces.part(0, usize::MAX).map(chunk).collect()
    }

    /// The chunks of a frame are found again by its pieces.
    #[test]
    fn a_frame_has_a_piece_in_each_of_its_chunks_or_is_none() {
        for first in [1, 13, 14, 15, 100] {
            let mut partial = Partial::default();
            for (chunk, len_bytes) in [(3, first), (7, 200), (5, 1)] {
                assert!(partial.push(Piece::new(chunk * CHUNK_BYTES + 256, len_bytes)));
            }
            let frame = payload(&partial.pieces).map(|frame| chunks(&frame));
            assert_eq!(frame, (first > ETHERNET_BYTES).then(|| vec![3, 7, 5]), "{first}");
        }
    }

    #[test]
    fn an_empty_piece_is_none_of_the_frame() {
        let mut partial = Partial::default();
        for (chunk, len_bytes, is_kept) in [(1, 0, false), (2, 60, true), (3, 0, false)] {
            assert_eq!(partial.push(Piece::new(chunk * CHUNK_BYTES, len_bytes)), is_kept);
        }
        assert!(partial.push(Piece::new(4 * CHUNK_BYTES, 8)) && !partial.overflow);
        assert_eq!(chunks(&payload(&partial.pieces).unwrap()), [2, 4]);
    }
}
