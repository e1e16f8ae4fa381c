//! Requests that are refused or pass allocate nothing.

use std::sync::Arc;

use sidecore_block::{Geometry, RamStore, Stage};
use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_stage_read_only::ReadOnlyStage;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn read_only() {
    let ram = Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap());
    allocates_nothing(&*ReadOnlyStage.open("disk", ram).unwrap(), allocations);
}
