//! A load on devices with stores of every kind. Threads on the data path must not allocate for it:
//! neither the sidecore nor, where doorbells are messages, the socket service's workers.
//! Allocations of other threads, such as those of a late commit, are not counted.
//!
//! Threads are found by their names, so a test binary has one test only. It installs the counting
//! allocator.

use std::path::Path;

use sidecore_assembly::spec::{
    ControllerSpec, DeviceSpec, FileOptions, FormatSpec, Sector, SidecoreSpec, Spec, StageKind,
    StoreKind, StoreSpec, VolumeSpec,
};
use sidecore_counting_alloc::allocations_of;
use sidecore_driver::Queue;
use sidecore_stage_delay::DelayStage;
use sidecore_stage_fault::FaultPlan;

const DISK_BYTES: u64 = 4 << 20;
const PAGES: u64 = DISK_BYTES / 4096;
const SIDECORE: &str = "sc0";
const REQUESTS: u64 = 100_000;

/// A store of each kind, with these devices in front of the stores of the same names.
pub fn spec(directory: &Path, devices: Vec<DeviceSpec>) -> Spec {
    let file = directory.join("disk.img");
    std::fs::File::create(&file).unwrap().set_len(DISK_BYTES).unwrap();
    let ram = |size_bytes| StoreKind::Ram { size_bytes, block_bytes: 512 };
    let kinds = [
        ("null", StoreKind::Null { size_bytes: DISK_BYTES, block_bytes: 512 }),
        ("ram", ram(DISK_BYTES)),
        ("file", StoreKind::File(FileOptions::new(file))),
        (
            "volume",
            StoreKind::Volume(VolumeSpec {
                size_bytes: Some(DISK_BYTES),
                ..VolumeSpec::new("pool", "volume")
            }),
        ),
        ("below", ram(DISK_BYTES)),
        ("pool", ram(4 * DISK_BYTES)),
    ];
    let mut stores: Vec<StoreSpec> = kinds.map(|(name, kind)| StoreSpec::new(name, kind)).into();
    stores.push(StoreSpec::in_front_of(
        "delay",
        "below",
        StageKind::Delay(DelayStage { delay_us: 1 }),
    ));
    stores.push(StoreSpec::in_front_of("fault", "below", StageKind::Fault(FaultPlan::default())));
    Spec {
        sidecores: vec![SidecoreSpec { name: SIDECORE.to_owned(), cpu: None }],
        devices,
        stores,
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec::default()),
            ..ControllerSpec::new("pool", "pool")
        }],
        ..Spec::default()
    }
}

/// The threads on the data path.
fn data_path() -> Vec<u32> {
    let mut has_sidecore = false;
    let mut threads = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap();
        // Other threads may end meanwhile; those on the data path do not.
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let is_sidecore = name.trim() == SIDECORE;
        if is_sidecore || (name.starts_with("peer-") && name.trim() != "peer-job") {
            threads.push(task.file_name().to_str().unwrap().parse().unwrap());
        }
        has_sidecore |= is_sidecore;
    }
    assert!(has_sidecore, "no thread has the sidecore's name");
    threads
}

/// Allocates on a thread that is not on the data path.
fn allocate_elsewhere() {
    std::thread::spawn(|| drop(std::hint::black_box(vec![0_u8; 4096]))).join().unwrap();
}

/// Loads a queue until allocations have settled, then counts them under further load. `what` names
/// the queue in failures.
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
                    // The first pass writes every page, because the allocation of a volume's blocks
                    // takes memory.
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
                // The sidecore may need this CPU.
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
    let threads = data_path();
    let count = || -> Vec<u64> { threads.iter().map(|thread| allocations_of(*thread)).collect() };
    let before = count();
    allocate_elsewhere();
    run(REQUESTS);
    assert_eq!(count(), before, "{what}, threads {threads:?}");
}
