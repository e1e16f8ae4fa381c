//! Requests that are held back allocate nothing.

use std::sync::Arc;

use sidecore_block::{Geometry, RamStore};
use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn delay() {
    let ram = Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap());
    allocates_nothing(&DelayStore::new(ram, Nanos(20)), allocations);
}
