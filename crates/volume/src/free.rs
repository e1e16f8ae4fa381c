//! Free blocks, found by where they are and by how many lie together.

use std::collections::BTreeSet;

use crate::ranges::RangeSet;

/// Free ranges. Nodes need aligned room, a *slot*, which many a free range is too small for: ranges
/// with a slot and scraps without are kept apart, so that data can fill the scraps when the slots
/// are needed for metadata.
#[derive(Debug)]
pub(crate) struct FreeSpace {
    ranges: RangeSet,
    /// Ranges with a slot, by (count, first).
    roomy: BTreeSet<(u64, u64)>,
    /// The same, by first.
    roomy_firsts: BTreeSet<u64>,
    /// Ranges without, by (count, first).
    scraps: BTreeSet<(u64, u64)>,
    slots: u64,
    node_blocks: u64,
}

impl FreeSpace {
    pub(crate) fn new(node_blocks: u64) -> Self {
        Self {
            ranges: RangeSet::default(),
            roomy: BTreeSet::new(),
            roomy_firsts: BTreeSet::new(),
            scraps: BTreeSet::new(),
            slots: 0,
            node_blocks: node_blocks.max(1),
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.ranges.blocks()
    }

    /// Nodes that there is room for.
    pub(crate) fn slots(&self) -> u64 {
        self.slots
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges.iter()
    }

    pub(crate) fn containing(&self, block: u64) -> Option<(u64, u64)> {
        self.ranges.containing(block)
    }

    /// Adds blocks; `false`, and nothing was done, if one of them is free.
    pub(crate) fn insert(&mut self, first: u64, count: u64) -> bool {
        let Some(joined) = self.ranges.insert_joined(first, count) else { return count == 0 };
        for old in [joined.left, joined.right].into_iter().flatten() {
            self.forget(old);
        }
        self.index(joined.whole);
        true
    }

    /// Takes blocks out; `false`, and nothing was done, unless all are free.
    pub(crate) fn remove(&mut self, first: u64, count: u64) -> bool {
        let Some((start, had)) = self.ranges.remove(first, count) else { return false };
        self.forget((start, had));
        let (end, had_end) = (first.saturating_add(count), start.saturating_add(had));
        self.index((start, first.saturating_sub(start)));
        self.index((end, had_end.saturating_sub(end)));
        true
    }

    /// The highest slot.
    pub(crate) fn highest_slot(&self) -> Option<u64> {
        let (first, count) = self.ranges.containing(*self.roomy_firsts.last()?)?;
        let slots_to_end = first.saturating_add(count).checked_div(self.node_blocks)?;
        slots_to_end.checked_sub(1).map(|slot| slot.saturating_mul(self.node_blocks))
    }

    /// The slots, from the highest one down.
    pub(crate) fn highest_slots(&self) -> impl Iterator<Item = u64> + '_ {
        let slots_of = |first: &u64| {
            let (first, count) = self.ranges.containing(*first).unwrap_or_default();
            let end = first.saturating_add(count).checked_div(self.node_blocks).unwrap_or(0);
            first.div_ceil(self.node_blocks)..end
        };
        let slots = self.roomy_firsts.iter().rev().flat_map(move |first| slots_of(first).rev());
        slots.map(|slot| slot.saturating_mul(self.node_blocks))
    }

    /// The smallest range with a slot and at least `count` blocks, else the largest one.
    pub(crate) fn best(&self, count: u64) -> Option<(u64, u64)> {
        let best = self.roomy.range((count, 0)..).next().or_else(|| self.roomy.last());
        best.map(|(count, first)| (*first, *count))
    }

    /// The largest range without a slot.
    pub(crate) fn largest_scrap(&self) -> Option<(u64, u64)> {
        self.scraps.last().map(|(count, first)| (*first, *count))
    }

    /// Slots in a range.
    pub(crate) fn slots_in(&self, first: u64, count: u64) -> u64 {
        let end = first.saturating_add(count).checked_div(self.node_blocks).unwrap_or(0);
        end.saturating_sub(first.div_ceil(self.node_blocks))
    }

    fn index(&mut self, (first, count): (u64, u64)) {
        let slots = self.slots_in(first, count);
        if slots > 0 {
            self.roomy.insert((count, first));
            self.roomy_firsts.insert(first);
            self.slots = self.slots.saturating_add(slots);
        } else if count > 0 {
            self.scraps.insert((count, first));
        }
    }

    fn forget(&mut self, (first, count): (u64, u64)) {
        if self.roomy.remove(&(count, first)) {
            self.roomy_firsts.remove(&first);
            self.slots = self.slots.saturating_sub(self.slots_in(first, count));
        } else {
            self.scraps.remove(&(count, first));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned() {
        let mut free = FreeSpace::new(4);
        assert!(free.insert(3, 8) && free.insert(20, 3) && free.insert(33, 7));
        assert_eq!((free.blocks(), free.slots()), (18, 2));
        assert_eq!(free.highest_slot(), Some(36));
        assert!(free.remove(36, 4));
        assert_eq!((free.highest_slot(), free.slots()), (Some(4), 1));
        assert_eq!((free.best(4), free.largest_scrap()), (Some((3, 8)), Some((33, 3))));
        assert!(free.remove(7, 1));
        assert_eq!((free.slots(), free.best(5), free.highest_slot()), (0, None, None));
    }

    #[test]
    fn the_indexes_agree_with_the_ranges() {
        let mut free = FreeSpace::new(8);
        let mut random = 1_u64;
        for _ in 0..4000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (first, count) = ((random >> 33) % 500, 1 + (random >> 45) % 30);
            if random >> 63 == 0 {
                free.insert(first, count);
            } else {
                free.remove(first, count);
            }
            let all: Vec<(u64, u64)> = free.iter().collect();
            assert_eq!(all.len(), free.roomy.len() + free.scraps.len());
            assert_eq!(
                free.slots(),
                all.iter().map(|(first, count)| free.slots_in(*first, *count)).sum::<u64>()
            );
            assert_eq!(free.roomy.len(), free.roomy_firsts.len());
            assert_eq!(free.highest_slots().next(), free.highest_slot());
            assert_eq!(free.highest_slots().count() as u64, free.slots());
            if let Some(slot) = free.highest_slot() {
                let (first, count) = free.containing(slot).unwrap();
                assert!(slot % 8 == 0 && slot + 8 <= first + count);
            }
        }
    }
}
