//! Giving up a whole subtree.

use super::{Forest, Tree};
use crate::disk::Disk;
use crate::node::{Kind, Pointer};
use crate::nodes::TreeError;

/// The nodes and data freed with a subtree. They are gathered first, which reads nodes and may
/// fail, and freed then, which may not fail.
#[derive(Debug, Default)]
pub(crate) struct Doomed {
    /// Nodes without another reference.
    nodes: Vec<u64>,
    /// Nodes with another reference, which stay.
    shared: Vec<u64>,
    /// Data of the first.
    data: Vec<(u64, u64)>,
    /// Extents and blocks of both.
    pub(super) extents: u64,
    pub(super) blocks: u64,
}

impl Forest {
    /// Gathers what goes with the subtree at `pointer`. Shared parts stay as they are, and are only
    /// looked into if their extents are to be counted.
    pub(super) fn doom(
        &mut self,
        disk: &mut dyn Disk,
        kind: Kind,
        (pointer, level): (Pointer, u8),
        count: bool,
        doomed: &mut Doomed,
    ) -> Result<(), TreeError> {
        if self.nodes.is_shared(pointer.address) {
            doomed.shared.push(pointer.address);
            return if count { self.count(disk, kind, (pointer, level), doomed) } else { Ok(()) };
        }
        let node = self.nodes.get(disk, pointer, kind, level)?;
        for entry in node.body.entries() {
            doomed.extents = doomed.extents.saturating_add(1);
            doomed.blocks = doomed.blocks.saturating_add(entry.count);
            doomed.data.push((entry.physical, entry.count));
        }
        for child in node.body.children() {
            self.doom(disk, kind, (child.pointer, level.saturating_sub(1)), count, doomed)?;
        }
        doomed.nodes.push(pointer.address);
        Ok(())
    }

    fn count(
        &mut self,
        disk: &mut dyn Disk,
        kind: Kind,
        (pointer, level): (Pointer, u8),
        doomed: &mut Doomed,
    ) -> Result<(), TreeError> {
        let node = self.nodes.get(disk, pointer, kind, level)?;
        for entry in node.body.entries() {
            doomed.extents = doomed.extents.saturating_add(1);
            doomed.blocks = doomed.blocks.saturating_add(entry.count);
        }
        for child in node.body.children() {
            self.count(disk, kind, (child.pointer, level.saturating_sub(1)), doomed)?;
        }
        Ok(())
    }

    /// Drops the gathered references.
    pub(crate) fn give_up(&mut self, doomed: Doomed) {
        for address in doomed.nodes {
            let fresh = self.nodes.forget(address);
            self.allocator.free_node(address, fresh);
        }
        for address in doomed.shared {
            self.nodes.abandon(address);
        }
        for (first, count) in doomed.data {
            self.allocator.drop_reference(first, count);
        }
    }

    /// Gathers what goes with a whole tree.
    pub(crate) fn doom_tree(
        &mut self,
        disk: &mut dyn Disk,
        tree: &Tree,
    ) -> Result<Doomed, TreeError> {
        let mut doomed = Doomed::default();
        if let Some(root) = tree.root {
            self.doom(disk, tree.kind, (root.pointer, root.level), false, &mut doomed)?;
        }
        Ok(doomed)
    }
}
