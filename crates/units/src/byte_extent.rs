//! The place of consecutive bytes of a virtual disk on a store.

/// Consecutive bytes of a virtual disk that lie on consecutive bytes of a store. No end overflows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteExtent {
    first: u64,
    len: u64,
    physical: u64,
}

impl ByteExtent {
    /// The `len` bytes from `first` on, which the store has from `physical` on; `None` if either
    /// range ends past 64 bits.
    #[must_use]
    pub const fn new(first: u64, len: u64, physical: u64) -> Option<Self> {
        if first.checked_add(len).is_none() || physical.checked_add(len).is_none() {
            return None;
        }
        Some(Self { first, len, physical })
    }

    /// The place on the store of the `len_bytes` from `offset_bytes` on, if the extent contains all
    /// of them.
    ///
    /// A virtual function's isolation depends on this answer. A request before the extent and one
    /// behind it take the same branch, which a processor can predict.
    #[must_use]
    #[inline]
    pub const fn locate(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
        // The extent's end is a number, so an offset before the extent wraps to one behind it.
        let offset = offset_bytes.wrapping_sub(self.first);
        if offset >= self.len || len_bytes > self.len.wrapping_sub(offset) {
            return None;
        }
        // Less than `physical + len`, which `new` has checked.
        Some(self.physical.wrapping_add(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers around the borders of 64 bits, and small ones.
    fn numbers() -> Vec<u64> {
        let around = [0, 1 << 20, 1 << 63, u64::MAX];
        around
            .iter()
            .flat_map(|number| (-3..=3).map(move |step| number.wrapping_add_signed(step)))
            .collect()
    }

    #[test]
    fn a_place_is_inside_of_the_extent_and_as_far_from_its_start() {
        let numbers = numbers();
        let mut found = 0;
        for (first, len) in numbers.iter().flat_map(|a| numbers.iter().map(move |b| (*a, *b))) {
            for physical in [0, 1 << 40, u64::MAX - len, (u64::MAX - len).saturating_add(1)] {
                let wide = u128::from;
                let ends = [wide(first) + wide(len), wide(physical) + wide(len)];
                let extent = ByteExtent::new(first, len, physical);
                let fits = ends.iter().all(|end| *end <= wide(u64::MAX));
                assert_eq!(extent.is_some(), fits, "{first}, {len}, {physical}");
                let Some(extent) = extent else { continue };
                for (at, part) in numbers.iter().flat_map(|a| numbers.iter().map(move |b| (a, b))) {
                    let inside =
                        *at >= first && wide(*at) < ends[0] && wide(*at) + wide(*part) <= ends[0];
                    let place = inside.then(|| physical + (at - first));
                    assert_eq!(extent.locate(*at, *part), place, "{extent:?}, {at}, {part}");
                    found += usize::from(inside);
                }
            }
        }
        assert!(found > 1000, "{found} parts were inside");
    }

    #[test]
    fn an_empty_extent_contains_nothing() {
        assert_eq!(ByteExtent::default().locate(0, 0), None);
        assert_eq!(ByteExtent::default().locate(0, 1), None);
    }
}
