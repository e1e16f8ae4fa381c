//! Visits of a whole tree: reports, and the check of its invariants.

use std::collections::HashSet;

use super::fill::{continues, least};
use super::splice::child;
use super::{ExtentTree, Shape};
use crate::entry::Entry;
use crate::memory::NodeMemory;
use crate::node::{NODE_BYTES, NodeId};
use crate::range::{BlockRange, Extent, Mapping};
use crate::sketch::Outline;
use crate::walk::Walk;

/// A violated invariant of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TreeFault {
    /// A node pointer leads to no node, or to one of another level.
    #[error("a pointer that leads to no node of the level below")]
    Pointer,
    /// Entries of a node overlap, are out of order, empty, or past the end.
    #[error("entries that overlap, are out of order, empty, or past the end")]
    Order,
    /// A node pointer does not cover exactly what its node covers.
    #[error("a node that covers something else than its pointer says")]
    Cover,
    /// Neighbours that continue each other, in one node.
    #[error("neighbours that should be one extent")]
    Unmerged,
    /// A node is in two places, or is retired.
    #[error("a node that is retired, or in the tree twice")]
    Retired,
    /// A search in a node misses one of its entries.
    #[error("a node in which a search goes wrong")]
    Search,
    /// A node has too few entries, and is not on the right edge.
    #[error("a node with too few entries")]
    Underfull,
}

pub(super) fn walk(tree: &ExtentTree) -> Walk<'_> {
    let all = BlockRange::new(sidecore_units::Vlba(0), tree.root.blocks());
    Walk::new(&tree.memory, tree.root.load(), all, false)
}

pub(super) fn extents(tree: &ExtentTree) -> impl Iterator<Item = Extent> {
    walk(tree).filter_map(|piece| match piece.mapping {
        Mapping::Mapped { physical, shared } => {
            Some(Extent { first: piece.range.first, count: piece.range.count, physical, shared })
        }
        Mapping::Hole | Mapping::Pruned => None,
    })
}

pub(super) fn shape(tree: &ExtentTree) -> Shape {
    let mut shape = Shape::default();
    let mut walk = walk(tree);
    let mut was_pruned = false;
    for piece in walk.by_ref() {
        let is_pruned = piece.mapping == Mapping::Pruned;
        match piece.mapping {
            Mapping::Mapped { .. } => {
                shape.extents = shape.extents.saturating_add(1);
                shape.mapped_blocks = shape.mapped_blocks.saturating_add(piece.range.count);
            }
            Mapping::Hole => {}
            Mapping::Pruned => {
                shape.pruned_ranges = shape.pruned_ranges.saturating_add(u64::from(!was_pruned));
                shape.pruned_blocks = shape.pruned_blocks.saturating_add(piece.range.count);
            }
        }
        was_pruned = is_pruned;
    }
    shape.bytes = walk.nodes().saturating_mul(NODE_BYTES as u64);
    shape.nodes = usize::try_from(walk.nodes()).unwrap_or(usize::MAX);
    let root = tree.root.load().and_then(|id| tree.memory.node(id)).and_then(|node| node.header());
    shape.depth = root.map_or(0, |header| header.level.saturating_add(1));
    shape
}

pub(super) fn check(tree: &ExtentTree) -> Result<(), TreeFault> {
    let Some(root) = tree.root.load() else { return Ok(()) };
    let level =
        tree.memory.node(root).and_then(|node| node.header()).ok_or(TreeFault::Pointer)?.level;
    let mut check = Check { memory: &tree.memory, seen: tree.retired.0.iter().copied().collect() };
    let (_, end) = check.node(root, level, true)?;
    if end > tree.root.blocks() {
        return Err(TreeFault::Order);
    }
    Ok(())
}

struct Check<'m> {
    memory: &'m NodeMemory,
    /// Nodes that must not be visited (again).
    seen: HashSet<NodeId>,
}

impl Check<'_> {
    /// Checks a node and all below; returns the start and the end of its entries.
    fn node(&mut self, id: NodeId, level: usize, edge: bool) -> Result<(u64, u64), TreeFault> {
        if !self.seen.insert(id) {
            return Err(TreeFault::Retired);
        }
        let node = self.memory.node(id).ok_or(TreeFault::Pointer)?;
        let header =
            node.header().filter(|header| header.level == level).ok_or(TreeFault::Pointer)?;
        if header.len < least(level) && !edge {
            return Err(TreeFault::Underfull);
        }
        let mut end = 0u64;
        let mut before: Option<Entry> = None;
        for (index, entry) in node.entries().enumerate() {
            if entry.count == 0
                || entry.first < end
                || entry.first.checked_add(entry.count).is_none()
            {
                return Err(TreeFault::Order);
            }
            let last = entry.end().saturating_sub(1);
            if [entry.first, last]
                .iter()
                .any(|block| node.search(level, header.len, node.outline(), *block) != index)
            {
                return Err(TreeFault::Search);
            }
            if level == 0 && before.is_some_and(|before| continues(level, before, entry)) {
                return Err(TreeFault::Unmerged);
            }
            if let Some(child) = child(level, entry) {
                let outline = Outline {
                    first: entry.first,
                    count: entry.count,
                    sketch: node.child_sketch(index),
                };
                if self.memory.node(child).is_none_or(|child| child.outline() != outline) {
                    return Err(TreeFault::Cover);
                }
                let is_last = index.saturating_add(1) == header.len;
                let covered = self.node(child, level.saturating_sub(1), edge && is_last)?;
                if covered != (entry.first, entry.end()) {
                    return Err(TreeFault::Cover);
                }
            }
            end = entry.end();
            before = Some(entry);
        }
        Ok((node.entries().next().map_or(0, |entry| entry.first), end))
    }
}
