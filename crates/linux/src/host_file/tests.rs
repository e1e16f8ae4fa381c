use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use sidecore_block::{BlockDevice, Operation};
use sidecore_block_contract::{self as contract, Harness, pattern};

use super::*;
use crate::{FileError, FileOptions};

mod rig;
use rig::{EXT4, EXT4_1K, Recipe, Rig, XFS};
use sidecore_skip::run;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Runs the test on each supported filesystem, one after the other.
fn on_each(test: impl Fn(&Rig)) {
    for recipe in [EXT4, EXT4_1K, XFS] {
        if let Some(rig) = Rig::new(recipe) {
            eprintln!("on {recipe:?}");
            test(&rig);
        }
    }
}

fn open(path: &Path) -> HostFile {
    HostFile::open(&HostFileOptions::new(path)).unwrap()
}

fn refused(path: &Path) -> HostFileError {
    let error = HostFile::open(&HostFileOptions {
        predecessor_timeout: SHORT,
        ..HostFileOptions::new(path)
    })
    .unwrap_err();
    eprintln!("refused: {error}");
    assert!(
        error.to_string().contains(path.file_name().unwrap().to_str().unwrap()),
        "the error names the file: {error}"
    );
    error
}

fn all_extents(file: &HostFile) -> Vec<HostExtent> {
    let mut extents = Vec::new();
    file.extents(0, file.size_bytes(), &mut extents).unwrap();
    extents
}

fn harness(store: Arc<FileStore>) -> Harness {
    Harness::new(&(store as Arc<dyn BlockDevice>), 8)
}

/// Reads a file's bytes in `range` from the device: bytes outside of extents are zeros.
fn read_around(
    file: &HostFile,
    device: &mut Harness,
    offset_bytes: u64,
    len_bytes: u64,
) -> Vec<u8> {
    let mut extents = Vec::new();
    file.extents(offset_bytes, len_bytes, &mut extents).unwrap();
    let mut bytes = vec![0; len_bytes as usize];
    for extent in extents {
        let at = (extent.logical_bytes - offset_bytes) as usize;
        let mut done = 0;
        while done < extent.len_bytes {
            let len = (extent.len_bytes - done).min(MIB);
            let read = device.load(extent.physical_bytes + done, len as usize);
            bytes[at + done as usize..][..len as usize].copy_from_slice(&read);
            done += len;
        }
    }
    bytes
}

/// Writes to the device at the places of the file's bytes, which must all be mapped.
fn write_around(file: &HostFile, device: &mut Harness, offset_bytes: u64, bytes: &[u8]) {
    let mut extents = Vec::new();
    file.extents(offset_bytes, bytes.len() as u64, &mut extents).unwrap();
    assert_eq!(
        extents.iter().map(|extent| extent.len_bytes).sum::<u64>(),
        bytes.len() as u64,
        "{extents:?}"
    );
    for extent in extents {
        let at = (extent.logical_bytes - offset_bytes) as usize;
        device.store(extent.physical_bytes, &bytes[at..][..extent.len_bytes as usize]);
    }
}

/// Whether an event comes within `time`.
fn event_within(file: &HostFile, time: Duration) -> bool {
    let events = file.lease_events();
    let mut fds = [PollFd::new(&events, PollFlags::IN)];
    let time = Timespec::try_from(time).unwrap();
    rustix::event::poll(&mut fds, Some(&time)).unwrap() == 1
}

const LONG: Duration = Duration::from_secs(20);
/// A timeout for a file that stays in use.
const SHORT: Duration = Duration::from_millis(100);

/// Opens the file without waiting for its lease: this breaks the lease, and closes the file again.
fn break_lease(path: &Path) {
    let error = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
}

/// The hypervisor's threads and the sidecores share a host file.
const fn is_shared<T: Send + Sync>() {}
const _: () = is_shared::<HostFile>();

#[test]
fn extents_are_the_places_of_the_bytes() {
    on_each(|rig| {
        let bytes = pattern(1, MIB as usize);
        let path = rig.sparse("disk", 4 * MIB);
        let file = File::options().write(true).open(&path).unwrap();
        // Data, hole, data, reserved, data at the end; in no order.
        file.write_all_at(&bytes, 3 * MIB).unwrap();
        file.write_all_at(&bytes[..64 << 10], 0).unwrap();
        file.write_all_at(&bytes[..256 << 10], MIB).unwrap();
        rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 2 * MIB, 512 * KIB).unwrap();
        let content = std::fs::read(&path).unwrap();
        drop(file);

        for read_only in [false, true] {
            let file =
                HostFile::open(&HostFileOptions { read_only, ..HostFileOptions::new(&path) })
                    .unwrap();
            assert_eq!(file.size_bytes(), 4 * MIB);
            assert!(file.block_bytes() == 4096 || file.block_bytes() == 1024);
            assert_eq!(file.device_path(), rig.device);
            let device = file.device_store();
            assert_eq!(device.geometry().read_only, read_only);
            assert!(device.geometry().capacity_bytes >= 96 * MIB, "all of the device");
            let mut device = harness(device);
            let extents = all_extents(&file);
            let mapped: u64 = extents.iter().map(|extent| extent.len_bytes).sum();
            assert_eq!(
                mapped,
                MIB + 64 * KIB + 256 * KIB,
                "reserved blocks are a hole: {extents:?}"
            );
            assert!(read_around(&file, &mut device, 0, 4 * MIB) == content);
            // The sample that the open compares.
            let agrees =
                |extent: &HostExtent| file.device.agrees(&file.lease.as_fd(), extent).unwrap();
            assert!(agrees(&extents[0]));
            assert!(!agrees(&HostExtent {
                physical_bytes: extents[0].physical_bytes + 4096,
                ..extents[0]
            }));
            // Cut to the requested range.
            assert!(
                read_around(&file, &mut device, 3 * MIB + 512, 1024)
                    == content[3 << 20..][512..1536]
            );
            let mut none = Vec::new();
            file.extents(2 * MIB, MIB, &mut none).unwrap();
            assert_eq!(none, []);
            assert!(matches!(
                file.extents(4 * MIB, 1, &mut none),
                Err(HostFileError::BadRange { .. })
            ));
        }
    });
}

#[test]
fn many_extents_take_several_calls() {
    on_each(|rig| {
        let mut content = pattern(2, 1200 * 4096);
        let path = rig.file("disk", &content);
        let file = open(&path);
        for index in (0..1200).step_by(2) {
            file.punch(index * 4096, 4096).unwrap();
            content[index as usize * 4096..][..4096].fill(0);
        }
        assert_eq!(all_extents(&file).len(), 600);
        assert!(read_around(&file, &mut harness(file.device_store()), 0, 1200 * 4096) == content);
        // The same in several parts.
        let mut parts = Vec::new();
        (0..1200).for_each(|index| file.extents(index * 4096, 4096, &mut parts).unwrap());
        file.verify(0, 1200 * 4096, &parts).unwrap();
    });
}

#[test]
fn allocated_blocks_are_zeros_and_not_old_data() {
    on_each(|rig| {
        // The device is full of another file's old bytes.
        let secret = vec![0x5a; 32 << 20];
        let path = rig.file("secret", &secret);
        run("sync", &[]).unwrap();
        std::fs::remove_file(path).unwrap();
        run("sync", &[]).unwrap();

        let block = pattern(3, 4096);
        let path = rig.sparse("disk", 8 * MIB);
        let prepared = File::options().write(true).open(&path).unwrap();
        prepared.write_all_at(&block, MIB).unwrap();
        rustix::fs::fallocate(&prepared, FallocateFlags::KEEP_SIZE, 2 * MIB, MIB).unwrap();
        drop(prepared);
        let file = open(&path);
        let mut expected = vec![0; 8 << 20];
        expected[1 << 20..][..4096].copy_from_slice(&block);

        let mut device = harness(file.device_store());
        file.allocate(512 * KIB, 6 * MIB).unwrap();
        let mut extents = Vec::new();
        file.extents(512 * KIB, 6 * MIB, &mut extents).unwrap();
        assert_eq!(extents.iter().map(|extent| extent.len_bytes).sum::<u64>(), 6 * MIB);
        assert!(read_around(&file, &mut device, 0, 8 * MIB) == expected);
        // The range is allocated already, so no write is made.
        file.allocate(512 * KIB, 6 * MIB).unwrap();
        file.verify(512 * KIB, 6 * MIB, &extents).unwrap();

        // Data written directly to the device is in the file, and survives a crash, like its
        // blocks.
        let bytes = pattern(4, 256 << 10);
        write_around(&file, &mut device, 3 * MIB, &bytes);
        expected[3 << 20..][..256 << 10].copy_from_slice(&bytes);
        let flush = device.request(Operation::Flush, 0, &[]);
        assert_eq!(device.run_one(flush), Ok(()));
        assert!(harness(file.file_store()).load(3 * MIB, 256 << 10) == bytes);
        let kind = if file.kind == Kind::Xfs { "nouuid" } else { "noatime" };
        let crashed = rig.after_a_crash(kind).unwrap();
        assert!(std::fs::read(crashed.path("disk")).unwrap() == expected);

        drop(device);
        file.release_lease().unwrap();
        assert!(std::fs::read(&path).unwrap() == expected);
    });
}

#[test]
fn a_range_is_whole_blocks_of_a_writable_file() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let path = rig.sparse("disk", MIB);
    let file = open(&path);
    for (offset, len) in
        [(0, 512), (512, 4096), (MIB, 4096), (0, MIB + 4096), (u64::MAX - 4095, 4096)]
    {
        assert!(
            matches!(file.allocate(offset, len), Err(HostFileError::BadRange { .. })),
            "{offset} {len}"
        );
        assert!(
            matches!(file.punch(offset, len), Err(HostFileError::BadRange { .. })),
            "{offset} {len}"
        );
    }
    file.allocate(MIB, 0).unwrap();
    file.punch(MIB, 0).unwrap();
    drop(file);
    let file =
        HostFile::open(&HostFileOptions { read_only: true, ..HostFileOptions::new(path) }).unwrap();
    assert!(matches!(file.allocate(0, 4096), Err(HostFileError::ReadOnly { .. })));
    assert!(matches!(file.punch(0, 4096), Err(HostFileError::ReadOnly { .. })));
}

#[test]
fn a_full_filesystem_is_reported_as_full() {
    let Some(rig) = Rig::new(Recipe { size_mib: 16, ..EXT4 }) else { return };
    let file = open(&rig.sparse("disk", 64 * MIB));
    let error = file.allocate(0, 64 * MIB).unwrap_err();
    assert!(matches!(error, HostFileError::NoSpace { quota: false, .. }), "{error}");
    // The allocated range is zeros or holes, and can be returned.
    assert!(
        read_around(&file, &mut harness(file.device_store()), 0, MIB).iter().all(|byte| *byte == 0)
    );
    file.punch(0, 64 * MIB).unwrap();
    file.allocate(0, MIB).unwrap();
}

#[test]
fn a_punched_hole_is_a_hole() {
    on_each(|rig| {
        let bytes = pattern(5, 4 << 20);
        let file = open(&rig.file("disk", &bytes));
        let before = all_extents(&file);
        file.verify(0, 4 * MIB, &before).unwrap();
        file.punch(MIB, 64 * KIB).unwrap();
        let error = file.verify(0, 4 * MIB, &before).unwrap_err();
        assert!(matches!(error, HostFileError::Moved { offset_bytes: MIB, .. }), "{error}");
        let mut expected = bytes;
        expected[1 << 20..][..64 << 10].fill(0);
        assert!(read_around(&file, &mut harness(file.device_store()), 0, 4 * MIB) == expected);
        assert!(
            harness(file.file_store()).load(MIB, 128 << 10) == expected[1 << 20..][..128 << 10]
        );
        // The range can be allocated again.
        file.allocate(MIB, 64 * KIB).unwrap();
        assert!(read_around(&file, &mut harness(file.device_store()), 0, 4 * MIB) == expected);
    });
}

#[test]
fn no_page_stays_in_the_page_cache() {
    on_each(|rig| {
        // The pages are dirty when the file is opened.
        let bytes = pattern(6, 1 << 20);
        let file = open(&rig.file("disk", &bytes));
        let cached = || cache::cached(file.lease.as_fd(), MIB).unwrap();
        assert_eq!(cached(), 0);
        let mut through = harness(file.file_store());
        through.store(4096, &pattern(7, 8192));
        // A sector is smaller than a block.
        let zeroes =
            through.range_request(Operation::WriteZeroes { may_unmap: true }, 65536 + 512, 1024);
        assert_eq!(through.run_one(zeroes), Ok(()));
        file.punch(128 * KIB, u64::from(file.block_bytes())).unwrap();
        file.allocate(128 * KIB, u64::from(file.block_bytes())).unwrap();
        assert_eq!(cached(), 0);
        let mut expected = bytes;
        expected[128 << 10..][..file.block_bytes() as usize].fill(0);
        expected[4096..12288].copy_from_slice(&pattern(7, 8192));
        expected[65536 + 512..][..1024].fill(0);
        // All data is on the device.
        let mut device = harness(file.device_store());
        assert!(read_around(&file, &mut device, 0, MIB) == expected);
        // Zeroing on the device, below a mounted filesystem, caches no page either.
        let extent = all_extents(&file)[0];
        let zeroes = device.range_request(
            Operation::WriteZeroes { may_unmap: true },
            extent.physical_bytes + 1024,
            2048,
        );
        assert_eq!(device.run_one(zeroes), Ok(()));
        expected[1024..3072].fill(0);
        assert!(through.load(0, 1 << 20) == expected);

        // Pages that are cached for another reason are dropped with the lease.
        rustix::fs::fadvise(file.lease.as_fd(), 0, None, rustix::fs::Advice::WillNeed).unwrap();
        device.store(extent.physical_bytes, &pattern(13, 4096));
        expected[..4096].copy_from_slice(&pattern(13, 4096));
        file.release_lease().unwrap();
        assert!(std::fs::read(rig.path("disk")).unwrap() == expected);
    });
}

#[test]
fn the_files_store_keeps_the_contract() {
    on_each(|rig| {
        let path = rig.sparse("disk", 4 * MIB);
        let open = || open(&path).file_store() as Arc<dyn BlockDevice>;
        contract::check(&open, &contract::Options::default());
    });
}

#[test]
fn another_process_that_opens_the_file_waits_and_causes_an_event() {
    on_each(|rig| {
        let path = rig.file("disk", &vec![1; MIB as usize]);
        let file = open(&path);
        let mut device = harness(file.device_store());
        assert_eq!(file.lease_state(), LeaseState::Held);
        assert!(!event_within(&file, Duration::ZERO));
        let other = std::thread::spawn({
            let path = path.clone();
            move || File::options().read(true).write(true).open(path).unwrap()
        });
        assert!(event_within(&file, LONG), "no event of the break");
        let LeaseState::Breaking { deadline } = file.lease_state() else {
            panic!("{:?}", file.lease_state())
        };
        assert!(deadline.is_none_or(|deadline| deadline > Instant::now()));
        assert!(matches!(
            file.extents(0, MIB, &mut Vec::new()),
            Err(HostFileError::LeaseGone { .. })
        ));
        assert!(matches!(
            file.extents(0, MIB, &mut Vec::new()),
            Err(HostFileError::LeaseGone { .. })
        ));
        // The last write in flight.
        let bytes = pattern(8, 4096);
        let mut extents = Vec::new();
        file.read_map(0, 4096, &mut extents).unwrap();
        device.store(extents[0].physical_bytes, &bytes);
        assert!(!other.is_finished(), "the other process has to wait");
        assert!(file.drain_lease_events());
        assert!(!file.drain_lease_events());

        assert!(matches!(file.try_lease_again(|| ()), Err(HostFileError::LeaseGone { .. })));

        file.release_lease().unwrap();
        let other = other.join().unwrap();
        assert_eq!(file.lease_state(), LeaseState::Released);
        file.release_lease().unwrap();
        let mut read = vec![0; 4096];
        other.read_exact_at(&mut read, 0).unwrap();
        assert!(read == bytes, "the other process reads directly written data");
        // Both processes use the filesystem now.
        let mut through = harness(file.file_store());
        other.write_all_at(&pattern(9, 4096), 8192).unwrap();
        assert!(through.load(8192, 4096) == pattern(9, 4096));
        let error = file.try_lease_again(|| ()).unwrap_err();
        assert!(matches!(error, HostFileError::InUse { .. }), "{error}");

        // Dirty pages of the other process.
        other.write_all_at(&pattern(10, 4096), 4096).unwrap();
        drop(other);
        file.try_lease_again(|| ()).unwrap();
        assert_eq!(file.lease_state(), LeaseState::Held);
        assert!(!event_within(&file, Duration::ZERO));
        assert!(
            read_around(&file, &mut device, 4096, 8192)
                == [pattern(10, 4096), pattern(9, 4096)].concat()
        );
        // The new lease can be broken again.
        break_lease(&path);
        assert!(event_within(&file, LONG));
    });
}

#[test]
fn each_of_several_files_gets_the_events_of_its_own_lease() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let paths: Vec<_> = (0..8).map(|index| rig.sparse(&format!("disk{index}"), MIB)).collect();
    let files: Vec<_> = paths.iter().map(|path| open(path)).collect();
    break_lease(&paths[3]);
    assert!(event_within(&files[3], LONG));
    // The lease is broken for reading and for writing, but with one event.
    assert!(rustix::fs::open(&paths[3], OFlags::RDWR | OFlags::NONBLOCK, Mode::empty()).is_err());
    let truncate = std::thread::spawn({
        let path = paths[6].clone();
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the name ends in a zero.
        move || unsafe { libc::truncate(path.as_ptr(), 512 << 10) }
    });
    assert!(event_within(&files[6], LONG));
    for (index, file) in files.iter().enumerate() {
        let is_broken = index == 3 || index == 6;
        assert_eq!(file.lease_state() != LeaseState::Held, is_broken, "{index}");
        assert_eq!(event_within(file, Duration::ZERO), is_broken, "{index}");
    }
    files[3].release_lease().unwrap();
    files[3].try_lease_again(|| ()).unwrap();
    files[6].release_lease().unwrap();
    assert_eq!(truncate.join().unwrap(), 0);
    let error = files[6].try_lease_again(|| ()).unwrap_err();
    let HostFileError::Shrunk { was_bytes: MIB, is_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(is_bytes, 512 * KIB);
    assert_eq!(files[6].lease_state(), LeaseState::Released);
    // The waiting process continues.
    drop(File::open(&paths[6]).unwrap());
}

#[test]
fn the_file_is_free_when_it_is_dropped() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let path = rig.sparse("disk", MIB);
    for _ in 0..10 {
        let file = open(&path);
        let mut through = harness(file.file_store());
        through.store(0, &[1; 4096]);
        let _ = harness(file.device_store()).load(0, 4096);
        drop((through, file));
        drop(File::options().write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap());
    }
    // A store keeps the whole file.
    let store = open(&path).device_store();
    break_lease(&path);
    drop(store);
    drop(File::options().write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap());
}

/// The variable with the file that this process has to hold until it is killed.
const HOLD: &str = "SIDECORE_TEST_HOLD";

#[test]
fn a_file_whose_holder_was_killed_is_free() {
    if let Some(path) = std::env::var_os(HOLD) {
        let file = open(Path::new(&path));
        let mut through = harness(file.file_store());
        through.store(0, &[1; 4096]);
        let mut device = harness(file.device_store());
        write_around(&file, &mut device, 0, &pattern(12, 4096));
        println!("held");
        std::io::read_to_string(std::io::stdin()).unwrap();
        return;
    }
    let Some(rig) = Rig::new(EXT4) else { return };
    let path = rig.sparse("disk", MIB);
    for _ in 0..3 {
        let name = "host_file::tests::a_file_whose_holder_was_killed_is_free";
        let mut holder = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(HOLD, &path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(holder.stdout.take().unwrap());
        let is_held = output.lines().map_while(Result::ok).any(|line| line.ends_with("held"));
        break_lease(&path);
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert!(is_held);
        let start = Instant::now();
        let file = open(&path);
        eprintln!("free after {:?}", start.elapsed());
        assert!(harness(file.file_store()).load(0, 4096) == pattern(12, 4096));
    }
}

#[test]
fn a_file_that_another_process_has_open_is_refused() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let path = rig.sparse("disk", MIB);
    for write in [false, true] {
        let other = File::options().read(true).write(write).open(&path).unwrap();
        let error =
            HostFile::open(&HostFileOptions { read_only: write, ..HostFileOptions::new(&path) })
                .unwrap_err();
        assert!(matches!(error, HostFileError::InUse { .. }), "{error}");
        drop(other);
    }
    // Another host file is refused, too; its open breaks the first one's lease.
    let first = open(&path);
    assert!(matches!(refused(&path), HostFileError::InUse { .. }));
    assert!(event_within(&first, LONG));
    first.release_lease().unwrap();
    // A file's store respects the lock, also after the lease is gone.
    let store = FileStore::open(&FileOptions::new(&path)).unwrap_err();
    assert!(matches!(store, FileError::Busy { .. }), "{store}");
    drop(first);
    drop(open(&path));
}

#[test]
fn a_signal_notifies_of_a_broken_lease() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let signals = || watcher::SIGNALS.load(std::sync::atomic::Ordering::SeqCst);
    let before = signals();
    // Once per round, because other tests cause signals, too.
    for round in 0..20 {
        let path = rig.sparse(&format!("disk{round}"), MIB);
        let file = open(&path);
        let start = Instant::now();
        break_lease(&path);
        assert!(event_within(&file, LONG));
        eprintln!("event after {:?}", start.elapsed());
    }
    // Except for breaks that the thread's regular check counted first.
    assert!(signals() >= before + 15, "{} signals", signals() - before);
}

#[test]
fn other_files_than_those_on_a_disk_are_refused() {
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = memory.path().join("disk");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let error = refused(&path);
    assert!(matches!(&error, HostFileError::Filesystem { name, .. } if name == "tmpfs"), "{error}");
    assert!(matches!(refused(memory.path()), HostFileError::NotRegular { .. }));
    assert!(matches!(refused(Path::new("/dev/null")), HostFileError::NotRegular { .. }));
    assert!(matches!(refused(&memory.path().join("missing")), HostFileError::Kernel { .. }));
    let Some(rig) = Rig::new(EXT4) else { return };
    assert!(matches!(
        refused(&rig.sparse("empty", 0)),
        HostFileError::Store(FileError::Empty { .. })
    ));
    let odd = refused(&rig.sparse("odd", MIB + 512));
    assert!(matches!(odd, HostFileError::Store(FileError::PartialBlock { block_bytes: 4096, .. })));
    // A link to a file is accepted.
    std::os::unix::fs::symlink(rig.sparse("disk", MIB), rig.path("link")).unwrap();
    drop(open(&rig.path("link")));
}

#[test]
fn a_filesystem_that_moves_blocks_is_refused() {
    let recipe =
        Recipe { kind: "btrfs", size_mib: 128, make: &["-q"], tune: &[], mount: "noatime" };
    let Some(rig) = Rig::new(recipe) else { return };
    let error = refused(&rig.file("disk", &[1; 8192]));
    assert!(matches!(&error, HostFileError::Filesystem { name, .. } if name == "btrfs"), "{error}");
    assert!(error.to_string().contains("copy on write"), "{error}");
}

#[test]
fn a_file_with_odd_properties_is_refused() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let path = rig.sparse("disk", MIB);
    let name = path.to_str().unwrap();
    for flag in ["i", "a", "j"] {
        if run("chattr", &[&format!("+{flag}"), name]).is_none() {
            continue;
        }
        let error = refused(&path);
        run("chattr", &[&format!("-{flag}"), name]).unwrap();
        assert!(matches!(error, HostFileError::Property { .. }), "{flag}: {error}");
    }
    // Changes by another process while it had the file open.
    let file = open(&path);
    file.release_lease().unwrap();
    run("chattr", &["+i", name]).unwrap();
    let error = file.try_lease_again(|| ()).unwrap_err();
    assert!(matches!(error, HostFileError::Property { .. }), "{error}");
    assert_eq!(file.lease_state(), LeaseState::Released);
}

#[test]
fn swap_space_is_refused() {
    let Some(rig) = Rig::new(EXT4) else { return };
    let path = rig.file("swap", &vec![0; MIB as usize]);
    let name = path.to_str().unwrap();
    struct Swap<'a>(&'a str);
    impl Drop for Swap<'_> {
        fn drop(&mut self) {
            let _ = Command::new("swapoff").arg(self.0).status();
        }
    }
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    if run("mkswap", &[name]).is_none() || run("swapon", &["--priority", "0", name]).is_none() {
        return;
    }
    let _swap = Swap(name);
    let error = refused(&path);
    // If the mounts are not those of /proc/swaps, the lease is refused.
    assert!(
        matches!(error, HostFileError::Property { .. } | HostFileError::InUse { .. }),
        "{error}"
    );
}

#[test]
fn a_filesystem_that_journals_data_is_refused() {
    let recipes = [
        Recipe { mount: "data=journal", ..EXT4 },
        // As the filesystem's default, which the list of mounts does not show.
        Recipe { tune: &["-E", "mount_opts=data=journal"], ..EXT4 },
    ];
    for recipe in recipes {
        let Some(rig) = Rig::new(recipe) else { continue };
        let error = refused(&rig.sparse("disk", MIB));
        assert!(matches!(error, HostFileError::Property { .. }), "{error}");
        assert!(error.to_string().contains("data=ordered"), "{error}");
    }
}

#[test]
fn a_file_inside_its_inode_is_refused() {
    // Inodes so large need a smaller number of them than usual.
    let make = &["-q", "-I", "4096", "-N", "1024", "-b", "4096", "-O", "inline_data"];
    let Some(rig) = Rig::new(Recipe { make, ..EXT4 }) else { return };
    let error = refused(&rig.file("disk", &[1; 512]));
    assert!(matches!(error, HostFileError::Property { .. }), "{error}");
    assert!(error.to_string().contains("inline_data"), "{error}");
    // Other files of the filesystem are accepted.
    drop(open(&rig.file("large", &[1; 65536])));
}

#[test]
fn a_file_without_extents_is_refused() {
    let make = &["-q", "-O", "^extent,^64bit"];
    let Some(rig) = Rig::new(Recipe { make, ..EXT4 }) else { return };
    let error = refused(&rig.file("disk", &[1; 65536]));
    assert!(error.to_string().contains("not in extents"), "{error}");
}

#[test]
fn a_file_that_shares_blocks_is_refused() {
    let Some(rig) = Rig::new(XFS) else { return };
    let path = rig.file("disk", &vec![1; MIB as usize]);
    let clone = |path: &Path| {
        let (from, to) =
            (File::open(path).unwrap(), File::create(path.with_extension("clone")).unwrap());
        rustix::fs::ioctl_ficlone(to, from).unwrap();
    };
    clone(&path);
    let error = refused(&path);
    assert!(
        matches!(error, HostFileError::Extent { flaw: ExtentFlaw::Shared, offset_bytes: 0, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("reflink"), "{error}");
    // A file that is shared while its lease is gone.
    let path = rig.file("later", &vec![1; MIB as usize]);
    let file = open(&path);
    file.release_lease().unwrap();
    clone(&path);
    let error = file.try_lease_again(|| ()).unwrap_err();
    assert!(matches!(error, HostFileError::Extent { flaw: ExtentFlaw::Shared, .. }), "{error}");
    // I/O continues through the filesystem.
    let mut through = harness(file.file_store());
    through.store(0, &pattern(11, 4096));
    assert!(through.load(0, 4096) == pattern(11, 4096));
}
