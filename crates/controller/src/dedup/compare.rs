//! The comparison of bytes.

/// The units around the one with this index, itself included, for which `is_equal` holds without a
/// gap: how many in front of it, and how many from it on. `None` if it does not hold for that one.
pub(super) fn around(
    index: usize,
    units: usize,
    is_equal: impl Fn(usize) -> bool,
) -> Option<(usize, usize)> {
    if index >= units || !is_equal(index) {
        return None;
    }
    let back = (0..index).rev().take_while(|unit| is_equal(*unit)).count();
    let forward = (index..units).take_while(|unit| is_equal(*unit)).count();
    Some((back, forward))
}

/// Whether there is nothing but zeros.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    // In words: a byte at a time takes several times as long.
    let mut words = bytes.chunks_exact(16);
    let whole = words.all(|word| word.try_into().is_ok_and(|word| u128::from_ne_bytes(word) == 0));
    whole && bytes.iter().skip(bytes.len() & !15).all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_equal_part_is_the_one_around_the_hint() {
        let equal = [true, false, true, true, true, false];
        let found = |index| around(index, equal.len(), |unit| equal[unit]);
        assert_eq!(found(0), Some((0, 1)));
        assert_eq!(found(1), None);
        assert_eq!(found(2), Some((0, 3)));
        assert_eq!(found(4), Some((2, 1)));
        assert_eq!(found(6), None);
    }

    #[test]
    fn zeros_are_zeros_to_the_last_byte() {
        for len in [0, 1, 15, 16, 17, 512, 515] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes), "{len}");
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "{at} of {len}");
                bytes[at] = 0;
            }
        }
    }
}
