//! Pruning under memory pressure (thesis 5.2): cold leaves first.
//!
//! A clock goes round the leaves. A leaf that a walk has touched since the clock's last visit is
//! spared once. No node is copied, because there may be none to copy to: NULL is stored in the
//! published node, where readers see it or not.

use super::splice::child;
use crate::entry::NULL;
use crate::memory::NodeMemory;
use crate::node::{Node, NodeId};

/// One round of the clock, or the rest of one.
#[derive(Debug)]
pub(super) struct Sweep<'m> {
    pub(super) memory: &'m NodeMemory,
    /// The number of nodes still to prune.
    pub(super) wanted: usize,
    /// The next block to visit.
    pub(super) hand: u64,
    pub(super) retired: Vec<NodeId>,
}

impl Sweep<'_> {
    /// Sweeps below `node` from the hand on. True if nothing is left below, so that the node itself
    /// is useless.
    pub(super) fn sweep(&mut self, node: &Node) -> bool {
        let Some(header) = node.header() else { return false };
        let level = header.level;
        if level == 0 {
            return !node.untouch();
        }
        for (index, entry) in node.entries().enumerate() {
            if self.wanted == 0 {
                return false;
            }
            if entry.end() <= self.hand {
                continue;
            }
            let Some(id) = child(level, entry) else { continue };
            let Some(below) = self.memory.node(id) else { continue };
            if self.sweep(below) {
                node.prune_entry(index);
                self.retire(id);
            }
            // A child whose sweep stopped half-way has moved the hand itself.
            if self.wanted > 0 || level == 1 {
                self.hand = entry.end();
            }
        }
        node.entries().all(|entry| entry.value == NULL)
    }

    pub(super) fn retire(&mut self, id: NodeId) {
        self.retired.push(id);
        self.wanted = self.wanted.saturating_sub(1);
    }
}
