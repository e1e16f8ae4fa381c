//! Sets of bytes of a disk.

use std::collections::BTreeMap;

/// Ranges that do not touch each other: first bytes, and the bytes behind the last ones.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Whether any of these bytes is in the set.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        start < end && self.0.range(..end).next_back().is_some_and(|(_, last)| *last > start)
    }

    /// Adds bytes.
    pub(super) fn insert(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        while let Some((&first, &last)) = self.0.range(..=end).next_back() {
            if last < start {
                break;
            }
            self.0.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        self.0.insert(start, end);
    }

    /// Takes bytes out.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        while let Some((&first, &last)) = self.0.range(..end).next_back() {
            if last <= start {
                break;
            }
            self.0.remove(&first);
            if last > end {
                self.0.insert(end, last);
            }
            if first < start {
                self.0.insert(first, start);
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random changes have the effect that they have on a list of bytes.
    #[test]
    fn a_set_is_that_of_its_bytes() {
        let mut state = 7_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let (mut set, mut bytes) = (Ranges::default(), [false; 64]);
        for _ in 0..5_000 {
            let (start, end) = (random(64), random(65));
            let places = start as usize..(end.max(start)) as usize;
            match random(3) {
                0 => {
                    set.remove(start, end);
                    bytes[places].fill(false);
                }
                1 => {
                    set.insert(start, end);
                    bytes[places].fill(true);
                }
                _ => {
                    let expected = bytes[places].contains(&true);
                    assert_eq!(set.overlaps(start, end), expected, "{start}..{end} {set:?}");
                }
            }
            let apart: Vec<(u64, u64)> = set.0.iter().map(|(start, end)| (*start, *end)).collect();
            assert!(apart.windows(2).all(|two| two[0].1 < two[1].0), "{set:?}");
            assert!(apart.iter().all(|(start, end)| start < end), "{set:?}");
        }
    }
}
