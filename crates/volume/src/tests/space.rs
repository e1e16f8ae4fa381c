//! Full stores, and how volumes lie on them.

use crate::testing::{
    MemoryDisk, clean, commit, mapping, random, range, reopen, store, volume, write,
};
use crate::{VolumeError, VolumeId, Volumes};

const MIB: u64 = 1 << 20;

/// Writes single pieces until the store is full.
fn fill(volumes: &mut Volumes, disk: &mut MemoryDisk, id: VolumeId, from: u64, piece: u64) -> u64 {
    let mut at = from;
    loop {
        match write(volumes, disk, id, at, piece) {
            Ok(_) => at += piece,
            Err(VolumeError::NoSpace { after_commit: true }) => {
                commit(volumes, disk);
                if write(volumes, disk, id, at, piece).is_err() {
                    return at;
                }
                at += piece;
            }
            Err(VolumeError::NoSpace { .. }) => return at,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn on_a_full_store_everything_can_be_deleted() {
    for block_bytes in [512, 1024, 4096] {
        let (mut disk, mut volumes) = store(8 * MIB, block_bytes);
        let (a, b) = (volume(&mut volumes, "a", 1 << 20), volume(&mut volumes, "b", 1 << 20));
        for index in 0..200 {
            write(&mut volumes, &mut disk, a, index * 3, 1).unwrap();
            write(&mut volumes, &mut disk, b, index * 5, 2).unwrap();
        }
        let snapshot = volumes.snapshot(&mut disk, a, "s", 1).unwrap();
        fill(&mut volumes, &mut disk, b, 10_000, 7);
        clean(&volumes, &mut disk);
        let space = volumes.space();
        let unused = space.free * u64::from(block_bytes);
        assert!(unused < 64 << 10, "{block_bytes}: {unused} bytes free, {space:?}");

        // Discards on shared volumes, which cost nodes and free nothing at first.
        for index in 0..200 {
            match volumes.unmap(&mut disk, a, range(index * 3, 1)) {
                Ok(()) => {}
                Err(VolumeError::NoSpace { after_commit: true }) => commit(&mut volumes, &mut disk),
                Err(error) => panic!("{block_bytes}: discard {index}: {error}"),
            }
        }
        commit(&mut volumes, &mut disk);
        for id in [a, snapshot, b] {
            volumes.delete(&mut disk, id).unwrap();
            commit(&mut volumes, &mut disk);
            clean(&volumes, &mut disk);
        }
        assert_eq!((volumes.space().data, volumes.list().count()), (0, 0));
        let volumes = reopen(volumes, &mut disk);
        assert_eq!(clean(&volumes, &mut disk).nodes, 0);
    }
}

#[test]
fn deleting_works_on_a_full_store_without_a_commit_in_between() {
    let (mut disk, mut volumes) = store(4 * MIB, 1024);
    let ids: Vec<VolumeId> =
        (0..100).map(|index| volume(&mut volumes, &format!("v{index}"), 1 << 20)).collect();
    for (index, id) in ids.iter().enumerate() {
        write(&mut volumes, &mut disk, *id, index as u64, 1).unwrap();
    }
    commit(&mut volumes, &mut disk);
    fill(&mut volumes, &mut disk, ids[0], 1000, 13);
    commit(&mut volumes, &mut disk);
    for id in ids {
        volumes.delete(&mut disk, id).unwrap();
    }
    commit(&mut volumes, &mut disk);
    assert_eq!(clean(&volumes, &mut disk).nodes, 0);
}

#[test]
fn a_full_store_says_so_and_goes_on_after_a_delete() {
    let (mut disk, mut volumes) = store(4 * MIB, 1024);
    let (a, b) = (volume(&mut volumes, "a", 1 << 20), volume(&mut volumes, "b", 1 << 20));
    write(&mut volumes, &mut disk, a, 0, 1000).unwrap();
    let end = fill(&mut volumes, &mut disk, b, 0, 16);
    commit(&mut volumes, &mut disk);
    let end = fill(&mut volumes, &mut disk, b, end, 1);
    volumes.delete(&mut disk, a).unwrap();
    let full = volumes.allocate(&mut disk, b, range(end, 64)).unwrap_err();
    assert!(matches!(full, VolumeError::NoSpace { after_commit: true }), "{full}");
    commit(&mut volumes, &mut disk);
    write(&mut volumes, &mut disk, b, end, 900).unwrap();
    clean(&volumes, &mut disk);
}

#[test]
fn volumes_written_in_turns_are_contiguous() {
    let (mut disk, mut volumes) = store(256 * MIB, 1024);
    let ids: Vec<VolumeId> =
        (0..4).map(|index| volume(&mut volumes, &format!("v{index}"), 1 << 20)).collect();
    // 16 MiB each, 4 KiB at a time.
    for step in 0..4096 {
        for id in &ids {
            write(&mut volumes, &mut disk, *id, step * 4, 4).unwrap();
        }
        if step % 512 == 0 {
            commit(&mut volumes, &mut disk);
        }
    }
    for id in &ids {
        let extents = volumes.get(*id).unwrap().extents;
        assert!(extents <= 20, "{extents} extents");
    }
    clean(&volumes, &mut disk);
}

#[test]
fn a_volume_written_at_random_comes_together() {
    let (mut disk, mut volumes) = store(256 * MIB, 1024);
    let (id, other) = (volume(&mut volumes, "a", 1 << 20), volume(&mut volumes, "b", 1 << 20));
    let mut random = random(1);
    let mut pieces: Vec<u64> = (0..2048).collect();
    for index in (1..pieces.len()).rev() {
        pieces.swap(index, (random() % (index as u64 + 1)) as usize);
    }
    for piece in pieces {
        write(&mut volumes, &mut disk, id, piece * 4, 4).unwrap();
        write(&mut volumes, &mut disk, other, piece * 4, 4).unwrap();
    }
    let extents = volumes.get(id).unwrap().extents;
    assert!(extents < 400, "{extents} extents for 2048 random writes");
    clean(&volumes, &mut disk);
}

#[test]
fn a_thousand_volumes_come_and_go_and_every_block_is_accounted_for() {
    let (mut disk, mut volumes) = store(64 * MIB, 1024);
    let empty = volumes.space();
    for index in 0..1000_u64 {
        let id = volume(&mut volumes, &format!("v{index}"), 1000);
        write(&mut volumes, &mut disk, id, index % 50, 5).unwrap();
        let snapshot = volumes.snapshot(&mut disk, id, &format!("s{index}"), index).unwrap();
        write(&mut volumes, &mut disk, id, index % 50 + 2, 10).unwrap();
        if index >= 100 {
            let old = index - 100;
            for name in [format!("v{old}"), format!("s{old}")] {
                let id = volumes.find(&name).unwrap().id;
                volumes.delete(&mut disk, id).unwrap();
            }
        }
        if index % 10 == 0 {
            commit(&mut volumes, &mut disk);
        }
        if index % 200 == 0 {
            clean(&volumes, &mut disk);
            assert!(!mapping(&mut volumes, &mut disk, snapshot).is_empty());
        }
    }
    commit(&mut volumes, &mut disk);
    volumes = reopen(volumes, &mut disk);
    assert_eq!(clean(&volumes, &mut disk).volumes, 200);
    let ids: Vec<VolumeId> = volumes.list().map(|info| info.id).collect();
    for id in ids {
        volumes.delete(&mut disk, id).unwrap();
    }
    commit(&mut volumes, &mut disk);
    clean(&volumes, &mut disk);
    assert_eq!(volumes.space(), empty);
    // Numbers are not used again.
    assert_eq!(volume(&mut volumes, "new", 1), VolumeId(2001));
}
