//! One writer and several readers, at once, on real threads. Retired nodes are freed, and used
//! again, after every reader was between two walks.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use sidecore_extent::{
    BlockRange, Coverage, Extent, ExtentTree, FunctionId, LastExtent, Mapping, NodeMemory, Retired,
    TranslationUnit, TreeRoot,
};
use sidecore_units::{Plba, Vlba};

const BLOCKS: u64 = 1 << 14;
const READERS: usize = 2;
const UPDATES: u64 = 1_500;
/// The blocks of an aligned stretch; each update sets one stretch.
const STRETCH: u64 = 64;

/// The physical place of a block of an update: it identifies the update and the block.
fn physical(stamp: u64, block: u64) -> u64 {
    stamp << 20 | block
}

/// Epoch-based reclamation: a reader acknowledges an epoch between two walks.
struct Epochs {
    epoch: AtomicU64,
    seen: [AtomicU64; READERS],
}

impl Epochs {
    fn acknowledge(&self, reader: usize) {
        self.seen[reader].store(self.epoch.load(Ordering::Acquire), Ordering::Release);
    }

    /// The epoch of nodes retired now.
    fn retire(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::AcqRel) + 1
    }

    fn is_over(&self, epoch: u64) -> bool {
        self.seen.iter().all(|seen| seen.load(Ordering::Acquire) >= epoch)
    }
}

struct Shared {
    root: Arc<TreeRoot>,
    memory: Arc<NodeMemory>,
    epochs: Epochs,
    /// For each stretch, the stamp of the last update that is certainly visible.
    stamps: Vec<AtomicU64>,
    /// The writer's last stamp, given or about to be given.
    newest: AtomicU64,
    done: AtomicBool,
}

fn read(shared: &Shared, reader: usize) -> u64 {
    let mut unit = TranslationUnit::new(Arc::clone(&shared.memory), 8);
    let mut last = LastExtent::default();
    let (mut number, mut blocks) = (reader as u64 + 1, 0u64);
    while !shared.done.load(Ordering::Acquire) {
        shared.epochs.acknowledge(reader);
        for _ in 0..16 {
            number = number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let first = (number >> 33) % BLOCKS;
            let range = BlockRange::between(
                Vlba(first),
                Vlba((first + 1 + (number >> 20) % 300).min(BLOCKS)),
            );
            let stretches =
                (first / STRETCH) as usize..=((range.end().unwrap().0 - 1) / STRETCH) as usize;
            let oldest: Vec<u64> = shared.stamps[stretches.clone()]
                .iter()
                .map(|stamp| stamp.load(Ordering::Acquire))
                .collect();
            let mut at = first;
            let coverage =
                unit.translate(FunctionId(1), &shared.root, &mut last, range, &mut |piece| {
                    assert_eq!(piece.range.first.0, at, "pieces follow each other");
                    at = piece.range.end().unwrap().0;
                    let Mapping::Mapped { physical: found, shared: is_shared } = piece.mapping
                    else {
                        return ControlFlow::Continue(());
                    };
                    let stamp = found.0 >> 20;
                    let newest = shared.newest.load(Ordering::Acquire);
                    for offset in 0..piece.range.count {
                        let block = piece.range.first.0 + offset;
                        assert_eq!(
                            found.0 + offset,
                            physical(stamp, block),
                            "a block lies where its stamp says"
                        );
                        let oldest = oldest[(block / STRETCH) as usize - stretches.start()];
                        assert!(
                            stamp >= oldest,
                            "stamp {stamp} of block {block} was replaced by {oldest} before"
                        );
                        assert!(stamp <= newest);
                    }
                    assert_eq!(is_shared, stamp.is_multiple_of(5));
                    ControlFlow::Continue(())
                });
            assert_eq!((coverage, at), (Coverage::Whole, range.end().unwrap().0));
            blocks += range.count;
        }
    }
    // This reader walks no more.
    shared.epochs.seen[reader].store(u64::MAX, Ordering::Release);
    blocks
}

/// Every other block of a stretch, so that the tree has many extents.
fn stamped(stamp: u64, stretch: u64) -> impl Iterator<Item = Extent> {
    (0..STRETCH / 2).map(move |index| {
        let block = stretch * STRETCH + 2 * index;
        let physical = Plba(physical(stamp, block));
        Extent { first: Vlba(block), count: 1, physical, shared: stamp.is_multiple_of(5) }
    })
}

#[test]
fn readers_see_what_was_published_and_nothing_that_was_freed() {
    // So few nodes that they are used again and again.
    let memory = Arc::new(NodeMemory::new(600));
    let all = (0..BLOCKS / STRETCH).flat_map(|stretch| stamped(1, stretch));
    let mut tree = ExtentTree::build(Arc::clone(&memory), BLOCKS, all).unwrap();
    let shared = Shared {
        root: tree.root(),
        memory: Arc::clone(&memory),
        epochs: Epochs { epoch: AtomicU64::new(0), seen: Default::default() },
        stamps: (0..BLOCKS / STRETCH).map(|_| AtomicU64::new(1)).collect(),
        newest: AtomicU64::new(1),
        done: AtomicBool::new(false),
    };
    let mut waiting: Vec<(u64, Retired)> = Vec::new();
    let (mut freed, mut number) = (0usize, 42u64);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                scope.spawn({
                    let shared = &shared;
                    move || read(shared, reader)
                })
            })
            .collect();
        for stamp in 2..UPDATES + 2 {
            number = number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let stretch = (number >> 33) % (BLOCKS / STRETCH);
            let range = BlockRange::new(Vlba(stretch * STRETCH), STRETCH);
            shared.newest.store(stamp, Ordering::Release);
            match stamp % 8 {
                0 => drop(tree.prune(range)),
                1 => drop(tree.prune_some(2)),
                2 if stamp % 64 == 2 => tree.prune_all(),
                3 => tree.set(range, &[]).unwrap(),
                _ => tree.set(range, &stamped(stamp, stretch).collect::<Vec<_>>()).unwrap(),
            }
            if stamp % 8 > 3 {
                shared.stamps[stretch as usize].store(stamp, Ordering::Release);
            }
            waiting.push((shared.epochs.retire(), tree.take_retired()));
            // Without reclamation the nodes would soon be used up; without waiting for the epoch, a
            // walk would find nodes of another tree.
            while memory.used_nodes() > 400 || waiting.len() > 16 {
                let over =
                    waiting.iter().take_while(|(epoch, _)| shared.epochs.is_over(*epoch)).count();
                for (_, retired) in waiting.drain(..over) {
                    freed += retired.len();
                    memory.free(retired);
                }
                if readers.iter().any(|reader| reader.is_finished()) {
                    break;
                }
                thread::yield_now();
            }
        }
        shared.done.store(true, Ordering::Release);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
    assert!(freed > 2 * memory.max_nodes(), "nodes were used again: {freed}");
    tree.check().unwrap();
}
