//! The block walk unit (thesis 6.3): through a tree, piece by piece.

use sidecore_units::{Plba, Vlba};

use crate::arithmetic;
use crate::entry::{Bounded, Entry, PRUNED};
use crate::memory::NodeMemory;
use crate::node::{Header, Node, NodeId};
use crate::range::{BlockRange, Mapping, Piece};
use crate::sketch::Outline;

/// The most levels of a tree. Nodes are at least two fifths full, except on the right edge, so that
/// no tree that fits any memory comes near this limit.
pub(crate) const MAX_LEVELS: usize = 7;

/// The walk's position in a node.
#[derive(Clone, Copy)]
struct Place<'a> {
    node: &'a Node,
    level: usize,
    /// The next entry to visit, and the number of entries.
    index: usize,
    len: usize,
    /// The node's end according to its parent: the node's entries do not count behind it.
    limit: u64,
}

impl<'a> Place<'a> {
    /// The position of block `at` in the root.
    #[inline(always)]
    fn root(memory: &'a NodeMemory, root: Option<NodeId>, at: u64) -> Option<Self> {
        let node = memory.node(root?)?;
        let Header { level, len } = node.header().filter(|header| header.level < MAX_LEVELS)?;
        let index = node.search(level, len, node.outline(), at);
        Some(Self { node, level, index, len, limit: u64::MAX })
    }

    /// The position of block `at` in the child of `entry`, the entry at this position, if the child
    /// is a node of the level below.
    #[inline(always)]
    fn child(&self, memory: &'a NodeMemory, entry: Entry, at: u64, limit: u64) -> Option<Self> {
        let node = memory.node(NodeId::from_word(entry.value)?)?;
        let level = self.level.checked_sub(1)?;
        let len = node.len_at(level)?;
        let sketch = self.node.child_sketch(self.index);
        let index =
            node.search(level, len, Outline { first: entry.first, count: entry.count, sketch }, at);
        Some(Self { node, level, index, len, limit })
    }
}

/// The extent pointer that maps all of `range`, the physical place, and the number of nodes on the
/// way. `None` if `range` has several pieces or no mapping, which only a [`Walk`] can list.
#[inline]
pub(crate) fn locate(
    memory: &NodeMemory,
    root: Option<NodeId>,
    range: BlockRange,
) -> Option<(Bounded, Plba, u64)> {
    let at = range.first.0;
    let mut here = Place::root(memory, root, at)?;
    let mut nodes = 1u64;
    loop {
        let entry = here.node.entry(here.index);
        if here.level == 0 {
            here.node.touch();
            let extent = entry.bounded().filter(|_| entry.value != PRUNED)?;
            return Some((extent, extent.locate(range)?, nodes));
        }
        if at.wrapping_sub(entry.first) >= entry.count {
            return None;
        }
        // The level falls with each step: the loop ends.
        here = here.child(memory, entry, at, u64::MAX)?;
        nodes = nodes.wrapping_add(1);
    }
}

/// Walks over a range of blocks and yields pieces that tile it, in order.
///
/// The walk ends for all contents of the nodes: levels fall by one from parent to child, a child is
/// opened only for blocks that are not covered yet, and a child covers all that its parent's
/// pointer does, or counts as pruned.
pub(crate) struct Walk<'a> {
    memory: &'a NodeMemory,
    /// The blocks that no piece has covered yet.
    at: u64,
    end: u64,
    /// The current position. `None`: the rest of the range is a hole.
    here: Option<Place<'a>>,
    /// The positions to resume at in the nodes above, by their level.
    parents: [Option<Place<'a>>; MAX_LEVELS],
    touch: bool,
    nodes: u64,
    extent: Bounded,
}

impl<'a> Walk<'a> {
    /// A walk over `range` in the tree under `root`. `touch`: marks the leaves for the clock.
    #[inline]
    pub(crate) fn new(
        memory: &'a NodeMemory,
        root: Option<NodeId>,
        range: BlockRange,
        touch: bool,
    ) -> Self {
        let at = range.first.0;
        let mut walk = Self {
            memory,
            at,
            // A range without an end is clipped to the largest number.
            end: arithmetic::reach(at, range.count),
            here: None,
            parents: [None; MAX_LEVELS],
            touch,
            nodes: 0,
            extent: Bounded::EMPTY,
        };
        walk.here = match Place::root(memory, root, at) {
            Some(root) => {
                walk.visit(root);
                Some(root)
            }
            // A node without entries that reaches to the end, and so is pruned.
            None => Some(Place { node: &NOTHING, level: 0, index: 0, len: 0, limit: walk.end }),
        };
        walk
    }

    /// The number of nodes visited so far.
    #[inline]
    pub(crate) fn nodes(&self) -> u64 {
        self.nodes
    }

    /// The extent pointer of the last mapped piece.
    #[inline]
    pub(crate) fn extent(&self) -> Option<Bounded> {
        (self.extent.count != 0).then_some(self.extent)
    }

    /// Counts a node, and touches it for the clock, which only checks leaves.
    #[inline]
    fn visit(&mut self, here: Place<'a>) {
        self.nodes = self.nodes.wrapping_add(1);
        if self.touch && here.level == 0 {
            here.node.touch();
        }
    }

    /// Returns to the node above at the end of this node.
    #[inline]
    fn close(&mut self, level: usize) {
        self.here = self.parents.get_mut(level.wrapping_add(1)).and_then(Option::take);
    }

    /// The piece from here to `to`, or to the range's end.
    #[inline]
    fn piece(&mut self, to: u64, mapping: Mapping) -> Option<Piece> {
        let (count, next) = arithmetic::cut(self.at, to, self.end);
        let range = BlockRange::new(Vlba(self.at), count);
        self.at = next;
        Some(Piece { range, mapping })
    }

    /// The piece from here to `to`, of the extent pointer `entry`.
    #[inline]
    fn mapped(&mut self, entry: Entry, to: u64) -> Option<Piece> {
        let (count, _) = arithmetic::cut(self.at, to, self.end);
        let range = BlockRange::new(Vlba(self.at), count);
        let extent = entry.bounded().filter(|_| entry.value != PRUNED);
        let mapping = match extent.and_then(|extent| Some((extent, extent.locate(range)?))) {
            Some((extent, physical)) => {
                self.extent = extent;
                Mapping::Mapped { physical, shared: entry.shared() }
            }
            None => Mapping::Pruned,
        };
        self.piece(to, mapping)
    }
}

/// Replaces a missing root.
static NOTHING: Node = Node::new();

impl Iterator for Walk<'_> {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        while self.at < self.end {
            let Some(here) = &mut self.here else {
                return self.piece(self.end, Mapping::Hole);
            };
            let Place { node, level, index, len, limit } = *here;
            if self.at >= limit {
                self.close(level);
                continue;
            }
            if index >= len {
                // Behind the root's last entry is only a hole. Any other node reaches as far as its
                // parent's pointer, or is corrupt.
                self.close(level);
                match self.here {
                    None if limit == u64::MAX => continue,
                    _ => return self.piece(limit, Mapping::Pruned),
                }
            }
            let entry = node.entry(index);
            if self.at < entry.first {
                return self.piece(entry.first.min(limit), Mapping::Hole);
            }
            here.index = index.wrapping_add(1);
            let end = entry.end().min(limit);
            if self.at >= end {
                continue;
            }
            if level == 0 {
                return self.mapped(entry, end);
            }
            let parent = *here;
            let Some(child) = Place { index, ..parent }.child(self.memory, entry, self.at, end)
            else {
                return self.piece(end, Mapping::Pruned);
            };
            if let Some(place) = self.parents.get_mut(level) {
                *place = Some(parent);
            }
            self.here = Some(child);
            self.visit(child);
        }
        None
    }
}

#[cfg(test)]
mod garbage;
