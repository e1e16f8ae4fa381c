//! The translation unit (thesis 6.3, figure 6.3): one per sidecore.

use std::ops::ControlFlow;
use std::sync::Arc;

use sidecore_units::Vlba;

use crate::arithmetic;
use crate::btlb::Btlb;
use crate::last::LastExtent;
use crate::memory::NodeMemory;
use crate::range::{BlockRange, Mapping, Piece};
use crate::root::TreeRoot;
use crate::stats::TranslationStats;
use crate::walk::{Walk, locate};

/// The size of NeSC's BTLB (thesis 6.3).
pub const DEFAULT_BTLB_ENTRIES: usize = 8;

/// A virtual function's number; the physical function's is 0 (thesis 6.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FunctionId(pub u32);

/// The coverage of a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// The pieces cover the whole range.
    Whole,
    /// The visitor stopped the translation.
    Stopped,
    /// The range extends past the end of the virtual disk; the pieces cover the part inside.
    Outside,
}

/// Translates vLBAs to pLBAs: tries the queue's last extent, then the BTLB, and then walks.
///
/// Only one sidecore uses it. Translation does not allocate, lock or divide.
#[derive(Debug)]
pub struct TranslationUnit {
    memory: Arc<NodeMemory>,
    btlb: Btlb,
    stats: Arc<TranslationStats>,
}

impl TranslationUnit {
    /// A unit for trees in `memory`, with a BTLB of so many extents; zero turns the BTLB off.
    #[must_use]
    pub fn new(memory: Arc<NodeMemory>, btlb_entries: usize) -> Self {
        Self { memory, btlb: Btlb::new(btlb_entries), stats: Arc::default() }
    }

    /// Calls `visit` with the mapping of `range`, in pieces that follow each other from its first
    /// block on, until the visitor stops or the range is covered. Pieces are never empty. In a
    /// sound tree neighbouring pieces differ or are not contiguous, except that a pruned part may
    /// come in several.
    ///
    /// `root` is the tree of `function`, and `last` belongs to one queue of it.
    #[inline]
    pub fn translate(
        &mut self,
        function: FunctionId,
        root: &TreeRoot,
        last: &mut LastExtent,
        range: BlockRange,
        visit: &mut impl FnMut(Piece) -> ControlFlow<()>,
    ) -> Coverage {
        if range.count == 0 {
            return Coverage::Whole;
        }
        if let Some((physical, shared)) = last.hit(root, range) {
            self.stats.last_hits.add(1);
            return whole(range, Mapping::Mapped { physical, shared }, visit);
        }
        // Before the walk: the result may be newer than this version, but not older.
        let version = root.version();
        if let Some((physical, extent)) = self.btlb.hit(function, version, range) {
            self.stats.btlb_hits.add(1);
            last.remember(version, extent);
            return whole(range, Mapping::Mapped { physical, shared: extent.shared() }, visit);
        }
        self.stats.walks.add(1);
        let found = locate(&self.memory, root.load(), range);
        let Some((extent, physical, nodes)) = found.filter(|_| end_of(range) <= root.blocks())
        else {
            return self.walk(function, version, root, last, range, visit);
        };
        self.stats.nodes_visited.add(nodes);
        last.remember(version, extent);
        // The extent was not cached, else it would have been a hit.
        self.btlb.insert_new(function, version, extent);
        whole(range, Mapping::Mapped { physical, shared: extent.shared() }, visit)
    }

    /// The slow path, for ranges of several pieces or without a mapping.
    fn walk(
        &mut self,
        function: FunctionId,
        version: u64,
        root: &TreeRoot,
        last: &mut LastExtent,
        range: BlockRange,
        visit: &mut impl FnMut(Piece) -> ControlFlow<()>,
    ) -> Coverage {
        let end = end_of(range).min(root.blocks());
        let inside = BlockRange::between(range.first, Vlba(end));
        let mut walk = Walk::new(&self.memory, root.load(), inside, true);
        let (mut holes, mut pruned) = (0u64, 0u64);
        let mut coverage = if inside == range { Coverage::Whole } else { Coverage::Outside };
        for piece in walk.by_ref() {
            match piece.mapping {
                Mapping::Mapped { .. } => {}
                Mapping::Hole => holes = holes.wrapping_add(1),
                Mapping::Pruned => pruned = pruned.wrapping_add(1),
            }
            if visit(piece).is_break() {
                coverage = Coverage::Stopped;
                break;
            }
        }
        self.stats.nodes_visited.add(walk.nodes());
        if holes != 0 {
            self.stats.holes.add(holes);
        }
        if pruned != 0 {
            self.stats.pruned.add(pruned);
        }
        if let Some(extent) = walk.extent() {
            last.remember(version, extent);
            self.btlb.insert(function, version, extent);
        }
        coverage
    }

    /// Counts a hit that the caller found with [`LastExtent::hit`] itself.
    #[inline]
    pub fn count_last_hit(&self) {
        self.stats.last_hits.add(1);
    }

    /// Drops the BTLB's extents of one function (thesis 6.3: "preserve meta-data consistency"). The
    /// queues' last extents are not part of the unit.
    pub fn flush(&mut self, function: FunctionId) {
        self.btlb.flush(function);
    }

    /// Drops all of the BTLB's extents.
    pub fn flush_all(&mut self) {
        self.btlb.flush_all();
    }

    /// The counters, readable by any thread.
    #[must_use]
    pub fn stats(&self) -> Arc<TranslationStats> {
        Arc::clone(&self.stats)
    }
}

/// The block after the last one, saturating.
#[inline]
fn end_of(range: BlockRange) -> u64 {
    arithmetic::reach(range.first.0, range.count)
}

/// Visits `range` as one piece.
#[inline]
fn whole(
    range: BlockRange,
    mapping: Mapping,
    visit: &mut impl FnMut(Piece) -> ControlFlow<()>,
) -> Coverage {
    // A stop makes no difference after the last piece.
    let _ = visit(Piece { range, mapping });
    Coverage::Whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::range::Extent;
    use crate::tree::{Content, ExtentTree};
    use sidecore_telemetry::CounterSet;
    use sidecore_units::Plba;

    const A: FunctionId = FunctionId(1);
    const B: FunctionId = FunctionId(2);

    fn extent(first: u64, count: u64, physical: u64) -> Extent {
        Extent { first: Vlba(first), count, physical: Plba(physical), shared: false }
    }

    fn range(first: u64, count: u64) -> BlockRange {
        BlockRange::new(Vlba(first), count)
    }

    /// Ten extents of ten blocks, one block apart.
    fn tree(memory: &Arc<NodeMemory>, physical: u64) -> ExtentTree {
        let extents = (0..10).map(|index| extent(11 * index, 10, physical + 100 * index));
        ExtentTree::build(Arc::clone(memory), 1000, extents).unwrap()
    }

    struct Bench {
        memory: Arc<NodeMemory>,
        unit: TranslationUnit,
    }

    impl Bench {
        fn new(btlb: usize) -> Self {
            let memory = Arc::new(NodeMemory::new(64));
            Self { unit: TranslationUnit::new(Arc::clone(&memory), btlb), memory }
        }

        /// Translates for a new queue.
        fn first(&mut self, function: FunctionId, tree: &ExtentTree, first: u64) -> Option<Plba> {
            let mut found = None;
            self.unit.translate(
                function,
                &tree.root(),
                &mut LastExtent::default(),
                range(first, 1),
                &mut |piece| {
                    if let Mapping::Mapped { physical, .. } = piece.mapping {
                        found = Some(physical);
                    }
                    ControlFlow::Continue(())
                },
            );
            found
        }

        /// The hits in the BTLB, and the walks, so far.
        fn counts(&self) -> (u64, u64) {
            let counts = self.unit.stats().counts();
            (counts.btlb_hits, counts.walks)
        }
    }

    #[test]
    fn the_oldest_extent_is_evicted() {
        let mut bench = Bench::new(3);
        let tree = tree(&bench.memory, 5000);
        for extent in [0, 1, 2, 0, 1, 2] {
            assert_eq!(bench.first(A, &tree, 11 * extent + 4), Some(Plba(5004 + 100 * extent)));
        }
        assert_eq!(bench.counts(), (3, 3));
        // Extent 0 is evicted, though it was used last: it was added first.
        bench.first(A, &tree, 0);
        bench.first(A, &tree, 33);
        assert_eq!(bench.counts(), (4, 4));
        bench.first(A, &tree, 11);
        bench.first(A, &tree, 22);
        assert_eq!(bench.counts(), (6, 4));
        bench.first(A, &tree, 0);
        assert_eq!(bench.counts(), (6, 5));
    }

    #[test]
    fn functions_do_not_see_each_others_extents() {
        let mut bench = Bench::new(8);
        let (a, b) = (tree(&bench.memory, 5000), tree(&bench.memory, 9000));
        assert_eq!(
            (bench.first(A, &a, 3), bench.first(B, &b, 3)),
            (Some(Plba(5003)), Some(Plba(9003)))
        );
        assert_eq!(
            (bench.first(A, &a, 4), bench.first(B, &b, 4)),
            (Some(Plba(5004)), Some(Plba(9004)))
        );
        assert_eq!(bench.counts(), (2, 2));
        // Also if a number is given to a new function before the old one's extents are flushed.
        assert_eq!(bench.first(A, &b, 4), Some(Plba(9004)));
        assert_eq!(bench.first(B, &a, 4), Some(Plba(5004)));
        assert_eq!(bench.counts(), (2, 4));
    }

    #[test]
    fn a_flush_forgets_one_function_or_all() {
        let mut bench = Bench::new(8);
        let (a, b) = (tree(&bench.memory, 5000), tree(&bench.memory, 9000));
        bench.first(A, &a, 3);
        bench.first(B, &b, 3);
        bench.unit.flush(A);
        bench.first(A, &a, 3);
        bench.first(B, &b, 3);
        assert_eq!(bench.counts(), (1, 3));
        bench.unit.flush_all();
        bench.first(A, &a, 3);
        bench.first(B, &b, 3);
        assert_eq!(bench.counts(), (1, 5));
    }

    #[test]
    fn what_changed_is_not_found_in_caches() {
        let mut bench = Bench::new(8);
        let mut tree = tree(&bench.memory, 5000);
        let root = tree.root();
        let mut last = LastExtent::default();
        bench.unit.translate(A, &root, &mut last, range(0, 1), &mut |_| ControlFlow::Continue(()));
        assert_eq!(last.hit(&root, range(2, 8)), Some((Plba(5002), false)));
        assert_eq!(last.hit(&root, range(2, 9)), None);
        // Filling a hole, here or elsewhere, does not change cached mappings.
        tree.set(range(500, 5), &[extent(500, 5, 7)]).unwrap();
        tree.set(range(10, 1), &[extent(10, 1, 5010)]).unwrap();
        assert_eq!(last.hit(&root, range(2, 8)), Some((Plba(5002), false)));
        // Setting the same mapping again is no change either.
        tree.set(range(0, 10), &[extent(0, 4, 5000), extent(4, 6, 5004)]).unwrap();
        assert_eq!(last.hit(&root, range(2, 8)), Some((Plba(5002), false)));
        let unchanged = root.version();
        for set in [
            vec![extent(0, 10, 6000)],
            vec![extent(0, 9, 6000)],
            vec![Extent { shared: true, ..extent(0, 9, 6000) }],
            vec![],
        ] {
            let version = root.version();
            tree.set(range(0, 10), &set).unwrap();
            assert_ne!(root.version(), version, "{set:?}");
            assert_eq!(last.hit(&root, range(2, 1)), None);
        }
        assert_ne!(root.version(), unchanged);
        assert_eq!(bench.first(A, &tree, 2), None);
    }

    #[test]
    fn a_long_request_is_one_walk_in_pieces() {
        let mut bench = Bench::new(8);
        let mut tree = tree(&bench.memory, 5000);
        tree.prune(range(22, 5));
        let mut pieces = Vec::new();
        let root = tree.root();
        let coverage = bench.unit.translate(
            A,
            &root,
            &mut LastExtent::default(),
            range(5, 30),
            &mut |piece| {
                pieces.push((piece.range.first.0, piece.range.count, piece.mapping));
                ControlFlow::Continue(())
            },
        );
        let mapped = |physical| Mapping::Mapped { physical: Plba(physical), shared: false };
        let expected = [
            (5, 5, mapped(5005)),
            (10, 1, Mapping::Hole),
            (11, 10, mapped(5100)),
            (21, 1, Mapping::Hole),
            (22, 5, Mapping::Pruned),
            (27, 5, mapped(5205)),
            (32, 1, Mapping::Hole),
            (33, 2, mapped(5300)),
        ];
        assert_eq!((coverage, pieces.as_slice()), (Coverage::Whole, expected.as_slice()));
        let counts = bench.unit.stats().counts();
        assert_eq!((counts.walks, counts.nodes_visited, counts.holes, counts.pruned), (1, 1, 3, 1));
    }

    #[test]
    fn a_request_ends_with_the_disk_or_the_visitors_patience() {
        let mut bench = Bench::new(0);
        let tree = ExtentTree::new(Arc::clone(&bench.memory), 100, Content::Hole).unwrap();
        let mut ask = |first, count, patience: usize| {
            let mut seen = Vec::new();
            let coverage = bench.unit.translate(
                A,
                &tree.root(),
                &mut LastExtent::default(),
                range(first, count),
                &mut |piece| {
                    seen.push(piece.range);
                    if seen.len() > patience {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                },
            );
            (coverage, seen)
        };
        assert_eq!(ask(90, 10, 9), (Coverage::Whole, vec![range(90, 10)]));
        assert_eq!(ask(90, 11, 9), (Coverage::Outside, vec![range(90, 10)]));
        assert_eq!(ask(100, 1, 9), (Coverage::Outside, vec![]));
        assert_eq!(ask(u64::MAX, u64::MAX, 9), (Coverage::Outside, vec![]));
        assert_eq!(ask(5, 0, 9), (Coverage::Whole, vec![]));
        assert_eq!(ask(5, 5, 0), (Coverage::Stopped, vec![range(5, 5)]));
    }
}
