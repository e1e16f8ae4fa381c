//! The arithmetic that isolation depends on, small enough to be proved.
//!
//! The functions are generic over the width of a word: translation uses 64 bits, and with a few
//! bits the tests try *every* input ([`tests`]). They are independent of trees.

/// An unsigned number of some width.
pub(crate) trait Word: Copy + Ord {
    /// `None` past the largest number.
    fn checked_add(self, other: Self) -> Option<Self>;
    /// `None` below zero.
    fn checked_sub(self, other: Self) -> Option<Self>;
    /// Past the largest number, wraps to zero.
    fn wrapping_add(self, other: Self) -> Self;
    /// Below zero, wraps to the largest number.
    fn wrapping_sub(self, other: Self) -> Self;
    /// The largest number instead of one past it.
    fn saturating_add(self, other: Self) -> Self;
    /// Zero instead of a number below it.
    fn saturating_sub(self, other: Self) -> Self;
}

impl Word for u64 {
    #[inline]
    fn checked_add(self, other: Self) -> Option<Self> {
        u64::checked_add(self, other)
    }

    #[inline]
    fn checked_sub(self, other: Self) -> Option<Self> {
        u64::checked_sub(self, other)
    }

    #[inline]
    fn wrapping_add(self, other: Self) -> Self {
        u64::wrapping_add(self, other)
    }

    #[inline]
    fn wrapping_sub(self, other: Self) -> Self {
        u64::wrapping_sub(self, other)
    }

    #[inline]
    fn saturating_add(self, other: Self) -> Self {
        u64::saturating_add(self, other)
    }

    #[inline]
    fn saturating_sub(self, other: Self) -> Self {
        u64::saturating_sub(self, other)
    }
}

/// The number after the last of `count` from `first` on.
#[inline]
pub(crate) fn end<W: Word>(first: W, count: W) -> Option<W> {
    first.checked_add(count)
}

/// The distance from `first` to `part`, if all of the `part_count` numbers from `part` on are among
/// the `count` numbers from `first` on.
#[inline]
pub(crate) fn offset_of<W: Word>(first: W, count: W, part: W, part_count: W) -> Option<W> {
    let offset = part.checked_sub(first)?;
    let left = count.checked_sub(offset)?;
    (part_count <= left && offset < count).then_some(offset)
}

/// The physical number of `part`, if the `count` numbers from `first` on, which lie from `physical`
/// on, contain all of it. `None` if either range runs past the last number.
#[inline]
pub(crate) fn displace<W: Word>(
    first: W,
    count: W,
    physical: W,
    part: W,
    part_count: W,
) -> Option<W> {
    end(first, count)?;
    end(physical, count)?;
    displace_within(first, count, physical, part, part_count)
}

/// [`displace`] for ranges that both have an [`end`].
///
/// A cache is asked about parts before its extent as often as about parts behind it. Here both take
/// the same branch, which a processor can predict; a misprediction would cost as much as all the
/// rest, and would wait for the walk before.
#[inline]
pub(crate) fn displace_within<W: Word>(
    first: W,
    count: W,
    physical: W,
    part: W,
    part_count: W,
) -> Option<W> {
    // The extent's end is a number, so a part before the extent wraps to an offset behind it.
    let offset = part.wrapping_sub(first);
    if offset >= count || part_count > count.wrapping_sub(offset) {
        return None;
    }
    // Less than the end of the physical range.
    Some(physical.wrapping_add(offset))
}

/// The intersection of two ranges: first and count, never empty.
#[inline]
pub(crate) fn intersect<W: Word>(first_a: W, count_a: W, first_b: W, count_b: W) -> Option<(W, W)> {
    let first = first_a.max(first_b);
    let last = end(first_a, count_a)?.min(end(first_b, count_b)?);
    let count = last.checked_sub(first)?;
    (first < last).then_some((first, count))
}

/// The number after the last of `count` from `first` on, saturating: for words that may be corrupt.
#[inline]
pub(crate) fn reach<W: Word>(first: W, count: W) -> W {
    first.saturating_add(count)
}

/// The piece from `at` to before `border`, or to before `end` if that comes first: its length, and
/// the start of the next piece.
#[inline]
pub(crate) fn cut<W: Word>(at: W, border: W, end: W) -> (W, W) {
    let next = border.min(end);
    (next.saturating_sub(at), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words of so few bits that all of them can be tried.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    struct Tiny<const BITS: u32>(u8);

    impl<const BITS: u32> Word for Tiny<BITS> {
        fn checked_add(self, other: Self) -> Option<Self> {
            let sum = self.0 + other.0;
            (sum < 1 << BITS).then_some(Self(sum))
        }

        fn checked_sub(self, other: Self) -> Option<Self> {
            self.0.checked_sub(other.0).map(Self)
        }

        fn wrapping_add(self, other: Self) -> Self {
            Self((self.0 + other.0) % (1 << BITS))
        }

        fn wrapping_sub(self, other: Self) -> Self {
            Self(self.0.wrapping_sub(other.0) % (1 << BITS))
        }

        fn saturating_add(self, other: Self) -> Self {
            Self((self.0 + other.0).min((1 << BITS) - 1))
        }

        fn saturating_sub(self, other: Self) -> Self {
            Self(self.0.saturating_sub(other.0))
        }
    }

    impl<const BITS: u32> Tiny<BITS> {
        fn all() -> impl Iterator<Item = Self> {
            (0..1 << BITS).map(Self)
        }
    }

    /// The numbers of a range as bits of a set, in a space that cannot overflow.
    fn set<const BITS: u32>(first: Tiny<BITS>, count: Tiny<BITS>) -> u128 {
        ((1u128 << count.0) - 1) << first.0
    }

    type Six = Tiny<6>;
    type Five = Tiny<5>;
    type Four = Tiny<4>;

    #[test]
    fn an_end_is_right_or_refused() {
        for first in Six::all() {
            for count in Six::all() {
                let right = u32::from(first.0) + u32::from(count.0);
                assert_eq!(
                    end(first, count).map(|end| u32::from(end.0)),
                    (right < 64).then_some(right)
                );
            }
        }
    }

    #[test]
    fn an_offset_is_given_if_and_only_if_the_part_is_inside() {
        for first in Five::all() {
            for count in Five::all() {
                let whole = set(first, count);
                for part in Five::all() {
                    for part_count in Five::all() {
                        // An empty part is inside if its place is.
                        let blocks = set(part, part_count) | 1 << part.0;
                        let inside = whole & blocks == blocks;
                        let expected = inside.then(|| Tiny(part.0 - first.0));
                        assert_eq!(offset_of(first, count, part, part_count), expected);
                    }
                }
            }
        }
    }

    /// The central property: for every extent, a part that is translated lies inside the extent's
    /// physical blocks, as far behind their first as the part is behind the extent's first; and a
    /// part inside a sound extent is always translated.
    #[test]
    fn no_translated_block_is_outside_the_extent() {
        let mut translated = 0u32;
        for first in Five::all() {
            for count in Five::all() {
                for physical in Five::all() {
                    for part in Five::all() {
                        for part_count in Five::all() {
                            let inside = offset_of(first, count, part, part_count);
                            let sound =
                                end(first, count).is_some() && end(physical, count).is_some();
                            let found = displace(first, count, physical, part, part_count);
                            assert_eq!(found.is_some(), inside.is_some() && sound);
                            if sound {
                                let within =
                                    displace_within(first, count, physical, part, part_count);
                                assert_eq!(within, found);
                            }
                            let Some(found) = found else { continue };
                            let (extent, blocks) = (set(physical, count), set(found, part_count));
                            assert_eq!(extent | blocks, extent);
                            assert_eq!(found.0 - physical.0, part.0 - first.0);
                            translated += 1;
                        }
                    }
                }
            }
        }
        assert!(translated > 10_000);
    }

    #[test]
    fn an_intersection_is_what_both_have() {
        for first_a in Five::all() {
            for count_a in Five::all() {
                for first_b in Five::all() {
                    for count_b in Five::all() {
                        let both = set(first_a, count_a) & set(first_b, count_b);
                        let representable =
                            end(first_a, count_a).is_some() && end(first_b, count_b).is_some();
                        match intersect(first_a, count_a, first_b, count_b) {
                            Some((first, count)) => assert!(both != 0 && set(first, count) == both),
                            None => assert!(both == 0 || !representable),
                        }
                    }
                }
            }
        }
    }

    /// Pieces are cut one after the other at the borders of entries, as the walk does it. For all
    /// borders, pieces are not empty, follow each other and end with the request, and there are at
    /// most as many as borders.
    #[test]
    fn pieces_tile_the_request() {
        for at in Four::all() {
            for count in Four::all() {
                let request_end = reach(at, count);
                for border_a in Four::all() {
                    for border_b in Four::all() {
                        for border_c in Four::all() {
                            let (mut here, mut told) = (at, 0u128);
                            for border in [border_a, border_b, border_c, Tiny(15)] {
                                if here >= request_end || border <= here {
                                    continue;
                                }
                                let (length, next) = cut(here, border, request_end);
                                assert!(length.0 > 0 && told & set(here, length) == 0);
                                told |= set(here, length);
                                here = next;
                            }
                            assert_eq!(told, set(at, Tiny(request_end.0 - at.0)));
                        }
                    }
                }
            }
        }
    }
}
