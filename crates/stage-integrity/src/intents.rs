//! Intents: the tags that blocks may have, written before their data is.
//!
//! A slot is a unit. Each of its sectors has up to 20 intents and a checksum of its own. Intents
//! need no order among each other: one counts if it is newer than the block's tag.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 24 × n | 8 | number of the block |
//! | 24 × n + 8 | 16 | tag |
//! | 480 | 8 | number of intents |
//! | 504 | 8 | checksum of the sector and its place |

use crate::tag::{SECTOR_BYTES, Sums, Tag, put_word, word_at};

/// Intents of a sector.
pub(crate) const PER_SECTOR: usize = 20;
const INTENT_BYTES: usize = 24;
const COUNT_AT: usize = PER_SECTOR * INTENT_BYTES;

/// A block and the tag that it may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Intent {
    pub(crate) block: u64,
    pub(crate) tag: Tag,
}

/// Encodes up to [`PER_SECTOR`] intents as a sector at this place of the store.
pub(crate) fn encode(sums: &Sums, at_bytes: u64, intents: &[Intent], sector: &mut [u8]) {
    sector.fill(0);
    for (intent, place) in intents.iter().zip(sector.chunks_exact_mut(INTENT_BYTES)) {
        let (sum, word) = intent.tag.words();
        put_word(place, 0, intent.block);
        put_word(place, 8, sum);
        put_word(place, 16, word);
    }
    put_word(sector, COUNT_AT, intents.len() as u64);
    sums.seal(at_bytes, sector);
}

/// The intents of a sector; none if it is not whole, or not of this place.
pub(crate) fn decode<'a>(
    sums: &Sums,
    at_bytes: u64,
    sector: &'a [u8],
) -> impl Iterator<Item = Intent> + use<'a> {
    let summed = sums.opened(at_bytes, sector).unwrap_or_default();
    let count = usize::try_from(word_at(summed, COUNT_AT)).unwrap_or(0).min(PER_SECTOR);
    summed.chunks_exact(INTENT_BYTES).take(count).map(|bytes| Intent {
        block: word_at(bytes, 0),
        tag: Tag::from_words(word_at(bytes, 8), word_at(bytes, 16)),
    })
}

const _: () = assert!(COUNT_AT + 8 < SECTOR_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_if_it_is_whole_and_in_its_place() {
        let sums = Sums::new(&[3; 16], 4096);
        let fresh = Tag::fresh(&sums, 0);
        let intents: Vec<Intent> =
            (0..20).map(|block| Intent { block, tag: fresh.next(block) }).collect();
        let mut sector = [0xff; SECTOR_BYTES];
        for count in [0, 1, 20] {
            encode(&sums, 8192, &intents[..count], &mut sector);
            assert!(decode(&sums, 8192, &sector).eq(intents[..count].iter().copied()));
        }
        assert_eq!(decode(&sums, 8704, &sector).count(), 0);
        for bit in 0..SECTOR_BYTES * 8 {
            sector[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&sums, 8192, &sector).count(), 0, "bit {bit}");
            sector[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(decode(&sums, 8192, &[0; SECTOR_BYTES]).count(), 0);
    }
}
