//! Requests that are encrypted and decrypted allocate nothing.

mod common;

use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_luks::SectorSize;

use common::{encrypted, ram, segment};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn encrypt() {
    allocates_nothing(&*encrypted(ram(), segment(SectorSize::SMALLEST)), allocations);
}
