//! Large trees stay dense and shallow under all updates, and their memory is bounded.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use sidecore_extent::{
    BlockRange, CHUNK_NODES, Content, Extent, ExtentTree, FunctionId, LastExtent, Mapping,
    NODE_BYTES, NodeMemory, OutOfNodes, SetError, TranslationUnit,
};
use sidecore_units::{Plba, Vlba};

/// Pseudo-random numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn extent(first: u64, count: u64, physical: u64) -> Extent {
    Extent { first: Vlba(first), count, physical: Plba(physical), shared: false }
}

fn one(first: u64) -> BlockRange {
    BlockRange::new(Vlba(first), 1)
}

fn free(memory: &NodeMemory, tree: &mut ExtentTree) {
    memory.free(tree.take_retired());
}

/// Extents of one block, none of which can be merged.
fn lonely(count: u64) -> impl Iterator<Item = Extent> {
    (0..count).map(|index| extent(2 * index, 1, 3 * index))
}

#[test]
fn a_tree_built_at_once_takes_25_bytes_an_extent() {
    for count in [10_000u64, 200_000] {
        let memory = Arc::new(NodeMemory::new(4096));
        let tree = ExtentTree::build(memory, 2 * count, lonely(count)).unwrap();
        tree.check().unwrap();
        let shape = tree.shape();
        assert_eq!((shape.extents, shape.mapped_blocks), (count, count));
        assert!(shape.bytes <= 25 * count, "{shape:?}");
        assert_eq!(shape.bytes, (shape.nodes * NODE_BYTES) as u64);
        assert!(tree.extents().eq(lonely(count)));
    }
}

#[test]
fn a_tree_that_grows_by_appending_is_as_dense() {
    let memory = Arc::new(NodeMemory::new(4096));
    let count = 8_000;
    let mut tree = ExtentTree::new(Arc::clone(&memory), 2 * count, Content::Hole).unwrap();
    for extent in lonely(count) {
        tree.set(extent.range(), &[extent]).unwrap();
        free(&memory, &mut tree);
    }
    tree.check().unwrap();
    assert!(tree.shape().bytes <= 26 * count, "{:?}", tree.shape());
}

#[test]
fn appending_what_continues_stays_one_extent() {
    let memory = Arc::new(NodeMemory::new(64));
    let mut tree = ExtentTree::new(Arc::clone(&memory), 1 << 40, Content::Hole).unwrap();
    for block in (0..8_000u64).step_by(8) {
        tree.set(BlockRange::new(Vlba(block), 8), &[extent(block, 8, block + 77)]).unwrap();
        free(&memory, &mut tree);
    }
    assert_eq!(tree.extents().collect::<Vec<_>>(), [extent(0, 8_000, 77)]);
    assert_eq!(memory.used_nodes(), 1);
}

#[test]
fn churn_leaves_trees_dense_and_shallow() {
    let memory = Arc::new(NodeMemory::new(1 << 14));
    let blocks = 1 << 20;
    let mut numbers = Numbers(11);
    let mut tree = ExtentTree::build(Arc::clone(&memory), blocks, lonely(100_000)).unwrap();
    for round in 0..6 {
        // Removes most, adds many, in places all over; and takes out large stretches.
        for _ in 0..2_000 {
            let first = numbers.below(blocks - 300);
            let range = BlockRange::new(
                Vlba(first),
                1 + numbers.below(if round % 2 == 0 { 300 } else { 3 }),
            );
            let set = if round % 2 == 0 {
                vec![]
            } else {
                vec![extent(first, 1, numbers.below(1 << 40))]
            };
            tree.set(range, &set).unwrap();
            free(&memory, &mut tree);
        }
        tree.check().unwrap();
        let shape = tree.shape();
        println!("round {round}: {shape:?}");
        assert_eq!(memory.used_nodes(), shape.nodes);
        assert!(shape.bytes <= 66 * shape.extents + 4 * NODE_BYTES as u64, "{shape:?}");
        assert!(shape.depth <= 3, "{shape:?}");
    }
    tree.set(BlockRange::new(Vlba(0), blocks), &[]).unwrap();
    free(&memory, &mut tree);
    assert_eq!((tree.shape().nodes, tree.shape().depth), (1, 1));
}

#[test]
fn pieces_regenerated_here_and_there_share_nodes() {
    let memory = Arc::new(NodeMemory::new(1 << 12));
    let blocks = 1 << 20;
    let mut numbers = Numbers(5);
    let mut tree = ExtentTree::new(Arc::clone(&memory), blocks, Content::Pruned).unwrap();
    for _ in 0..5_000 {
        let first = 2 * numbers.below(blocks / 2);
        tree.set(one(first), &[extent(first, 1, first * 2)]).unwrap();
        free(&memory, &mut tree);
    }
    tree.check().unwrap();
    let shape = tree.shape();
    // Each piece is an extent and a pruned part behind it.
    assert!(shape.bytes <= 2 * 66 * shape.extents, "{shape:?}");
    assert_eq!(shape.pruned_blocks + shape.mapped_blocks, blocks);
    assert!(shape.pruned_ranges >= shape.extents - 1);
}

#[test]
fn without_nodes_an_update_changes_nothing() {
    let memory = Arc::new(NodeMemory::new(100));
    let mut tree = ExtentTree::build(Arc::clone(&memory), 1 << 20, lonely(9_000)).unwrap();
    let before: Vec<Extent> = tree.extents().collect();
    let (version, used) = (tree.root().version(), memory.used_nodes());
    let result = tree.set(BlockRange::new(Vlba(0), 1 << 20), &lonely(10_000).collect::<Vec<_>>());
    assert_eq!(result, Err(SetError::OutOfNodes(OutOfNodes)));
    assert!(tree.take_retired().is_empty());
    assert_eq!((tree.root().version(), memory.used_nodes()), (version, used));
    assert!(tree.extents().eq(before));
    tree.check().unwrap();
    assert!(matches!(
        ExtentTree::build(Arc::clone(&memory), 1 << 20, lonely(10_000)),
        Err(SetError::OutOfNodes(_))
    ));
    assert_eq!(memory.used_nodes(), used);
}

/// A tree in a memory that has no node left.
fn full() -> (Arc<NodeMemory>, ExtentTree, Vec<ExtentTree>) {
    let memory = Arc::new(NodeMemory::new(40));
    let tree = ExtentTree::build(Arc::clone(&memory), 1 << 20, lonely(3_000)).unwrap();
    let mut others = Vec::new();
    while let Ok(other) = ExtentTree::new(Arc::clone(&memory), 9, Content::Hole) {
        others.push(other);
    }
    assert_eq!(memory.used_nodes(), memory.max_nodes());
    (memory, tree, others)
}

#[test]
fn without_nodes_pruning_prunes_more() {
    let (_memory, mut tree, _others) = full();
    let version = tree.root().version();
    assert_eq!(tree.prune(BlockRange::new(Vlba(100), 1)), BlockRange::new(Vlba(0), 1 << 20));
    assert_eq!((tree.shape().nodes, tree.shape().pruned_blocks), (0, 1 << 20));
    assert_ne!(tree.root().version(), version);
    tree.check().unwrap();
}

#[test]
fn without_nodes_shrinking_prunes() {
    let (_memory, mut tree, _others) = full();
    tree.resize(101);
    assert_eq!((tree.root().blocks(), tree.shape().pruned_blocks), (101, 101));
    tree.check().unwrap();
}

#[test]
fn pruning_under_pressure_spares_what_was_touched() {
    let (memory, mut tree, _others) = full();
    let mut unit = TranslationUnit::new(Arc::clone(&memory), 0);
    let mut is_pruned = |root: &sidecore_extent::TreeRoot, block: u64| {
        let mut found = None;
        unit.translate(FunctionId(1), root, &mut LastExtent::default(), one(block), &mut |piece| {
            found = Some(piece.mapping == Mapping::Pruned);
            ControlFlow::Continue(())
        });
        found.unwrap()
    };
    let root = tree.root();
    // The first round finds all leaves touched, because all are new.
    assert_eq!(tree.prune_some(2), 2);
    assert!(is_pruned(&root, 0) && is_pruned(&root, 400));
    // Now the hand is behind the second leaf. Of the next three, the middle one is hot.
    assert!(!is_pruned(&root, 2 * 168 * 3));
    let version = root.version();
    assert_eq!(tree.prune_some(2), 2);
    assert_ne!(root.version(), version);
    assert!(
        is_pruned(&root, 2 * 168 * 2)
            && !is_pruned(&root, 2 * 168 * 3)
            && is_pruned(&root, 2 * 168 * 4)
    );
    tree.check().unwrap();
    free(&memory, &mut tree);
    // There are nodes again, to regenerate with.
    tree.set(one(4), &[extent(4, 1, 6)]).unwrap();
    assert!(!is_pruned(&root, 4) && is_pruned(&root, 5));
    tree.check().unwrap();
    // A request for all nodes prunes all of the tree.
    let nodes = tree.shape().nodes;
    assert_eq!(tree.prune_some(usize::MAX), nodes);
    assert_eq!(tree.shape().depth, 0);
    assert_eq!(tree.prune_some(1), 0);
}

#[test]
fn chunks_are_pinned_once_and_aligned() {
    let pinned = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&pinned);
    let pin = move |nodes: &[sidecore_extent::Node]| {
        seen.lock().unwrap().push((nodes.as_ptr().addr(), std::mem::size_of_val(nodes)));
    };
    let memory = Arc::new(NodeMemory::with_pin(2 * CHUNK_NODES, Box::new(pin)));
    assert_eq!(pinned.lock().unwrap().len(), 0);
    let mut trees = Vec::new();
    for _ in 0..2 {
        while trees.len() < 2 * CHUNK_NODES {
            trees.push(ExtentTree::new(Arc::clone(&memory), 9, Content::Hole).unwrap());
            let chunks = trees.len().div_ceil(CHUNK_NODES);
            assert!(pinned.lock().unwrap().len() >= chunks);
        }
        assert!(matches!(ExtentTree::new(Arc::clone(&memory), 9, Content::Hole), Err(OutOfNodes)));
        trees.clear();
        assert_eq!(memory.used_nodes(), 0);
    }
    let pinned = pinned.lock().unwrap();
    assert_eq!(pinned.len(), 2);
    assert!(pinned.iter().all(|(address, size)| address % (2 << 20) == 0 && *size == 2 << 20));
}

#[test]
fn a_tree_that_readers_know_keeps_its_nodes_when_dropped() {
    let memory = Arc::new(NodeMemory::new(64));
    let tree = ExtentTree::build(Arc::clone(&memory), 10_000, lonely(1_000)).unwrap();
    let root = tree.root();
    drop(tree);
    assert!(memory.used_nodes() > 0, "a reader may walk in them");
    drop(root);
    let lost = memory.used_nodes();
    let tree = ExtentTree::build(Arc::clone(&memory), 10_000, lonely(1_000)).unwrap();
    let _root = tree.root();
    memory.free(tree.dismantle());
    assert_eq!(memory.used_nodes(), lost);
}
