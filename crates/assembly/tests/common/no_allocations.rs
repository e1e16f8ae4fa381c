//! A load on a disk of every kind, under which nothing may be allocated anywhere in the process but by the guest.
//!
//! The counts are the whole process's, so a test binary has one test only, and installs the allocator that counts.

use std::path::Path;

use sidecore_assembly::spec::{
    ControllerSpec, DeviceSpec, FaultPlan, FileOptions, FormatSpec, Nanos, Sector, SidecoreSpec, Spec, StoreKind,
    StoreSpec, VolumeSpec,
};
use sidecore_counting_alloc::{allocations, process_allocations};
use sidecore_driver::Queue;

const DISK_BYTES: u64 = 4 << 20;
const PAGES: u64 = DISK_BYTES / 4096;
/// More than a transaction and its grace period take.
const SETTLING_ROUNDS: u32 = 10;
const REQUESTS: u64 = 100_000;

/// A store of each kind, and these devices in front of the stores of the same names.
pub fn spec(directory: &Path, devices: Vec<DeviceSpec>) -> Spec {
    let file = directory.join("disk.img");
    std::fs::File::create(&file).unwrap().set_len(DISK_BYTES).unwrap();
    let ram = |size_bytes| StoreKind::Ram { size_bytes, block_bytes: 512 };
    let below = || "below".to_owned();
    let kinds = [
        ("null", StoreKind::Null { size_bytes: DISK_BYTES, block_bytes: 512 }),
        ("ram", ram(DISK_BYTES)),
        ("file", StoreKind::File(FileOptions::new(file))),
        ("delay", StoreKind::Delay { store: below(), delay: Nanos::from_micros(1) }),
        ("fault", StoreKind::Fault { store: below(), plan: FaultPlan::default() }),
        ("volume", StoreKind::Volume(VolumeSpec { size_bytes: Some(DISK_BYTES), ..VolumeSpec::new("pool", "volume") })),
        ("below", ram(DISK_BYTES)),
        ("pool", ram(4 * DISK_BYTES)),
    ];
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        devices,
        stores: kinds.map(|(name, kind)| StoreSpec { name: name.to_owned(), kind }).into(),
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec::default()),
            ..ControllerSpec::new("pool", "pool")
        }],
    }
}

/// Allocations of every thread but this one, which plays the guest.
fn daemon_allocations() -> u64 {
    process_allocations() - allocations()
}

/// Drives a fresh queue until everything has settled, and then counts; `what` is being driven.
pub fn assert_none<Q: Queue>(queue: &mut Q, what: &str) {
    let mut completions: Vec<Q::Completion> = Vec::with_capacity(64);
    let mut sent = 0_u64;
    let mut run = |requests: u64| {
        let last = sent + requests;
        let mut done = sent;
        while done < last {
            while sent < last
                && let Some(slot) = queue.take_slot()
            {
                let sector = Sector(sent * 8 % (DISK_BYTES / 512));
                match sent % 8 {
                    // Every page is there once before it counts: giving a volume blocks takes memory.
                    _ if sent < PAGES => queue.submit_write(slot, sector, 4096),
                    0 => queue.submit_flush(slot),
                    1..4 => queue.submit_write(slot, sector, 4096),
                    _ => queue.submit_read(slot, sector, 4096),
                }
                .unwrap();
                sent += 1;
            }
            queue.publish().unwrap();
            if queue.poll_completions(&mut completions).unwrap() == 0 {
                // The sidecore may need this core.
                std::thread::yield_now();
            }
            for completion in completions.drain(..) {
                let (slot, is_ok) = Q::outcome(completion);
                assert!(is_ok, "{what}: {completion:?}");
                queue.release_slot(slot);
                done += 1;
            }
        }
    };
    // Pools, kernel structures and page tables settle first.
    run(PAGES + 1_000);
    // And so does the metadata of a volume, behind the guest's back: until then, rounds are not counted.
    for _ in 0..SETTLING_ROUNDS {
        let before = daemon_allocations();
        run(20_000);
        if daemon_allocations() == before {
            break;
        }
    }
    let before = daemon_allocations();
    run(REQUESTS);
    assert_eq!(daemon_allocations() - before, 0, "{what}");
}
