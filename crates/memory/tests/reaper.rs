//! The thread that drops a peer's memory does not free it itself.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_memory::reaper::{MAX_WAITING, wait_until_reaped, when_reaped};
use sidecore_memory::{
    GuestAddress, GuestMemory, MAX_REGIONS, MemoryFile, RegionHint, RegionSpec, UserAddress,
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const SOON: Duration = Duration::from_secs(30);

/// There is one reaper per process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TESTS: Mutex<()> = Mutex::new(());
    TESTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stops the reaper until it is dropped.
struct Stopped(#[allow(dead_code, reason = "its end is what counts")] Sender<()>);

fn stop_reaper() -> Stopped {
    let (let_go, stopped) = channel::<()>();
    let (begun, begins) = channel();
    when_reaped(move || {
        begun.send(()).unwrap();
        let _ = stopped.recv_timeout(SOON);
    });
    begins.recv_timeout(SOON).unwrap();
    Stopped(let_go)
}

/// A file with all of its pages.
fn populated(name: &str, len_bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len_bytes).unwrap();
    file
}

fn region(address: u64, len_bytes: u64, file: OwnedFd) -> RegionSpec {
    let (guest_address, user_address) = (GuestAddress(address), UserAddress(address));
    RegionSpec { guest_address, user_address, len_bytes, file, file_offset_bytes: 0 }
}

fn mapped(name: &str) -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .filter(|line| line.contains(name))
        .count()
}

fn is_open(name: &str) -> bool {
    let links = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.unwrap().path().read_link().ok());
    links.into_iter().any(|link| link.to_string_lossy().contains(name))
}

#[test]
fn a_guests_memory_is_freed_later_without_an_allocation() {
    let _alone = alone();
    const BYTES: u64 = 256 << 20;
    let name = "a-guest-that-leaves";
    let memory = GuestMemory::map(vec![region(0, BYTES, populated(name, BYTES))]).unwrap();
    let mut hint = RegionHint::default();
    for page in 0..BYTES >> 12 {
        memory.write_slice(GuestAddress(page << 12), &[1], &mut hint).unwrap();
    }
    let stopped = stop_reaper();
    let sidecore = thread::spawn(move || {
        let before = allocations();
        drop(memory);
        allocations() - before
    });
    assert_eq!(sidecore.join().unwrap(), 0);
    assert_eq!(mapped(name), 1, "the thread that dropped it has unmapped it");
    drop(stopped);
    wait_until_reaped();
    assert_eq!(mapped(name), 0);
}

#[test]
fn a_file_is_closed_later_unless_it_is_taken_out() {
    let _alone = alone();
    let [kept, gone] = ["a-file-taken-out", "a-file-let-go-of"];
    let stopped = stop_reaper();
    drop(MemoryFile::new(populated(kept, 4096)).into_inner());
    assert!(!is_open(kept));
    let file = MemoryFile::new(populated(gone, 4096));
    let before = allocations();
    drop(file);
    assert_eq!(allocations() - before, 0);
    assert!(is_open(gone));
    drop(stopped);
    wait_until_reaped();
    assert!(!is_open(gone));
}

#[test]
fn no_more_waits_than_may() {
    let _alone = alone();
    let name = "many-regions";
    let file = populated(name, 4096);
    let table = |count: usize| {
        let region = |index| region(index as u64 * 4096, 4096, file.try_clone().unwrap());
        GuestMemory::map((0..count).map(region).collect()).unwrap()
    };
    // The call that stops the reaper counts too.
    let most = MAX_WAITING - 1;
    let stopped = stop_reaper();
    for first in (0..most).step_by(MAX_REGIONS) {
        drop(table(MAX_REGIONS.min(most - first)));
    }
    assert_eq!(mapped(name), most);
    drop(table(3));
    assert_eq!(mapped(name), most, "given back on the spot");
    drop(stopped);
    // The call has room in the queue after one mapping was freed.
    let start = Instant::now();
    while mapped(name) == most {
        assert!(start.elapsed() < SOON, "nothing is given back");
        thread::yield_now();
    }
    wait_until_reaped();
    assert_eq!(mapped(name), 0);
    let stopped = stop_reaper();
    drop(table(3));
    assert_eq!(mapped(name), 3);
    drop(stopped);
}

#[test]
fn concurrent_drops_lose_nothing() {
    let _alone = alone();
    let name = "let-go-by-many";
    let file = populated(name, 4096);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..500 {
                    drop(
                        GuestMemory::map(vec![region(0, 4096, file.try_clone().unwrap())]).unwrap(),
                    );
                    if round % 100 == 99 {
                        wait_until_reaped();
                    }
                }
            });
        }
    });
    wait_until_reaped();
    assert_eq!(mapped(name), 0);
}
