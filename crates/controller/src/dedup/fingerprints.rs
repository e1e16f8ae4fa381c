//! Fingerprints of blocks, with the place of the first block that has each.
//!
//! # Bounded memory
//!
//! The table holds so many fingerprints at most. When it is full, it keeps those alone whose lowest
//! bit is zero, then whose lowest two are, and so on: a sample. An equal run of blocks is still
//! found by any of its blocks that is in the sample, and compared in both directions from there.
//! With a sample of one in 2^n, runs of less than about 2^n blocks may be missed, and no others.
//!
//! # The key
//!
//! A fingerprint is SipHash with a key of the run, so that no guest can make blocks whose
//! fingerprints collide. A collision would only cost a comparison.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher, Hasher};

use sidecore_volume::VolumeId;

/// Fingerprints kept, those of the blocks of 4 KiB of 7 GiB: as many as a table of about 50 MB
/// holds. Another 20 MB are needed for a moment when they are thinned.
pub(super) const CAPACITY: usize = (1 << 21) / 8 * 7;

/// A block of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) volume: VolumeId,
    pub(super) block: u64,
}

/// The fingerprint of some bytes.
pub(super) fn fingerprint(key: u64, bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write_u64(key);
    hasher.write(bytes);
    hasher.finish()
}

/// The table of a run.
#[derive(Debug)]
pub(super) struct Fingerprints {
    places: HashMap<u64, Place, BuildHasherDefault<AsItIs>>,
    capacity: usize,
    /// The bits that are zero in each fingerprint of the sample.
    mask: u64,
}

impl Fingerprints {
    pub(super) fn new(capacity: usize) -> Self {
        Self { places: HashMap::default(), capacity, mask: 0 }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.capacity);
    }

    /// Whether only a sample of the fingerprints is kept.
    pub(super) fn is_sample(&self) -> bool {
        self.mask != 0
    }

    pub(super) fn get(&self, fingerprint: u64) -> Option<Place> {
        self.places.get(&fingerprint).copied()
    }

    /// Notes the place of a fingerprint, in the place of a former one.
    pub(super) fn set(&mut self, fingerprint: u64, place: Place) {
        if fingerprint & self.mask != 0 {
            return;
        }
        while self.places.len() >= self.capacity && !self.places.contains_key(&fingerprint) {
            self.thin();
            if fingerprint & self.mask != 0 {
                return;
            }
        }
        self.places.insert(fingerprint, place);
    }

    /// Keeps about half of the fingerprints.
    ///
    /// Those are put into the emptied table, because places that are only marked as free count as
    /// taken there, and the table would grow.
    fn thin(&mut self) {
        self.mask = self.mask << 1 | 1;
        let sample = self.places.iter().filter(|(fingerprint, _)| *fingerprint & self.mask == 0);
        let sample: Vec<_> = sample.map(|(fingerprint, place)| (*fingerprint, *place)).collect();
        self.places.clear();
        self.places.extend(sample);
    }
}

/// Fingerprints are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = fingerprint(self.0, bytes);
    }

    fn write_u64(&mut self, fingerprint: u64) {
        // The lowest bits are all zero in a sample, and the table needs those.
        self.0 = fingerprint.rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(block: u64) -> Place {
        Place { volume: VolumeId(1), block }
    }

    #[test]
    fn a_full_table_keeps_a_sample_that_holds_still() {
        let mut table = Fingerprints::new(100);
        let prints: Vec<u64> = (0..1000)
            .map(|block: u64| fingerprint(7, &[block as u8, (block >> 8) as u8]))
            .collect();
        for (block, print) in prints.iter().enumerate().take(100) {
            table.set(*print, place(block as u64));
        }
        assert!(!table.is_sample());
        assert!(prints.iter().take(100).all(|print| table.get(*print).is_some()));
        for (block, print) in prints.iter().enumerate() {
            table.set(*print, place(block as u64));
            assert!(table.places.len() <= 100);
        }
        assert!(table.is_sample());
        // Fingerprints of the sample have their places, and no others have one.
        for (block, print) in prints.iter().enumerate() {
            let expected = (print & table.mask == 0).then_some(place(block as u64));
            assert_eq!(table.get(*print), expected);
        }
        assert!(table.places.len() > 25, "{}", table.places.len());
        table.clear();
        assert!(!table.is_sample() && table.places.is_empty());
    }

    #[test]
    fn a_full_table_does_not_grow() {
        // As many as 128 places may hold.
        let mut table = Fingerprints::new(112);
        for block in 0..10_000_u64 {
            table.set(fingerprint(7, &block.to_le_bytes()), place(block));
            assert!(table.places.capacity() <= 112, "{}", table.places.capacity());
        }
        assert!(table.is_sample());
    }

    #[test]
    fn the_key_changes_every_fingerprint() {
        assert_ne!(fingerprint(1, b"block"), fingerprint(2, b"block"));
        assert_eq!(fingerprint(1, b"block"), fingerprint(1, b"block"));
    }
}
