//! How the data of a request is cut into frames.

use crate::wire::DATA_HEADER_BYTES;

/// Most segments of a request: those that have arrived are bits of a word.
pub const MAX_SEGMENTS: u32 = 64;

/// The cut of one request's data: segments of one size, the last one of the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segmentation {
    len_bytes: u32,
    segment_bytes: u32,
    block_bytes: u32,
}

/// The largest segment of a device with blocks of `block_bytes`, in frames of `frame_bytes` with a
/// tag of `tag_bytes`.
///
/// Segments are whole blocks if a frame has room for one, and whole 4 KiB if it has room for two of
/// those; otherwise a block is whole segments. So an edge never has to be copied, and a read can be
/// repaired block by block.
#[must_use]
#[inline]
pub fn segment_bytes(frame_bytes: u32, tag_bytes: usize, block_bytes: u32) -> u32 {
    let header_bytes = DATA_HEADER_BYTES.saturating_add(tag_bytes);
    let room = frame_bytes.saturating_sub(u32::try_from(header_bytes).unwrap_or(u32::MAX));
    let whole = |unit: u32| {
        if unit.is_power_of_two() {
            // Nearly all devices: no division.
            return room & !unit.wrapping_sub(1);
        }
        room.checked_rem(unit).map_or(0, |rest| room.saturating_sub(rest))
    };
    if room >= 8192 && block_bytes <= 4096 {
        whole(4096)
    } else if room >= block_bytes {
        whole(block_bytes)
    } else {
        // The largest power of two, which divides the block.
        1_u32.checked_shl(room.checked_ilog2().unwrap_or(0)).unwrap_or(1)
    }
}

impl Segmentation {
    /// The cut of `len_bytes` into segments of `segment_bytes`, of a device with blocks of
    /// `block_bytes`; `None` if there are more than [`MAX_SEGMENTS`].
    #[must_use]
    #[inline]
    pub fn new(len_bytes: u32, segment_bytes: u32, block_bytes: u32) -> Option<Self> {
        let cut = Self { len_bytes, segment_bytes, block_bytes };
        (segment_bytes > 0 && cut.count() <= MAX_SEGMENTS).then_some(cut)
    }

    /// Number of segments.
    #[must_use]
    #[inline]
    pub fn count(&self) -> u32 {
        if self.segment_bytes == 0 {
            0
        } else if self.len_bytes <= self.segment_bytes {
            // Nearly all requests: no division.
            u32::from(self.len_bytes > 0)
        } else {
            self.len_bytes.div_ceil(self.segment_bytes)
        }
    }

    /// Size of the data.
    #[must_use]
    pub const fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// A bit for each segment.
    #[must_use]
    #[inline]
    pub fn all(&self) -> u64 {
        low_bits(self.count())
    }

    /// Offset and size of a segment; `None` if there is no such segment.
    #[must_use]
    #[inline]
    pub fn range(&self, index: u32) -> Option<(u32, u32)> {
        let offset_bytes = index.checked_mul(self.segment_bytes)?;
        let left = self.len_bytes.checked_sub(offset_bytes).filter(|left| *left > 0)?;
        Some((offset_bytes, left.min(self.segment_bytes)))
    }

    /// The segment with this offset and size; `None` if there is no such segment.
    #[must_use]
    #[inline(always)]
    pub fn index_of(&self, offset_bytes: u32, len_bytes: usize) -> Option<u32> {
        let index =
            if offset_bytes == 0 { 0 } else { offset_bytes.checked_div(self.segment_bytes)? };
        let (offset, len) = self.range(index)?;
        (offset == offset_bytes && usize::try_from(len) == Ok(len_bytes)).then_some(index)
    }

    /// Those of the `received` segments whose blocks have been received whole.
    #[must_use]
    pub fn whole_blocks(&self, received: u64) -> u64 {
        let group = self.block_bytes.checked_div(self.segment_bytes).unwrap_or(1).max(1);
        let mut whole = 0;
        let mut first = 0_u32;
        while first < self.count() {
            let block = low_bits(group).checked_shl(first).unwrap_or(0) & self.all();
            if received & block == block {
                whole |= block;
            }
            first = first.saturating_add(group);
        }
        whole
    }
}

/// The lowest `count` bits.
pub(crate) fn low_bits(count: u32) -> u64 {
    1_u64.checked_shl(count).map_or(u64::MAX, |bit| bit.wrapping_sub(1))
}

/// The numbers of the bits that are set, from the lowest on.
pub(crate) fn bits(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let lowest = (mask != 0).then(|| mask.trailing_zeros())?;
        mask &= mask.wrapping_sub(1);
        Some(lowest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_whole_blocks_where_a_frame_has_room() {
        // Frame, tag, block: segment.
        let cases = [
            (8_100, 16, 512, 7_680),
            (8_100, 16, 4096, 4096),
            (9_000, 16, 512, 8192),
            (9_000, 16, 4096, 8192),
            (1_452, 16, 512, 1024),
            (1_500, 0, 512, 1024),
            (1_452, 16, 4096, 1024),
            (65_000, 16, 512, 61_440),
        ];
        for (frame, tag, block, segment) in cases {
            assert_eq!(segment_bytes(frame, tag, block), segment, "{frame} {tag} {block}");
        }
    }

    #[test]
    fn the_papers_largest_message_is_nine_jumbo_frames() {
        let cut = Segmentation::new(65_536, segment_bytes(8_100, 16, 512), 512).unwrap();
        assert_eq!(cut.count(), 9);
        assert_eq!(cut.range(8), Some((61_440, 4096)));
        assert_eq!(cut.range(9), None);
        assert_eq!(cut.all(), 0x1ff);
    }

    #[test]
    fn a_segment_is_known_by_its_offset_and_size() {
        let cut = Segmentation::new(2560, 1024, 512).unwrap();
        assert_eq!(cut.index_of(0, 1024), Some(0));
        assert_eq!(cut.index_of(2048, 512), Some(2));
        for (offset, len) in
            [(0, 512), (1, 1024), (512, 1024), (2048, 1024), (3072, 0), (u32::MAX, 1024)]
        {
            assert_eq!(cut.index_of(offset, len), None, "{len} at {offset}");
        }
        assert_eq!(Segmentation::new(64 * 1024 + 1, 1024, 512), None);
        assert_eq!(Segmentation::new(1, 0, 512), None);
        assert_eq!(Segmentation::new(64 * 1024, 1024, 512).unwrap().all(), u64::MAX);
    }

    #[test]
    fn a_block_of_several_segments_counts_when_it_is_whole() {
        let cut = Segmentation::new(12_288, 1024, 4096).unwrap();
        assert_eq!(cut.whole_blocks(0b1111_0111_1111), 0b1111_0000_1111);
        assert_eq!(cut.whole_blocks(cut.all()), cut.all());
        // Segments of several blocks count each.
        let cut = Segmentation::new(12_288, 8192, 4096).unwrap();
        assert_eq!(cut.whole_blocks(0b10), 0b10);
    }

    #[test]
    fn bits_come_from_the_lowest_on() {
        assert_eq!(bits(1 << 63 | 0b101).collect::<Vec<_>>(), [0, 2, 63]);
        assert_eq!((low_bits(0), low_bits(3), low_bits(64)), (0, 7, u64::MAX));
    }
}
