//! The physical blocks that a run has read, so that blocks which snapshots share are read once.

use std::collections::BTreeMap;

/// Disjoint ranges of blocks; neighbours are joined, so that the set is as large as the store is
/// fragmented.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// By first block: the end.
    ranges: BTreeMap<u64, u64>,
}

impl Seen {
    /// The first blocks of `first..end` that are not in the set: where they begin, and their end.
    pub(super) fn first_gap(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        let start = match self.ranges.range(..=first).next_back() {
            Some((_, covered)) if *covered > first => *covered,
            _ => first,
        };
        if start >= end {
            return None;
        }
        let next = self.ranges.range(start..end).next().map_or(end, |(next, _)| *next);
        // Neighbours are joined, so a range that begins where another ends does not exist.
        Some((start, next))
    }

    /// Adds `first..end`, none of which is in the set.
    pub(super) fn add(&mut self, first: u64, end: u64) {
        if first >= end {
            return;
        }
        let end = self.ranges.remove(&end).unwrap_or(end);
        match self.ranges.range_mut(..first).next_back() {
            Some((_, before)) if *before == first => *before = end,
            _ => drop(self.ranges.insert(first, end)),
        }
    }

    pub(super) fn clear(&mut self) {
        self.ranges.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_found_and_filled() {
        let mut seen = Seen::default();
        assert_eq!(seen.first_gap(5, 10), Some((5, 10)));
        seen.add(10, 20);
        seen.add(30, 40);
        assert_eq!(seen.first_gap(5, 50), Some((5, 10)));
        assert_eq!(seen.first_gap(10, 20), None);
        assert_eq!(seen.first_gap(15, 35), Some((20, 30)));
        seen.add(20, 30);
        assert_eq!(seen.ranges.len(), 1);
        assert_eq!(seen.first_gap(12, 45), Some((40, 45)));
        seen.add(9, 10);
        seen.add(3, 3);
        assert_eq!(seen.first_gap(0, 100), Some((0, 9)));
        seen.clear();
        assert_eq!(seen.first_gap(12, 45), Some((12, 45)));
    }
}
