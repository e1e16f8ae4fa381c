//! Reading a tree of extents.

use super::{Forest, Tree};
use crate::disk::Disk;
use crate::node::{Entry, Pointer, child_for};
use crate::nodes::TreeError;

/// A part of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) entry: Entry,
    /// Whether another tree refers to the entry too.
    pub(crate) shared: bool,
}

/// A lookup and its result so far.
struct Look {
    first: u64,
    end: u64,
    limit: usize,
    found: Vec<Found>,
}

impl Forest {
    /// The mappings in `first..end`, in order, but no more than `limit` pieces. The second part is
    /// the end of the range looked up.
    pub(crate) fn look(
        &mut self,
        disk: &mut dyn Disk,
        tree: &Tree,
        first: u64,
        end: u64,
        limit: usize,
    ) -> Result<(Vec<Found>, u64), TreeError> {
        let mut look = Look { first, end, limit, found: Vec::new() };
        let Some(root) = tree.root else { return Ok((look.found, end)) };
        if limit == 0 {
            return Ok((look.found, first));
        }
        // One piece more than asked for shows that there are more.
        look.limit = limit.saturating_add(1);
        self.look_into(disk, tree, root.pointer, root.level, false, &mut look)?;
        let more = look.found.len() > limit;
        look.found.truncate(limit);
        let reached = look.found.last().filter(|_| more).map_or(end, |last| last.entry.end());
        Ok((look.found, reached))
    }

    fn look_into(
        &mut self,
        disk: &mut dyn Disk,
        tree: &Tree,
        pointer: Pointer,
        level: u8,
        shared: bool,
        look: &mut Look,
    ) -> Result<(), TreeError> {
        let shared =
            shared || self.nodes.is_shared(pointer.address) || self.nodes.lingers(pointer.address);
        let node = self.nodes.get(disk, pointer, tree.kind, level)?;
        let entries = node.body.entries();
        let from = entries.partition_point(|entry| entry.end() <= look.first);
        for entry in entries.get(from..).unwrap_or_default() {
            let Some(part) = entry.clip(look.first, look.end) else { break };
            for piece in self.allocator.pieces(part.physical, part.count) {
                let into = piece.first.saturating_sub(part.physical);
                let first = part.first.saturating_add(into);
                let entry = Entry { first, count: piece.count, physical: piece.first };
                self.add_piece(tree, Found { entry, shared: shared || piece.shared }, look);
                if look.found.len() >= look.limit {
                    return Ok(());
                }
            }
        }
        let children = node.body.children();
        for child in children.get(child_for(children, look.first)..).unwrap_or_default() {
            if child.key >= look.end || look.found.len() >= look.limit {
                break;
            }
            self.look_into(disk, tree, child.pointer, level.saturating_sub(1), shared, look)?;
        }
        Ok(())
    }

    /// Adds a piece. What something unread may share counts as shared.
    fn add_piece(&self, tree: &Tree, piece: Found, look: &mut Look) {
        let Some(doubt) = self.doubts.get(&tree.owner).filter(|_| !piece.shared) else {
            return look.add(piece);
        };
        let mut at = piece.entry.first;
        let mut add = |end: u64, shared: bool| {
            if let Some(entry) = piece.entry.clip(at, end) {
                look.add(Found { entry, shared });
                at = end;
            }
        };
        for (first, count) in doubt.inside(piece.entry.first, piece.entry.count) {
            add(first, false);
            add(first.saturating_add(count), true);
        }
        add(piece.entry.end(), false);
    }

    /// The extent that begins last in front of `key`.
    pub(crate) fn before(
        &mut self,
        disk: &mut dyn Disk,
        tree: &Tree,
        key: u64,
    ) -> Result<Option<Entry>, TreeError> {
        let (Some(root), Some(key)) = (tree.root, key.checked_sub(1)) else { return Ok(None) };
        let (mut pointer, mut level) = (root.pointer, root.level);
        loop {
            let node = self.nodes.get(disk, pointer, tree.kind, level)?;
            let children = node.body.children();
            let Some(child) = children.get(child_for(children, key)) else {
                let entries = node.body.entries();
                let index = entries.partition_point(|entry| entry.first <= key).checked_sub(1);
                return Ok(index.and_then(|index| entries.get(index)).copied());
            };
            pointer = child.pointer;
            level = level.saturating_sub(1);
        }
    }
}

impl Look {
    /// Adds a piece, joined to the one in front if it continues that.
    fn add(&mut self, piece: Found) {
        match self.found.last_mut() {
            Some(last)
                if last.shared == piece.shared
                    && last.entry.end() == piece.entry.first
                    && last.entry.physical_end() == piece.entry.physical =>
            {
                last.entry.count = last.entry.count.saturating_add(piece.entry.count);
            }
            _ => self.found.push(piece),
        }
    }
}
