//! How many extents refer to a data block, where it is more than one.

use std::collections::BTreeMap;

use crate::ranges::clip;

/// Counts of references, as ranges. A block that is in use and not in here has one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shares {
    /// By first block: how many blocks, and their references, at least two.
    ranges: BTreeMap<u64, (u64, u64)>,
}

impl Shares {
    /// The ranges (first block, count, references), in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.ranges.iter().map(|(first, (count, references))| (*first, *count, *references))
    }

    /// Adds a reference to each of these blocks, which all have one or more.
    pub(crate) fn add(&mut self, first: u64, count: u64) {
        self.change(first, count, |references| references.saturating_add(1));
    }

    /// Drops a reference of each of these blocks. Returns those without a reference.
    pub(crate) fn drop_one(&mut self, first: u64, count: u64) -> Vec<(u64, u64)> {
        let gone = self.pieces(first, count).into_iter().filter(|piece| !piece.shared);
        let gone = gone.map(|piece| (piece.first, piece.count)).collect();
        self.change(first, count, |references| references.saturating_sub(1));
        gone
    }

    /// These blocks, in pieces that are all shared or all not.
    pub(crate) fn pieces(&self, first: u64, count: u64) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for (first, count, references) in self.counted(first, count) {
            let shared = references > 1;
            match pieces.last_mut() {
                Some(last) if last.shared == shared => {
                    last.count = last.count.saturating_add(count)
                }
                _ => pieces.push(Piece { first, count, shared }),
            }
        }
        pieces
    }

    /// These blocks, in pieces with equal counts.
    fn counted(&self, first: u64, count: u64) -> Vec<(u64, u64, u64)> {
        let end = first.saturating_add(count);
        let from = self.ranges.range(..=first).next_back().map_or(first, |(start, _)| *start);
        let mut pieces = Vec::new();
        let mut at = first;
        for (start, (count, references)) in self.ranges.range(from..end.max(from)) {
            let Some((start, count)) = clip((*start, *count), first, end) else { continue };
            if at < start {
                pieces.push((at, start.saturating_sub(at), 1));
            }
            pieces.push((start, count, *references));
            at = start.saturating_add(count);
        }
        if at < end {
            pieces.push((at, end.saturating_sub(at), 1));
        }
        pieces
    }

    fn change(&mut self, first: u64, count: u64, change: impl Fn(u64) -> u64) {
        let end = first.saturating_add(count);
        let pieces = self.counted(first, count);
        self.cut(first);
        self.cut(end);
        for (first, count, references) in pieces {
            let references = change(references);
            if references > 1 {
                self.ranges.insert(first, (count, references));
            } else {
                self.ranges.remove(&first);
            }
            self.join(first);
        }
        self.join(end);
    }

    /// Makes `at` the border of two ranges, if it is inside of one.
    fn cut(&mut self, at: u64) {
        let Some((start, (count, references))) = self.ranges.range_mut(..at).next_back() else {
            return;
        };
        let end = start.saturating_add(*count);
        if at < end {
            *count = at.saturating_sub(*start);
            let rest = (end.saturating_sub(at), *references);
            self.ranges.insert(at, rest);
        }
    }

    /// Joins the ranges that meet at `at`, if their counts are equal.
    fn join(&mut self, at: u64) {
        let Some((right, right_references)) = self.ranges.get(&at).copied() else { return };
        let Some((start, (left, left_references))) = self.ranges.range_mut(..at).next_back() else {
            return;
        };
        if start.saturating_add(*left) == at && *left_references == right_references {
            *left = left.saturating_add(right);
            self.ranges.remove(&at);
        }
    }
}

/// Blocks that are all shared or all not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) shared: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(shares: &Shares) -> Vec<(u64, u64, u64)> {
        shares.iter().collect()
    }

    #[test]
    fn references_come_and_go() {
        let mut shares = Shares::default();
        shares.add(10, 10);
        shares.add(15, 10);
        assert_eq!(list(&shares), [(10, 5, 2), (15, 5, 3), (20, 5, 2)]);
        assert_eq!(shares.drop_one(15, 5), []);
        assert_eq!(list(&shares), [(10, 15, 2)]);
        assert_eq!(shares.drop_one(5, 10), [(5, 5)]);
        assert_eq!(list(&shares), [(15, 10, 2)]);
        assert_eq!(shares.drop_one(0, 30), [(0, 15), (25, 5)]);
        assert_eq!(list(&shares), []);
    }

    #[test]
    fn pieces_tell_shared_from_not() {
        let mut shares = Shares::default();
        shares.add(10, 10);
        shares.add(12, 2);
        let piece = |first, count, shared| Piece { first, count, shared };
        assert_eq!(
            shares.pieces(5, 20),
            [piece(5, 5, false), piece(10, 10, true), piece(20, 5, false)]
        );
        assert_eq!(shares.pieces(12, 1), [piece(12, 1, true)]);
        assert_eq!(shares.pieces(30, 1), [piece(30, 1, false)]);
    }

    #[test]
    fn against_an_array() {
        let mut shares = Shares::default();
        let mut array = [1_u64; 64];
        let mut random = 12345_u64;
        for step in 0..5000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (first, count) = ((random >> 33) % 56, 1 + (random >> 40) % 8);
            let cells = &mut array[first as usize..(first + count) as usize];
            if random >> 63 == 0 {
                shares.add(first, count);
                cells.iter_mut().for_each(|cell| *cell += 1);
            } else if cells.iter().all(|cell| *cell > 1) {
                assert_eq!(shares.drop_one(first, count), []);
                cells.iter_mut().for_each(|cell| *cell -= 1);
            }
            let counted = shares.counted(0, 64);
            let flat: Vec<u64> =
                counted.iter().flat_map(|(_, count, n)| vec![*n; *count as usize]).collect();
            assert_eq!(flat, array, "step {step}");
            let joined = list(&shares);
            assert!(
                joined.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0 || w[0].2 != w[1].2),
                "step {step}"
            );
        }
    }
}
