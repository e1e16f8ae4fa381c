//! A file or device in use is recognized by its other names: loop devices, partitions, disks.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sidecore_kit::loop_device::LoopDevice;
use sidecore_linux::{FileError, FileOptions, FileStore, stacked_on};
use sidecore_skip::run;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A file with one partition, from 1 MiB on for 2 MiB.
fn image() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let file = File::create(&path).unwrap();
    file.set_len(8 * MIB).unwrap();
    // Status, first and last in an old unit, type between them, first sector, sectors; and the
    // table's mark.
    file.write_all_at(&[0, 0, 2, 0, 0x83, 0, 2, 0, 0, 8, 0, 0, 0, 16, 0, 0], 446).unwrap();
    file.write_all_at(&[0x55, 0xaa], 510).unwrap();
    (directory, path)
}

/// Opens a store as soon as programs that other tests start have closed their copies of its
/// descriptors.
fn open(path: &Path) -> FileStore {
    for _ in 0..200 {
        match FileStore::open(&FileOptions::new(path)) {
            Err(FileError::Busy { .. } | FileError::Overlaps { .. }) => {
                std::thread::sleep(Duration::from_millis(10))
            }
            opened => return opened.unwrap(),
        }
    }
    panic!("{} is busy for ever", path.display());
}

fn refuse(path: &Path, other: &Path) {
    for read_only in [false, true] {
        let error =
            FileStore::open(&FileOptions { read_only, ..FileOptions::new(path) }).unwrap_err();
        assert!(
            matches!(&error, FileError::Overlaps { other: found, .. } if found == other),
            "{error}"
        );
        assert!(error.to_string().contains("in use"), "{error}");
    }
}

#[test]
fn a_file_and_a_loop_device_over_it_have_one_writer() {
    let (_directory, file) = image();
    let Some(device) = LoopDevice::over(&file, &[]) else { return };
    let Some(stacked) = LoopDevice::over(device.path(), &[]) else { return };
    let store = open(&file);
    refuse(device.path(), &file);
    refuse(stacked.path(), &file);
    drop(store);
    let store = open(device.path());
    refuse(&file, device.path());
    refuse(stacked.path(), device.path());
    drop(store);
    let store = open(stacked.path());
    refuse(&file, stacked.path());
    drop(store);
    // Readers may share the file, by every name.
    let reader = |path: &Path| {
        FileStore::open(&FileOptions { read_only: true, ..FileOptions::new(path) }).unwrap()
    };
    let _readers = (reader(&file), reader(device.path()), reader(stacked.path()));
    assert!(FileStore::open(&FileOptions::new(&file)).is_err());
}

#[test]
fn a_device_that_is_made_of_a_disk_is_found_also_when_it_is_not_in_use() {
    let (_directory, file) = image();
    assert_eq!(stacked_on(&file), None, "a file is no disk");
    let Some(disk) = LoopDevice::over(&file, &["--partscan"]) else { return };
    assert_eq!(stacked_on(disk.path()), None, "its partition is");
    let Some(stacked) = LoopDevice::over(disk.path(), &[]) else { return };
    assert_eq!(stacked_on(disk.path()).as_deref(), Some(stacked.path()));
    assert_eq!(stacked_on(stacked.path()), None);
}

#[test]
fn a_refused_open_leaves_no_lock_with_programs_that_are_being_started() {
    let (_directory, file) = image();
    let Some(device) = LoopDevice::over(&file, &[]) else { return };
    let _store = open(device.path());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                std::process::Command::new("true").status().unwrap();
            }
        });
        // Ends the other thread also when a check fails.
        let _over = Over(&is_over);
        for _ in 0..100 {
            refuse(&file, device.path());
        }
    });
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn loop_devices_over_one_file_overlap_where_they_show_the_same_bytes() {
    let (_directory, file) = image();
    let part =
        |offset: &str| LoopDevice::over(&file, &["--offset", offset, "--sizelimit", "1048576"]);
    let (Some(whole), Some(first), Some(second)) =
        (LoopDevice::over(&file, &[]), part("0"), part("1048576"))
    else {
        return;
    };
    let store = open(first.path());
    refuse(whole.path(), first.path());
    let other = open(second.path());
    drop((store, other));
    let _store = open(whole.path());
    refuse(second.path(), whole.path());
}

#[test]
fn a_partition_is_part_of_its_disk_and_of_the_file_below() {
    let (_directory, file) = image();
    let Some(disk) = LoopDevice::over(&file, &["--partscan"]) else { return };
    let partition = PathBuf::from(format!("{}p1", disk.path().display()));
    // A kernel may know no partition table; it takes a partition from a program then.
    let place = ["1", "2048", "4096"];
    if !partition.exists()
        && run("addpart", &[&[disk.path().to_str().unwrap()], place.as_slice()].concat()).is_none()
    {
        return;
    }
    let store = open(&partition);
    // The disk or the partition is named, because both are in use.
    let error = FileStore::open(&FileOptions::new(&file)).map(drop);
    assert!(matches!(error, Err(FileError::Overlaps { .. })), "{error:?}");
    assert!(FileStore::open(&FileOptions::new(disk.path())).is_err());
    drop(store);
    let store = open(&file);
    refuse(&partition, &file);
    drop(store);
    let _store = open(disk.path());
    assert!(FileStore::open(&FileOptions::new(&partition)).is_err());
}

#[test]
fn a_file_whose_loop_device_is_mounted_is_in_use() {
    let (_directory, file) = image();
    let Some(device) = LoopDevice::over(&file, &[]) else { return };
    let place = tempfile::tempdir().unwrap();
    let (node, directory) = (device.path().to_str().unwrap(), place.path().to_str().unwrap());
    if run("mkfs.ext4", &["-q", "-F", node]).is_none() || run("mount", &[node, directory]).is_none()
    {
        return;
    }
    let error = FileStore::open(&FileOptions::new(&file)).map(drop);
    run("umount", &[directory]).unwrap();
    assert!(matches!(error, Err(FileError::Overlaps { .. })), "{error:?}");
}
