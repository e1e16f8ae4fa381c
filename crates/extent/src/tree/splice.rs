//! The only way in which a tree changes: a range of it is cut out, and other entries are put in its
//! place.
//!
//! Downwards, the two paths to the range's borders are taken apart: on each level, the entries left
//! of the left path and right of the right path remain, and all between are dropped. Upwards, each
//! level is put together again, from the remains on both sides and the new nodes of the level
//! below. No published node is written; the nodes taken apart are retired.

use std::collections::VecDeque;

use super::fill::{coalesce, is_pruned, least, pruned_value, sizes};
use crate::entry::{Entry, NULL, PRUNED};
use crate::memory::{NodeMemory, OutOfNodes, Retired};
use crate::node::{NodeId, capacity};
use crate::sketch::Sketch;
use crate::walk::MAX_LEVELS;

#[derive(Clone, Copy, Debug)]
enum Side {
    Left,
    Right,
}

/// The remaining entries of a level.
#[derive(Debug, Default)]
struct Remains {
    left: Vec<Entry>,
    right: VecDeque<Entry>,
}

/// A tree taken apart.
#[derive(Debug)]
pub(super) struct Splice<'m> {
    memory: &'m NodeMemory,
    levels: Vec<Remains>,
    /// Allocated, and not published yet.
    fresh: Vec<NodeId>,
    retired: Vec<NodeId>,
}

/// A tree put together.
#[derive(Debug)]
pub(super) struct Spliced {
    pub(super) root: Option<NodeId>,
    pub(super) retired: Retired,
}

impl<'m> Splice<'m> {
    /// A tree without entries.
    pub(super) fn empty(memory: &'m NodeMemory) -> Self {
        Self { memory, levels: vec![Remains::default()], fresh: Vec::new(), retired: Vec::new() }
    }

    /// Cuts `from..to` out of the tree under `root`, over `blocks` blocks.
    pub(super) fn cut(
        memory: &'m NodeMemory,
        root: Option<NodeId>,
        blocks: u64,
        from: u64,
        to: u64,
    ) -> Self {
        let mut splice = Self::empty(memory);
        let top = root.and_then(|root| memory.node(root)).and_then(|node| node.header());
        let Some(top) = top else {
            // The whole tree is pruned, and so are the remains.
            if let Some(leaves) = splice.levels.first_mut() {
                leaves.left.extend(Entry::between(0, from.min(blocks), PRUNED));
                leaves.right.extend(Entry::between(to, blocks, PRUNED));
            }
            return splice;
        };
        splice.levels.resize_with((top.level).saturating_add(1), Remains::default);
        let (mut left, mut right) = (root, root);
        for level in (0..splice.levels.len()).rev() {
            (left, right) = splice.cut_level(level, left, right, from, to);
        }
        splice
    }

    /// Takes the border nodes of one level apart; returns the border nodes of the level below.
    ///
    /// The entries on the borders are opened even if they only touch `from` or `to`: the new
    /// entries may continue them.
    fn cut_level(
        &mut self,
        level: usize,
        left: Option<NodeId>,
        right: Option<NodeId>,
        from: u64,
        to: u64,
    ) -> (Option<NodeId>, Option<NodeId>) {
        let same = left == right;
        let mut dropped = Vec::new();
        let (mut open_left, mut open_right) = (None, None);
        let (mut remains_left, mut remains_right) = (Vec::new(), VecDeque::new());
        for (is_left, is_right, node) in
            [(true, same, left), (false, true, if same { None } else { right })]
        {
            let entries = self.take_apart(node);
            // The last entry that begins before the range, and the first that ends behind it:
            // possibly the same entry.
            let last_before = entries.iter().rposition(|entry| is_left && entry.first < from);
            let first_behind = entries.iter().position(|entry| is_right && entry.end() > to);
            for (index, entry) in entries.into_iter().enumerate() {
                let child = child(level, entry);
                let (at_left, at_right) = (last_before == Some(index), first_behind == Some(index));
                if last_before.is_some_and(|last| index < last) {
                    remains_left.push(entry);
                } else if first_behind.is_some_and(|first| index > first) {
                    remains_right.push_back(entry);
                } else if !at_left && !at_right {
                    dropped.extend(child);
                } else {
                    if at_left {
                        open_left = child;
                    }
                    if at_right {
                        open_right = child;
                    }
                    if child.is_none() {
                        remains_left
                            .extend(part(level, entry, entry.first, from).filter(|_| at_left));
                        remains_right
                            .extend(part(level, entry, to, entry.end()).filter(|_| at_right));
                    }
                }
            }
        }
        for id in dropped {
            retire_subtree(self.memory, id, level.saturating_sub(1), &mut self.retired);
        }
        if let Some(remains) = self.levels.get_mut(level) {
            *remains = Remains { left: remains_left, right: remains_right };
        }
        (open_left, open_right)
    }

    /// The entries of a node that will be retired.
    fn take_apart(&mut self, id: Option<NodeId>) -> Vec<Entry> {
        let Some(id) = id else { return Vec::new() };
        self.retired.push(id);
        self.memory.node(id).map_or_else(Vec::new, |node| node.entries().collect())
    }

    /// Puts `entries`, extent pointers, in place of the range.
    pub(super) fn finish(
        mut self,
        entries: Vec<Entry>,
        blocks: u64,
    ) -> Result<Spliced, OutOfNodes> {
        match self.join(entries, blocks) {
            Ok(root) => Ok(Spliced { root, retired: Retired(self.retired) }),
            Err(out) => {
                // The old tree is unchanged, and no reader has seen the new nodes.
                self.memory.free(Retired(self.fresh));
                Err(out)
            }
        }
    }

    fn join(&mut self, mut middle: Vec<Entry>, blocks: u64) -> Result<Option<NodeId>, OutOfNodes> {
        for level in 0..MAX_LEVELS {
            let entries = self.join_level(level, middle);
            let is_top = level.saturating_add(1) >= self.levels.len();
            match entries.as_slice() {
                [] if is_top => return self.make(0, &[]).map(Some),
                [only] if is_top && is_pruned(level, *only) => {
                    return self.pruned_root(*only, blocks);
                }
                // A root with a single pointer is useless.
                [only] if is_top && level > 0 => return self.descend(*only, blocks),
                some if is_top && some.len() <= capacity(level) => {
                    return self.make(level, some).map(Some);
                }
                some => middle = self.pack(level, some)?,
            }
        }
        Err(OutOfNodes)
    }

    /// All entries of a level, with neighbours' if there are few.
    fn join_level(&mut self, level: usize, middle: Vec<Entry>) -> Vec<Entry> {
        let mut entries = match self.levels.get_mut(level) {
            Some(remains) => {
                let mut entries = std::mem::take(&mut remains.left);
                entries.extend(middle);
                entries.extend(remains.right.drain(..));
                coalesce(level, entries)
            }
            None => middle,
        };
        while entries.len() < least(level) && !self.is_edge(level) {
            let above = level.saturating_add(1);
            if let Some(neighbour) = self.neighbour(above, Side::Left) {
                entries.splice(0..0, self.lower(level, neighbour));
            } else if let Some(neighbour) = self.neighbour(above, Side::Right) {
                entries.extend(self.lower(level, neighbour));
            } else {
                break;
            }
            entries = coalesce(level, entries);
        }
        entries
    }

    /// Whether a level's last node will be the last of the tree.
    fn is_edge(&self, level: usize) -> bool {
        self.levels.iter().skip(level).all(|remains| remains.right.is_empty())
    }

    /// Takes the nearest remaining entry of a level, out of a node of the level above if necessary.
    fn neighbour(&mut self, level: usize, side: Side) -> Option<Entry> {
        let remains = self.levels.get_mut(level)?;
        let found = match side {
            Side::Left => remains.left.pop(),
            Side::Right => remains.right.pop_front(),
        };
        if found.is_some() {
            return found;
        }
        let parent = self.neighbour(level.saturating_add(1), side)?;
        let entries = self.lower(level, parent);
        let remains = self.levels.get_mut(level)?;
        match side {
            Side::Left => {
                remains.left.extend(entries);
                remains.left.pop()
            }
            Side::Right => {
                remains.right.extend(entries);
                remains.right.pop_front()
            }
        }
    }

    /// The entries on `level` for an entry of the level above: a pruned subtree is a pruned part
    /// there too.
    fn lower(&mut self, level: usize, entry: Entry) -> Vec<Entry> {
        match NodeId::from_word(entry.value) {
            Some(id) => self.take_apart(Some(id)),
            None => vec![Entry { value: pruned_value(level), ..entry }],
        }
    }

    /// Nodes for `entries` of `level`, and the pointers to them.
    fn pack(&mut self, level: usize, mut entries: &[Entry]) -> Result<Vec<Entry>, OutOfNodes> {
        let mut pointers = Vec::new();
        for size in sizes(level, entries.len(), self.is_edge(level)) {
            let (some, others) = entries.split_at_checked(size).unwrap_or((entries, &[]));
            entries = others;
            let (Some(first), Some(last)) = (some.first(), some.last()) else { continue };
            let value = match some {
                [only] if is_pruned(level, *only) => NULL,
                _ => NodeId::to_word(Some(self.make(level, some)?)),
            };
            pointers.extend(Entry::between(first.first, last.end(), value));
        }
        Ok(pointers)
    }

    fn make(&mut self, level: usize, entries: &[Entry]) -> Result<NodeId, OutOfNodes> {
        let id = self.memory.take()?;
        self.fresh.push(id);
        let node = self.memory.node(id).ok_or(OutOfNodes)?;
        // A pruned child has no sketch, and needs none.
        let nodes =
            entries.iter().map(|entry| child(level, *entry).and_then(|id| self.memory.node(id)));
        let sketches =
            nodes.map(|node| node.map_or(Sketch::default(), |node| node.outline().sketch));
        node.write(level, entries, sketches);
        Ok(id)
    }

    /// The root of a tree that contains only this pruned part.
    fn pruned_root(&mut self, part: Entry, blocks: u64) -> Result<Option<NodeId>, OutOfNodes> {
        if part.first == 0 && part.end() >= blocks {
            return Ok(None);
        }
        self.make(0, &[Entry { value: PRUNED, ..part }]).map(Some)
    }

    /// The root of a tree that contains only the subtree of `entry`.
    fn descend(&mut self, mut entry: Entry, blocks: u64) -> Result<Option<NodeId>, OutOfNodes> {
        while let Some(id) = NodeId::from_word(entry.value) {
            let node = self.memory.node(id).ok_or(OutOfNodes)?;
            match node.header() {
                Some(header) if header.level > 0 && header.len == 1 => {
                    entry = node.entry(0);
                    self.retired.push(id);
                }
                _ => return Ok(Some(id)),
            }
        }
        self.pruned_root(entry, blocks)
    }
}

/// Retires a node of `level` and all below it.
pub(super) fn retire_subtree(
    memory: &NodeMemory,
    id: NodeId,
    level: usize,
    retired: &mut Vec<NodeId>,
) {
    retired.push(id);
    let Some(below) = level.checked_sub(1) else { return };
    let Some(node) = memory.node(id) else { return };
    for child in node.entries().filter_map(|entry| child(level, entry)) {
        retire_subtree(memory, child, below, retired);
    }
}

/// The node that an entry of `level` points to, if it is a node pointer.
pub(super) fn child(level: usize, entry: Entry) -> Option<NodeId> {
    if level == 0 { None } else { NodeId::from_word(entry.value) }
}

/// The part of an entry without a child that is in `from..to`, if there is one.
fn part(level: usize, entry: Entry, from: u64, to: u64) -> Option<Entry> {
    let (first, end) = (entry.first.max(from), entry.end().min(to));
    let value = match entry.value {
        // A pruned part has no physical place.
        value if is_pruned(level, entry) => value,
        value => value.wrapping_add(first.saturating_sub(entry.first)),
    };
    Entry::between(first, end, value)
}
