//! A request that a disk refuses because of another host's reservation.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use sidecore_block::{BlockDevice, BlockError, Operation};
use sidecore_block_contract::Harness;
use sidecore_fuse::SlowDisk;
use sidecore_linux::{FileOptions, FileStore, on_reservation_conflict};

static CONFLICTS: AtomicU32 = AtomicU32::new(0);

#[test]
fn a_daemon_acts_on_a_reservation_conflict_before_it_answers_and_on_no_other_error() {
    let Some(disk) = SlowDisk::mount(1 << 20) else { return };
    on_reservation_conflict(|| {
        CONFLICTS.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(conflicts_of_a_write(&disk.path(), None), 0);
    disk.refuse_writes(libc::EIO);
    assert_eq!(conflicts_of_a_write(&disk.path(), Some(BlockError::EIO)), 0);
    disk.refuse_writes(libc::EBADE);
    assert_eq!(conflicts_of_a_write(&disk.path(), Some(BlockError::Io { errno: libc::EBADE })), 1);
}

/// The conflicts that were noted for a write, whose result is as expected.
fn conflicts_of_a_write(path: &Path, expected: Option<BlockError>) -> u32 {
    let store: Arc<dyn BlockDevice> = Arc::new(FileStore::open(&FileOptions::new(path)).unwrap());
    let mut harness = Harness::new(&store, 8);
    let request = harness.request(Operation::Write, 0, &[(0x10_0000, 4096)]);
    let before = CONFLICTS.load(Ordering::Relaxed);
    assert_eq!(harness.run_one(request).err(), expected);
    CONFLICTS.load(Ordering::Relaxed) - before
}
