//! Requests that are checked allocate nothing.

mod common;

use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};

use common::{formatted, open, ram};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn integrity() {
    let below = ram(5 << 20, |it| it);
    // So short that checkpoints come by themselves, too.
    formatted(&below, 4096, Some(4));
    allocates_nothing(&*open(&below), allocations);
}
