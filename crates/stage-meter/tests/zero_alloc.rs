//! Requests that are counted allocate nothing.

use std::sync::Arc;

use sidecore_block::{Geometry, RamStore, Stage as _};
use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_stage_meter::MeterStage;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn meter() {
    let ram = Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap());
    let meter = MeterStage::default().open("disk", ram).unwrap();
    allocates_nothing(&*meter, allocations);
}
