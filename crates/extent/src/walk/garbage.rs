//! Walks in nodes with arbitrary contents: the mappings may be wrong, but the walks end, and the
//! pieces obey the rules.

use std::sync::Arc;

use proptest::prelude::*;
use sidecore_units::Plba;

use super::*;
use crate::node::ENTRY_PLACES;
use crate::{Extent, ExtentTree, NodeMemory, TreeRoot};

/// Words that are more likely to do harm than others.
fn word(number: u64, near: u64) -> u64 {
    match number % 16 {
        0 => 0,
        1 => u64::MAX,
        2 => number >> 4,
        3 => u64::MAX - (number >> 60),
        // Node pointers, also to nodes above: a loop.
        4..=8 => (number >> 8) % 40,
        9 => 1 << (number >> 58),
        _ => near.wrapping_add((number >> 8) % 64).wrapping_sub(32),
    }
}

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ self.0 >> 29
    }
}

/// A tree of three levels, of which `words` words are overwritten.
fn broken(seed: u64, words: usize, headers: bool) -> (Arc<NodeMemory>, Arc<TreeRoot>) {
    let memory = Arc::new(NodeMemory::new(256));
    let extents = (0..20_000u64).map(|index| Extent {
        first: Vlba(3 * index),
        count: 2,
        physical: Plba(5 * index),
        shared: index.is_multiple_of(2),
    });
    let tree = ExtentTree::build(Arc::clone(&memory), 60_000, extents).unwrap();
    let mut numbers = Numbers(seed);
    for index in 0..memory.used_nodes() {
        let node = memory.node(NodeId::at(index).unwrap()).unwrap();
        for _ in 0..words {
            let place = numbers.next() as usize % 512;
            if headers || place >= ENTRY_PLACES {
                node.set_word(place, word(numbers.next(), numbers.next() % 60_000));
            }
        }
    }
    // With a reader left, dropping the tree does not follow its pointers.
    let root = tree.root();
    (memory, root)
}

/// Walks, and checks the rules.
fn walk(memory: &NodeMemory, root: &TreeRoot, range: BlockRange) {
    let mut walk = Walk::new(memory, root.load(), range, true);
    let mut at = range.first.0;
    let end = at.saturating_add(range.count);
    // Each piece ends at the border of an entry or of a node: no walk is long because of a loop.
    while let Some(piece) = walk.next() {
        assert_eq!(piece.range.first.0, at);
        assert!(piece.range.count > 0);
        at = piece.range.end().unwrap().0;
        if let Mapping::Mapped { physical, .. } = piece.mapping {
            // On both sides, the piece is inside the extent of the node's words.
            let extent = walk.extent().unwrap().extent();
            let within = extent.clip(piece.range).expect("inside the extent");
            assert_eq!((within.physical, within.count), (physical, piece.range.count));
            let last = extent.physical.0.checked_add(extent.count).unwrap();
            assert!(physical.0 >= extent.physical.0 && physical.0 + piece.range.count <= last);
        }
        // The fast path descends on its own, by the same rules.
        if let Some((entry, physical, nodes)) = locate(memory, root.load(), piece.range) {
            let within = entry.extent().clip(piece.range).expect("inside the extent");
            assert_eq!((within.physical, within.count), (physical, piece.range.count));
            assert!(nodes <= MAX_LEVELS as u64);
        }
        assert!(walk.nodes() <= 100_000, "a walk of {} blocks does not end", range.count);
    }
    assert_eq!(at, end);
}

proptest! {
    #![proptest_config(
        ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() }
    )]

    #[test]
    fn walks_in_garbage_end_and_tile(
        seed in any::<u64>(),
        words in prop_oneof![Just(1usize), Just(20), Just(400), Just(4000)],
        headers in any::<bool>(),
        requests in proptest::collection::vec((any::<u64>(), 1..2000u64), 1..30),
    ) {
        let (memory, root) = broken(seed, words, headers);
        walk(&memory, &root, BlockRange::new(Vlba(0), 60_000));
        for (first, count) in requests {
            walk(&memory, &root, BlockRange::new(Vlba(first % 60_000), count));
            walk(&memory, &root, BlockRange::new(Vlba(first), count));
        }
    }
}

/// Every entry of every node covers everything and points to a node of the level below: the number
/// of paths is the largest possible, and still each is one walk.
#[test]
fn a_maze_is_walked_once() {
    let memory = NodeMemory::new(16);
    let mut below = memory.take().unwrap();
    memory.node(below).unwrap().write(0, &[], []);
    for level in 1..MAX_LEVELS {
        let id = memory.take().unwrap();
        let pointer = Entry { first: 0, count: u64::MAX, value: NodeId::to_word(Some(below)) };
        memory.node(id).unwrap().write(level, &[pointer; 84], []);
        below = id;
    }
    let range = BlockRange::new(Vlba(0), 1 << 40);
    let mut walk = Walk::new(&memory, Some(below), range, true);
    assert_eq!(walk.next(), Some(Piece { range, mapping: Mapping::Pruned }));
    assert_eq!(walk.next(), None);
    assert_eq!(walk.nodes(), MAX_LEVELS as u64);
}

#[test]
fn a_pointer_to_a_node_above_is_pruned() {
    let memory = NodeMemory::new(16);
    let id = memory.take().unwrap();
    let pointer = Entry { first: 5, count: 10, value: NodeId::to_word(Some(id)) };
    memory.node(id).unwrap().write(1, &[pointer], []);
    let pieces: Vec<Piece> =
        Walk::new(&memory, Some(id), BlockRange::new(Vlba(0), 30), true).collect();
    let piece =
        |first, count, mapping| Piece { range: BlockRange::new(Vlba(first), count), mapping };
    let expected =
        [piece(0, 5, Mapping::Hole), piece(5, 10, Mapping::Pruned), piece(15, 15, Mapping::Hole)];
    assert_eq!(pieces, expected);
}

#[test]
fn a_root_that_is_no_node_is_pruned() {
    let memory = NodeMemory::new(16);
    let range = BlockRange::new(Vlba(7), 30);
    for root in [None, NodeId::at(0), NodeId::at(9_999), NodeId::from_word(u64::from(u32::MAX))] {
        let pieces: Vec<Piece> = Walk::new(&memory, root, range, true).collect();
        assert_eq!(pieces, [Piece { range, mapping: Mapping::Pruned }]);
    }
}
