//! A set of blocks, as ranges.

use std::collections::BTreeMap;

/// Disjoint ranges of blocks; neighbours are joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RangeSet {
    /// By first block: how many.
    ranges: BTreeMap<u64, u64>,
    blocks: u64,
}

impl RangeSet {
    /// The number of blocks in the set.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The ranges (first block, count), in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges.iter().map(|(first, count)| (*first, *count))
    }

    /// The range with this block in it.
    pub(crate) fn containing(&self, block: u64) -> Option<(u64, u64)> {
        let (first, count) = self.ranges.range(..=block).next_back()?;
        (block < first.saturating_add(*count)).then_some((*first, *count))
    }

    /// Whether any of these blocks is in it.
    pub(crate) fn overlaps(&self, first: u64, count: u64) -> bool {
        let end = first.saturating_add(count);
        let before = self.ranges.range(..end).next_back();
        count > 0 && before.is_some_and(|(start, count)| start.saturating_add(*count) > first)
    }

    /// Adds blocks, none of which may be in it: `false`, and nothing was done, if one is.
    pub(crate) fn insert(&mut self, first: u64, count: u64) -> bool {
        self.insert_joined(first, count).is_some() || count == 0
    }

    /// As `insert`; says which ranges were there before, and which one is now.
    pub(crate) fn insert_joined(&mut self, first: u64, count: u64) -> Option<Joined> {
        let end = first.checked_add(count)?;
        if count == 0 || self.overlaps(first, count) {
            return None;
        }
        let mut joined = Joined { whole: (first, count), left: None, right: None };
        if let Some((start, before)) =
            self.ranges.range(..first).next_back().map(|(start, count)| (*start, *count))
            && start.saturating_add(before) == first
        {
            joined.left = Some((start, before));
            joined.whole = (start, before.saturating_add(count));
        }
        if let Some(after) = self.ranges.remove(&end) {
            joined.right = Some((end, after));
            joined.whole.1 = joined.whole.1.saturating_add(after);
        }
        self.ranges.insert(joined.whole.0, joined.whole.1);
        self.blocks = self.blocks.saturating_add(count);
        Some(joined)
    }

    /// Takes blocks out, all of which have to be in it: the range that they were in, or `None`, and
    /// nothing was done.
    pub(crate) fn remove(&mut self, first: u64, count: u64) -> Option<(u64, u64)> {
        let (start, had) = self.containing(first)?;
        let (end, had_end) = (first.checked_add(count)?, start.saturating_add(had));
        if count == 0 || end > had_end {
            return None;
        }
        self.ranges.remove(&start);
        if start < first {
            self.ranges.insert(start, first.saturating_sub(start));
        }
        if end < had_end {
            self.ranges.insert(end, had_end.saturating_sub(end));
        }
        self.blocks = self.blocks.saturating_sub(count);
        Some((start, had))
    }

    /// The parts of these blocks that are in the set, in order.
    pub(crate) fn inside(&self, first: u64, count: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let end = first.saturating_add(count);
        let from = self.containing(first).map_or(first, |(start, _)| start);
        self.ranges
            .range(from..end.max(from))
            .filter_map(move |(start, had)| clip((*start, *had), first, end))
    }

    /// Takes out whatever of these blocks is in it, and returns it.
    pub(crate) fn take(&mut self, first: u64, count: u64) -> Vec<(u64, u64)> {
        let inside: Vec<(u64, u64)> = self.inside(first, count).collect();
        for (first, count) in &inside {
            self.remove(*first, *count);
        }
        inside
    }

    /// Adds blocks, whatever is there already; returns the parts that were there.
    pub(crate) fn cover(&mut self, first: u64, count: u64) -> Vec<(u64, u64)> {
        if self.insert(first, count) {
            return Vec::new();
        }
        let twice = self.take(first, count);
        self.insert(first, count);
        twice
    }

    /// Empties the set, and returns its contents.
    pub(crate) fn take_all(&mut self) -> Self {
        std::mem::take(self)
    }
}

/// The result of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Joined {
    pub(crate) whole: (u64, u64),
    pub(crate) left: Option<(u64, u64)>,
    pub(crate) right: Option<(u64, u64)>,
}

/// The part of a range that lies in `first..end`.
pub(crate) fn clip((start, count): (u64, u64), first: u64, end: u64) -> Option<(u64, u64)> {
    let (from, to) = (start.max(first), start.saturating_add(count).min(end));
    (from < to).then(|| (from, to.saturating_sub(from)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ranges: &[(u64, u64)]) -> RangeSet {
        let mut set = RangeSet::default();
        assert!(ranges.iter().all(|(first, count)| set.insert(*first, *count)));
        set
    }

    #[test]
    fn neighbours_are_joined_on_both_sides() {
        let set = of(&[(0, 5), (10, 5), (5, 5)]);
        assert_eq!((set.iter().collect::<Vec<_>>(), set.blocks()), (vec![(0, 15)], 15));
    }

    #[test]
    fn what_is_in_it_is_not_inserted_again() {
        let mut set = of(&[(10, 10)]);
        for (first, count) in [(10, 10), (5, 6), (19, 1), (12, 2), (0, 100), (u64::MAX, 2)] {
            assert!(!set.insert(first, count), "{first}+{count}");
        }
        assert_eq!(set, of(&[(10, 10)]));
    }

    #[test]
    fn only_what_is_wholly_in_it_is_removed() {
        let mut set = of(&[(10, 10), (30, 10)]);
        for (first, count) in [(9, 2), (19, 2), (10, 30), (25, 1), (15, 0)] {
            assert_eq!(set.remove(first, count), None, "{first}+{count}");
        }
        assert_eq!(set.remove(12, 3), Some((10, 10)));
        assert_eq!(set, of(&[(10, 2), (15, 5), (30, 10)]));
        assert_eq!(set.blocks(), 17);
    }

    #[test]
    fn take_and_cover_say_what_was_there() {
        let mut set = of(&[(10, 10), (30, 10)]);
        assert_eq!(set.take(15, 20), [(15, 5), (30, 5)]);
        assert_eq!(set, of(&[(10, 5), (35, 5)]));
        assert_eq!(set.cover(12, 30), [(12, 3), (35, 5)]);
        assert_eq!(set, of(&[(10, 32)]));
        assert_eq!(set.take(0, 5), []);
    }
}
