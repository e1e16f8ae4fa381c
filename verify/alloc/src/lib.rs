//! A global allocator that counts, for tests of code that must not allocate.
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
//! The count is per thread, because the test harness and other tests allocate on their threads. For
//! code under test that runs on another thread, use [`allocations_of`].
//!
//! This crate is one of the few that may hold `unsafe` (the trait demands it), so that the tests
//! need none.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The system's allocator with a counter in front of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct CountingAllocator;

/// More threads than a test binary ever starts.
const THREADS_MAX: usize = 4096;

/// One thread's count, which other threads can read.
struct Account {
    thread: AtomicU32,
    count: AtomicU64,
}

static ACCOUNTS: [Account; THREADS_MAX] =
    [const { Account { thread: AtomicU32::new(0), count: AtomicU64::new(0) } }; THREADS_MAX];

/// The number of accounts in use.
static OPENED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    // Const-initialised and without a destructor: access never allocates, even while a thread
    // starts or ends.
    static ON_THREAD: Cell<u64> = const { Cell::new(0) };
    static ACCOUNT: Cell<Option<&'static Account>> = const { Cell::new(None) };
}

/// The number of the calling thread's allocations (a reallocation counts, a release does not).
///
/// Always 0 unless [`CountingAllocator`] is the binary's `#[global_allocator]`.
pub fn allocations() -> u64 {
    ON_THREAD.get()
}

/// The number of allocations of the thread with this id (gettid(2)); 0 for an unknown thread.
///
/// # Panics
/// The process has started more than `THREADS_MAX` threads, so that some have no account.
pub fn allocations_of(thread: u32) -> u64 {
    assert!(OPENED.load(Ordering::Relaxed) <= THREADS_MAX, "more than {THREADS_MAX} threads");
    // The kernel may reuse an id for a later thread: the counts of both add up.
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

// SAFETY: every method passes its arguments on to `System` unchanged and returns what it returned;
// counting touches only thread-local cells and atomics and asks the kernel for the thread's id,
// none of which allocates or unwinds.
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
        // SAFETY: `block` came from `System` by one of these methods, with `layout`, as the caller
        // promises.
        unsafe { System.realloc(block, layout, new_size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as for `realloc`.
        unsafe { System.dealloc(block, layout) }
    }
}
