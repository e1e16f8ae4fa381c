//! An entry: one change of one volume's mappings.

use crate::geometry::checksum;

/// Words of an entry.
pub(crate) const ENTRY_WORDS: usize = 8;

const KIND_MAP: u64 = 1;
const KIND_UNMAP: u64 = 2;

/// A logged change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// `count` virtual blocks from `first` on are mapped to fresh blocks from `physical` on. The
    /// former blocks lost a reference.
    Map { volume: u64, first: u64, count: u64, physical: u64 },
    /// `count` virtual blocks from `first` on became a hole.
    Unmap { volume: u64, first: u64, count: u64 },
}

/// A change, and the generation that makes it durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) generation: u64,
    pub(crate) change: Change,
}

impl Entry {
    /// The words of the entry with number `sequence`.
    pub(crate) fn encode(&self, sequence: u64) -> [u64; ENTRY_WORDS] {
        let (kind, volume, first, count, physical) = match self.change {
            Change::Map { volume, first, count, physical } => {
                (KIND_MAP, volume, first, count, physical)
            }
            Change::Unmap { volume, first, count } => (KIND_UNMAP, volume, first, count, 0),
        };
        let rest = [sequence, self.generation, kind, volume, first, count, physical];
        let [sequence, generation, kind, volume, first, count, physical] = rest;
        [checksum_of(&rest), sequence, generation, kind, volume, first, count, physical]
    }

    /// The entry with number `sequence`.
    ///
    /// # Errors
    /// Checks an entry's words; the error is the damage.
    pub(crate) fn decode(words: &[u64; ENTRY_WORDS], sequence: u64) -> Result<Self, String> {
        let [sum, found_sequence, generation, kind, volume, first, count, physical] = *words;
        if !is_sum_of(sum, &[found_sequence, generation, kind, volume, first, count, physical]) {
            return Err("its checksum is wrong".to_owned());
        }
        if found_sequence != sequence {
            return Err(format!("its number is {found_sequence}"));
        }
        let change = match kind {
            KIND_MAP => Change::Map { volume, first, count, physical },
            KIND_UNMAP if physical == 0 => Change::Unmap { volume, first, count },
            _ => return Err(format!("its kind is {kind}")),
        };
        if count == 0 {
            return Err("it is about no blocks".to_owned());
        }
        Ok(Self { generation, change })
    }
}

/// The checksum of words, lowest byte first.
pub(super) fn checksum_of<const N: usize>(words: &[u64; N]) -> u64 {
    let mut bytes = [0; ENTRY_WORDS * 16];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    checksum(bytes.get(..N.saturating_mul(8)).unwrap_or_default())
}

/// Whether the words have this checksum. When fuzzing, all have.
pub(super) fn is_sum_of<const N: usize>(sum: u64, words: &[u64; N]) -> bool {
    cfg!(fuzzing) || checksum_of(words) == sum
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: Entry = Entry {
        generation: 7,
        change: Change::Map { volume: 3, first: 100, count: 4, physical: 5000 },
    };

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(Entry::decode(&MAP.encode(9), 9), Ok(MAP));
        let unmap =
            Entry { generation: 7, change: Change::Unmap { volume: 3, first: 0, count: 1 } };
        assert_eq!(Entry::decode(&unmap.encode(10), 10), Ok(unmap));
        assert!(Entry::decode(&MAP.encode(9), 10).is_err());
        assert!(Entry::decode(&[0; ENTRY_WORDS], 0).is_err());
    }

    #[test]
    fn every_bit_is_covered() {
        for bit in 0..ENTRY_WORDS * 64 {
            let mut words = MAP.encode(9);
            words[bit / 64] ^= 1 << (bit % 64);
            assert!(Entry::decode(&words, 9).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn fields_that_cannot_be_are_refused_whatever_the_checksum_says() {
        let none = Entry { change: Change::Unmap { volume: 3, first: 0, count: 0 }, ..MAP };
        assert!(Entry::decode(&none.encode(9), 9).is_err());
        let [_, sequence, generation, _, volume, first, count, physical] = MAP.encode(9);
        for kind in [0, KIND_UNMAP, 3] {
            let rest = [sequence, generation, kind, volume, first, count, physical];
            let words =
                [checksum_of(&rest), sequence, generation, kind, volume, first, count, physical];
            assert!(Entry::decode(&words, 9).is_err(), "kind {kind}");
        }
    }
}
