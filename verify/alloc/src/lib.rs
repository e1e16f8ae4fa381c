//! A global allocator that counts, for tests which promise not to allocate.
//!
//! A test binary installs it, warms up, and compares two readings:
//!
//! ```
//! use sidecore_counting_alloc::{CountingAllocator, allocations};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! let mut queue: Vec<u64> = Vec::with_capacity(64);
//! let before = allocations();
//! for request in 0..64 {
//!     queue.push(request);
//! }
//! assert_eq!(allocations() - before, 0);
//! ```
//!
//! The count is the calling thread's own, because the test harness and other tests allocate on theirs. Code under
//! test that hands work to another thread is measured on that thread, or as a whole with [`process_allocations`].
//!
//! This crate is one of the few that may hold `unsafe` (the trait demands it), so that no test has to.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator with a counter in front of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct CountingAllocator;

static IN_PROCESS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    // Const-initialised and without a destructor: reading it never allocates, even while a thread starts or ends.
    static ON_THREAD: Cell<u64> = const { Cell::new(0) };
}

/// How often the calling thread has asked for memory (a reallocation counts, a release does not).
///
/// Always 0 unless [`CountingAllocator`] is the binary's `#[global_allocator]`.
pub fn allocations() -> u64 {
    ON_THREAD.get()
}

/// How often all threads of the process together have asked for memory.
pub fn process_allocations() -> u64 {
    IN_PROCESS.load(Ordering::Relaxed)
}

fn count() {
    ON_THREAD.set(ON_THREAD.get().wrapping_add(1));
    IN_PROCESS.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: every method passes its arguments on to `System` unchanged and returns what it returned; counting touches
// only a thread-local cell and an atomic, neither of which allocates or unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds `GlobalAlloc::alloc`'s contract, which is `System`'s own.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as for `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: `block` came from `System` by one of these methods, with `layout`, as the caller promises.
        unsafe { System.realloc(block, layout, new_size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as for `realloc`.
        unsafe { System.dealloc(block, layout) }
    }
}
