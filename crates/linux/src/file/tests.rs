use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use sidecore_block::{Batch, BlockError, BlockRequest, Operation, dropped_tags};
use sidecore_block_contract::{self as contract, Harness};
use sidecore_kit::loop_device::LoopDevice;
use sidecore_kit::mount::Mount;
use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};
use sidecore_reactor::{CoreContext, Sleeper, WakeKey};
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};
use sidecore_units::Nanos;
use tempfile::TempDir;

use sidecore_skip::{run, skip};

use super::*;
use crate::EpollSleeper;

const MIB: u64 = 1 << 20;
/// Guest memory that is aligned to pages (see `contract::guest_memory`).
const ALIGNED: u64 = 0x1_0000_0000;

/// A directory in memory; `None`, and a message, if the machine has none.
fn tmpfs() -> Option<TempDir> {
    let directory = tempfile::tempdir_in("/dev/shm").ok();
    let found = directory.filter(|directory| {
        rustix::fs::statfs(directory.path()).is_ok_and(|stat| stat.f_type == libc::TMPFS_MAGIC)
    });
    if found.is_none() {
        skip("/dev/shm is no writable tmpfs");
    }
    found
}

fn image(directory: impl AsRef<Path>, name: &str, len_bytes: u64) -> PathBuf {
    let path = directory.as_ref().join(name);
    File::create(&path).unwrap().set_len(len_bytes).unwrap();
    path
}

fn open(path: &Path) -> FileStore {
    open_patiently(&FileOptions::new(path))
}

/// Opens a device that was just used: a program that another test is starting has copies of all
/// descriptors, for a moment, and keeps the device in use.
fn open_patiently(options: &FileOptions) -> FileStore {
    for _ in 0..200 {
        match FileStore::open(options) {
            Err(FileError::Busy { .. }) => std::thread::sleep(std::time::Duration::from_millis(10)),
            opened => return opened.unwrap(),
        }
    }
    panic!("{} is busy for ever", options.path.display());
}

fn harness(path: &Path) -> Harness {
    Harness::new(&(Arc::new(open(path)) as Arc<dyn BlockDevice>), 8)
}

fn allocated_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// A loop device over a file in memory.
struct Loop {
    device: LoopDevice,
    _directory: TempDir,
}

impl Loop {
    fn new(len_bytes: u64, arguments: &[&str]) -> Option<Self> {
        let directory = tmpfs()?;
        let backing = image(&directory, "backing", len_bytes);
        Some(Self { device: LoopDevice::over(&backing, arguments)?, _directory: directory })
    }
}

/// A mounted filesystem. Unmounted when dropped, before the loop device below it.
struct Mounted {
    directory: Mount,
    _device: Option<Loop>,
}

impl Mounted {
    fn tmpfs(len_bytes: u64) -> Option<Self> {
        Some(Self { directory: Mount::tmpfs(len_bytes)?, _device: None })
    }

    fn ext4(len_bytes: u64) -> Option<Self> {
        let device = Loop::new(len_bytes, &[])?;
        let node = device.device.path().to_str()?;
        run("mkfs.ext4", &["-q", node])?;
        Some(Self { directory: Mount::new(&[node])?, _device: Some(device) })
    }
}

fn check(path: &Path, change: impl Fn(&mut FileOptions)) {
    let open = || {
        let mut options = FileOptions::new(path);
        change(&mut options);
        Arc::new(open_patiently(&options)) as Arc<dyn BlockDevice>
    };
    for depth in [1, 8, 64] {
        contract::check(&open, &contract::Options { depth, ..contract::Options::default() });
    }
    assert_eq!(dropped_tags(), 0);
}

#[test]
fn a_file_in_memory_keeps_the_contract() {
    let Some(directory) = tmpfs() else { return };
    let path = image(&directory, "disk", 4 * MIB);
    check(&path, |_| {});
    check(&path, |options| options.direct = false);
    check(&path, |options| options.block_bytes = Some(4096));
    check(&path, |options| options.read_only = true);
}

#[test]
fn a_file_on_a_disk_keeps_the_contract() {
    // On the filesystem of the machine's temporary files.
    let directory = tempfile::tempdir().unwrap();
    let path = image(&directory, "disk", 4 * MIB);
    check(&path, |_| {});
    check(&path, |options| options.direct = false);
}

#[test]
fn a_file_on_ext4_keeps_the_contract_and_bounces_unaligned_requests() {
    let Some(mount) = Mounted::ext4(64 * MIB) else { return };
    let path = image(&mount.directory, "disk", 4 * MIB);
    let store = open(&path);
    assert!(store.is_direct());
    let alignment = store.target.direct.unwrap();
    assert!(
        alignment.memory_bytes > 1 || alignment.file_bytes > 1,
        "{alignment:?}: this test needs a demand"
    );
    drop(store);
    check(&path, |_| {});
}

#[test]
fn a_block_device_keeps_the_contract() {
    let Some(device) = Loop::new(4 * MIB, &[]) else { return };
    let store = open(device.device.path());
    assert_eq!(store.geometry().capacity_bytes, 4 * MIB);
    assert!(store.geometry().discard && store.geometry().write_zeroes);
    drop(store);
    check(device.device.path(), |_| {});
}

/// The kernel's workers that carry out requests which this thread's io_urings could not do in
/// place.
fn workers_of_this_thread() -> usize {
    let name = format!("iou-wrk-{}", rustix::thread::gettid().as_raw_nonzero());
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let is_worker = |thread: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(thread.unwrap().path().join("comm"))
            .is_ok_and(|comm| comm.trim() == name)
    };
    threads.map(is_worker).filter(|is_worker| *is_worker).count()
}

#[test]
fn requests_larger_than_a_block_device_takes_are_cut_here_and_not_by_a_worker() {
    let Some(device) = Loop::new(64 * MIB, &["--direct-io=on"]) else { return };
    assert!(
        open(device.device.path()).target.limits.is_some(),
        "loop devices have limits of their own"
    );
    // Together more portions than there are slots; the memory comes in an order that tells them
    // apart.
    let mut harness = harness(device.device.path());
    let (count, repeats, piece) = (4, 8, 2 * MIB);
    let bytes = contract::pattern(1, piece as usize);
    harness.poke(ALIGNED, &bytes);
    let pieces = |index: u64| {
        let turned = (index + 1) * 4096;
        [(ALIGNED + turned, piece - turned), (ALIGNED, turned)].repeat(repeats)
    };
    let at = |index: u64| index * piece * repeats as u64;
    let writes = (0..count)
        .map(|index| harness.request(Operation::Write, at(index), &pieces(index)))
        .collect();
    assert!(harness.run(writes).iter().all(Result::is_ok));
    for index in 0..count {
        let turned = ((index + 1) * 4096) as usize;
        for repeat in 0..repeats as u64 {
            let found = harness.load(at(index) + repeat * piece, piece as usize);
            assert!(
                found[..bytes.len() - turned] == bytes[turned..],
                "request {index}, repeat {repeat}"
            );
            assert!(
                found[bytes.len() - turned..] == bytes[..turned],
                "request {index}, repeat {repeat}"
            );
        }
        harness.poke(ALIGNED, &bytes);
    }
    assert_eq!(workers_of_this_thread(), 0);
}

#[test]
fn a_block_devices_block_size_is_found_out() {
    let Some(device) = Loop::new(4 * MIB, &["--sector-size", "4096"]) else { return };
    assert_eq!(open(device.device.path()).geometry().block_bytes, 4096);
    let error = FileStore::open(&FileOptions {
        block_bytes: Some(512),
        ..FileOptions::new(device.device.path())
    });
    let error = error.unwrap_err();
    assert!(matches!(error, FileError::BlockTooSmall { needed_bytes: 4096, .. }), "{error}");
    check(device.device.path(), |_| {});
}

#[test]
fn a_mounted_device_is_busy() {
    let Some(mount) = Mounted::ext4(16 * MIB) else { return };
    let device = mount._device.as_ref().unwrap().device.path();
    let error = FileStore::open(&FileOptions::new(device)).unwrap_err();
    assert!(matches!(error, FileError::Busy { .. }), "{error}");
}

#[test]
fn unaligned_memory_works_under_direct_io() {
    let Some(mount) = Mounted::ext4(64 * MIB) else { return };
    let mut harness = harness(&image(&mount.directory, "disk", 4 * MIB));
    // Larger than the bounce buffer, at an odd address, and across regions.
    let bytes = contract::pattern(1, 300 << 10);
    for address in [ALIGNED + 1, 0x20_0000 - 1001] {
        harness.poke(address, &bytes);
        let write = harness.request(Operation::Write, 512, &[(address, bytes.len() as u64)]);
        assert_eq!(harness.run_one(write), Ok(()));
        assert!(harness.load(512, bytes.len()) == bytes);
        harness.poke(address, &vec![0; bytes.len()]);
        let read = harness.request(Operation::Read, 512, &[(address, bytes.len() as u64)]);
        assert_eq!(harness.run_one(read), Ok(()));
        assert!(harness.peek(address, bytes.len()) == bytes);
    }
}

#[test]
fn a_request_may_have_more_pieces_than_a_submission() {
    let Some(directory) = tmpfs() else { return };
    let mut harness = harness(&image(&directory, "disk", 4 * MIB));
    let bytes = contract::pattern(2, 512 * 300);
    harness.poke(ALIGNED, &bytes);
    // Every second piece backwards, so that no two are adjacent.
    let pieces: Vec<_> = (0..300).map(|index| (ALIGNED + 512 * (index ^ 1), 512)).collect();
    let write = harness.request(Operation::Write, 0, &pieces);
    assert_eq!(harness.run_one(write), Ok(()));
    let expected: Vec<_> =
        pieces.iter().flat_map(|&(address, _)| harness.peek(address, 512)).collect();
    assert!(harness.load(0, bytes.len()) == expected);
}

#[test]
fn written_data_is_in_the_file() {
    let Some(directory) = tmpfs() else { return };
    let path = image(&directory, "disk", MIB);
    let bytes = contract::pattern(3, 4096);
    let mut harness = harness(&path);
    harness.store(8192, &bytes);
    let mut read = vec![0; 4096];
    File::open(&path).unwrap().read_exact_at(&mut read, 8192).unwrap();
    assert!(read == bytes);
}

#[test]
fn a_discard_frees_blocks_and_a_zeroing_need_not() {
    let Some(mount) = Mounted::ext4(64 * MIB) else { return };
    let directories = [tmpfs().unwrap(), tempfile::tempdir_in(mount.directory.path()).unwrap()];
    for (directory, keeps) in directories.iter().zip([true, true]) {
        let path = image(directory, "disk", 4 * MIB);
        let mut harness = harness(&path);
        let bytes = contract::pattern(4, MIB as usize);
        let fill = |harness: &mut Harness| (0..4).for_each(|mib| harness.store(mib * MIB, &bytes));
        fill(&mut harness);
        assert_eq!(allocated_bytes(&path), 4 * MIB);
        let discard = harness.range_request(Operation::Discard, MIB, 2 * MIB);
        assert_eq!(harness.run_one(discard), Ok(()));
        assert_eq!(allocated_bytes(&path), 2 * MIB);
        fill(&mut harness);
        let zeroing =
            harness.range_request(Operation::WriteZeroes { may_unmap: true }, MIB, 2 * MIB);
        assert_eq!(harness.run_one(zeroing), Ok(()));
        assert_eq!(allocated_bytes(&path), 2 * MIB);
        fill(&mut harness);
        let zeroing =
            harness.range_request(Operation::WriteZeroes { may_unmap: false }, MIB, 2 * MIB);
        assert_eq!(harness.run_one(zeroing), Ok(()));
        assert_eq!(allocated_bytes(&path) == 4 * MIB, keeps);
        assert!(harness.load(MIB, bytes.len()).iter().all(|byte| *byte == 0));
        assert!(harness.load(3 * MIB, bytes.len()) == bytes);
    }
}

#[test]
fn a_full_filesystem_is_distinguished_from_a_broken_one() {
    let mounts = [Mounted::tmpfs(MIB), Mounted::ext4(8 * MIB)];
    for mount in mounts.into_iter().flatten() {
        let mut harness = harness(&image(&mount.directory, "disk", 64 * MIB));
        let results: Vec<_> = (0..64)
            .map(|mib| {
                let write = harness.request(Operation::Write, mib * MIB, &[(ALIGNED, MIB)]);
                harness.run_one(write)
            })
            .collect();
        let failed = results.iter().position(Result::is_err).expect("64 MiB do not fit");
        // The part before the limit is written before the rest of the request is refused.
        assert_eq!(results[failed], Err(BlockError::NoSpace));
        // The store continues where it has space.
        let read = harness.request(Operation::Read, 0, &[(ALIGNED, MIB)]);
        assert_eq!(harness.run_one(read), Ok(()));
    }
}

#[test]
fn a_failing_medium_is_an_io_error() {
    let Some(directory) = tmpfs() else { return };
    let inner = Arc::new(open(&image(&directory, "disk", MIB)));
    let rules = vec![FaultRule {
        affected: Affected::All,
        when: When::Touching(4096..4097),
        fault: Fault::Eio,
    }];
    let store: Arc<dyn BlockDevice> =
        Arc::new(FaultStore::new(inner, FaultPlan { seed: 1, rules }));
    let mut harness = Harness::new(&store, 8);
    let requests = (0..4)
        .map(|block| harness.request(Operation::Read, block * 4096, &[(ALIGNED, 4096)]))
        .collect();
    assert_eq!(harness.run(requests), [Ok(()), Err(BlockError::EIO), Ok(()), Ok(())]);
}

#[test]
fn a_file_that_shrinks_while_it_is_served_reads_short() {
    let Some(directory) = tmpfs() else { return };
    let path = image(&directory, "disk", MIB);
    let mut harness = harness(&path);
    File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let read = harness.request(Operation::Read, 0, &[(ALIGNED, 8192)]);
    assert_eq!(
        harness.run_one(read),
        Err(BlockError::Short { done_bytes: 4096, asked_bytes: 8192 })
    );
    let read = harness.request(Operation::Read, 4096, &[(ALIGNED, 4096)]);
    assert_eq!(harness.run_one(read), Err(BlockError::Short { done_bytes: 0, asked_bytes: 4096 }));
}

#[test]
fn a_file_that_cannot_be_a_disk_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let refuse = |path: &Path| {
        let error = FileStore::open(&FileOptions::new(path)).unwrap_err();
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        error
    };
    let missing = refuse(&directory.path().join("missing"));
    assert!(matches!(
        &missing, FileError::Kernel { source, .. } if source.kind() == io::ErrorKind::NotFound
    ));
    assert!(matches!(refuse(directory.path()), FileError::NotAFile { .. }));
    assert!(matches!(refuse(Path::new("/dev/null")), FileError::NotAFile { .. }));
    assert!(matches!(refuse(&image(&directory, "empty", 0)), FileError::Empty { .. }));
    let odd = refuse(&image(&directory, "odd", 1000));
    assert!(matches!(odd, FileError::PartialBlock { size_bytes: 1000, .. }));
    assert!(odd.to_string().contains("truncate"), "names the remedy: {odd}");
    let pipe = directory.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .unwrap();
    assert!(matches!(refuse(&pipe), FileError::NotAFile { .. }));
}

#[test]
fn a_block_size_is_a_power_of_two_in_range() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(&directory, "disk", MIB);
    for block_bytes in [0, 1, 256, 513, 1 << 17] {
        let error = FileStore::open(&FileOptions {
            block_bytes: Some(block_bytes),
            ..FileOptions::new(&path)
        });
        assert!(matches!(error, Err(FileError::BadBlockSize { .. })), "{block_bytes}");
    }
}

#[test]
fn a_file_belongs_to_one_writer_or_to_readers() {
    let Some(directory) = tmpfs() else { return };
    let path = image(&directory, "disk", MIB);
    let writer = FileOptions::new(&path);
    let reader = FileOptions { read_only: true, ..FileOptions::new(&path) };
    let first = FileStore::open(&writer).unwrap();
    for second in [&writer, &reader] {
        assert!(matches!(FileStore::open(second), Err(FileError::Busy { .. })));
    }
    // The file is free again at once, although it was registered with a ring.
    let device: Arc<dyn BlockDevice> = Arc::new(first);
    let mut harness = Harness::new(&device, 8);
    harness.store(0, &[1; 512]);
    drop((harness, device));
    let _readers = (FileStore::open(&reader).unwrap(), FileStore::open(&reader).unwrap());
    assert!(matches!(FileStore::open(&writer), Err(FileError::Busy { .. })));
}

#[test]
fn memory_that_cannot_be_pinned_is_used_as_it_is() {
    // The kernel refuses to pin pages past a file's end, which has been cut off.
    let directory = tempfile::tempdir().unwrap();
    let file =
        File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(MIB).unwrap();
    let memory = GuestMemory::map(vec![RegionSpec {
        guest_address: GuestAddress(0),
        user_address: UserAddress(0),
        len_bytes: MIB,
        file: file.try_clone().unwrap().into(),
        file_offset_bytes: 0,
    }])
    .unwrap();
    file.set_len(4096).unwrap();
    let disk = image(&directory, "disk", MIB);
    std::fs::write(&disk, contract::pattern(5, MIB as usize)).unwrap();
    let mut channel = open(&disk).open_channel(&CoreContext::default(), 1).unwrap();
    channel.attach_memory(&memory).unwrap();
    let mut completed = Batch::new();
    channel.submit(
        Nanos::ZERO,
        &mut vec![contract::request(&memory, Operation::Read, 0, &[(0, 4096)])],
    );
    while completed.is_empty() {
        channel.poll(Nanos::ZERO, &mut completed);
    }
    assert_eq!(completed[0].result, Ok(()));
    let mut read = vec![0; 4096];
    completed[0].segments.copy_to_slice(0, &mut read);
    assert!(read == contract::pattern(5, 4096));
}

#[test]
fn a_sidecore_that_sleeps_in_epoll_is_woken() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(&image(&directory, "disk", MIB));
    let mut channel = store.open_channel(&CoreContext::default(), 4).unwrap();
    let mut sleeper = EpollSleeper::new().unwrap();
    sleeper.watch(channel.wake_fd().unwrap(), WakeKey(1)).unwrap();
    for _ in 0..20 {
        // A worker thread of the kernel carries out a flush.
        let mut flush = BlockRequest::blank(0);
        flush.operation = Operation::Flush;
        channel.submit(Nanos::ZERO, &mut vec![flush]);
        let (mut woken, mut completed) = (Vec::new(), Batch::new());
        let start = std::time::Instant::now();
        while completed.is_empty() {
            sleeper.wait(Some(Nanos::from_millis(10_000)), &mut woken).unwrap();
            channel.poll(Nanos::ZERO, &mut completed);
            assert!(start.elapsed().as_secs() < 10, "not woken");
        }
    }
    let mut woken = Vec::new();
    sleeper.wait(Some(Nanos::from_millis(1)), &mut woken).unwrap();
    assert!(woken.is_empty(), "readable with nothing to hand back");
}

#[test]
fn a_channel_reports_since_when_it_waits_for_the_kernel_also_through_a_stage() {
    let directory = tempfile::tempdir().unwrap();
    let store: Arc<dyn BlockDevice> = Arc::new(open(&image(&directory, "disk", MIB)));
    let stage: Arc<dyn BlockDevice> =
        Arc::new(FaultStore::new(Arc::clone(&store), FaultPlan::default()));
    for device in [store, stage] {
        let mut channel = device.open_channel(&CoreContext::default(), 4).unwrap();
        assert_eq!(channel.waits_since(), None);
        let flush = |taken_at| {
            let mut flush = BlockRequest::blank(0);
            flush.operation = Operation::Flush;
            flush.taken_at = taken_at;
            flush
        };
        channel.submit(Nanos::ZERO, &mut vec![flush(Nanos(7)), flush(Nanos(5))]);
        // No request is completed before the next poll, at any progress of the kernel.
        assert_eq!(channel.waits_since(), Some(Nanos(5)));
        let mut completed = Batch::new();
        while completed.len() < 2 {
            channel.poll(Nanos::ZERO, &mut completed);
            std::thread::yield_now();
        }
        assert_eq!(channel.waits_since(), None);
    }
}

#[test]
fn a_channel_dropped_with_requests_in_flight_waits_for_the_kernel() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(&image(&directory, "disk", 16 * MIB));
    let memory = contract::guest_memory();
    for _ in 0..10 {
        let mut channel = store.open_channel(&CoreContext::default(), 64).unwrap();
        channel.attach_memory(&memory).unwrap();
        let requests = (0..64).map(|index| {
            let operation = if index % 8 == 0 { Operation::Flush } else { Operation::Write };
            // Without a tag: the test does not wait for these requests.
            contract::request(&memory, operation, index * 65536, &[(ALIGNED, 65536)])
        });
        let mut batch: Vec<Box<BlockRequest>> = requests.collect();
        channel.submit(Nanos::ZERO, &mut batch);
        assert_eq!(channel.readiness().in_flight, 64);
        drop(channel);
    }
}
