//! Which volumes refer to given blocks: asked when two of them cannot both be right.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use crate::node::{Kind, Pointer};
use crate::record::Record;
use crate::walk::Source;

/// Blocks that are looked for: ranges in order, disjoint.
struct Search<'a> {
    source: &'a mut dyn Source,
    ranges: &'a [(u64, u64)],
    node_blocks: u64,
    /// Ranges that a node and all below it refer to, by its address.
    found: HashMap<u64, Rc<BTreeSet<usize>>>,
}

/// For each of `ranges`, the numbers of the volumes whose trees have a node or data there.
/// Unreadable nodes refer to nothing.
pub(crate) fn claimants(
    source: &mut dyn Source,
    records: &[Record],
    node_blocks: u64,
    ranges: &[(u64, u64)],
) -> Vec<BTreeSet<u64>> {
    let mut search = Search { source, ranges, node_blocks, found: HashMap::new() };
    let mut claimants = vec![BTreeSet::new(); ranges.len()];
    for record in records {
        let Some(root) = record.root else { continue };
        let found = search.below(root.pointer, root.level);
        for index in found.iter() {
            if let Some(volumes) = claimants.get_mut(*index) {
                volumes.insert(record.id);
            }
        }
    }
    claimants
}

impl Search<'_> {
    fn below(&mut self, pointer: Pointer, level: u8) -> Rc<BTreeSet<usize>> {
        if let Some(found) = self.found.get(&pointer.address) {
            return Rc::clone(found);
        }
        let mut found = BTreeSet::new();
        if let Ok((node, _)) = self.source.node(pointer, Kind::Extents, level) {
            self.touched((pointer.address, self.node_blocks), &mut found);
            for entry in node.body.entries() {
                self.touched((entry.physical, entry.count), &mut found);
            }
            for child in node.body.children() {
                let below = self.below(child.pointer, level.saturating_sub(1));
                found.extend(below.iter().copied());
            }
        }
        let found = Rc::new(found);
        self.found.insert(pointer.address, Rc::clone(&found));
        found
    }

    /// Adds the ranges that these blocks overlap.
    fn touched(&self, (first, count): (u64, u64), found: &mut BTreeSet<usize>) {
        let end = first.saturating_add(count);
        let from =
            self.ranges.partition_point(|(start, count)| start.saturating_add(*count) <= first);
        let overlapping =
            self.ranges.iter().enumerate().skip(from).take_while(|(_, (start, _))| *start < end);
        found.extend(overlapping.map(|(index, _)| index));
    }
}
