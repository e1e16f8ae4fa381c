//! The root of a tree, shared by its readers and its writer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::node::NodeId;

/// Versions come from one sequence for all trees, so that no two trees ever have the same version:
/// a translation cached from one tree cannot hit under another, even if a caller mixes them up.
/// Zero is never used.
static NEXT_VERSION: AtomicU64 = AtomicU64::new(1);

fn draw_version() -> u64 {
    NEXT_VERSION.fetch_add(1, Ordering::Relaxed)
}

/// The readers' side of an extent tree: the *ExtentTreeRoot* register (thesis 6.1) and related
/// state.
#[derive(Debug)]
pub struct TreeRoot {
    /// A next node pointer like any other: NULL means that the whole tree is pruned.
    root: AtomicU64,
    version: AtomicU64,
    blocks: AtomicU64,
}

impl TreeRoot {
    pub(crate) fn new(root: Option<NodeId>, blocks: u64) -> Self {
        Self {
            root: AtomicU64::new(NodeId::to_word(root)),
            version: AtomicU64::new(draw_version()),
            blocks: AtomicU64::new(blocks),
        }
    }

    /// The version under which cached translations are valid. It changes when a mapping is changed
    /// or removed, never when a mapping is added.
    #[must_use]
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The logical size, in blocks.
    #[must_use]
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    /// The root node.
    #[inline]
    pub(crate) fn load(&self) -> Option<NodeId> {
        NodeId::from_word(self.root.load(Ordering::Acquire))
    }

    /// Publishes the tree under `root` to later walks.
    pub(crate) fn publish(&self, root: Option<NodeId>) {
        self.root.store(NodeId::to_word(root), Ordering::Release);
    }

    /// Invalidates all cached translations. Call after the change was published: a reader that sees
    /// the new version sees the change too, and a reader that tags a new translation with the old
    /// version loses only time.
    pub fn bump_version(&self) {
        self.version.store(draw_version(), Ordering::Release);
    }

    pub(crate) fn set_blocks(&self, blocks: u64) {
        self.blocks.store(blocks, Ordering::Release);
    }
}
