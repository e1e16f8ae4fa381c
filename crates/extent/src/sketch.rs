//! A sketch of a node's keys, small enough to be stored beside the pointer to the node.

/// Words of a sketch.
pub(crate) const SKETCH_WORDS: usize = 3;

/// Keys in a sketch.
pub(crate) const SAMPLES: usize = SKETCH_WORDS * LANES;

/// The number of segments that a node's entries are divided into.
pub(crate) const SEGMENTS: usize = SAMPLES + 1;

/// Samples in a word.
const LANES: usize = 4;
const LANE_BITS: usize = 16;
/// A lane has two bits more than its sample: one is the borrow of the comparison, and one
/// distinguishes a sample from the filler of an unused lane.
const SAMPLE_BITS: u32 = 14;
const LARGEST: u64 = (1 << SAMPLE_BITS) - 1;
const NO_SAMPLE: u64 = 0x7fff;
const BORROWS: u64 = 0x8000_8000_8000_8000;
const ONES: u64 = 0x0001_0001_0001_0001;

/// The first keys of the node's second segment, third segment and so on, as distances from the
/// node's first key, shortened to 14 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sketch(pub(crate) [u64; SKETCH_WORDS]);

/// The blocks that a node covers, and its sketch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outline {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) sketch: Sketch,
}

impl Outline {
    /// Computes the outline of entries that cover `count` blocks from `first` on.
    pub(crate) fn draw(first: u64, count: u64, segments: impl IntoIterator<Item = u64>) -> Self {
        let mut outline = Self { first, count, sketch: Sketch([0; SKETCH_WORDS]) };
        let mut samples = segments.into_iter().skip(1).map(|key| outline.shorten(key));
        let mut sketch = Sketch([0; SKETCH_WORDS]);
        for word in &mut sketch.0 {
            for lane in 0..LANES {
                *word |= samples.next().unwrap_or(NO_SAMPLE) << lane.wrapping_mul(LANE_BITS);
            }
        }
        drop(samples);
        outline.sketch = sketch;
        outline
    }

    #[inline]
    fn shorten(&self, block: u64) -> u64 {
        let shift =
            u64::BITS.saturating_sub(self.count.leading_zeros()).saturating_sub(SAMPLE_BITS);
        // All blocks behind the node's last one are equal.
        (block.saturating_sub(self.first) >> shift).min(LARGEST)
    }

    /// The segment of the last key at `block` or before; or one behind it, if `block` and the keys
    /// between are equal when shortened.
    #[inline]
    pub(crate) fn segment(&self, block: u64) -> usize {
        // All lanes at once: a lane's borrow stays if its sample is not larger.
        let blocks = self.shorten(block).wrapping_mul(ONES) | BORROWS;
        let [a, b, c] = self.sketch.0.map(|samples| (blocks.wrapping_sub(samples) & BORROWS) >> 15);
        let lanes = a.wrapping_add(b).wrapping_add(c);
        (lanes.wrapping_mul(ONES) >> 48) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected result of `segment`: the number of samples that are not larger.
    fn counted(outline: &Outline, keys: &[u64], block: u64) -> usize {
        keys.iter().skip(1).filter(|key| outline.shorten(**key) <= outline.shorten(block)).count()
    }

    #[test]
    fn segments_are_counted_in_all_lanes() {
        for keys in 1..=SEGMENTS as u64 {
            for scale in [1u64, 3, 1 << 20, 1 << 44] {
                let keys: Vec<u64> = (0..keys).map(|key| 77 + key * key * scale).collect();
                let outline =
                    Outline::draw(77, keys.last().unwrap() - 77 + scale, keys.iter().copied());
                for key in &keys {
                    for block in [key - 1, *key, key + 1, key + scale / 2, u64::MAX] {
                        assert_eq!(outline.segment(block), counted(&outline, &keys, block));
                    }
                }
            }
        }
    }

    #[test]
    fn a_short_node_is_sketched_exactly() {
        let keys: Vec<u64> = (0..SEGMENTS as u64).map(|key| (1 << 40) + key * 1200).collect();
        let outline = Outline::draw(1 << 40, 16_000, keys.iter().copied());
        for (segment, key) in keys.iter().enumerate() {
            assert_eq!(outline.segment(*key), segment);
            assert_eq!(outline.segment(key - 1), segment.saturating_sub(1));
        }
    }

    #[test]
    fn garbage_is_a_segment_too() {
        let mut word = 1u64;
        for block in 0..10_000u64 {
            let sketch = Sketch([word, !word.rotate_left(9), word.wrapping_mul(block)]);
            word = word
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            assert!(Outline { first: word, count: !word, sketch }.segment(block) < SEGMENTS);
        }
    }
}
