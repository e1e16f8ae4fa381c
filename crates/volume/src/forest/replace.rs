//! The one change to a tree: from now on, this is all that is in that range.

use super::drop::Doomed;
use super::splice::{Item, splice};
use super::{Delta, Forest, Tree};
use crate::allocator::Need;
use crate::disk::Disk;
use crate::limits::MAX_LEVELS;
use crate::node::{Body, Child, Node, Pointer, Root, child_for};
use crate::nodes::TreeError;

/// Items that one change can put in. With them a full leaf becomes two.
pub(crate) const MAX_ITEMS: usize = 128;

/// The keys that a change is about: `first..end`, and whether something is put in there.
#[derive(Clone, Copy)]
struct Span {
    first: u64,
    end: u64,
    inserts: bool,
}

/// The fate of a child.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Nothing of it is in the span.
    Kept,
    /// All of it is.
    Dropped,
    /// The child is entered; and items go into it, or not.
    Entered { inserts: bool },
}

/// A change that has been prepared.
struct Change {
    tree: Tree,
    /// Node addresses reserved for splits.
    spare: Vec<u64>,
    delta: Delta,
    /// Data that loses a reference.
    dropped: Vec<(u64, u64)>,
}

impl Span {
    /// The fates of the children of a node, whose last child ends at `upper`: the index of the
    /// first child that is not simply kept, and the fates from there on, each with the end of the
    /// child, as far as they matter.
    ///
    /// Items go to the extent in front of them: there they can be merged with it, and the keys
    /// behind them in that child are in the span, and are removed.
    fn fates(&self, children: &[Child], upper: u64) -> (usize, Vec<(Fate, u64)>) {
        let target = self.inserts.then(|| child_for(children, self.first.saturating_sub(1)));
        let with_first = child_for(children, self.first);
        let start = target.map_or(with_first, |target| target.min(with_first));
        let behind = children.partition_point(|child| child.key < self.end);
        let behind = target.map_or(behind, |target| behind.max(target.saturating_add(1)));
        let fate = |index: usize| {
            let key = children.get(index)?.key;
            let next = children.get(index.saturating_add(1)).map_or(upper, |child| child.key);
            let fate = if target == Some(index) {
                Fate::Entered { inserts: true }
            } else if next <= self.first || key >= self.end {
                Fate::Kept
            } else if key >= self.first && next <= self.end {
                Fate::Dropped
            } else {
                Fate::Entered { inserts: false }
            };
            Some((fate, next))
        };
        (start, (start..behind).map_while(fate).collect())
    }

    fn inserting(self, inserts: bool) -> Self {
        Self { inserts, ..self }
    }
}

impl Forest {
    /// Makes `items`, at most [`MAX_ITEMS`], all that the tree has in `first..end`. They are in
    /// order, disjoint, and inside.
    ///
    /// On an error nothing has changed but where nodes lie: `tree.root` has to be kept also then.
    pub(crate) fn replace(
        &mut self,
        disk: &mut dyn Disk,
        tree: &mut Tree,
        (first, end): (u64, u64),
        items: Vec<Item>,
        need: Need,
    ) -> Result<Delta, TreeError> {
        let span = Span { first, end, inserts: !items.is_empty() };
        let Some(root) = tree.root else { return self.plant(tree, span, items, need) };
        if root.level >= MAX_LEVELS {
            return Err(TreeError::NoSpace);
        }
        let pointer = self.writable(disk, tree, root.pointer, root.level, need)?;
        tree.root = Some(Root { pointer, level: root.level });

        let mut doomed = Doomed::default();
        self.prepare(
            disk,
            tree,
            (pointer.address, root.level),
            (span, u64::MAX),
            need,
            &mut doomed,
        )?;
        let spare = self
            .allocator
            .nodes(usize::from(root.level).saturating_add(3), need)
            .ok_or(TreeError::NoSpace)?;

        let delta =
            Delta { less_extents: doomed.extents, less_blocks: doomed.blocks, ..Delta::default() };
        let mut change = Change { tree: *tree, spare, delta, dropped: Vec::new() };
        let pieces = self.apply(
            disk,
            &mut change,
            (pointer.address, root.level),
            (span, u64::MAX),
            Some(items),
        );
        tree.root = self.crown(&mut change, pieces, root.level);
        self.give_up(doomed);
        Ok(self.finish(change))
    }

    /// The first items of an empty tree.
    fn plant(
        &mut self,
        tree: &mut Tree,
        span: Span,
        items: Vec<Item>,
        need: Need,
    ) -> Result<Delta, TreeError> {
        if !span.inserts {
            return Ok(Delta::default());
        }
        let spare = self.allocator.nodes(1, need).ok_or(TreeError::NoSpace)?;
        let mut change =
            Change { tree: *tree, spare, delta: Delta::default(), dropped: Vec::new() };
        let body = match items.first() {
            Some(Item::Volume(_)) => Body::Records(Vec::new()),
            _ => Body::Extents(Vec::new()),
        };
        let mut node = self.new_node(&change, 0, body);
        splice(&mut node, span.first, span.end, items, &mut change.delta);
        let address = change.spare.pop().ok_or(TreeError::NoSpace)?;
        self.nodes.put(address, node);
        tree.root = Some(Root { pointer: Pointer { address, checksum: 0 }, level: 0 });
        Ok(self.finish(change))
    }

    fn finish(&mut self, change: Change) -> Delta {
        for (first, count) in change.dropped {
            self.allocator.drop_reference(first, count);
        }
        for address in change.spare {
            self.allocator.free_node(address, true);
        }
        change.delta
    }

    fn new_node(&self, change: &Change, level: u8, body: Body) -> Node {
        Node {
            kind: change.tree.kind,
            owner: change.tree.owner,
            generation: self.generation,
            level,
            body,
        }
    }

    /// Makes all nodes writable that will change, and gathers what will go.
    fn prepare(
        &mut self,
        disk: &mut dyn Disk,
        tree: &Tree,
        (address, level): (u64, u8),
        (span, upper): (Span, u64),
        need: Need,
        doomed: &mut Doomed,
    ) -> Result<(), TreeError> {
        let children = self
            .nodes
            .change(address)
            .map(|node| node.body.children().to_vec())
            .unwrap_or_default();
        let below = level.saturating_sub(1);
        let (start, fates) = span.fates(&children, upper);
        for ((index, child), (fate, next)) in children.iter().enumerate().skip(start).zip(fates) {
            match fate {
                Fate::Kept => {}
                Fate::Dropped => {
                    self.doom(disk, tree.kind, (child.pointer, below), true, doomed)?
                }
                Fate::Entered { inserts } => {
                    let pointer = self.writable_child(disk, tree, (address, level), index, need)?;
                    self.prepare(
                        disk,
                        tree,
                        (pointer.address, below),
                        (span.inserting(inserts), next),
                        need,
                        doomed,
                    )?;
                }
            }
        }
        Ok(())
    }

    /// Applies the prepared change. Returns the node's replacements: none, the node itself, or
    /// several.
    fn apply(
        &mut self,
        disk: &mut dyn Disk,
        change: &mut Change,
        (address, level): (u64, u8),
        (span, upper): (Span, u64),
        mut items: Option<Vec<Item>>,
    ) -> Vec<Child> {
        let Some(mut node) = self.nodes.take(address) else { return Vec::new() };
        let mut at_end = false;
        if let Body::Inner(children) = &mut node.body {
            let (start, fates) = span.fates(children, upper);
            let kept = children.split_off(start.saturating_add(fates.len()).min(children.len()));
            let touched = children.split_off(start.min(children.len()));
            let mut entered = Vec::new();
            for (child, (fate, next)) in touched.into_iter().zip(fates) {
                at_end = false;
                match fate {
                    Fate::Kept => children.push(child),
                    Fate::Dropped => {}
                    Fate::Entered { inserts } => {
                        let place = (child.pointer.address, level.saturating_sub(1));
                        let items = if inserts { items.take() } else { None };
                        entered.push(children.len());
                        children.extend(self.apply(
                            disk,
                            change,
                            place,
                            (span.inserting(inserts), next),
                            items,
                        ));
                        at_end = kept.is_empty();
                    }
                }
            }
            children.extend(kept);
            for index in entered.into_iter().rev() {
                self.take_in_neighbour(disk, change, children, index, level.saturating_sub(1));
            }
        } else {
            at_end = node.body.last_key().is_some_and(|last| last < span.first);
            let dropped = splice(
                &mut node,
                span.first,
                span.end,
                items.unwrap_or_default(),
                &mut change.delta,
            );
            change.dropped.extend(dropped);
        }
        self.put_in_pieces(change, address, node, at_end)
    }

    /// Puts a changed node back: split if it is too full, and not at all if it is empty. What grows
    /// at its end leaves full nodes behind.
    fn put_in_pieces(
        &mut self,
        change: &mut Change,
        address: u64,
        mut node: Node,
        at_end: bool,
    ) -> Vec<Child> {
        let (count, capacity) = (node.body.len(), node.body.capacity());
        let pieces = count.div_ceil(capacity.max(1));
        if pieces == 0 {
            self.allocator.free_node(address, true);
            return Vec::new();
        }
        let piece_len = if at_end { capacity } else { count.div_ceil(pieces) };
        let mut children = Vec::with_capacity(pieces);
        let mut address = address;
        loop {
            let key = node.body.first_key().unwrap_or(0);
            children.push(Child { key, pointer: Pointer { address, checksum: 0 } });
            let next = if node.body.len() > capacity { change.spare.pop() } else { None };
            // Without room, which has been taken ahead, the node stays too full, and the commit
            // refuses it.
            let Some(next) = next else { break };
            let rest = self.new_node(change, node.level, node.body.split_off(piece_len));
            self.nodes.put(address, std::mem::replace(&mut node, rest));
            address = next;
        }
        self.nodes.put(address, node);
        children
    }

    /// If the child there is nearly empty, it takes a neighbour in. That is no must: a neighbour
    /// that cannot be read stays.
    fn take_in_neighbour(
        &mut self,
        disk: &mut dyn Disk,
        change: &Change,
        children: &mut Vec<Child>,
        index: usize,
        level: u8,
    ) {
        let Some(child) = children.get(index).copied() else { return };
        let right = index.saturating_add(1);
        let neighbour = if right < children.len() { Some(right) } else { index.checked_sub(1) };
        let Some((neighbour, other)) =
            neighbour.and_then(|at| Some((at, children.get(at).copied()?)))
        else {
            return;
        };
        let Some(own) = self.nodes.change(child.pointer.address) else { return };
        let (len, capacity) = (own.body.len(), own.body.capacity());
        if len >= capacity / 4 {
            return;
        }
        let Ok(node) = self.nodes.get(disk, other.pointer, change.tree.kind, level) else { return };
        if len.saturating_add(node.body.len()) > capacity.saturating_sub(capacity / 4) {
            return;
        }
        let Some(own) = self.nodes.change(child.pointer.address) else { return };
        let joined = if neighbour > index {
            own.body.append(&node.body)
        } else {
            let mut body = node.body.clone();
            let joined = body.append(&own.body);
            if joined {
                own.body = body;
            }
            joined
        };
        if !joined {
            return;
        }
        if self.nodes.is_shared(other.pointer.address) {
            self.nodes.drop_reference(other.pointer.address);
            self.refer_to_all_in(&node);
        } else {
            self.hand_on(other.pointer.address, &node);
            let fresh = self.nodes.forget(other.pointer.address);
            self.allocator.free_node(other.pointer.address, fresh);
        }
        if let Some(child) = children.get_mut(index) {
            child.key = child.key.min(other.key);
        }
        children.remove(neighbour);
    }

    /// The root above what the old root has become.
    fn crown(&mut self, change: &mut Change, pieces: Vec<Child>, level: u8) -> Option<Root> {
        let first = *pieces.first()?;
        if pieces.len() > 1
            && let Some(address) = change.spare.pop()
        {
            let level = level.saturating_add(1);
            let node = self.new_node(change, level, Body::Inner(pieces));
            self.nodes.put(address, node);
            return Some(Root { pointer: Pointer { address, checksum: 0 }, level });
        }
        // A root with one child is none.
        let (mut pointer, mut level) = (first.pointer, level);
        while level > 0
            && self.nodes.is_dirty(pointer.address)
            && !self.nodes.is_shared(pointer.address)
        {
            let only = match self.nodes.change(pointer.address).map(|node| node.body.children()) {
                Some([only]) => only.pointer,
                _ => break,
            };
            let fresh = self.nodes.forget(pointer.address);
            self.allocator.free_node(pointer.address, fresh);
            pointer = only;
            level = level.saturating_sub(1);
        }
        Some(Root { pointer, level })
    }
}
