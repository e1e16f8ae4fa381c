//! A store is not opened while a killed process has requests in flight to it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use sidecore_block::BlockDevice;
use sidecore_block_contract::Harness;
use sidecore_fuse::{Operation, SlowDisk};
use sidecore_kit::loop_device::LoopDevice;
use sidecore_kit::process::Process;
use sidecore_linux::{FileError, FileOptions, FileStore, HostFile, HostFileError, HostFileOptions};
use sidecore_skip::run;

/// Makes the test's own program the process that is killed: the way to open the file, and the file.
const VICTIM: &str = "SIDECORE_FENCE_VICTIM";

/// The mark that identifies the victim's writes on the disk.
const MARK: &[u8; 8] = b"latewrit";

const AT: u64 = 256 << 10;
const READ_AT: u64 = 512 << 10;

/// Blocks, because its requests are held until the process is killed.
#[test]
fn victim() {
    let Ok(victim) = std::env::var(VICTIM) else { return };
    let (kind, path) = victim.split_once(' ').unwrap();
    let path = Path::new(path);
    let store: Arc<dyn BlockDevice> = match kind {
        "host-file" => {
            let file = HostFile::open(&HostFileOptions::new(path)).unwrap();
            // Directly to an extent of the device, because the filesystem's own writes are held
            // too.
            let mut extents = Vec::new();
            file.allocate(0, 4096).unwrap();
            file.extents(0, 4096, &mut extents).unwrap();
            let device: Arc<dyn BlockDevice> = file.device_store();
            let mut harness = Harness::new(&device, 8);
            harness.store(extents[0].physical_bytes, &MARK.repeat(512));
            return;
        }
        kind => Arc::new(
            FileStore::open(&FileOptions { read_only: kind == "reader", ..FileOptions::new(path) })
                .unwrap(),
        ),
    };
    std::thread::scope(|scope| {
        let reads = Arc::clone(&store);
        if kind != "writer" {
            scope.spawn(move || Harness::new(&reads, 8).load(READ_AT, 4096));
        }
        if kind != "reader" {
            scope.spawn(move || Harness::new(&store, 8).store(AT, &MARK.repeat(512)));
        }
    });
}

fn start_victim(kind: &str, path: &Path) -> Process {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim", "--nocapture"])
        .env(VICTIM, format!("{kind} {}", path.display()))
        .stdout(Stdio::null())
        .spawn();
    child.unwrap().into()
}

/// Holds the victim's writes, and its reads at its offset.
fn hold_the_victims(disk: &SlowDisk) {
    disk.hold(|request| match request.operation() {
        Operation::Write => request.data().windows(8).any(|bytes| bytes == MARK),
        Operation::Read => request.offset_bytes() == READ_AT,
        _ => false,
    });
}

fn patient(path: &Path, seconds: u64) -> FileOptions {
    FileOptions { predecessor_timeout: Duration::from_secs(seconds), ..FileOptions::new(path) }
}

/// Opens the store without waiting for a predecessor.
fn open_at_once(path: &Path, read_only: bool) -> Result<FileStore, FileError> {
    FileStore::open(&FileOptions { read_only, ..patient(path, 0) })
}

/// Kills a process of this kind when all of its requests are held.
fn a_successor_waits(disk: &SlowDisk, path: &Path, kind: &str) {
    let (writes, reads) = (kind != "reader", kind != "writer");
    hold_the_victims(disk);
    let victim = start_victim(kind, path);
    disk.wait_for_held(|held| {
        let has = |wanted| held.iter().any(|(operation, _)| *operation == wanted);
        has(Operation::Write) == writes && has(Operation::Read) == reads
    });
    drop(victim);
    disk.hold_no_more();

    // The claim has ended with the process: no other process has the file.
    for read_only in [false, true] {
        let error = open_at_once(path, read_only).unwrap_err();
        assert!(matches!(error, FileError::Predecessor { .. }), "{error}");
        assert!(error.to_string().contains("predecessor_timeout_s"), "{error}");
    }
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| FileStore::open(&patient(path, 3600)));
        assert!(!disk.held().is_empty() && !opened.is_finished());
        disk.release();
        let store: Arc<dyn BlockDevice> = Arc::new(opened.join().unwrap().unwrap());
        let mut harness = Harness::new(&store, 8);
        // The late write arrives before the first read, and no write arrives after an overwrite.
        assert!(!writes || harness.load(AT, 4096).starts_with(MARK));
        harness.store(AT, &[7; 4096]);
        assert_eq!(harness.load(AT, 4096), [7; 4096]);
    });
}

#[test]
fn a_file_waits_for_the_requests_of_a_killed_process() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    a_successor_waits(&disk, &disk.path(), "both");
    assert_eq!(disk.bytes(AT as usize, 4096), [7; 4096]);
}

#[test]
fn a_block_device_waits_for_the_requests_of_a_killed_process() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    let Some(device) = LoopDevice::over(&disk.path(), &[]) else { return };
    // The last close of a block device waits for its requests. It must not be the victim's, which
    // would outlive SIGKILL.
    let _open = std::fs::File::open(device.path()).unwrap();
    let _releaser = disk.releaser();
    // The loop device carries out one request after the other: a write behind the read would not
    // arrive.
    a_successor_waits(&disk, device.path(), "writer");
    a_successor_waits(&disk, device.path(), "reader");
}

#[test]
fn a_reader_waits_for_dead_readers_and_not_for_live_ones() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    let path = disk.path();
    let living = [open_at_once(&path, true).unwrap(), open_at_once(&path, true).unwrap()];
    hold_the_victims(&disk);
    let victim = start_victim("reader", &path);
    disk.wait_for_held(|held| !held.is_empty());
    // A reader with slow requests counts as alive.
    drop(open_at_once(&path, true).unwrap());
    drop(victim);
    disk.hold_no_more();
    assert!(matches!(open_at_once(&path, true).unwrap_err(), FileError::Predecessor { .. }));
    disk.release();
    let last = FileStore::open(&FileOptions { read_only: true, ..patient(&path, 3600) }).unwrap();
    assert!(matches!(open_at_once(&path, false).unwrap_err(), FileError::Busy { .. }));
    drop((living, last));
    drop(open_at_once(&path, false).unwrap());
}

/// A mounted filesystem. Unmounted when dropped.
struct Mount(tempfile::TempDir);

impl Drop for Mount {
    fn drop(&mut self) {
        // Rings are taken down, and close their files, some time after their stores.
        let unmount = || Command::new("umount").arg(self.0.path()).stderr(Stdio::null()).status();
        for _ in 0..500 {
            if unmount().is_ok_and(|status| status.success()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("{} is still mounted", self.0.path().display());
    }
}

#[test]
fn a_host_file_waits_for_the_requests_of_a_killed_process() {
    let Some(disk) = SlowDisk::mount(32 << 20) else { return };
    let Some(device) = LoopDevice::over(&disk.path(), &[]) else { return };
    let place = Mount(tempfile::tempdir().unwrap());
    let (node, directory) = (device.path().to_str().unwrap(), place.0.path().to_str().unwrap());
    run("mkfs.ext4", &["-q", node]).unwrap();
    if run("mount", &[node, directory]).is_none() {
        return;
    }
    let _releaser = disk.releaser();
    let path = place.0.path().join("file");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    hold_the_victims(&disk);
    let victim = start_victim("host-file", &path);
    disk.wait_for_held(|held| !held.is_empty());
    drop(victim);
    disk.hold_no_more();
    let options = |seconds| HostFileOptions {
        predecessor_timeout: Duration::from_secs(seconds),
        ..HostFileOptions::new(&path)
    };
    let error = HostFile::open(&options(0)).unwrap_err();
    assert!(matches!(error, HostFileError::InUse { .. }), "{error}");
    disk.release();
    let file = HostFile::open(&options(3600)).unwrap();
    let store: Arc<dyn BlockDevice> = file.file_store();
    assert!(Harness::new(&store, 8).load(0, 4096).starts_with(MARK));
    drop((store, file));
}
