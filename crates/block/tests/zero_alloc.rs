//! The simple stores' requests allocate nothing, once the channel is warm.

use sidecore_block::{Geometry, NullStore, RamStore};
use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const GEOMETRY: Geometry = Geometry::new(1 << 20, 512);

#[test]
fn null() {
    allocates_nothing(&NullStore::new(GEOMETRY), allocations);
}

#[test]
fn ram_disk() {
    allocates_nothing(&RamStore::new(GEOMETRY).unwrap(), allocations);
}
