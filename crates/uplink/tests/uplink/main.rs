//! Interfaces of this host as ports of a switch, in a network namespace of each test's own.

mod lan;
mod packet;
mod tap;

use sidecore_counting_alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
