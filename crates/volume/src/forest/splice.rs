//! Changing the entries of a leaf.

use super::Delta;
use crate::node::{Body, Entry, Node};
use crate::record::Record;

/// An entry of a leaf, of either kind of tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Extent(Entry),
    Volume(Record),
}

/// Makes `items` all that the leaf has in the keys `first..end`. Returns the blocks that lost a
/// reference.
pub(super) fn splice(
    node: &mut Node,
    first: u64,
    end: u64,
    items: Vec<Item>,
    delta: &mut Delta,
) -> Vec<(u64, u64)> {
    match &mut node.body {
        Body::Extents(entries) => {
            let new = items.into_iter().filter_map(|item| match item {
                Item::Extent(entry) => Some(entry),
                Item::Volume(_) => None,
            });
            extents(entries, first, end, new.collect(), delta)
        }
        Body::Records(records) => {
            let new = items.into_iter().filter_map(|item| match item {
                Item::Volume(record) => Some(record),
                Item::Extent(_) => None,
            });
            let from = records.partition_point(|record| record.id < first);
            let to = records.partition_point(|record| record.id < end).max(from);
            records.splice(from..to, new);
            Vec::new()
        }
        Body::Inner(_) => Vec::new(),
    }
}

fn extents(
    entries: &mut Vec<Entry>,
    first: u64,
    end: u64,
    new: Vec<Entry>,
    delta: &mut Delta,
) -> Vec<(u64, u64)> {
    let from = entries.partition_point(|entry| entry.end() <= first);
    let to = entries.partition_point(|entry| entry.first < end).max(from);
    let old = entries.get(from..to).unwrap_or_default();
    let dropped: Vec<Entry> = old.iter().filter_map(|entry| entry.clip(first, end)).collect();
    let left = old.first().and_then(|entry| entry.clip(0, first));
    let right = old.last().and_then(|entry| entry.clip(end, u64::MAX));

    // The neighbours may be continued by what comes between them.
    let (mut from, mut to) = (from, to);
    let mut joined: Vec<Entry> = Vec::with_capacity(new.len().saturating_add(4));
    if left.is_none()
        && let Some((index, before)) =
            from.checked_sub(1).and_then(|index| Some((index, entries.get(index)?)))
    {
        joined.push(*before);
        from = index;
    }
    let added: u64 = new.iter().map(|entry| entry.count).fold(0, u64::saturating_add);
    let mut after = None;
    if right.is_none() {
        after = entries.get(to).copied();
        to = if after.is_some() { to.saturating_add(1) } else { to };
    }
    for entry in left.into_iter().chain(new).chain(right).chain(after) {
        match joined.last_mut() {
            Some(last) if last.end() == entry.first && last.physical_end() == entry.physical => {
                last.count = last.count.saturating_add(entry.count);
            }
            _ => joined.push(entry),
        }
    }
    delta.less_extents = delta.less_extents.saturating_add(to.saturating_sub(from) as u64);
    delta.more_extents = delta.more_extents.saturating_add(joined.len() as u64);
    delta.more_blocks = delta.more_blocks.saturating_add(added);
    let lost: u64 = dropped.iter().map(|entry| entry.count).fold(0, u64::saturating_add);
    delta.less_blocks = delta.less_blocks.saturating_add(lost);
    entries.splice(from..to, joined);
    dropped.into_iter().map(|entry| (entry.physical, entry.count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(first: u64, count: u64, physical: u64) -> Entry {
        Entry { first, count, physical }
    }

    fn splice_into(
        before: &[Entry],
        first: u64,
        end: u64,
        new: &[Entry],
    ) -> (Vec<Entry>, Vec<(u64, u64)>, Delta) {
        let mut entries = before.to_vec();
        let mut delta = Delta::default();
        let dropped = extents(&mut entries, first, end, new.to_vec(), &mut delta);
        let blocks = |entries: &[Entry]| entries.iter().map(|entry| entry.count).sum::<u64>();
        assert_eq!(delta.extents(before.len() as u64), entries.len() as u64);
        assert_eq!(delta.blocks(blocks(before)), blocks(&entries));
        (entries, dropped, delta)
    }

    #[test]
    fn a_hole_in_an_extent_leaves_its_two_ends() {
        let (after, dropped, _) = splice_into(&[entry(10, 10, 100)], 12, 15, &[]);
        assert_eq!((after, dropped), (vec![entry(10, 2, 100), entry(15, 5, 105)], vec![(102, 3)]));
    }

    #[test]
    fn what_is_covered_in_part_is_cut_and_what_is_covered_whole_goes() {
        let before = [entry(0, 5, 50), entry(6, 2, 80), entry(10, 10, 100)];
        let (after, dropped, _) = splice_into(&before, 4, 12, &[entry(4, 8, 200)]);
        assert_eq!(after, [entry(0, 4, 50), entry(4, 8, 200), entry(12, 8, 102)]);
        assert_eq!(dropped, [(54, 1), (80, 2), (100, 2)]);
    }

    #[test]
    fn extents_that_continue_each_other_are_one() {
        let before = [entry(0, 4, 50), entry(8, 4, 58)];
        let (after, dropped, _) = splice_into(&before, 4, 8, &[entry(4, 4, 54)]);
        assert_eq!((after, dropped), (vec![entry(0, 12, 50)], vec![]));
        let (after, ..) = splice_into(&[entry(0, 4, 50)], 2, 4, &[entry(2, 2, 52)]);
        assert_eq!(after, [entry(0, 4, 50)]);
        let (after, ..) =
            splice_into(&[entry(0, 4, 50)], 4, 6, &[entry(4, 1, 54), entry(5, 1, 55)]);
        assert_eq!(after, [entry(0, 6, 50)]);
    }

    #[test]
    fn nothing_in_nothing_changes_nothing() {
        let before = [entry(0, 4, 50), entry(8, 4, 70)];
        let (after, dropped, _) = splice_into(&before, 4, 8, &[]);
        assert_eq!((after, dropped), (before.to_vec(), vec![]));
        let (after, ..) = splice_into(&[], 4, 8, &[entry(5, 1, 9)]);
        assert_eq!(after, [entry(5, 1, 9)]);
    }
}
