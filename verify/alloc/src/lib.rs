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
//! test that runs on threads of its own is measured by [`allocations_of`] those.
//!
//! This crate is one of the few that may hold `unsafe` (the trait demands it), so that no test has to.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The system's allocator with a counter in front of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct CountingAllocator;

/// More threads than a test has in all its time.
const THREADS_MAX: usize = 4096;

/// The count of one thread, for the others.
struct Account {
    thread: AtomicU32,
    count: AtomicU64,
}

static ACCOUNTS: [Account; THREADS_MAX] =
    [const { Account { thread: AtomicU32::new(0), count: AtomicU64::new(0) } }; THREADS_MAX];

/// Accounts that have been opened.
static OPENED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    // Const-initialised and without a destructor: reading it never allocates, even while a thread starts or ends.
    static ON_THREAD: Cell<u64> = const { Cell::new(0) };
    static ACCOUNT: Cell<Option<&'static Account>> = const { Cell::new(None) };
}

/// How often the calling thread has asked for memory (a reallocation counts, a release does not).
///
/// Always 0 unless [`CountingAllocator`] is the binary's `#[global_allocator]`.
pub fn allocations() -> u64 {
    ON_THREAD.get()
}

/// How often the thread with this id (gettid(2)) has asked for memory; one that has not yet is unknown, and that is 0.
///
/// # Panics
/// There were more threads than are counted apart.
pub fn allocations_of(thread: u32) -> u64 {
    assert!(OPENED.load(Ordering::Relaxed) <= THREADS_MAX, "more than {THREADS_MAX} threads");
    // An id is given again to a later thread: their counts add up.
    let its = ACCOUNTS.iter().filter(|account| account.thread.load(Ordering::Relaxed) == thread);
    its.map(|account| account.count.load(Ordering::Relaxed)).sum()
}

/// The calling thread's account, if there is room for one.
fn account() -> Option<&'static Account> {
    if let Some(account) = ACCOUNT.get() {
        return Some(account);
    }
    let account = ACCOUNTS.get(OPENED.fetch_add(1, Ordering::Relaxed))?;
    account.thread.store(rustix::thread::gettid().as_raw_pid().unsigned_abs(), Ordering::Relaxed);
    ACCOUNT.set(Some(account));
    Some(account)
}

fn count() {
    ON_THREAD.set(ON_THREAD.get().wrapping_add(1));
    if let Some(account) = account() {
        account.count.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every method passes its arguments on to `System` unchanged and returns what it returned; counting touches
// only thread-local cells and atomics and asks the kernel for the thread's id, none of which allocates or unwinds.
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
