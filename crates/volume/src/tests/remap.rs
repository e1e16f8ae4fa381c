//! Equal blocks become one, under a guard.

use sidecore_units::{Plba, Vlba};

use crate::grant::PhysicalRange;
use crate::testing::{
    MemoryDisk, clean, commit, mapping, random, range, reopen, store, volume, write,
};
use crate::{VolumeError, VolumeId, Volumes};

const MIB: u64 = 1 << 20;

fn physical(first: u64, count: u64) -> PhysicalRange {
    PhysicalRange { first: Plba(first), count }
}

/// Two volumes of eight blocks each, durable, with the places of the blocks.
fn two() -> (MemoryDisk, Volumes, [(VolumeId, u64); 2]) {
    let (mut disk, mut volumes) = store(8 * MIB, 4096);
    let places = ["a", "b"].map(|name| {
        let id = volume(&mut volumes, name, 64);
        (id, write(&mut volumes, &mut disk, id, 0, 8).unwrap()[0].0)
    });
    commit(&mut volumes, &mut disk);
    (disk, volumes, places)
}

#[test]
fn guarded_blocks_are_shared_until_the_guard_ends() {
    let (mut disk, mut volumes, [(a, at), _]) = two();
    volumes.guard(&[physical(at + 2, 2)]);
    assert_eq!(
        mapping(&mut volumes, &mut disk, a),
        [(0, 2, at, false), (2, 2, at + 2, true), (4, 4, at + 4, false)]
    );
    // Also over commits, which end everything that lingers.
    write(&mut volumes, &mut disk, a, 20, 1).unwrap();
    commit(&mut volumes, &mut disk);
    assert!(volumes.guard_holds());
    assert_eq!(mapping(&mut volumes, &mut disk, a)[1], (2, 2, at + 2, true));
    clean(&volumes, &mut disk);
    volumes.end_guard();
    assert!(!volumes.guard_holds());
    assert_eq!(mapping(&mut volumes, &mut disk, a)[0], (0, 8, at, false));
}

#[test]
fn a_guard_breaks_when_a_block_of_it_is_freed_and_comes_back() {
    let (mut disk, mut volumes, [(a, at), _]) = two();
    volumes.guard(&[physical(at, 8)]);
    volumes.unmap(&mut disk, a, range(7, 1)).unwrap();
    commit(&mut volumes, &mut disk);
    write(&mut volumes, &mut disk, a, 7, 1).unwrap();
    let back = mapping(&mut volumes, &mut disk, a);
    assert_eq!(back.iter().map(|piece| piece.2).min(), Some(at), "{back:?}");
    assert_eq!(back.last().map(|piece| piece.2 + piece.1), Some(at + 8), "the same place");
    assert!(!volumes.guard_holds());
}

#[test]
fn a_block_that_a_snapshot_keeps_does_not_break_the_guard() {
    let (mut disk, mut volumes, [(a, at), _]) = two();
    volumes.snapshot(&mut disk, a, "s", 1).unwrap();
    volumes.guard(&[physical(at, 8)]);
    write(&mut volumes, &mut disk, a, 0, 8).unwrap();
    commit(&mut volumes, &mut disk);
    assert!(volumes.guard_holds());
}

#[test]
fn snapshots_are_remapped_and_space_comes_back_with_the_last_reference() {
    let (mut disk, mut volumes, [(a, at), (b, _)]) = two();
    let snapshot = volumes.snapshot(&mut disk, b, "s", 1).unwrap();
    commit(&mut volumes, &mut disk);
    assert!(matches!(
        volumes.share(&mut disk, (a, range(0, 8)), (snapshot, Vlba(0))),
        Err(VolumeError::VolumeReadOnly(_))
    ));
    let before = volumes.space().data;
    volumes.remap(&mut disk, (a, range(0, 8)), (b, Vlba(0))).unwrap();
    assert_eq!(volumes.space().data, before, "the snapshot has them");
    volumes.remap(&mut disk, (a, range(0, 8)), (snapshot, Vlba(0))).unwrap();
    assert_eq!(volumes.space().data, before - 8);
    commit(&mut volumes, &mut disk);
    let report = clean(&volumes, &mut disk);
    assert_eq!((report.data_blocks, report.shared_data_blocks), (8, 8));
    for id in [a, b, snapshot] {
        assert_eq!(mapping(&mut volumes, &mut disk, id), [(0, 8, at, true)]);
    }
    let mut volumes = reopen(volumes, &mut disk);
    clean(&volumes, &mut disk);
    // A write parts them again, and the other two keep their blocks.
    write(&mut volumes, &mut disk, b, 3, 1).unwrap();
    commit(&mut volumes, &mut disk);
    assert_eq!(mapping(&mut volumes, &mut disk, snapshot), [(0, 8, at, true)]);
    assert_eq!(mapping(&mut volumes, &mut disk, b).len(), 3);
    clean(&volumes, &mut disk);
}

#[test]
fn zeros_become_a_hole_also_in_a_snapshot() {
    let (mut disk, mut volumes, [(a, at), _]) = two();
    let snapshot = volumes.snapshot(&mut disk, a, "s", 1).unwrap();
    let before = volumes.space().data;
    for id in [a, snapshot] {
        volumes.remap_zeros(&mut disk, id, range(2, 4)).unwrap();
        let left = [(0, 2, at, true), (6, 2, at + 6, true)];
        assert_eq!(mapping(&mut volumes, &mut disk, id), left);
    }
    assert_eq!(volumes.space().data, before - 4);
    assert!(volumes.remap_zeros(&mut disk, a, range(60, 5)).is_err());
    commit(&mut volumes, &mut disk);
    clean(&volumes, &mut disk);
}

#[test]
fn a_remap_within_a_family_leaves_the_store_with_nothing_but_copies() {
    let (mut disk, mut volumes, [(a, _), (b, _)]) = two();
    let clone = volumes.clone_volume(&mut disk, a, "clone", 1).unwrap();
    write(&mut volumes, &mut disk, clone, 0, 8).unwrap();
    volumes.remap(&mut disk, (a, range(0, 8)), (clone, Vlba(0))).unwrap();
    commit(&mut volumes, &mut disk);
    assert!(volumes.superblock.only_copies);
    volumes.remap(&mut disk, (a, range(0, 8)), (clone, Vlba(10))).unwrap();
    assert!(!volumes.superblock.only_copies, "another place");
    let (mut disk, mut volumes, [(a, _), (b2, _)]) = two();
    assert_eq!(b, b2);
    volumes.remap(&mut disk, (a, range(0, 8)), (b, Vlba(0))).unwrap();
    assert!(!volumes.superblock.only_copies, "another family");
}

#[test]
fn on_a_full_store_a_remap_works_or_leaves_everything_as_it_was() {
    let (mut disk, mut volumes) = store(MIB, 4096);
    let ids = ["a", "b"].map(|name| volume(&mut volumes, name, 1000));
    let mut at = 0;
    while ids.iter().all(|id| write(&mut volumes, &mut disk, *id, at * 2, 1).is_ok()) {
        at += 1;
    }
    volumes.commit_now(&mut disk).unwrap();
    let before = volumes.space();
    assert!(at > 20 && before.free < 2, "{before:?}");
    let mut remapped = 0;
    for block in 0..at {
        match volumes.remap(&mut disk, (ids[0], range(block * 2, 1)), (ids[1], Vlba(block * 2))) {
            Ok(()) => remapped += 1,
            Err(VolumeError::NoSpace { .. }) => volumes.commit_now(&mut disk).unwrap(),
            Err(error) => panic!("{error}"),
        }
        clean(&volumes, &mut disk);
    }
    volumes.commit_now(&mut disk).unwrap();
    assert!(remapped > 20, "{remapped}");
    assert_eq!(volumes.space().data, before.data - remapped);
    clean(&volumes, &mut disk);
}

#[test]
fn a_power_cut_leaves_the_former_blocks_or_the_common_ones() {
    for seed in 0..200 {
        let mut random = random(seed);
        let (mut disk, mut volumes, [(a, at), (b, other)]) = two();
        volumes.remap(&mut disk, (a, range(0, 8)), (b, Vlba(0))).unwrap();
        // The commit fails somewhere, and then the power does.
        disk.fail_after = Some((random() % 6) as usize);
        let _ = volumes.commit_now(&mut disk);
        disk.cut(&mut random);
        let mut volumes = Volumes::open(&mut disk).unwrap();
        clean(&volumes, &mut disk);
        let [now_a, now_b] = [a, b].map(|id| mapping(&mut volumes, &mut disk, id));
        if now_b[0].2 == at {
            assert_eq!((now_a, now_b), (vec![(0, 8, at, true)], vec![(0, 8, at, true)]));
        } else {
            assert_eq!((now_a, now_b), (vec![(0, 8, at, false)], vec![(0, 8, other, false)]));
        }
    }
}
