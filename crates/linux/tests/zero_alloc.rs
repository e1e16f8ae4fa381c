//! Requests to a file allocate no memory, once the channel is warm; a signal to a peer never does.

use std::os::fd::AsFd;
use std::sync::Arc;

use sidecore_block::{Batch, BlockDevice, Operation};
use sidecore_block_contract::{guest_memory, request};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_linux::{Clock, FileOptions, FileStore, peer_event};
use sidecore_reactor::CoreContext;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const DEPTH: usize = 32;
const ADDRESS: u64 = 0x1_0000_0000;

/// Counts the allocations of `total` requests of all kinds, after a warm-up.
fn allocations_in(device: &Arc<dyn BlockDevice>, total: usize) -> u64 {
    let memory = guest_memory();
    let clock = Clock::new();
    let mut channel = device.open_channel(&CoreContext::default(), DEPTH).unwrap();
    channel.attach_memory(&memory).unwrap();
    let one = |index: u64| {
        let at = index * 4096;
        match index % 8 {
            0 => request(&memory, Operation::Write, at, &[(ADDRESS + at, 4096)]),
            1 => request(
                &memory,
                Operation::Read,
                at,
                &[(ADDRESS + 512, 512), (ADDRESS + 4096, 3584)],
            ),
            // Across two regions, at an odd address.
            2 => request(&memory, Operation::Write, at, &[(0x20_0000 - 2047, 4096)]),
            _ => request(&memory, Operation::Read, at, &[(ADDRESS + at, 4096)]),
        }
    };
    let mut batch: Batch = (0..DEPTH as u64).map(one).collect();
    let mut completed = Batch::with_capacity(DEPTH);
    let mut run = |count: usize| {
        let mut done = 0;
        while done < count {
            channel.submit(clock.now(), &mut batch);
            channel.poll(clock.now(), &mut completed);
            done += completed.len();
            assert!(completed.iter().all(|request| request.result.is_ok()));
            batch.append(&mut completed);
        }
    };
    run(1_000);
    let before = allocations();
    run(total);
    let during = allocations() - before;
    while channel.readiness().in_flight > 0 {
        channel.poll(clock.now(), &mut completed);
    }
    during
}

fn check(directory: &std::path::Path, direct: bool) {
    let Ok(directory) = tempfile::tempdir_in(directory) else {
        sidecore_skip::skip(format_args!("no place for a file in {}", directory.display()));
        return;
    };
    let path = directory.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let store = FileStore::open(&FileOptions { direct, ..FileOptions::new(&path) }).unwrap();
    assert_eq!(allocations_in(&(Arc::new(store) as _), 100_000), 0);
}

#[test]
fn a_file_in_memory() {
    check("/dev/shm".as_ref(), true);
}

#[test]
fn a_file_on_a_disk() {
    check(&std::env::temp_dir(), true);
}

#[test]
fn a_file_in_the_page_cache() {
    check(&std::env::temp_dir(), false);
}

#[test]
fn signalling_a_peer_allocates_nothing() {
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let mut signal = peer_event(event.as_fd()).unwrap();
    let before = allocations();
    (0..100_000).for_each(|_| signal.signal());
    assert_eq!(allocations() - before, 0);
}
