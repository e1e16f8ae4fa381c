//! Nothing is allocated for a command of an NVMe function, anywhere in the process: reactor, queue, store, and completion.

mod common;
#[path = "common/host.rs"]
mod host;

use std::path::Path;

use sidecore_assembly::Assembly;
use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    ControllerSpec, FileOptions, FormatSpec, IdleMode, Sector, SidecoreSpec, Spec, StoreKind, StoreSpec, VolumeSpec,
};
use sidecore_counting_alloc::{CountingAllocator, allocations, process_allocations};
use sidecore_driver::{NvmeCompletion, NvmeStatus};

use common::until;
use host::{ADAPTIVE, connect, function};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const DISK_BYTES: u64 = 4 << 20;
const PAGES: u64 = DISK_BYTES / 4096;
/// More than a transaction and its grace period take.
const SETTLING_ROUNDS: u32 = 10;
const COMMANDS: u64 = 100_000;

/// Each kind of store, with doorbells that are mapped and with doorbells that are messages.
fn spec(directory: &Path) -> Spec {
    let file = directory.join("disk.img");
    std::fs::File::create(&file).unwrap().set_len(DISK_BYTES).unwrap();
    let kinds = [
        ("ram", StoreKind::Ram { size_bytes: DISK_BYTES, block_bytes: 512 }),
        ("file", StoreKind::File(FileOptions { path: file, read_only: false, block_bytes: None, direct: true })),
        ("volume", StoreKind::Volume(VolumeSpec { size_bytes: Some(DISK_BYTES), ..VolumeSpec::new("pool", "volume") })),
    ];
    let pool = StoreKind::Ram { size_bytes: 4 * DISK_BYTES, block_bytes: 512 };
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        devices: kinds.iter().map(|(name, _)| function(directory, name, IdleMode::Poll)).collect(),
        stores: kinds
            .into_iter()
            .chain([("pool", pool)])
            .map(|(name, kind)| StoreSpec { name: name.to_owned(), kind })
            .collect(),
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec::default()),
            ..ControllerSpec::new("pool", "pool")
        }],
    }
}

/// Allocations of every thread but this one, which plays the host.
fn daemon_allocations() -> u64 {
    process_allocations() - allocations()
}

#[test]
fn a_hundred_thousand_commands_allocate_nothing() {
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let mut spec = spec(directory.path());
        spec.devices.iter_mut().for_each(|device| device.idle = idle);
        let assembly = Assembly::start(&spec).unwrap();
        for (index, device) in spec.devices.iter().enumerate() {
            let mut client = connect(&device.socket);
            let queue = client.queue(0).unwrap();
            let mut completions: Vec<NvmeCompletion> = Vec::with_capacity(64);
            let mut sent = 0_u64;
            let mut run = |commands: u64| {
                let last = sent + commands;
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
                        std::thread::yield_now();
                    }
                    for completion in completions.drain(..) {
                        assert_eq!(completion.status, NvmeStatus::OK);
                        queue.release_slot(completion.slot);
                        done += 1;
                    }
                }
            };
            // Pools, kernel structures and page tables settle first.
            run(PAGES + 1_000);
            // And so does the metadata of a volume, behind the host's back: until then, rounds are not counted.
            for _ in 0..SETTLING_ROUNDS {
                let before = daemon_allocations();
                run(20_000);
                if daemon_allocations() == before {
                    break;
                }
            }
            let before = daemon_allocations();
            run(COMMANDS);
            assert_eq!(daemon_allocations() - before, 0, "store {}, {idle:?}", device.name);
            drop(client);
            // Ending a connection allocates, and must not be counted against the next one.
            until(&assembly, index, |report| report.state == DeviceState::Waiting);
        }
        assembly.drain();
    }
}
