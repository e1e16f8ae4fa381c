//! A disk that has no space for a commit, and flushes that fail.

use crate::testing::{
    MemoryDisk, clean, commit, mapping, random, range, reopen, store, volume, write,
};
use crate::{VolumeError, VolumeId, Volumes};

const MIB: u64 = 1 << 20;

fn example() -> (MemoryDisk, Volumes, VolumeId) {
    let (mut disk, mut volumes) = store(4 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1000);
    write(&mut volumes, &mut disk, id, 0, 100).unwrap();
    commit(&mut volumes, &mut disk);
    (disk, volumes, id)
}

#[test]
fn a_commit_that_finds_no_space_is_kept_and_written_again_when_there_is_some() {
    for writes in 0..6 {
        let (mut disk, mut volumes, a) = example();
        let generation = volumes.generation();
        write(&mut volumes, &mut disk, a, 200, 10).unwrap();
        volumes.unmap(&mut disk, a, range(0, 10)).unwrap();
        disk.full_after = Some(writes);
        let first = volumes.commit_now(&mut disk);
        if first.is_ok() {
            assert!(writes > 2, "as many writes as that have a commit");
            continue;
        }
        assert!(matches!(&first, Err(VolumeError::DiskFull(_))), "{first:?}");
        assert!(volumes.read_only().is_none() && volumes.disk_is_full().is_some());
        assert!(
            volumes.is_dirty(a) && volumes.needs_commit() && volumes.generation() == generation
        );
        // No fresh blocks; what gives some back is taken.
        let refused = volumes.allocate(&mut disk, a, range(300, 1)).unwrap_err();
        assert!(
            matches!(&refused, VolumeError::DiskFull(_)) && refused.to_string().contains("full"),
            "{refused}"
        );
        volumes.unmap(&mut disk, a, range(50, 10)).unwrap();
        volumes.map(&mut disk, a, range(0, 1000), 100).unwrap();
        assert!(volumes.commit_now(&mut disk).is_err());
        // A power cut meanwhile brings back one generation or the other.
        for seed in 0..8 {
            let mut cut = disk.clone();
            cut.full_after = None;
            cut.cut(&mut random(seed));
            let opened = Volumes::open(&mut cut).unwrap();
            assert!([generation, generation + 1].contains(&opened.generation()));
            clean(&opened, &mut cut);
        }
        disk.full_after = None;
        volumes.commit_now(&mut disk).unwrap();
        assert_eq!(
            (volumes.generation(), volumes.disk_is_full(), volumes.is_dirty(a)),
            (generation + 2, None, false)
        );
        clean(&volumes, &mut disk);
        let before = mapping(&mut volumes, &mut disk, a);
        let mut volumes = reopen(volumes, &mut disk);
        assert_eq!(mapping(&mut volumes, &mut disk, a), before);
        write(&mut volumes, &mut disk, a, 300, 1).unwrap();
    }
}

#[test]
fn a_kept_commit_is_the_same_bytes_at_the_same_places() {
    let (mut disk, mut volumes, a) = example();
    write(&mut volumes, &mut disk, a, 200, 10).unwrap();
    let mut without = disk.clone();
    let first = volumes.begin_commit().unwrap();
    disk.full_after = Some(1);
    let failed = first.write(&mut disk);
    first.write(&mut without).unwrap();
    assert!(failed.as_ref().unwrap_err().is_full());
    assert!(volumes.end_commit(first, failed).is_empty());
    disk.full_after = None;
    let again = volumes.begin_commit().unwrap();
    again.write(&mut disk).unwrap();
    let (mut one, mut other) = (vec![0; 4 << 20], vec![0; 4 << 20]);
    crate::Disk::read(&mut disk, 0, &mut one).unwrap();
    crate::Disk::read(&mut without, 0, &mut other).unwrap();
    assert!(one == other);
    let freed = volumes.end_commit(again, Ok(()));
    volumes.reuse(freed);
    clean(&volumes, &mut disk);
}

#[test]
fn after_a_flush_that_failed_nothing_changes_whatever_the_reason() {
    let (mut disk, mut volumes, a) = example();
    write(&mut volumes, &mut disk, a, 200, 10).unwrap();
    volumes.flush_failed(&std::io::ErrorKind::StorageFull.into());
    assert!(volumes.read_only().unwrap().contains("flushed"));
    assert!(volumes.begin_commit().is_none());
    assert!(matches!(
        volumes.allocate(&mut disk, a, range(300, 1)),
        Err(VolumeError::StoreReadOnly(_))
    ));
    assert!(matches!(volumes.commit_now(&mut disk), Err(VolumeError::StoreReadOnly(_))));
}
