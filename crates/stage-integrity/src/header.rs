//! The header: what the store was made with. It is written once, in two equal copies.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 8 | magic, `SCINTEGR` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | bytes of a block |
//! | 16 | 16 | UUID |
//! | 32 | 8 | blocks |
//! | 40 | 4 | bytes of a unit |
//! | 44 | 4 | slots of a half of the journal |
//! | 48 | 4040 | zeros |
//! | 4088 | 8 | checksum, XXH3 |

use twox_hash::XxHash3_64;

use crate::error::IntegrityError;
use crate::layout::{COPY_BYTES, Layout};
use crate::tag::{put_word, word_at};

const MAGIC: [u8; 8] = *b"SCINTEGR";
const VERSION: u32 = 1;
const BYTES: usize = COPY_BYTES as usize;
const FIELDS_BYTES: usize = 48;
const CHECKSUM_AT: usize = BYTES - 8;

/// The fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) uuid: [u8; 16],
    pub(crate) layout: Layout,
}

/// Two numbers of 4 bytes as a word.
fn word_of(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The two numbers of a word.
fn halves(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
}

/// Writes the checksum of a copy into it.
fn seal(bytes: &mut [u8; BYTES]) {
    let sum = XxHash3_64::oneshot(bytes.get(..CHECKSUM_AT).unwrap_or_default());
    put_word(bytes, CHECKSUM_AT, sum);
}

impl Header {
    /// A copy of the header.
    pub(crate) fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let Self { uuid, layout } = self;
        let (low, high) = uuid.split_at(8);
        for (at, word) in [
            (0, u64::from_le_bytes(MAGIC)),
            (8, word_of(VERSION, layout.block_bytes)),
            (16, word_at(low, 0)),
            (24, word_at(high, 0)),
            (32, layout.blocks),
            (40, word_of(layout.unit_bytes, layout.slots)),
        ] {
            put_word(&mut bytes, at, word);
        }
        seal(&mut bytes);
        bytes
    }

    /// The header in these copies, and whether one of them is damaged.
    ///
    /// # Errors
    /// There is none, or it is of a version or contents that this program does not know.
    pub(crate) fn of_copies(copies: &[u8]) -> Result<(Self, bool), IntegrityError> {
        let all: Vec<_> = copies.chunks_exact(BYTES).map(Self::decode).collect();
        let mut whole = all.iter().flatten();
        let Some(header) = whole.next() else {
            // A copy of another version says more than a blank one.
            let errors = all.into_iter().filter_map(Result::err);
            return Err(errors
                .max_by_key(IntegrityError::rank)
                .unwrap_or(IntegrityError::NoHeader));
        };
        if whole.any(|other| other != header) {
            return Err(IntegrityError::Differ);
        }
        Ok((*header, all.iter().any(Result::is_err)))
    }

    fn decode(bytes: &[u8]) -> Result<Self, IntegrityError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(IntegrityError::NoHeader);
        }
        let (summed, sum) = bytes.split_at_checked(CHECKSUM_AT).unwrap_or_default();
        if XxHash3_64::oneshot(summed) != word_at(sum, 0) {
            return Err(IntegrityError::Damaged);
        }
        let (version, block_bytes) = halves(word_at(bytes, 8));
        if version != VERSION {
            return Err(IntegrityError::Version(version));
        }
        let uuid = bytes.get(16..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
        let (unit_bytes, slots) = halves(word_at(bytes, 40));
        let layout = Layout { block_bytes, unit_bytes, slots, blocks: word_at(bytes, 32) };
        let rest = summed.get(FIELDS_BYTES..).unwrap_or_default();
        if !layout.is_sound() || rest.iter().any(|byte| *byte != 0) {
            return Err(IntegrityError::Damaged);
        }
        Ok(Self { uuid, layout })
    }
}

/// The usual text of a UUID.
#[must_use]
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| -> String {
        let bytes = uuid.get(range).unwrap_or_default();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    };
    [hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16)].join("-")
}

/// Decodes the fields of a header, whatever they are, with the right magic, version and checksum:
/// for a fuzz target. Returns whether they were taken, and are written as they were read.
#[doc(hidden)]
#[must_use]
pub fn decodes(fields: &[u8]) -> Option<bool> {
    let mut bytes = [0; BYTES];
    for (place, byte) in bytes.iter_mut().zip(fields) {
        *place = *byte;
    }
    put_word(&mut bytes, 0, u64::from_le_bytes(MAGIC));
    let (_, block_bytes) = halves(word_at(&bytes, 8));
    put_word(&mut bytes, 8, word_of(VERSION, block_bytes));
    seal(&mut bytes);
    let (header, _) = Header::of_copies(&bytes).ok()?;
    // The places that follow from the fields are calculated, too.
    let layout = header.layout;
    let is_sound = layout.store_bytes() > layout.data_at() && layout.data_at() > layout.tags_at();
    Some(is_sound && header.encode() == bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Header {
        let layout = Layout { block_bytes: 4096, unit_bytes: 512, slots: 8, blocks: 1000 };
        Header { uuid: *b"0123456789abcdef", layout }
    }

    fn copies(one: &[u8], other: &[u8]) -> Result<(Header, bool), IntegrityError> {
        Header::of_copies(&[one, other].concat())
    }

    #[test]
    fn one_whole_copy_suffices_and_two_must_be_equal() {
        let good = example().encode();
        assert_eq!(copies(&good, &good), Ok((example(), false)));
        let mut bad = good;
        bad[20] ^= 1;
        assert_eq!(copies(&good, &bad), Ok((example(), true)));
        assert_eq!(copies(&bad, &good), Ok((example(), true)));
        assert_eq!(copies(&[0; BYTES], &good), Ok((example(), true)));
        assert_eq!(copies(&bad, &bad), Err(IntegrityError::Damaged));
        let other = Header { uuid: [1; 16], ..example() };
        assert_eq!(copies(&good, &other.encode()), Err(IntegrityError::Differ));
        assert_eq!(copies(&[0; BYTES], &[0; BYTES]), Err(IntegrityError::NoHeader));
        assert_eq!(Header::of_copies(&[]), Err(IntegrityError::NoHeader));
        assert_eq!(decodes(&good), Some(true));
        assert_eq!(decodes(&[]), None);
    }

    #[test]
    fn every_bit_is_covered() {
        let good = example().encode();
        for bit in 0..BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(copies(&bad, &bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_version_and_impossible_fields_are_refused_whatever_the_checksum_says() {
        let mut bytes = example().encode();
        put_word(&mut bytes, 8, word_of(7, 4096));
        seal(&mut bytes);
        assert_eq!(copies(&bytes, &[0; BYTES]), Err(IntegrityError::Version(7)));
        let layout = example().layout;
        for layout in [
            Layout { block_bytes: 1000, ..layout },
            Layout { unit_bytes: 0, ..layout },
            Layout { slots: 0, ..layout },
            Layout { blocks: u64::MAX, ..layout },
        ] {
            let bad = Header { layout, ..example() }.encode();
            assert_eq!(copies(&bad, &bad), Err(IntegrityError::Damaged), "{layout:?}");
        }
        let mut bytes = example().encode();
        bytes[100] = 1;
        seal(&mut bytes);
        assert_eq!(copies(&bytes, &bytes), Err(IntegrityError::Damaged), "a field of the future");
    }

    #[test]
    fn a_uuid_has_the_usual_text() {
        let uuid = std::array::from_fn(|at| at as u8);
        assert_eq!(uuid_text(&uuid), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
