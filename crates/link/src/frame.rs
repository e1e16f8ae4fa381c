//! Frames in a link's memory: where they lie, and who may use them.

use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError, RegionHint, Segments, Span};

use crate::LinkAddress;

/// The most pieces of a frame: a jumbo frame in AF_XDP's chunks, which are pages at most.
pub const PIECES_MAX: usize = 4;

/// A contiguous part of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    start: u32,
    len_bytes: u32,
}

impl Piece {
    pub(crate) const fn new(start: u32, len_bytes: u32) -> Self {
        Self { start, len_bytes }
    }

    /// The first byte, in the link's memory.
    #[must_use]
    pub const fn address(self) -> GuestAddress {
        GuestAddress(self.start as u64)
    }

    /// Size in bytes; zero only if the frame has no such piece.
    #[must_use]
    pub const fn len_bytes(self) -> usize {
        self.len_bytes as usize
    }

    /// The piece without its first `skip_bytes`, and of that at most `len_bytes`.
    fn part(self, skip_bytes: usize, len_bytes: usize) -> Self {
        let skip = u32::try_from(skip_bytes).unwrap_or(u32::MAX).min(self.len_bytes);
        let rest = self.len_bytes.saturating_sub(skip);
        Self {
            start: self.start.saturating_add(skip),
            len_bytes: u32::try_from(len_bytes).unwrap_or(u32::MAX).min(rest),
        }
    }
}

/// The pieces of a frame, in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pieces {
    pieces: [Piece; PIECES_MAX],
    len_bytes: u32,
}

impl Pieces {
    #[inline]
    pub(crate) const fn one(piece: Piece) -> Self {
        let none = Piece::new(0, 0);
        Self { pieces: [piece, none, none, none], len_bytes: piece.len_bytes }
    }

    /// Appends a piece; false if there is no room for it.
    pub(crate) fn push(&mut self, piece: Piece) -> bool {
        let Some(place) = self.pieces.iter_mut().find(|place| place.len_bytes == 0) else {
            return false;
        };
        *place = piece;
        self.len_bytes = self.len_bytes.saturating_add(piece.len_bytes);
        true
    }

    /// Bytes in all pieces.
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        self.len_bytes as usize
    }

    /// The frame's memory, if it is in one piece.
    #[inline]
    #[must_use]
    pub fn span<'a>(&self, memory: &'a GuestMemory, hint: &mut RegionHint) -> Option<Span<'a>> {
        let [piece, ..] = self.pieces;
        let is_one = piece.len_bytes == self.len_bytes;
        is_one.then(|| memory.span(piece.address(), piece.len_bytes(), hint)).flatten()
    }

    /// The pieces of `len_bytes` from byte `skip_bytes` on, or of fewer if the frame ends before.
    pub fn part(&self, skip_bytes: usize, len_bytes: usize) -> impl Iterator<Item = Piece> + '_ {
        let (mut skip, mut rest) = (skip_bytes, len_bytes);
        let whole = self.pieces.iter().take_while(|piece| piece.len_bytes > 0);
        let parts = whole.map(move |piece| {
            let part = piece.part(skip, rest);
            skip = skip.saturating_sub(piece.len_bytes());
            rest = rest.saturating_sub(part.len_bytes());
            part
        });
        parts.filter(|part| part.len_bytes > 0)
    }

    /// Copies from byte `skip_bytes` on to `to`. Returns the number of bytes, fewer than asked for
    /// if the frame ends before.
    pub fn read(&self, memory: &GuestMemory, skip_bytes: usize, to: &mut [u8]) -> usize {
        let mut done = 0_usize;
        for part in self.part(skip_bytes, to.len()) {
            let end = done.saturating_add(part.len_bytes());
            let copied = to.get_mut(done..end).is_some_and(|to| {
                memory.read_slice(part.address(), to, &mut RegionHint::default()).is_ok()
            });
            if !copied {
                break;
            }
            done = end;
        }
        done
    }

    /// Copies `from` to byte `skip_bytes` and after. Returns the number of bytes, fewer than given
    /// if the frame ends before.
    pub fn write(&self, memory: &GuestMemory, skip_bytes: usize, from: &[u8]) -> usize {
        let mut done = 0_usize;
        for part in self.part(skip_bytes, from.len()) {
            let end = done.saturating_add(part.len_bytes());
            let copied = from.get(done..end).is_some_and(|from| {
                memory.write_slice(part.address(), from, &mut RegionHint::default()).is_ok()
            });
            if !copied {
                break;
            }
            done = end;
        }
        done
    }

    /// Appends `len_bytes` from byte `skip_bytes` on to a list that is bound to the link's memory:
    /// a store then reads or writes the frame itself.
    ///
    /// # Errors
    /// The list is full, or is bound to other memory.
    pub fn push_to(
        &self,
        segments: &mut Segments,
        skip_bytes: usize,
        len_bytes: usize,
    ) -> Result<(), MemoryError> {
        for part in self.part(skip_bytes, len_bytes) {
            segments.push(part.address(), u64::from(part.len_bytes), &mut RegionHint::default())?;
        }
        Ok(())
    }
}

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Frames and buffers that were dropped by this process instead of being given back: each is lost
/// to its link for good.
#[must_use]
pub fn dropped_frames() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// A slot of a link's memory that the link's user has. A frame or a buffer ends by being given
/// back, which [`Slot::into_number`] is; a drop is a bug.
#[derive(Debug)]
pub(crate) struct Slot(u32);

impl Slot {
    pub(crate) const fn new(number: u32) -> Self {
        Self(number)
    }

    pub(crate) const fn number(&self) -> u32 {
        self.0
    }

    pub(crate) const fn into_number(self) -> u32 {
        let number = self.0;
        std::mem::forget(self);
        number
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        DROPPED.fetch_add(1, Ordering::Relaxed);
        debug_assert!(
            std::thread::panicking(),
            "slot {} was dropped instead of being given back to its link",
            self.0
        );
    }
}

/// A received frame, lent by its link until [`Link::give_back`](crate::Link::give_back).
///
/// The memory of some links is shared with a peer that can change it at any time, so a frame is
/// never a Rust slice: the header is copied out and then parsed, the payload is copied, or given to
/// a store as [`Segments`].
#[derive(Debug)]
pub struct Frame {
    /// The sender, as the medium names it. Nothing proves it.
    pub from: LinkAddress,
    pieces: Pieces,
    slot: Slot,
}

impl Frame {
    pub(crate) const fn new(from: LinkAddress, pieces: Pieces, slot: u32) -> Self {
        Self { from, pieces, slot: Slot::new(slot) }
    }

    /// Size in bytes: that of the frame sent, or more where the medium pads short frames (Ethernet,
    /// to 46 bytes).
    #[must_use]
    pub const fn len_bytes(&self) -> usize {
        self.pieces.len_bytes()
    }

    /// Where it lies in the link's memory.
    #[must_use]
    pub const fn pieces(&self) -> &Pieces {
        &self.pieces
    }

    pub(crate) fn into_slot(self) -> u32 {
        self.slot.into_number()
    }
}

/// A transmit buffer that a link has lent: to be filled, addressed and sent, or cancelled.
///
/// It holds what was sent in it before. The sender writes every byte of the frame.
#[derive(Debug)]
pub struct Buffer {
    pieces: Pieces,
    to: Option<LinkAddress>,
    len_bytes: u32,
    slot: Slot,
}

impl Buffer {
    pub(crate) const fn new(pieces: Pieces, slot: u32) -> Self {
        Self { pieces, to: None, len_bytes: 0, slot: Slot::new(slot) }
    }

    /// The longest frame that fits.
    #[must_use]
    pub const fn capacity_bytes(&self) -> usize {
        self.pieces.len_bytes()
    }

    /// Where its bytes lie in the link's memory.
    #[must_use]
    pub const fn pieces(&self) -> &Pieces {
        &self.pieces
    }

    /// Makes its first `len_bytes` a frame for `to`.
    pub fn address(&mut self, to: LinkAddress, len_bytes: usize) {
        self.to = Some(to);
        self.len_bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX);
    }

    /// The destination and the size of the frame, if there is one that fits.
    pub(crate) fn frame(&self) -> Option<(LinkAddress, usize)> {
        let len_bytes = self.len_bytes as usize;
        let to = self.to?;
        (1..=self.capacity_bytes()).contains(&len_bytes).then_some((to, len_bytes))
    }

    pub(crate) const fn slot(&self) -> u32 {
        self.slot.number()
    }

    pub(crate) fn into_slot(self) -> u32 {
        self.slot.into_number()
    }
}

#[cfg(test)]
mod tests {
    use sidecore_memory::SharedPages;

    use super::*;

    fn pieces() -> Pieces {
        let mut pieces = Pieces::one(Piece::new(100, 10));
        assert!(pieces.push(Piece::new(4096, 20)) && pieces.push(Piece::new(200, 5)));
        pieces
    }

    #[test]
    fn a_part_of_a_frame_is_cut_out_of_its_pieces() {
        let pieces = pieces();
        let part =
            |skip, len| pieces.part(skip, len).map(|p| (p.start, p.len_bytes)).collect::<Vec<_>>();
        assert_eq!(part(0, 35), [(100, 10), (4096, 20), (200, 5)]);
        assert_eq!(part(0, 1000), part(0, 35));
        assert_eq!(part(9, 2), [(109, 1), (4096, 1)]);
        assert_eq!(part(10, 20), [(4096, 20)]);
        assert_eq!(part(34, 5), [(204, 1)]);
        assert!(part(35, 5).is_empty() && part(usize::MAX, 5).is_empty() && part(3, 0).is_empty());
    }

    #[test]
    fn bytes_are_written_and_read_across_pieces_and_a_store_gets_the_same_ones() {
        let pages = SharedPages::new("frames", 8192).unwrap();
        let memory = pages.memory();
        let bytes: Vec<u8> = (1..=40).collect();
        assert_eq!(pieces().write(memory, 3, &bytes), 32, "the frame ends");
        let mut read = [0; 40];
        assert_eq!(pieces().read(memory, 0, &mut read), 35);
        assert_eq!((&read[..3], &read[3..35]), (&[0; 3][..], &bytes[..32]));
        let mut segments = Segments::with_capacity(PIECES_MAX);
        segments.bind(memory);
        pieces().push_to(&mut segments, 8, 24).unwrap();
        let mut stored = [0; 24];
        assert_eq!(
            (segments.copy_to_slice(0, &mut stored), stored),
            (24, read[8..32].try_into().unwrap())
        );
        segments.bind(&GuestMemory::empty());
        assert!(pieces().push_to(&mut segments, 8, 24).is_err());
    }

    #[test]
    fn a_buffer_is_a_frame_once_it_has_a_destination_and_a_size_that_fits() {
        let mut buffer = Buffer::new(pieces(), 7);
        assert_eq!(buffer.frame(), None);
        for (len, fits) in [(0, false), (1, true), (35, true), (36, false), (usize::MAX, false)] {
            buffer.address(LinkAddress::Peer(0), len);
            assert_eq!(buffer.frame(), fits.then_some((LinkAddress::Peer(0), len)));
        }
        assert_eq!(buffer.into_slot(), 7);
    }

    #[test]
    #[should_panic(expected = "slot 3 was dropped")]
    fn a_frame_that_is_dropped_is_a_bug() {
        drop(Frame::new(LinkAddress::Peer(0), pieces(), 3));
    }
}
