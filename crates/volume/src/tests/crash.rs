//! Power cuts, and disks that fail. The large simulation is in verify/sim; these are the rules, one
//! at a time.

use std::collections::BTreeMap;

use crate::testing::{MemoryDisk, clean, commit, mapping, random, range, store, volume, write};
use crate::{Place, VolumeError, VolumeId, Volumes};

const MIB: u64 = 1 << 20;

type State = BTreeMap<String, Vec<(u64, u64, u64)>>;

/// Everything that is durable by now.
fn state(volumes: &mut Volumes, disk: &mut MemoryDisk) -> State {
    let ids: Vec<(VolumeId, String)> =
        volumes.list().map(|info| (info.id, info.name.clone())).collect();
    let flat = |(first, count, physical, _): (u64, u64, u64, bool)| (first, count, physical);
    ids.into_iter()
        .map(|(id, name)| (name, mapping(volumes, disk, id).into_iter().map(flat).collect()))
        .collect()
}

/// A few changes of every sort.
fn change(volumes: &mut Volumes, disk: &mut MemoryDisk, step: u64) {
    let found = volumes.find("a").map(|info| info.id);
    let id = found.unwrap_or_else(|| volume(volumes, "a", 10_000));
    write(volumes, disk, id, step * 37 % 5000, 1 + step % 20).unwrap();
    volumes.unmap(disk, id, range(step * 53 % 5000, 10)).unwrap();
    if step.is_multiple_of(3) {
        volumes.snapshot(disk, id, &format!("s{step}"), step).unwrap();
    }
    if let (1, Some(old)) =
        (step % 3, volumes.find(&format!("s{}", step.saturating_sub(4))).map(|info| info.id))
    {
        volumes.delete(disk, old).unwrap();
    }
}

#[test]
fn a_power_cut_leaves_the_state_before_or_after() {
    for seed in 0..60 {
        let mut random = random(seed);
        let (mut disk, mut volumes) = store(8 * MIB, 1024);
        for step in 0..12 {
            let before = state(&mut volumes, &mut disk);
            change(&mut volumes, &mut disk, step);
            let after = state(&mut volumes, &mut disk);
            let generation = volumes.generation();
            let pending = volumes.begin_commit().unwrap();
            // The cut comes after any number of writes and flushes, or after all of it.
            disk.fail_after = Some((random() % 12) as usize);
            let written = pending.write(&mut disk);
            let durable = written.is_ok();
            disk.cut(&mut random);
            volumes = Volumes::open(&mut disk).unwrap();
            assert_eq!(volumes.read_only(), None, "seed {seed} step {step}");
            assert!(
                volumes.damage().iter().all(|damage| matches!(damage.place, Place::Superblock(_)))
            );
            let found = state(&mut volumes, &mut disk);
            if durable || volumes.generation() > generation {
                assert_eq!(
                    (volumes.generation(), &found),
                    (generation + 1, &after),
                    "seed {seed} step {step}"
                );
            } else {
                assert_eq!(found, before, "seed {seed} step {step}");
            }
            // A torn copy is repaired by the next commit or the one after.
            commit_if_any(&mut volumes, &mut disk);
            clean_but_for_slots(&volumes, &mut disk);
        }
    }
}

fn commit_if_any(volumes: &mut Volumes, disk: &mut MemoryDisk) {
    if volumes.needs_commit() {
        commit(volumes, disk);
    }
}

fn clean_but_for_slots(volumes: &Volumes, disk: &mut MemoryDisk) {
    let report = volumes.check(disk);
    assert!(
        report.problems.iter().all(|problem| matches!(problem.place, Place::Superblock(_))),
        "{report:#?}"
    );
}

#[test]
fn what_a_commit_in_flight_freed_is_not_given_out() {
    let (mut disk, mut volumes) = store(4 * MIB, 1024);
    let id = volume(&mut volumes, "a", 10_000);
    let old = write(&mut volumes, &mut disk, id, 0, 2000).unwrap();
    commit(&mut volumes, &mut disk);
    volumes.unmap(&mut disk, id, range(0, 2000)).unwrap();
    let overlaps = |new: &[(u64, u64)]| {
        new.iter().any(|(a, count)| old.iter().any(|(b, had)| *a < b + had && *b < a + count))
    };
    // Freed and not committed, being committed, committed and not given back.
    assert!(!overlaps(&write(&mut volumes, &mut disk, id, 0, 400).unwrap()));
    let pending = volumes.begin_commit().unwrap();
    assert!(!overlaps(&write(&mut volumes, &mut disk, id, 400, 400).unwrap()));
    assert!(volumes.begin_commit().is_none() && volumes.is_committing() && volumes.is_dirty(id));
    clean(&volumes, &mut disk);
    pending.write(&mut disk).unwrap();
    let freed = volumes.end_commit(pending, Ok(()));
    assert!(volumes.is_dirty(id), "written while the commit was in flight");
    assert!(!overlaps(&write(&mut volumes, &mut disk, id, 800, 200).unwrap()));
    clean(&volumes, &mut disk);
    volumes.reuse(freed);
    assert!(overlaps(&write(&mut volumes, &mut disk, id, 2000, 1500).unwrap()));
    commit(&mut volumes, &mut disk);
    clean(&volumes, &mut disk);
}

#[test]
fn changes_during_a_commit_are_in_the_next_one() {
    let (mut disk, mut volumes) = store(8 * MIB, 1024);
    let id = volume(&mut volumes, "a", 10_000);
    for step in 0..200 {
        write(&mut volumes, &mut disk, id, step * 3, 2).unwrap();
    }
    let first = volumes.begin_commit().unwrap();
    let at_first = state(&mut volumes, &mut disk);
    // Same nodes again, a snapshot of what is in flight, and a new volume.
    volumes.unmap(&mut disk, id, range(90, 200)).unwrap();
    volumes.snapshot(&mut disk, id, "s", 1).unwrap();
    write(&mut volumes, &mut disk, id, 100, 7).unwrap();
    volume(&mut volumes, "b", 5);
    first.write(&mut disk).unwrap();
    assert_eq!(state(&mut Volumes::open(&mut disk.clone()).unwrap(), &mut disk), at_first);
    let freed = volumes.end_commit(first, Ok(()));
    volumes.reuse(freed);
    let at_second = state(&mut volumes, &mut disk);
    commit(&mut volumes, &mut disk);
    let mut volumes = Volumes::open(&mut disk).unwrap();
    assert_eq!(state(&mut volumes, &mut disk), at_second);
    clean(&volumes, &mut disk);
}

#[test]
fn a_commit_that_fails_makes_the_store_read_only() {
    for fail_after in 0..4 {
        let (mut disk, mut volumes) = store(8 * MIB, 1024);
        let id = volume(&mut volumes, "a", 10_000);
        write(&mut volumes, &mut disk, id, 0, 100).unwrap();
        disk.fail_after = Some(fail_after);
        assert!(
            matches!(volumes.commit_now(&mut disk), Err(VolumeError::StoreReadOnly(_))),
            "{fail_after}"
        );
        assert!(volumes.read_only().unwrap().contains("the disk is broken"));
        assert!(volumes.is_dirty(id) && volumes.begin_commit().is_none());
        assert!(matches!(
            volumes.allocate(&mut disk, id, range(0, 1)),
            Err(VolumeError::StoreReadOnly(_))
        ));
        assert!(matches!(volumes.delete(&mut disk, id), Err(VolumeError::StoreReadOnly(_))));
        assert_eq!(mapping(&mut volumes, &mut disk, id).len(), 1, "it can be read");
    }
}

#[test]
fn a_disk_that_cannot_be_read_fails_the_operation_and_changes_nothing() {
    let (mut disk, mut volumes) = store(8 * MIB, 4096);
    let id = volume(&mut volumes, "a", 10_000);
    for step in 0..400 {
        write(&mut volumes, &mut disk, id, step * 2, 1).unwrap();
    }
    commit(&mut volumes, &mut disk);
    let mut volumes = crate::testing::reopen(volumes, &mut disk);
    let before = state(&mut volumes, &mut disk);
    let mut volumes = crate::testing::reopen(volumes, &mut disk);
    disk.fail_reads = true;
    assert!(matches!(volumes.map(&mut disk, id, range(0, 10), 5), Err(VolumeError::Io(_))));
    assert!(matches!(volumes.allocate(&mut disk, id, range(0, 10)), Err(VolumeError::Io(_))));
    assert!(matches!(volumes.unmap(&mut disk, id, range(0, 1000)), Err(VolumeError::Io(_))));
    assert!(matches!(volumes.resize(&mut disk, id, 5), Err(VolumeError::Io(_))));
    assert!(matches!(volumes.snapshot(&mut disk, id, "s", 1), Err(VolumeError::Io(_))));
    assert!(matches!(volumes.delete(&mut disk, id), Err(VolumeError::Io(_))));
    disk.fail_reads = false;
    assert_eq!(volumes.read_only(), None);
    assert_eq!(state(&mut volumes, &mut disk), before);
    clean(&volumes, &mut disk);
    // Some nodes in memory, others not: the change gets stuck on its way.
    let mut volumes = crate::testing::reopen(volumes, &mut disk);
    volumes.map(&mut disk, id, range(0, 1), 1).unwrap();
    volumes.map(&mut disk, id, range(799, 1), 1).unwrap();
    disk.fail_reads = true;
    assert!(matches!(volumes.unmap(&mut disk, id, range(100, 695)), Err(VolumeError::Io(_))));
    disk.fail_reads = false;
    assert_eq!(state(&mut volumes, &mut disk), before);
    clean(&volumes, &mut disk);
    commit(&mut volumes, &mut disk);
    let mut volumes = crate::testing::reopen(volumes, &mut disk);
    assert_eq!(state(&mut volumes, &mut disk), before);
}
