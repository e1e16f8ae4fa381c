//! Numbers in blocks of bytes: little-endian, and never outside.
//!
//! The layouts are constants, checked by the codecs' tests; words outside of the block read as zero
//! and are not written.

pub(crate) fn u8_at(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    array_at(bytes, at).map_or(0, u16::from_le_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    array_at(bytes, at).map_or(0, u32::from_le_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    array_at(bytes, at).map_or(0, u64::from_le_bytes)
}

/// `N` bytes from there on, if they are inside.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..value.len())) {
        place.copy_from_slice(value);
    }
}

pub(crate) fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    put(bytes, at, &value.to_le_bytes());
}

/// Whether all of them are zero.
pub(crate) fn all_zero(bytes: &[u8]) -> bool {
    // In words first: this runs over the unused part of every node.
    let mut words = bytes.chunks_exact(8);
    words.by_ref().all(|word| word == [0; 8]) && words.remainder().iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_read_and_nothing_outside() {
        let mut bytes = [0; 16];
        put_u64(&mut bytes, 8, 0x0102_0304_0506_0708);
        put_u64(&mut bytes, 9, u64::MAX);
        assert_eq!(u64_at(&bytes, 8), 0x0102_0304_0506_0708);
        assert_eq!(
            (u8_at(&bytes, 8), u16_at(&bytes, 8), u32_at(&bytes, 8)),
            (8, 0x0708, 0x0506_0708)
        );
        assert_eq!((u64_at(&bytes, 9), u8_at(&bytes, 16)), (0, 0));
    }

    #[test]
    fn zeros_are_recognised_also_in_the_odd_bytes_at_the_end() {
        assert!(all_zero(&[0; 13]) && all_zero(&[]));
        for at in 0..13 {
            let mut bytes = [0; 13];
            bytes[at] = 1;
            assert!(!all_zero(&bytes), "byte {at}");
        }
    }
}
