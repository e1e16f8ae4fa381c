//! Translation allocates nothing: not in hits, not in walks, for any size of request.

use std::ops::ControlFlow;
use std::sync::Arc;

use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_extent::{
    BlockRange, Extent, ExtentTree, FunctionId, LastExtent, Mapping, NodeMemory, TranslationUnit,
};
use sidecore_telemetry::CounterSet;
use sidecore_units::{Plba, Vlba};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const EXTENTS: u64 = 50_000;

#[test]
fn translation() {
    let memory = Arc::new(NodeMemory::new(1024));
    // Holes at every third, and a part that is pruned.
    let extents = (0..EXTENTS).map(|index| Extent {
        first: Vlba(3 * index),
        count: 2,
        physical: Plba(7 * index),
        shared: index.is_multiple_of(5),
    });
    let mut tree = ExtentTree::build(Arc::clone(&memory), 3 * EXTENTS, extents).unwrap();
    tree.prune(BlockRange::new(Vlba(30_000), 10_000));
    let root = tree.root();
    let mut unit = TranslationUnit::new(memory, 8);
    let mut last = [LastExtent::default(); 4];
    let (mut mapped, mut holes, mut pruned) = (0u64, 0u64, 0u64);
    let before = allocations();
    for request in 0..100_000u64 {
        let first = request.wrapping_mul(2_654_435_761) % (3 * EXTENTS);
        let count = if request.is_multiple_of(64) { 4_000 } else { 1 + request % 7 };
        // A hit between the walks.
        let first = if request.is_multiple_of(3) { 0 } else { first };
        let last = &mut last[(request % 4) as usize];
        unit.translate(
            FunctionId(1),
            &root,
            last,
            BlockRange::new(Vlba(first), count),
            &mut |piece| {
                match piece.mapping {
                    Mapping::Mapped { .. } => mapped += 1,
                    Mapping::Hole => holes += 1,
                    Mapping::Pruned => pruned += 1,
                }
                ControlFlow::Continue(())
            },
        );
    }
    unit.flush(FunctionId(1));
    unit.flush_all();
    assert_eq!(allocations() - before, 0);
    let counts = unit.stats().counts();
    assert!(mapped > 0 && holes > 0 && pruned > 0);
    assert_eq!((counts.holes, counts.pruned), (holes, pruned));
    assert_eq!(counts.last_hits + counts.btlb_hits + counts.walks, 100_000);
    assert!(counts.last_hits > 0 && counts.btlb_hits > 0 && counts.walks > 0, "{counts:?}");
}
