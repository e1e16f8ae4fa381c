//! The extent tree's writer.

mod clock;
mod fill;
mod look;
mod splice;

use std::sync::Arc;

use sidecore_units::Vlba;

use self::clock::Sweep;
pub use self::look::TreeFault;
use self::splice::{Splice, Spliced, retire_subtree};
use crate::entry::{Entry, PRUNED};
use crate::memory::{NodeMemory, OutOfNodes, Retired};
use crate::node::{Node, NodeId};
use crate::range::{BlockRange, Extent, MAX_PHYSICAL_BLOCKS, Mapping};
use crate::root::TreeRoot;
use crate::walk::Walk;

/// The initial mapping of all blocks of a new tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// No block was ever written.
    Hole,
    /// The hypervisor has the mappings.
    Pruned,
}

/// Why an update failed. The tree is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// The range is not inside the virtual disk, or an extent not inside the range.
    #[error("blocks outside of the range to be set, or of the virtual disk")]
    Outside,
    /// Extents overlap or are not in order, or one is empty.
    #[error("extents that are empty, overlap or are out of order")]
    Disorder,
    /// A physical block past [`MAX_PHYSICAL_BLOCKS`](crate::MAX_PHYSICAL_BLOCKS).
    #[error("a physical block beyond what an extent pointer can hold")]
    PhysicalTooFar,
    /// All nodes are in use, see [`OutOfNodes`].
    #[error(transparent)]
    OutOfNodes(#[from] OutOfNodes),
}

/// Why a tree was not built: as for an update of a whole empty tree.
pub type BuildError = SetError;

/// The size of a tree, for reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Levels of nodes; zero when the tree is pruned whole.
    pub depth: usize,
    /// Nodes reachable from the root.
    pub nodes: usize,
    /// Memory of the nodes, in bytes.
    pub bytes: u64,
    /// Extent pointers in all leaves.
    pub extents: u64,
    /// Blocks that are mapped.
    pub mapped_blocks: u64,
    /// Pruned parts, neighbouring ones counted once.
    pub pruned_ranges: u64,
    /// Blocks in pruned parts.
    pub pruned_blocks: u64,
}

/// A virtual function's extent tree (thesis figure 5.1), and its only writer.
///
/// Do not drop a tree while readers have its root: its nodes are then lost to the memory.
/// [`dismantle`](Self::dismantle) returns them.
#[derive(Debug)]
pub struct ExtentTree {
    memory: Arc<NodeMemory>,
    root: Arc<TreeRoot>,
    retired: Retired,
    /// The block at which pruning under memory pressure resumes.
    hand: u64,
}

impl ExtentTree {
    /// A tree over `blocks` blocks with one mapping.
    ///
    /// # Errors
    /// [`OutOfNodes`]; never for [`Content::Pruned`], which takes no node.
    pub fn new(
        memory: Arc<NodeMemory>,
        blocks: u64,
        initially: Content,
    ) -> Result<Self, OutOfNodes> {
        let root = match initially {
            Content::Hole => Splice::empty(&memory).finish(Vec::new(), blocks)?.root,
            Content::Pruned => None,
        };
        Ok(Self::over(memory, blocks, root))
    }

    /// A tree over `blocks` blocks with `extents`, which are sorted, and holes between them. Its
    /// nodes are full: 25 bytes for each extent.
    ///
    /// # Errors
    /// As [`set`](Self::set) of all blocks.
    pub fn build(
        memory: Arc<NodeMemory>,
        blocks: u64,
        extents: impl IntoIterator<Item = Extent>,
    ) -> Result<Self, BuildError> {
        let entries = checked(BlockRange::new(Vlba(0), blocks), extents)?;
        let root = Splice::empty(&memory).finish(entries, blocks)?.root;
        Ok(Self::over(memory, blocks, root))
    }

    fn over(memory: Arc<NodeMemory>, blocks: u64, root: Option<NodeId>) -> Self {
        Self {
            memory,
            root: Arc::new(TreeRoot::new(root, blocks)),
            retired: Retired::default(),
            hand: 0,
        }
    }

    /// The readers' side.
    #[must_use]
    pub fn root(&self) -> Arc<TreeRoot> {
        Arc::clone(&self.root)
    }

    /// Maps exactly `extents` in `range`, and makes its other blocks holes. Extents that continue
    /// each other are merged, across the borders of `range` too.
    ///
    /// Cached translations become invalid if a mapped block is unmapped, or its place or its shared
    /// mark changes; not if the update only fills holes and regenerates pruned parts.
    ///
    /// # Errors
    /// The extents are not sorted, disjoint and inside `range`, or `range` is not inside the tree,
    /// or there are no nodes. Then nothing has changed.
    pub fn set(&mut self, range: BlockRange, extents: &[Extent]) -> Result<(), SetError> {
        let end = range.end().ok_or(SetError::Outside)?;
        if end.0 > self.root.blocks() {
            return Err(SetError::Outside);
        }
        let entries = checked(range, extents.iter().copied())?;
        if range.is_empty() {
            return Ok(());
        }
        let moved = self.moves(range, extents);
        self.splice(range.first.0, end.0, entries, self.root.blocks())?;
        if moved {
            self.root.bump_version();
        }
        Ok(())
    }

    /// Prunes `range`, as far as it is inside the tree, and nothing else. Without nodes for the new
    /// paths, prunes the whole tree instead, which needs none.
    ///
    /// Returns the pruned range.
    pub fn prune(&mut self, range: BlockRange) -> BlockRange {
        let blocks = self.root.blocks();
        let disk = BlockRange::new(Vlba(0), blocks);
        let range = BlockRange::between(
            range.first,
            Vlba(range.first.0.saturating_add(range.count).min(blocks)),
        );
        if range.is_empty() {
            return range;
        }
        let pruned = Entry { first: range.first.0, count: range.count, value: PRUNED };
        match self.splice(pruned.first, pruned.end(), vec![pruned], blocks) {
            Ok(()) => {
                self.root.bump_version();
                range
            }
            Err(OutOfNodes) => {
                self.prune_all();
                disk
            }
        }
    }

    /// Prunes the whole tree. Needs no nodes.
    pub fn prune_all(&mut self) {
        if let Some(root) = self.root.load() {
            let level =
                self.memory.node(root).and_then(Node::header).map_or(0, |header| header.level);
            self.root.publish(None);
            retire_subtree(&self.memory, root, level, &mut self.retired.0);
        }
        self.root.bump_version();
    }

    /// Prunes about `nodes` nodes of the tree, cold leaves first; returns the number of nodes
    /// retired. Needs no nodes.
    ///
    /// A leaf is cold if no walk has touched it since the last round. Hits in caches touch no leaf.
    pub fn prune_some(&mut self, nodes: usize) -> usize {
        let Some(root) = self.root.load() else { return 0 };
        let Some(node) = self.memory.node(root) else { return 0 };
        let mut sweep =
            Sweep { memory: &self.memory, wanted: nodes, hand: self.hand, retired: Vec::new() };
        // The rest of a round, a round that may find all leaves touched, and a round that finds
        // none touched.
        for _ in 0..3 {
            if sweep.wanted == 0 {
                break;
            }
            if sweep.sweep(node) {
                self.root.publish(None);
                sweep.retire(root);
                break;
            }
            if sweep.wanted > 0 {
                sweep.hand = 0;
            }
        }
        self.hand = sweep.hand;
        let mut retired = Retired(sweep.retired);
        let count = retired.len();
        if count > 0 {
            self.root.bump_version();
        }
        self.retired.0.append(&mut retired.0);
        count
    }

    /// Changes the logical size. Mappings past a smaller end are dropped; blocks added by a larger
    /// end are holes, or pruned if the whole tree is. Without nodes for dropping mappings, the
    /// whole tree is pruned.
    pub fn resize(&mut self, blocks: u64) {
        let before = self.root.blocks();
        if blocks >= before || self.root.load().is_none() {
            self.root.set_blocks(blocks);
            return;
        }
        let cut = self.splice(blocks, u64::MAX, Vec::new(), blocks);
        self.root.set_blocks(blocks);
        match cut {
            Ok(()) => self.root.bump_version(),
            Err(OutOfNodes) => self.prune_all(),
        }
    }

    /// Returns the nodes replaced since the last call.
    pub fn take_retired(&mut self) -> Retired {
        std::mem::take(&mut self.retired)
    }

    /// Dismantles the tree: readers that still have its root find the whole tree pruned. The result
    /// has all its nodes.
    pub fn dismantle(mut self) -> Retired {
        self.prune_all();
        self.take_retired()
    }

    /// The size of the tree. Visits all of it.
    #[must_use]
    pub fn shape(&self) -> Shape {
        look::shape(self)
    }

    /// All extents, in order.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        look::extents(self)
    }

    /// Checks all invariants of a tree, among them that no retired node that was not taken yet can
    /// be reached. Visits all of the tree.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self) -> Result<(), TreeFault> {
        look::check(self)
    }

    /// Replaces `from..to` by `entries`, and publishes the result.
    fn splice(
        &mut self,
        from: u64,
        to: u64,
        entries: Vec<Entry>,
        blocks: u64,
    ) -> Result<(), OutOfNodes> {
        let cut = Splice::cut(&self.memory, self.root.load(), blocks, from, to);
        let Spliced { root, retired } = cut.finish(entries, blocks)?;
        self.root.publish(root);
        self.retired.append(retired);
        // A visit of all of a large tree on each update would make debug builds useless.
        #[cfg(debug_assertions)]
        if self.memory.used_nodes() <= 16 {
            debug_assert_eq!(look::check(self), Ok(()));
        }
        Ok(())
    }

    /// Whether the mapping of a mapped block in `range` would change under `extents`.
    fn moves(&self, range: BlockRange, extents: &[Extent]) -> bool {
        let mut extents = extents.iter().peekable();
        let mut stays = |mut old: Extent| {
            while old.count > 0 {
                // Both are sorted: extents that end before this piece do not overlap later ones.
                while extents
                    .next_if(|new| new.range().end().is_none_or(|end| end <= old.first))
                    .is_some()
                {}
                let Some(new) = extents.peek().and_then(|new| new.clip(old.range())) else {
                    return false;
                };
                if (new.first, new.physical, new.shared) != (old.first, old.physical, old.shared) {
                    return false;
                }
                let (_, rest) = old.range().split(new.count);
                let Some(rest) = old.clip(rest) else { break };
                old = rest;
            }
            true
        };
        Walk::new(&self.memory, self.root.load(), range, false).any(|piece| match piece.mapping {
            Mapping::Mapped { physical, shared } => !stays(Extent {
                first: piece.range.first,
                count: piece.range.count,
                physical,
                shared,
            }),
            Mapping::Hole | Mapping::Pruned => false,
        })
    }
}

impl Drop for ExtentTree {
    /// Frees the nodes if no reader has the root.
    fn drop(&mut self) {
        if Arc::strong_count(&self.root) == 1 {
            self.prune_all();
            self.memory.free(std::mem::take(&mut self.retired));
        }
    }
}

/// Extent pointers for `extents`, if they are sorted, disjoint, inside `range` and of a size that
/// can be stored.
fn checked(
    range: BlockRange,
    extents: impl IntoIterator<Item = Extent>,
) -> Result<Vec<Entry>, SetError> {
    let mut behind = range.first;
    let end = range.end().ok_or(SetError::Outside)?;
    extents
        .into_iter()
        .map(|extent| {
            let Extent { first, count, physical, .. } = extent;
            let extent_end = extent
                .range()
                .end()
                .filter(|extent_end| *extent_end <= end && first >= range.first);
            let extent_end = extent_end.ok_or(SetError::Outside)?;
            if count == 0 || first < behind {
                return Err(SetError::Disorder);
            }
            if physical.0.checked_add(count).is_none_or(|end| end > MAX_PHYSICAL_BLOCKS) {
                return Err(SetError::PhysicalTooFar);
            }
            behind = extent_end;
            Ok(Entry::of(extent))
        })
        .collect()
}
