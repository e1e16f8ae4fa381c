//! Requests that are mirrored allocate nothing.

mod common;

use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_units::Nanos;

use common::{creation, options, ram};
use sidecore_mirror::{Mirror, OpenOptions, Sleep, create};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn mirror() {
    let legs = [ram(), ram()];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    // Regions stay open, as they do while they are written.
    let options = OpenOptions { clear_after: Nanos::MAX, ..options() };
    allocates_nothing(&Mirror::open(&legs, options).unwrap(), allocations);
}
