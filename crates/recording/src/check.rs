//! Checksums: XXH3 of 64 bits.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;
use twox_hash::xxhash3_64::{DEFAULT_SECRET_LENGTH, RawHasher, SecretBuffer};

/// The checksum of these bytes.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// The same of bytes that come in parts. Allocates nothing.
pub struct Checksum(RawHasher<&'static [u8; DEFAULT_SECRET_LENGTH]>);

impl Checksum {
    /// The checksum of no bytes so far.
    #[must_use]
    pub fn new() -> Self {
        Self(RawHasher::new(SecretBuffer::default()))
    }

    /// Takes the next part.
    pub fn add(&mut self, part: &[u8]) {
        self.0.write(part);
    }

    /// The checksum of all parts.
    #[must_use]
    pub fn finish(&self) -> u64 {
        self.0.finish()
    }
}

impl Default for Checksum {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|number| (number >> 3) as u8).collect();
        for part in [1, 7, 64, 4096, 20_000] {
            let mut sum = Checksum::new();
            bytes.chunks(part).for_each(|part| sum.add(part));
            assert_eq!(sum.finish(), checksum(&bytes), "{part}");
        }
        assert_eq!(Checksum::new().finish(), checksum(&[]));
    }
}
