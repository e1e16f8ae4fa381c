//! Sets of legs.

use std::fmt;

/// The most legs that a mirror can have.
pub const MAX_LEGS: usize = 8;

/// Legs of a mirror, by their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LegSet(u8);

impl LegSet {
    /// No leg.
    pub const EMPTY: Self = Self(0);

    /// One leg; empty if no leg can have this number.
    #[must_use]
    pub const fn of(leg: usize) -> Self {
        if leg < MAX_LEGS { Self(1 << leg) } else { Self::EMPTY }
    }

    /// The legs 0 to `count` - 1.
    #[must_use]
    pub fn first(count: usize) -> Self {
        (0..count).map(Self::of).fold(Self::EMPTY, Self::with)
    }

    /// The set of [`bits`](Self::bits).
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// A bit for each leg.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The legs of both.
    #[must_use]
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// The legs that `others` has not.
    #[must_use]
    pub const fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// The legs that are in both.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        Self(self.0 & others.0)
    }

    /// Whether the leg is in the set.
    #[must_use]
    pub const fn has(self, leg: usize) -> bool {
        self.0 & Self::of(leg).0 != 0
    }

    /// Whether `others` has all of these legs.
    #[must_use]
    pub const fn is_within(self, others: Self) -> bool {
        self.0 & !others.0 == 0
    }

    /// Whether it has no leg.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The number of legs.
    #[must_use]
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The lowest number.
    #[must_use]
    pub fn lowest(self) -> Option<usize> {
        self.numbers().next()
    }

    /// The legs' numbers, in order.
    pub fn numbers(self) -> impl Iterator<Item = usize> {
        (0..MAX_LEGS).filter(move |leg| self.has(*leg))
    }
}

impl fmt::Display for LegSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.numbers().map(|leg| leg.to_string()).collect();
        match numbers.as_slice() {
            [] => f.write_str("no leg"),
            [one] => write!(f, "leg {one}"),
            [rest @ .., last] => write!(f, "legs {} and {last}", rest.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_have_their_members_and_names() {
        let set = LegSet::of(0).with(LegSet::of(2));
        assert_eq!((set.len(), set.lowest(), set.bits()), (2, Some(0), 0b101));
        assert!(set.has(2) && !set.has(1) && !set.has(MAX_LEGS));
        assert!(set.is_within(LegSet::first(3)) && !LegSet::first(3).is_within(set));
        assert_eq!(LegSet::first(3).without(set), LegSet::of(1));
        assert_eq!(LegSet::first(2).and(set), LegSet::of(0));
        assert!(LegSet::of(MAX_LEGS).is_empty());
        let named = [LegSet::EMPTY, LegSet::of(3), LegSet::first(3)].map(|set| set.to_string());
        assert_eq!(named, ["no leg", "leg 3", "legs 0, 1 and 2"]);
    }
}
