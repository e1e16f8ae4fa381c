//! Requests to a stage on another thread allocate nothing, on either thread.

mod common;

use std::sync::OnceLock;

use sidecore_block_contract::allocates_nothing;
use sidecore_counting_alloc::{CountingAllocator, allocations, allocations_of};
use sidecore_reactor::CoreContext;

use common::{ram, told};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The threads of the stage.
static THREADS: OnceLock<Vec<u32>> = OnceLock::new();

/// Of this thread, and of those of the stage.
fn all_allocations() -> u64 {
    let threads = THREADS.get().unwrap().iter();
    allocations() + threads.map(|thread| allocations_of(*thread)).sum::<u64>()
}

#[test]
fn a_handed_over_request() {
    let (device, orders) = told(2, ram());
    drop(device.open_channel(&CoreContext::default(), 2).unwrap());
    let mut threads = orders.opened_on.lock().unwrap().clone();
    threads.sort_unstable();
    assert_eq!(threads.len(), 2);
    THREADS.set(threads).unwrap();
    assert!(all_allocations() > allocations(), "those of the threads are counted");
    allocates_nothing(&*device, all_allocations);
}
