//! The trees under measurement, and their readers.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sidecore_extent::{
    BlockRange, Extent, ExtentTree, FunctionId, LastExtent, Mapping, NodeMemory, Shape,
    TranslationCounts, TranslationUnit, TreeRoot,
};
use sidecore_telemetry::CounterSet;
use sidecore_units::{Plba, Vlba};

use super::EXTENT_BLOCKS;
use crate::load::Places;

const FUNCTION: FunctionId = FunctionId(1);

/// A tree whose blocks are all mapped.
pub(super) struct Tree {
    memory: Arc<NodeMemory>,
    tree: ExtentTree,
    blocks: u64,
}

impl Tree {
    /// Builds a tree of so many extents, of which no two are contiguous on the store.
    pub(super) fn fresh(extents: u64) -> Result<Self> {
        // Room for twice the nodes of a tree whose nodes are half empty.
        let nodes = usize::try_from(extents / 16 + 4096)?;
        let memory = Arc::new(NodeMemory::with_pin(nodes, Box::new(sidecore_linux::pin_memory)));
        let blocks = extents * EXTENT_BLOCKS;
        let all = (0..extents).map(|index| Extent {
            first: Vlba(index * EXTENT_BLOCKS),
            count: EXTENT_BLOCKS,
            physical: Plba(scatter(index, extents) * EXTENT_BLOCKS),
            shared: false,
        });
        let tree = ExtentTree::build(Arc::clone(&memory), blocks, all)?;
        Ok(Self { memory, tree, blocks })
    }

    pub(super) fn shape(&self) -> Shape {
        self.tree.shape()
    }

    pub(super) fn extents(&self) -> u64 {
        self.shape().extents
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Makes a reader with a BTLB of so many entries.
    pub(super) fn reader(&self, btlb_entries: usize) -> Reader {
        Reader {
            unit: TranslationUnit::new(Arc::clone(&self.memory), btlb_entries),
            root: self.tree.root(),
            last: LastExtent::default(),
        }
    }

    /// Remaps pieces of 1 to 32 blocks all over the tree, `changes` of them, as writes after a
    /// snapshot do. Returns their number and the time.
    pub(super) fn churn(&mut self, changes: u64) -> Result<(u64, Duration)> {
        let mut places = Places::new(self.blocks);
        let mut lengths = Places::new(2 * EXTENT_BLOCKS);
        // Beyond all mapped blocks, and never next to the extent before.
        let mut physical = 4 * self.blocks;
        let start = Instant::now();
        for _ in 0..changes {
            let first = places.next_block();
            let count = (lengths.next_block() + 1).min(self.blocks - first);
            let extent =
                Extent { first: Vlba(first), count, physical: Plba(physical), shared: false };
            physical += count + 1;
            let range = BlockRange { first: Vlba(first), count };
            self.tree.set(range, &[extent]).context("the tree takes no change")?;
            // No reader exists meanwhile.
            self.memory.free(self.tree.take_retired());
        }
        Ok((changes, start.elapsed()))
    }
}

/// A bijection on `0..count` that puts neighbours far apart.
fn scatter(index: u64, count: u64) -> u64 {
    // Odd and not a multiple of five, so coprime to the powers of ten that counts are, and to the
    // powers of two.
    index * 6_174_037 % count
}

/// The state that a queue and a sidecore have for a tree.
pub(super) struct Reader {
    unit: TranslationUnit,
    root: Arc<TreeRoot>,
    last: LastExtent,
}

impl Reader {
    /// Looks up the last extent: the fast path of a virtual function's queue.
    #[inline]
    pub(super) fn hit(&self, range: BlockRange) -> Option<u64> {
        self.last.hit(&self.root, range).map(|(physical, _)| physical.0)
    }

    /// Translates by the whole path: last extent, BTLB, walk.
    #[inline]
    pub(super) fn translate(&mut self, range: BlockRange) -> Option<u64> {
        self.translate_pieces(range, 1)
    }

    /// Translates a range by the whole path. Returns the physical block of the last piece, if there
    /// were exactly `pieces`.
    #[inline]
    pub(super) fn translate_pieces(&mut self, range: BlockRange, pieces: u64) -> Option<u64> {
        let mut found = None;
        let mut left = pieces;
        self.unit.translate(FUNCTION, &self.root, &mut self.last, range, &mut |piece| {
            left = left.wrapping_sub(1);
            found = match piece.mapping {
                Mapping::Mapped { physical, .. } => Some(physical.0),
                Mapping::Hole | Mapping::Pruned => None,
            };
            if found.is_some() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        found.filter(|_| left == 0)
    }

    /// Forgets the last extent.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.last.clear();
    }

    pub(super) fn counts(&self) -> TranslationCounts {
        self.unit.stats().counts()
    }
}

/// The bytes of this process that are on huge pages.
pub(super) fn huge_page_bytes() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = rollup.lines().find_map(|line| line.strip_prefix("AnonHugePages:"));
    line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scatter_is_a_bijection_without_neighbours() {
        for count in [1, 8, 1000, 20_000] {
            let scattered: Vec<u64> = (0..count).map(|index| scatter(index, count)).collect();
            let mut sorted = scattered.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count), "{count}");
            assert!(scattered.windows(2).all(|pair| pair[1] != pair[0] + 1), "{count}");
        }
    }

    #[test]
    fn fresh_and_churned_trees_are_mapped_everywhere() {
        let mut tree = Tree::fresh(1000).unwrap();
        assert_eq!((tree.extents(), tree.blocks()), (1000, 16_000));
        tree.churn(2000).unwrap();
        assert_eq!(tree.shape().mapped_blocks, 16_000);
        let mut reader = tree.reader(8);
        for block in 0..16_000 {
            assert!(
                reader.translate(BlockRange { first: Vlba(block), count: 1 }).is_some(),
                "{block}"
            );
        }
    }
}
