//! The allocator counts allocations: a counter that always reads 0 would pass every other test.

use std::hint::black_box;

use sidecore_counting_alloc::{CountingAllocator, allocations, allocations_of};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn an_allocation_counts_once_and_its_release_does_not() {
    let before = allocations();
    drop(black_box(Box::new(1_u64)));
    assert_eq!(allocations() - before, 1);
}

#[test]
fn growing_counts_and_room_reserved_in_advance_does_not() {
    let mut bytes: Vec<u8> = black_box(Vec::with_capacity(16));
    let before = allocations();
    bytes.extend_from_slice(&[0; 16]);
    assert_eq!(allocations() - before, 0);
    bytes.push(0);
    assert_eq!(allocations() - before, 1);
    black_box(bytes);
}

#[test]
fn another_threads_allocations_count_for_that_thread_only() {
    let me = || rustix::thread::gettid().as_raw_pid().unsigned_abs();
    std::thread::scope(|scope| {
        let (ready, wait) = std::sync::mpsc::sync_channel::<()>(1);
        let (done, finished) = std::sync::mpsc::sync_channel::<u32>(1);
        scope.spawn(move || {
            done.send(me()).unwrap();
            wait.recv().unwrap();
            for _ in 0..100 {
                drop(black_box(Box::new([0_u8; 32])));
            }
            done.send(me()).unwrap();
        });
        let other = finished.recv().unwrap();
        let (mine, its) = (allocations(), allocations_of(other));
        ready.send(()).unwrap();
        finished.recv().unwrap();
        // A channel may allocate a few times when it blocks, but not a hundred times.
        assert!(allocations() - mine < 100);
        assert!(allocations_of(other) - its >= 100);
        assert_eq!(allocations_of(me()), allocations());
    });
}
