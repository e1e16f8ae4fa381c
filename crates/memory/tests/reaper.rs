//! Who lets go of a peer's memory does not give it back himself.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_memory::reaper::{MAX_WAITING, wait_until_reaped, when_reaped};
use sidecore_memory::{GuestAddress, GuestMemory, MAX_REGIONS, MemoryFile, RegionHint, RegionSpec, UserAddress};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const SOON: Duration = Duration::from_secs(30);

/// There is one reaper: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TESTS: Mutex<()> = Mutex::new(());
    TESTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reaper does nothing until this is dropped.
struct Held(#[allow(dead_code, reason = "its end is what counts")] Sender<()>);

fn hold() -> Held {
    let (let_go, held) = channel::<()>();
    let (begun, begins) = channel();
    when_reaped(move || {
        begun.send(()).unwrap();
        let _ = held.recv_timeout(SOON);
    });
    begins.recv_timeout(SOON).unwrap();
    Held(let_go)
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
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains(name)).count()
}

fn is_open(name: &str) -> bool {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.unwrap().path().read_link().ok());
    links.into_iter().any(|link| link.to_string_lossy().contains(name))
}

#[test]
fn a_guests_memory_goes_later_and_nobody_allocates_for_it() {
    let _alone = alone();
    const BYTES: u64 = 256 << 20;
    let name = "a-guest-that-leaves";
    let memory = GuestMemory::map(vec![region(0, BYTES, populated(name, BYTES))]).unwrap();
    let mut hint = RegionHint::default();
    for page in 0..BYTES >> 12 {
        memory.write_slice(GuestAddress(page << 12), &[1], &mut hint).unwrap();
    }
    let held = hold();
    let sidecore = thread::spawn(move || {
        let before = allocations();
        drop(memory);
        allocations() - before
    });
    assert_eq!(sidecore.join().unwrap(), 0);
    assert_eq!(mapped(name), 1, "whoever let go of it has unmapped it");
    drop(held);
    wait_until_reaped();
    assert_eq!(mapped(name), 0);
}

#[test]
fn a_file_is_closed_later_unless_it_is_taken_out() {
    let _alone = alone();
    let [kept, gone] = ["a-file-taken-out", "a-file-let-go-of"];
    let held = hold();
    drop(MemoryFile::new(populated(kept, 4096)).into_inner());
    assert!(!is_open(kept));
    let file = MemoryFile::new(populated(gone, 4096));
    let before = allocations();
    drop(file);
    assert_eq!(allocations() - before, 0);
    assert!(is_open(gone));
    drop(held);
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
    // The call that holds it counts as well.
    let most = MAX_WAITING - 1;
    let held = hold();
    for first in (0..most).step_by(MAX_REGIONS) {
        drop(table(MAX_REGIONS.min(most - first)));
    }
    assert_eq!(mapped(name), most);
    drop(table(3));
    assert_eq!(mapped(name), most, "given back on the spot");
    drop(held);
    // There is room for the call once one of them has gone.
    let start = Instant::now();
    while mapped(name) == most {
        assert!(start.elapsed() < SOON, "nothing is given back");
        thread::yield_now();
    }
    wait_until_reaped();
    assert_eq!(mapped(name), 0);
    let held = hold();
    drop(table(3));
    assert_eq!(mapped(name), 3);
    drop(held);
}

#[test]
fn whoever_lets_go_at_the_same_time_loses_nothing() {
    let _alone = alone();
    let name = "let-go-by-many";
    let file = populated(name, 4096);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..500 {
                    drop(GuestMemory::map(vec![region(0, 4096, file.try_clone().unwrap())]).unwrap());
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
