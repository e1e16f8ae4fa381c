//! Two extent trees in one memory, and a translation unit that reads both, compared with arrays.
//!
//! The input is a sequence of updates, malformed ones among them, of prunings, resizings and
//! translations, some of which are interrupted by updates. A model has the state of each block. The
//! tree may report any pruned block as unknown, and must agree with the model otherwise.
#![no_main]

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_extent::{
    BlockRange, Content, Coverage, Extent, ExtentTree, FunctionId, LastExtent, Mapping, NodeMemory,
    Piece, SetError, TranslationUnit,
};
use sidecore_fuzz::Input;
use sidecore_units::{Plba, Vlba};

/// Enough for trees of three levels if every block is an extent.
const BLOCKS: usize = 16_384;
/// The most operations of an input, and the most blocks that they touch together, so that no input
/// takes long.
const MOST_STEPS: usize = 150;
const MOST_BLOCKS: usize = 150_000;
/// The distance of the model's blocks on the store.
const ROOM: u64 = 1 << 34;
/// Node memories, by size, which last for all inputs, because making one takes longer than most
/// inputs. Small ones run out of nodes.
const MEMORIES: [usize; 4] = [512, 512, 12, 3];

/// The mapping of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    Hole,
    At { physical: u64, shared: bool },
}

/// Whether the tree may report a block as unknown.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pruned {
    No,
    Perhaps,
    Yes,
}

/// The expected state of a block.
#[derive(Clone, Copy, Debug)]
struct Block {
    is: Is,
    pruned: Pruned,
}

/// The place of the model's blocks in the tree: each is `scale` of the tree's blocks, and all but
/// block 0 are `base` further on.
#[derive(Clone, Copy, Debug)]
struct Place {
    base: u64,
    scale: u64,
}

impl Place {
    fn at(self, block: usize) -> u64 {
        if block == 0 { 0 } else { self.base + block as u64 * self.scale }
    }

    fn range(self, blocks: &Range<usize>) -> BlockRange {
        BlockRange::between(Vlba(self.at(blocks.start)), Vlba(self.at(blocks.end)))
    }
}

/// A tree, its model, and two queues that read the tree.
struct Function {
    id: FunctionId,
    tree: ExtentTree,
    model: Vec<Block>,
    place: Place,
    queues: [LastExtent; 2],
}

/// Translates a range: returns the pieces that were reported, and where they end.
fn translate(
    unit: &mut TranslationUnit,
    function: &mut Function,
    queue: usize,
    range: BlockRange,
    mut meanwhile: impl FnMut(usize, &mut ExtentTree) -> ControlFlow<()>,
) -> (Vec<Piece>, Coverage) {
    let root = function.tree.root();
    let last = &mut function.queues[queue];
    let hit = last.hit(&root, range);
    let mut pieces = Vec::new();
    let coverage = unit.translate(function.id, &root, last, range, &mut |piece| {
        pieces.push(piece);
        meanwhile(pieces.len(), &mut function.tree)
    });
    if let Some((physical, shared)) = hit.filter(|_| range.count > 0) {
        assert_eq!(pieces, [Piece { range, mapping: Mapping::Mapped { physical, shared } }]);
    }
    (pieces, coverage)
}

/// Compares the pieces, which must be contiguous from the first block on, with the model. Returns
/// the number of blocks that they cover.
fn compare(
    place: Place,
    model: &[Block],
    first: usize,
    pieces: &[Piece],
    perhaps_pruned: bool,
) -> u64 {
    let mut at = place.at(first);
    let mut block = first;
    for piece in pieces {
        assert!(piece.range.first.0 == at && piece.range.count > 0, "{piece:?} at {at}");
        let end = piece.range.end().unwrap().0;
        while at < end {
            if at >= place.at(block + 1) {
                block += 1;
                continue;
            }
            let (told, model) = (place.at(block + 1).min(end) - at, model[block]);
            let (into_piece, into_block) = (at - piece.range.first.0, at - place.at(block));
            match piece.mapping {
                Mapping::Pruned => assert!(
                    perhaps_pruned || model.pruned != Pruned::No,
                    "block {block} is {model:?}"
                ),
                _ if model.pruned == Pruned::Yes => {
                    panic!("block {block} is pruned, and not {piece:?}")
                }
                Mapping::Hole => assert_eq!(model.is, Is::Hole, "block {block}"),
                Mapping::Mapped { physical, shared } => {
                    let physical = (physical.0 + into_piece).checked_sub(into_block);
                    assert_eq!(
                        Some(model.is),
                        physical.map(|physical| Is::At { physical, shared }),
                        "block {block}"
                    );
                }
            }
            at += told;
        }
    }
    at - place.at(first)
}

impl Function {
    /// The next part of the tree's blocks.
    fn part(&self, input: &mut Input<'_>, left: &mut usize) -> Option<Range<usize>> {
        let known = [64, 168, 1000, BLOCKS as u64 / 2, self.model.len() as u64];
        let first = (input.number(&known)? as usize).min(self.model.len());
        let count = (input.number(&known)? as usize).min(self.model.len() - first);
        *left = left.checked_sub(count)?;
        Some(first..first + count)
    }

    /// The model's mappings, with an extent for each block: the tree joins them.
    fn extents(&self, blocks: &Range<usize>) -> Vec<Extent> {
        let of = |block| match self.model[block] {
            Block { is: Is::At { physical, shared }, .. } => {
                let range = self.place.range(&(block..block + 1));
                Some(Extent {
                    first: range.first,
                    count: range.count,
                    physical: Plba(physical),
                    shared,
                })
            }
            Block { is: Is::Hole, .. } => None,
        };
        blocks.clone().filter_map(of).collect()
    }

    /// Sets a part of the tree to a pattern: runs of blocks with gaps, contiguous on the store or
    /// not.
    fn set(&mut self, input: &mut Input<'_>, left: &mut usize) -> Option<()> {
        let blocks = self.part(input, left)?;
        let (run, gap, start, step) =
            (input.byte()?, input.byte()? % 8, input.byte()?, input.byte()?);
        let (run, gap) = (usize::from(run % 32) + 1, usize::from(gap));
        let before = self.model[blocks.clone()].to_vec();
        for block in blocks.clone() {
            let index = block - blocks.start;
            let (number, into) = (index / (run + gap), index % (run + gap));
            let first_of_run = block - into;
            // Blocks of different runs are far from each other on the store.
            let physical = (u64::from(start) + number as u64 * u64::from(step)) * ROOM * 64
                + (self.place.at(block) - self.place.at(first_of_run));
            let is = if into < run {
                Is::At { physical, shared: step & 1 != 0 && number % 3 == 0 }
            } else {
                Is::Hole
            };
            self.model[block] = Block { is, pruned: Pruned::No };
        }
        self.put(&blocks, before);
        Some(())
    }

    /// Sets the tree to the model's current mappings; if the memory has no nodes left, sets the
    /// model back to `before`.
    fn put(&mut self, blocks: &Range<usize>, before: Vec<Block>) {
        let (version, root) = (self.tree.root().version(), self.tree.root());
        match self.tree.set(self.place.range(blocks), &self.extents(blocks)) {
            Ok(()) => {
                let moved = before.iter().zip(&self.model[blocks.clone()]).any(|(old, new)| {
                    old.pruned == Pruned::No && old.is != Is::Hole && old.is != new.is
                });
                assert!(
                    !moved || root.version() != version,
                    "a mapping that moved is still in the caches"
                );
            }
            Err(SetError::OutOfNodes(_)) => {
                assert_eq!(root.version(), version);
                self.model[blocks.clone()].copy_from_slice(&before);
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn mark(&mut self, blocks: Range<usize>, pruned: Pruned) {
        for block in &mut self.model[blocks] {
            block.pruned = pruned;
        }
    }

    /// An update that the tree may refuse, which must then leave the tree as it was.
    fn set_wildly(&mut self, input: &mut Input<'_>) -> Option<()> {
        let known =
            [self.tree.root().blocks(), self.place.at(1), self.place.at(2), 1 << 63, 1 << 32];
        let range = BlockRange::new(Vlba(input.number(&known)?), input.number(&known)?);
        let mut extents = Vec::new();
        for _ in 0..input.byte()? % 4 {
            let (first, count) = (Vlba(input.number(&known)?), input.number(&known)?);
            let (physical, shared) = (Plba(input.number(&known)?), input.byte()? & 1 != 0);
            extents.push(Extent { first, count, physical, shared });
        }
        let version = self.tree.root().version();
        let before: Vec<Extent> = self.tree.extents().collect();
        match self.tree.set(range, &extents) {
            Ok(()) => {
                let now: u64 = self
                    .tree
                    .extents()
                    .filter_map(|extent| extent.clip(range))
                    .map(|extent| extent.count)
                    .sum();
                assert_eq!(now, extents.iter().map(|extent| extent.count).sum::<u64>());
                // The update may also have changed blocks between the model's blocks. After the
                // pruning the model is right again.
                self.model.iter_mut().for_each(|block| block.pruned = Pruned::Perhaps);
                self.tree.prune_all();
                self.mark(0..self.model.len(), Pruned::Yes);
            }
            Err(_) => {
                assert_eq!(
                    (self.tree.extents().collect::<Vec<_>>(), self.tree.root().version()),
                    (before, version)
                );
            }
        }
        Some(())
    }

    fn prune(&mut self, input: &mut Input<'_>, left: &mut usize) -> Option<()> {
        let blocks = self.part(input, left)?;
        let range = self.place.range(&blocks);
        let pruned = self.tree.prune(range);
        if pruned == range {
            self.mark(blocks, Pruned::Yes);
        } else {
            // Without a node to prune a part with, the whole tree is pruned.
            assert_eq!(pruned, BlockRange::new(Vlba(0), self.tree.root().blocks()));
            self.mark(0..self.model.len(), Pruned::Yes);
        }
        Some(())
    }

    fn prune_some(&mut self, input: &mut Input<'_>) -> Option<()> {
        let wanted = usize::from(input.byte()?);
        let before = self.tree.shape();
        let pruned = self.tree.prune_some(wanted);
        let after = self.tree.shape();
        assert_eq!(before.nodes - after.nodes, pruned);
        assert!(pruned >= wanted.min(before.nodes), "{pruned} of {wanted} nodes, {before:?}");
        for block in self.model.iter_mut().filter(|block| block.pruned == Pruned::No && pruned > 0)
        {
            block.pruned = Pruned::Perhaps;
        }
        Some(())
    }

    fn resize(&mut self, input: &mut Input<'_>) -> Option<()> {
        let blocks =
            (input.number(&[BLOCKS as u64, self.model.len() as u64])? as usize).clamp(1, BLOCKS);
        self.tree.resize(self.place.at(blocks));
        self.model.resize(blocks, Block { is: Is::Hole, pruned: Pruned::No });
        if self.tree.shape().depth == 0 {
            self.mark(0..blocks, Pruned::Yes);
        }
        Some(())
    }

    /// Builds a new tree from the model.
    fn rebuild(&mut self, memory: &Arc<NodeMemory>, left: &mut usize) -> Option<()> {
        *left = left.checked_sub(self.model.len())?;
        let extents = self.extents(&(0..self.model.len()));
        let blocks = self.place.at(self.model.len());
        if let Ok(tree) = ExtentTree::build(Arc::clone(memory), blocks, extents) {
            memory.free(std::mem::replace(&mut self.tree, tree).dismantle());
            self.mark(0..self.model.len(), Pruned::No);
        }
        Some(())
    }

    /// Reads a part, perhaps past the end of the tree, perhaps stopping early.
    fn read(
        &mut self,
        input: &mut Input<'_>,
        unit: &mut TranslationUnit,
        left: &mut usize,
    ) -> Option<()> {
        let blocks = self.part(input, left)?;
        let (setup, patience) = (input.byte()?, input.byte()?);
        let mut range = self.place.range(&blocks);
        // Some requests do not begin and end with a model's block.
        let beyond = if setup & 2 != 0 { u64::from(patience) + 1 } else { 0 };
        range.count += beyond;
        let stops = setup & 4 != 0;
        let (pieces, coverage) = translate(unit, self, usize::from(setup & 1), range, |told, _| {
            if stops && told > usize::from(patience) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        let told = compare(self.place, &self.model, blocks.start, &pieces, false);
        let inside = self.tree.root().blocks().saturating_sub(range.first.0).min(range.count);
        match coverage {
            Coverage::Whole => assert_eq!(told, range.count),
            Coverage::Outside => assert!(told == inside && inside < range.count),
            Coverage::Stopped => assert!(stops && pieces.len() == usize::from(patience) + 1),
        }
        Some(())
    }

    /// Reads a part while the tree changes: each piece must be from before the change, or unknown.
    fn read_meanwhile(
        &mut self,
        input: &mut Input<'_>,
        unit: &mut TranslationUnit,
        left: &mut usize,
    ) -> Option<()> {
        let (blocks, other) = (self.part(input, left)?, self.part(input, left)?);
        let (setup, when) = (input.byte()?, usize::from(input.byte()?) + 1);
        let old = self.model.clone();
        let place = self.place;
        let changed = place.range(&other);
        let mut done = false;
        let (pieces, coverage) =
            translate(unit, self, usize::from(setup & 1), place.range(&blocks), |told, tree| {
                if told == when {
                    done = match setup % 5 {
                        0 | 1 => tree.set(changed, &[]).is_ok(),
                        2 => tree.prune(changed) == changed,
                        3 => tree.prune_some(2) == usize::MAX,
                        _ => {
                            tree.prune_all();
                            false
                        }
                    };
                }
                ControlFlow::Continue(())
            });
        assert_eq!(coverage, Coverage::Whole);
        compare(place, &old, blocks.start, &pieces, true);
        if pieces.len() >= when {
            match (setup % 5, done) {
                (0 | 1, true) => {
                    self.model[other].fill(Block { is: Is::Hole, pruned: Pruned::No });
                }
                (0 | 1, false) => {}
                (2, true) => self.mark(other, Pruned::Yes),
                (3, _) => {
                    for block in self.model.iter_mut().filter(|block| block.pruned == Pruned::No) {
                        block.pruned = Pruned::Perhaps;
                    }
                }
                _ => self.mark(0..self.model.len(), Pruned::Yes),
            }
        }
        Some(())
    }

    /// Reads all blocks.
    fn read_all(&mut self, unit: &mut TranslationUnit) {
        let blocks = 0..self.model.len();
        let range = self.place.range(&blocks);
        let (pieces, coverage) = translate(unit, self, 0, range, |_, _| ControlFlow::Continue(()));
        assert_eq!(
            (coverage, compare(self.place, &self.model, 0, &pieces, false)),
            (Coverage::Whole, range.count)
        );
        assert_eq!(self.tree.check(), Ok(()));
        let extents: Vec<Extent> = self.tree.extents().collect();
        assert!(
            extents.windows(2).all(|pair| !pair[0].continues_in(pair[1])),
            "extents that could be one"
        );
    }
}

fn memory(setup: u8) -> Arc<NodeMemory> {
    thread_local! {
        static MEMORY: [Arc<NodeMemory>; 4] =
            MEMORIES.map(|nodes| Arc::new(NodeMemory::new(nodes)));
    }
    MEMORY.with(|memories| Arc::clone(&memories[usize::from(setup % 4)]))
}

fn function(setup: u8, id: u32, memory: &Arc<NodeMemory>) -> Option<Function> {
    let content = if setup & 4 == 0 { Content::Hole } else { Content::Pruned };
    let places = [(0, 1), (0, 1), (1 << 46, 1), ((1 << 47) - 3, (1 << 33) + 1)];
    let (base, scale) = places[usize::from(setup >> 3 & 3)];
    let place = Place { base, scale };
    let pruned = if setup & 4 == 0 { Pruned::No } else { Pruned::Yes };
    // Large trees are slow, so few inputs have one.
    let blocks = if setup >> 5 == 7 { BLOCKS } else { 1000 };
    Some(Function {
        id: FunctionId(id),
        tree: ExtentTree::new(Arc::clone(memory), place.at(blocks), content).ok()?,
        model: vec![Block { is: Is::Hole, pruned }; blocks],
        place,
        queues: [LastExtent::default(); 2],
    })
}

fn step(
    functions: &mut [Function],
    unit: &mut TranslationUnit,
    memory: &Arc<NodeMemory>,
    input: &mut Input<'_>,
    left: &mut usize,
) -> Option<()> {
    let operation = input.byte()?;
    let function = &mut functions[usize::from(operation & 1)];
    match operation >> 1 & 15 {
        0..=3 => function.set(input, left)?,
        4 => {
            // The tree gets the model's mappings of pruned blocks again, which invalidates no
            // cached extent.
            let blocks = function.part(input, left)?;
            let (version, before) =
                (function.tree.root().version(), function.model[blocks.clone()].to_vec());
            function.mark(blocks.clone(), Pruned::No);
            function.put(&blocks, before);
            assert_eq!(function.tree.root().version(), version);
        }
        5 => function.prune(input, left)?,
        6 => function.prune_some(input)?,
        7 => function.resize(input)?,
        8 => function.set_wildly(input)?,
        9 => {
            function.tree.prune_all();
            function.mark(0..function.model.len(), Pruned::Yes);
        }
        10 => function.rebuild(memory, left)?,
        11 => function.read_meanwhile(input, unit, left)?,
        12 => match input.byte()? {
            0 => unit.flush_all(),
            byte => unit.flush(FunctionId(byte.into())),
        },
        _ => function.read(input, unit, left)?,
    }
    // No translation is in progress, so retired nodes can be reused.
    memory.free(function.tree.take_retired());
    Some(())
}

fuzz_target!(|input: &[u8]| {
    let mut input = Input::new(input);
    let (Some(setup), Some(other), Some(btlb)) = (input.byte(), input.byte(), input.byte()) else {
        return;
    };
    let memory = memory(setup);
    assert_eq!(memory.used_nodes(), 0);
    let functions = [function(setup, 1, &memory), function(other, 2, &memory)];
    let mut functions: Vec<Function> = functions.into_iter().flatten().collect();
    if functions.len() == 2 {
        let mut unit = TranslationUnit::new(Arc::clone(&memory), usize::from(btlb % 12));
        let mut left = MOST_BLOCKS;
        for _ in 0..MOST_STEPS {
            if step(&mut functions, &mut unit, &memory, &mut input, &mut left).is_none() {
                break;
            }
            let nodes: usize = functions.iter().map(|function| function.tree.shape().nodes).sum();
            assert_eq!(memory.used_nodes(), nodes, "a node is lost");
        }
        functions.iter_mut().for_each(|function| function.read_all(&mut unit));
    }
    functions.into_iter().for_each(|function| memory.free(function.tree.dismantle()));
    assert_eq!(memory.used_nodes(), 0);
});
