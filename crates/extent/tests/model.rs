//! Random trees against a model that is obviously right: after every update, every translation
//! agrees with the model.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use proptest::prelude::*;
use sidecore_extent::{
    BlockRange, Content, Coverage, Extent, ExtentTree, FunctionId, LastExtent, Mapping, NodeMemory,
    Piece, SetError, TranslationUnit,
};
use sidecore_units::{Plba, Vlba};

/// The mapping of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct At {
    physical: u64,
    shared: bool,
}

/// Few blocks, anywhere: the tree sees `base + scale * block`, the model `block`.
#[derive(Clone, Copy, Debug)]
struct Place {
    base: u64,
    scale: u64,
}

const BLOCKS: u64 = 4096;

impl Place {
    fn vlba(self, block: u64) -> u64 {
        if block == 0 { 0 } else { self.base + block * self.scale }
    }

    fn range(self, from: u64, to: u64) -> BlockRange {
        BlockRange::between(Vlba(self.vlba(from)), Vlba(self.vlba(to)))
    }
}

struct Model {
    place: Place,
    mapped: BTreeMap<u64, At>,
    /// Blocks that the tree may report as pruned, and must, if true.
    pruned: BTreeMap<u64, bool>,
    blocks: u64,
}

#[derive(Clone, Debug)]
enum Step {
    /// Maps runs of blocks in a range and makes holes between them.
    Set {
        from: u64,
        len: u64,
        runs: Vec<(u64, u64, u64, bool)>,
    },
    /// Sets the model's mappings in the tree again.
    Regenerate {
        from: u64,
        len: u64,
    },
    Prune {
        from: u64,
        len: u64,
    },
    PruneSome {
        nodes: usize,
    },
    PruneAll,
    Resize {
        blocks: u64,
    },
    Read {
        from: u64,
        len: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let run = (0..6u64, 1..9u64, 0..512u64, proptest::bool::weighted(0.2));
    let runs = proptest::collection::vec(run, 0..60);
    let few = proptest::collection::vec((0..3u64, 1..5u64, 0..64u64, Just(false)), 0..4);
    prop_oneof![
        10 => (0..BLOCKS, 1..600u64, runs)
            .prop_map(|(from, len, runs)| Step::Set { from, len, runs }),
        6 => (0..BLOCKS, 1..20u64, few)
            .prop_map(|(from, len, runs)| Step::Set { from, len, runs }),
        4 => (0..BLOCKS, 1..2000u64).prop_map(|(from, len)| Step::Regenerate { from, len }),
        3 => (0..BLOCKS, 1..900u64).prop_map(|(from, len)| Step::Prune { from, len }),
        2 => (0..6usize).prop_map(|nodes| Step::PruneSome { nodes }),
        1 => Just(Step::PruneAll),
        1 => (1..=BLOCKS).prop_map(|blocks| Step::Resize { blocks }),
        6 => (0..BLOCKS, 1..1500u64).prop_map(|(from, len)| Step::Read { from, len }),
    ]
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![
        Just(Place { base: 0, scale: 1 }),
        (0..1u64 << 47, 1..1u64 << 34).prop_map(|(base, scale)| Place { base, scale }),
    ]
}

impl Model {
    fn at(&self, block: u64) -> Option<At> {
        self.mapped.get(&block).copied()
    }

    /// Extents for `from..to`, block by block: the tree has to merge them.
    fn extents(&self, from: u64, to: u64) -> Vec<Extent> {
        let of = |(block, at): (&u64, &At)| {
            let range = self.place.range(*block, *block + 1);
            Extent {
                first: range.first,
                count: range.count,
                physical: Plba(at.physical),
                shared: at.shared,
            }
        };
        self.mapped.range(from..to).map(of).collect()
    }

    /// Checks the `pieces` of a translation of `from..to`.
    fn check(&self, from: u64, to: u64, pieces: &[Piece]) {
        let mut pieces = pieces.iter();
        let mut piece: Option<Piece> = None;
        for block in from..to {
            let mut left = self.place.range(block, block + 1);
            let mut into = 0u64;
            while left.count > 0 {
                let now = match piece.filter(|piece| piece.range.contains(left.first)) {
                    Some(piece) => piece,
                    None => {
                        let next = *pieces.next().expect("pieces cover the request");
                        assert_eq!(next.range.first, left.first, "pieces follow each other");
                        assert!(next.range.count > 0);
                        piece = Some(next);
                        next
                    }
                };
                let offset = left.first.0 - now.range.first.0;
                let common = now.range.intersect(left).unwrap().count;
                match (now.mapping, self.at(block), self.pruned.get(&block)) {
                    (Mapping::Pruned, _, Some(_)) => {}
                    (_, _, Some(true)) => panic!("block {block} is not pruned but {now:?}"),
                    (Mapping::Mapped { physical, shared }, Some(at), _) => {
                        assert_eq!(
                            (physical.0 + offset, shared),
                            (at.physical + into, at.shared),
                            "block {block}"
                        );
                    }
                    (Mapping::Hole, None, _) => {}
                    (got, expected, _) => panic!("block {block} is {expected:?}, not {got:?}"),
                }
                into += common;
                left = left.split(common).1;
            }
        }
        assert_eq!(pieces.next(), None, "pieces end with the request");
    }
}

/// One block in the model may be many in the tree: give each room on the store.
const ROOM: u64 = 1 << 35;

/// Applies a step to the tree and to the model.
fn apply(
    step: &Step,
    tree: &mut ExtentTree,
    model: &mut Model,
    read: &mut dyn FnMut(&Model, u64, u64),
) {
    let span = |from: u64, len: u64| (from.min(model.blocks), (from + len).min(model.blocks));
    match step {
        Step::Set { from, len, runs } => {
            let (from, to) = span(*from, *len);
            model.mapped.retain(|block, _| !(from..to).contains(block));
            let mut at = from;
            for (gap, count, physical, shared) in runs {
                at += gap;
                for block in (at..at + count).take_while(|block| *block < to) {
                    // Runs are contiguous on the store at every place in the tree.
                    let physical =
                        physical * ROOM * 64 + model.place.vlba(block) - model.place.vlba(at);
                    model.mapped.insert(block, At { physical, shared: *shared });
                }
                at += count;
            }
            model.pruned.retain(|block, _| !(from..to).contains(block));
            tree.set(model.place.range(from, to), &model.extents(from, to)).unwrap();
        }
        Step::Regenerate { from, len } => {
            let (from, to) = span(*from, *len);
            let version = tree.root().version();
            model.pruned.retain(|block, _| !(from..to).contains(block));
            tree.set(model.place.range(from, to), &model.extents(from, to)).unwrap();
            assert_eq!(tree.root().version(), version, "nothing was changed that could be cached");
        }
        Step::Prune { from, len } => {
            let (from, to) = span(*from, *len);
            assert_eq!(tree.prune(model.place.range(from, to)), model.place.range(from, to));
            model.pruned.extend((from..to).map(|block| (block, true)));
        }
        Step::PruneSome { nodes } => {
            let before = tree.shape();
            let pruned = tree.prune_some(*nodes);
            let after = tree.shape();
            assert_eq!(before.nodes - after.nodes, pruned);
            assert!(pruned >= (*nodes).min(before.nodes));
            for block in 0..model.blocks {
                model.pruned.entry(block).or_insert(false);
            }
        }
        Step::PruneAll => {
            tree.prune_all();
            model.pruned = (0..model.blocks).map(|block| (block, true)).collect();
        }
        Step::Resize { blocks } => {
            let all_pruned = tree.shape().depth == 0;
            tree.resize(model.place.vlba(*blocks));
            model.mapped.split_off(blocks);
            model.pruned.split_off(blocks);
            if all_pruned {
                model.pruned.extend((model.blocks..*blocks).map(|block| (block, true)));
            }
            model.blocks = *blocks;
        }
        Step::Read { from, len } => {
            let (from, to) = span(*from, *len);
            read(model, from, to);
        }
    }
}

fn run(place: Place, initially: Content, btlb: usize, steps: &[Step]) {
    let memory = Arc::new(NodeMemory::new(4096));
    let mut model =
        Model { place, mapped: BTreeMap::new(), pruned: BTreeMap::new(), blocks: BLOCKS };
    if initially == Content::Pruned {
        model.pruned = (0..BLOCKS).map(|block| (block, true)).collect();
    }
    let mut tree = ExtentTree::new(Arc::clone(&memory), place.vlba(BLOCKS), initially).unwrap();
    let mut unit = TranslationUnit::new(Arc::clone(&memory), btlb);
    let (root, mut last) = (tree.root(), LastExtent::default());
    let mut read = |model: &Model, from: u64, to: u64| {
        let mut pieces = Vec::new();
        let coverage = unit.translate(
            FunctionId(3),
            &root,
            &mut last,
            model.place.range(from, to),
            &mut |piece| {
                pieces.push(piece);
                ControlFlow::Continue(())
            },
        );
        assert_eq!(coverage, Coverage::Whole);
        model.check(from, to, &pieces);
    };
    for step in steps {
        apply(step, &mut tree, &mut model, &mut read);
        assert_eq!(tree.check(), Ok(()), "after {step:?}");
        let retired = tree.take_retired();
        assert_eq!(memory.used_nodes(), tree.shape().nodes + retired.len(), "no node is lost");
        memory.free(retired);
    }
    read(&model, 0, model.blocks);
    // Neighbours that continue each other are merged, also across nodes.
    let extents: Vec<Extent> = tree.extents().collect();
    assert!(extents.windows(2).all(|pair| !pair[0].continues_in(pair[1])));
    memory.free(tree.dismantle());
    assert_eq!(memory.used_nodes(), 0);
}

proptest! {
    #![proptest_config(
        ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() }
    )]

    #[test]
    fn translations_are_the_models(
        place in place(),
        pruned in any::<bool>(),
        btlb in 0..9usize,
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        run(place, if pruned { Content::Pruned } else { Content::Hole }, btlb, &steps);
    }

    /// An update is done exactly, or rejected with nothing changed.
    #[test]
    fn wild_updates_are_refused_whole(
        range in (any::<u64>(), any::<u64>()),
        extents in proptest::collection::vec(
            (any::<u64>(), any::<u64>(), any::<u64>(), any::<bool>()),
            0..4,
        ),
        small in any::<bool>(),
    ) {
        let memory = Arc::new(NodeMemory::new(64));
        let known = Extent { first: Vlba(5), count: 7, physical: Plba(9), shared: false };
        let mut tree = ExtentTree::build(memory, 1 << 48, [known]).unwrap();
        let narrow = |number: u64| if small { number % 64 } else { number };
        let range = BlockRange::new(Vlba(narrow(range.0)), narrow(range.1));
        let extents: Vec<Extent> = extents
            .into_iter()
            .map(|(first, count, physical, shared)| {
                Extent {
                    first: Vlba(narrow(first)),
                    count: narrow(count),
                    physical: Plba(physical),
                    shared,
                }
            })
            .collect();
        let version = tree.root().version();
        match tree.set(range, &extents) {
            Ok(()) => {
                let clipped = tree.extents().filter_map(|extent| extent.clip(range));
                let now: u64 = clipped.map(|extent| extent.count).sum();
                prop_assert_eq!(now, extents.iter().map(|extent| extent.count).sum::<u64>());
            }
            Err(_) => {
                prop_assert_eq!(tree.extents().collect::<Vec<_>>(), vec![known]);
                prop_assert_eq!(tree.root().version(), version);
            }
        }
        prop_assert_eq!(tree.check(), Ok(()));
    }
}

#[test]
fn each_kind_of_wrong_update_has_its_error() {
    let memory = Arc::new(NodeMemory::new(64));
    let mut tree = ExtentTree::new(memory, 100, Content::Hole).unwrap();
    let extent = |first, count, physical| Extent {
        first: Vlba(first),
        count,
        physical: Plba(physical),
        shared: false,
    };
    let mut set =
        |first, count, extents: &[Extent]| tree.set(BlockRange::new(Vlba(first), count), extents);
    assert_eq!(set(0, 101, &[]), Err(SetError::Outside));
    assert_eq!(set(u64::MAX, 2, &[]), Err(SetError::Outside));
    assert_eq!(set(10, 10, &[extent(9, 2, 0)]), Err(SetError::Outside));
    assert_eq!(set(10, 10, &[extent(19, 2, 0)]), Err(SetError::Outside));
    assert_eq!(set(10, 10, &[extent(12, 0, 0)]), Err(SetError::Disorder));
    assert_eq!(set(10, 10, &[extent(12, 3, 0), extent(14, 1, 50)]), Err(SetError::Disorder));
    assert_eq!(set(10, 10, &[extent(14, 1, 0), extent(12, 1, 50)]), Err(SetError::Disorder));
    assert_eq!(set(10, 10, &[extent(12, 1, u64::MAX)]), Err(SetError::PhysicalTooFar));
    assert_eq!(set(10, 10, &[extent(12, 2, (1 << 63) - 2)]), Err(SetError::PhysicalTooFar));
    assert_eq!(set(10, 10, &[extent(12, 2, (1 << 63) - 3)]), Ok(()));
}
