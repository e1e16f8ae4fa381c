//! Tags: the checksum and the write generation of each block.
//!
//! A sector of 512 bytes has the tags of 31 blocks and a checksum of its own, because a sector is
//! the unit that a power cut leaves whole. A sector of zeros has the tags of blocks that were never
//! written, which hold zeros.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 16 × n | 8 | checksum of the block and its number |
//! | 16 × n + 8 | 8 | generation (37 bits), part of the checksum before (24), unknown (1) |
//! | 496 | 8 | zeros |
//! | 504 | 8 | checksum of the sector and its number |

use twox_hash::XxHash3_64;

/// Bytes of a sector of metadata.
pub(crate) const SECTOR_BYTES: usize = 512;
/// Bytes of a sector under its checksum.
pub(crate) const SUMMED_BYTES: usize = SECTOR_BYTES - 8;
/// Tags of a sector.
pub(crate) const TAGS_PER_SECTOR: u64 = 31;
const TAG_BYTES: usize = 16;

const GENERATION_BITS: u32 = 37;
const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;
const PRIOR_MASK: u64 = (1 << 24) - 1;
/// The tag was lost: no content of the block is good.
const UNKNOWN: u64 = 1 << 61;
/// Bits of the second word that only memory uses.
pub(crate) const MEMORY_BITS: u64 = 0b11 << 62;

/// Checksums of one store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums {
    /// Makes the checksums those of one store.
    seed: u64,
    /// The hash of a block of zeros.
    zeros: u64,
}

/// Sebastiano Vigna's splitmix64, which is a permutation.
#[inline]
fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Sums {
    pub(crate) fn new(uuid: &[u8; 16], block_bytes: u32) -> Self {
        let zeros = vec![0; block_bytes as usize];
        Self { seed: XxHash3_64::oneshot(uuid), zeros: Self::hash(&zeros) }
    }

    /// The hash of a block's bytes, wherever it is.
    #[inline]
    pub(crate) fn hash(data: &[u8]) -> u64 {
        XxHash3_64::oneshot(data)
    }

    /// The checksum of a block with this hash. It is its own inverse: see
    /// [`hash_of`](Self::hash_of).
    #[inline]
    pub(crate) fn at(&self, block: u64, hash: u64) -> u64 {
        hash ^ mixed(self.seed ^ block.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// The hash of the bytes that have this checksum as a block.
    #[inline]
    pub(crate) fn hash_of(&self, block: u64, sum: u64) -> u64 {
        self.at(block, sum)
    }

    /// The checksum of a block of zeros.
    #[inline]
    pub(crate) fn zeros_at(&self, block: u64) -> u64 {
        self.at(block, self.zeros)
    }

    pub(crate) fn is_of_zeros(&self, hash: u64) -> bool {
        hash == self.zeros
    }

    /// The checksum of a sector of metadata, by its place on the store.
    pub(crate) fn of_sector(&self, at_bytes: u64, summed: &[u8]) -> [u8; 8] {
        XxHash3_64::oneshot_with_seed(self.seed ^ at_bytes, summed).to_le_bytes()
    }

    /// Writes the checksum of a sector into it.
    pub(crate) fn seal(&self, at_bytes: u64, sector: &mut [u8]) {
        let Some((summed, sum)) = sector.split_at_mut_checked(SUMMED_BYTES) else { return };
        sum.copy_from_slice(&self.of_sector(at_bytes, summed));
    }

    /// The bytes of a sector that has its checksum.
    pub(crate) fn opened<'a>(&self, at_bytes: u64, sector: &'a [u8]) -> Option<&'a [u8]> {
        let (summed, sum) = sector.split_at_checked(SUMMED_BYTES)?;
        (self.of_sector(at_bytes, summed) == *sum).then_some(summed)
    }
}

/// The tag of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) sum: u64,
    /// The generation and the other fields, as on the store.
    word: u64,
}

impl Tag {
    /// The tag of a block that was never written.
    pub(crate) fn fresh(sums: &Sums, block: u64) -> Self {
        Self { sum: sums.zeros_at(block), word: 0 }
    }

    /// The tag of a block whose tag was lost.
    pub(crate) fn unknown() -> Self {
        Self { sum: 0, word: UNKNOWN }
    }

    #[inline]
    pub(crate) fn from_words(sum: u64, word: u64) -> Self {
        Self { sum, word: word & !MEMORY_BITS }
    }

    #[inline]
    pub(crate) fn words(self) -> (u64, u64) {
        (self.sum, self.word)
    }

    /// The tag of the next write of the block.
    #[inline]
    pub(crate) fn next(self, sum: u64) -> Self {
        let prior = (self.sum & PRIOR_MASK) << GENERATION_BITS;
        Self { sum, word: self.next_generation() | prior }
    }

    fn next_generation(self) -> u64 {
        // Generations wrap after 2^37 writes of one block, and zero is that of none.
        (self.generation().wrapping_add(1) & GENERATION_MASK).max(1)
    }

    /// The same content, at the generation of `other`.
    pub(crate) fn confirmed_at(self, other: Self) -> Self {
        Self { sum: self.sum, word: (self.word & !GENERATION_MASK) | other.generation() }
    }

    #[inline]
    pub(crate) fn generation(self) -> u64 {
        self.word & GENERATION_MASK
    }

    /// Whether its generation is after that of `other`: half of the circle is.
    pub(crate) fn is_newer(self, other: Self) -> bool {
        let after = self.generation().wrapping_sub(other.generation()) & GENERATION_MASK;
        after != 0 && after <= GENERATION_MASK >> 1
    }

    #[inline]
    pub(crate) fn is_unknown(self) -> bool {
        self.word & UNKNOWN != 0
    }

    /// Whether `sum` is the checksum of the content before, as far as the tag knows.
    pub(crate) fn followed(self, sum: u64) -> bool {
        !self.is_unknown() && (self.word >> GENERATION_BITS) & PRIOR_MASK == sum & PRIOR_MASK
    }
}

/// Reads 8 bytes at an offset; zero outside.
pub(crate) fn word_at(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk());
    u64::from_le_bytes(word.copied().unwrap_or_default())
}

/// Writes 8 bytes at an offset, if they are inside.
pub(crate) fn put_word(bytes: &mut [u8], at: usize, word: u64) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *place = word.to_le_bytes();
    }
}

/// Encodes the tags of a sector at this place of the store, which starts with block `first`.
pub(crate) fn encode_sector(
    sums: &Sums,
    at_bytes: u64,
    sector: &mut [u8],
    tag_of: impl Fn(u64) -> Option<Tag>,
    first: u64,
) {
    sector.fill(0);
    let mut is_fresh = true;
    for (index, place) in (0..TAGS_PER_SECTOR).zip(sector.chunks_exact_mut(TAG_BYTES)) {
        let Some(tag) = tag_of(first.saturating_add(index)) else { break };
        if tag.word == 0 {
            continue;
        }
        is_fresh = false;
        put_word(place, 0, tag.sum);
        put_word(place, 8, tag.word);
    }
    if !is_fresh {
        sums.seal(at_bytes, sector);
    }
}

/// Decodes the tags of a sector. False if the sector is damaged; then each tag is unknown.
pub(crate) fn decode_sector(
    sums: &Sums,
    at_bytes: u64,
    sector: &[u8],
    first: u64,
    mut put: impl FnMut(u64, Tag),
) -> bool {
    let is_fresh = sector.iter().all(|byte| *byte == 0);
    let opened = if is_fresh { Some(sector) } else { sums.opened(at_bytes, sector) };
    let tags = opened.unwrap_or(sector).chunks_exact(TAG_BYTES);
    for (index, bytes) in (0..TAGS_PER_SECTOR).zip(tags) {
        let block = first.saturating_add(index);
        let word = word_at(bytes, 8);
        let tag = match opened {
            None => Tag::unknown(),
            Some(_) if word == 0 => Tag::fresh(sums, block),
            Some(_) => Tag::from_words(word_at(bytes, 0), word),
        };
        put(block, tag);
    }
    opened.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums() -> Sums {
        Sums::new(&[7; 16], 512)
    }

    fn example(block: u64) -> Option<Tag> {
        match block {
            100 => Some(Tag::fresh(&sums(), 100)),
            101 => Some(Tag::fresh(&sums(), 101).next(5).next(6)),
            102 => Some(Tag::unknown()),
            103..131 => Some(Tag::fresh(&sums(), block).next(block)),
            _ => None,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let mut sector = [0xff; SECTOR_BYTES];
        encode_sector(&sums(), 8192, &mut sector, example, 100);
        let mut count = 0;
        assert!(decode_sector(&sums(), 8192, &sector, 100, |block, tag| {
            assert_eq!(Some(tag), example(block));
            count += 1;
        }));
        assert_eq!(count, TAGS_PER_SECTOR);
    }

    #[test]
    fn a_sector_that_is_not_whole_or_of_another_place_or_store_has_no_tags() {
        let mut sector = [0; SECTOR_BYTES];
        encode_sector(&sums(), 8192, &mut sector, example, 100);
        let is_whole = |sums: &Sums, at, sector: &[u8]| {
            let mut unknown = 0;
            let is_whole = decode_sector(sums, at, sector, 100, |_, tag| {
                unknown += u64::from(tag.is_unknown());
            });
            assert!(is_whole || unknown == TAGS_PER_SECTOR);
            is_whole
        };
        for bit in 0..SECTOR_BYTES * 8 {
            sector[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_whole(&sums(), 8192, &sector), "bit {bit}");
            sector[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(is_whole(&sums(), 8192, &sector));
        assert!(!is_whole(&sums(), 8704, &sector), "another place");
        assert!(!is_whole(&Sums::new(&[8; 16], 512), 8192, &sector), "another store");
    }

    #[test]
    fn zeros_are_the_tags_of_blocks_that_were_never_written() {
        assert!(decode_sector(&sums(), 0, &[0; SECTOR_BYTES], 9, |block, tag| {
            assert_eq!(tag, Tag::fresh(&sums(), block));
            assert_eq!(tag.sum, sums().at(block, Sums::hash(&[0; 512])));
        }));
    }

    #[test]
    fn a_tag_knows_the_content_before_and_its_order() {
        let sums = sums();
        let first = Tag::fresh(&sums, 3).next(0x1234_5678);
        assert!(first.followed(sums.zeros_at(3)) && !first.followed(0x1234_5678));
        let second = first.next(0x9abc_def0);
        assert!(second.followed(0x1234_5678));
        assert!(second.is_newer(first) && !first.is_newer(second) && !first.is_newer(first));
        assert_eq!(first.confirmed_at(second).generation(), second.generation());
        assert_eq!(first.confirmed_at(second).sum, first.sum);
        let last = Tag::from_words(1, GENERATION_MASK);
        assert_eq!(last.next(2).generation(), 1);
        assert!(last.next(2).is_newer(last));
        assert_ne!(sums.at(3, 77), sums.at(4, 77), "the number enters the checksum");
        assert_eq!(sums.hash_of(3, sums.at(3, 77)), 77);
    }
}
