//! Shared blocks, and blocks that a delete would free.

use sidecore_units::Vlba;

use crate::testing::{MemoryDisk, clean, commit, range, store, volume, write};
use crate::{VolumeId, Volumes};

const MIB: u64 = 1 << 20;

fn exclusive(volumes: &Volumes, disk: &mut MemoryDisk, id: VolumeId) -> u64 {
    volumes.durable().usage(disk).unwrap().exclusive[&id]
}

/// Blocks that are free in the end, and those that are used.
fn free(volumes: &Volumes) -> u64 {
    let space = volumes.space();
    space.total - space.data - space.metadata - space.pending - space.granted
}

#[test]
fn a_clone_shares_everything_until_it_is_written() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let a = volume(&mut volumes, "a", 4000);
    // Leaves below an inner node, so that the clone shares nodes, and no extents.
    for index in 0..400 {
        write(&mut volumes, &mut disk, a, index * 2, 1).unwrap();
    }
    let b = volume(&mut volumes, "b", 4000);
    write(&mut volumes, &mut disk, b, 0, 70).unwrap();
    commit(&mut volumes, &mut disk);
    assert_eq!(clean(&volumes, &mut disk).shared_data_blocks, 0);
    let copy = volumes.clone_volume(&mut disk, a, "copy", 1).unwrap();
    commit(&mut volumes, &mut disk);
    assert_eq!(clean(&volumes, &mut disk).shared_data_blocks, 400);
    let usage = volumes.durable().usage(&mut disk).unwrap();
    assert_eq!((usage.shared_data, usage.generation), (400, volumes.generation()));
    assert_eq!((usage.exclusive[&a], usage.exclusive[&copy]), (0, 0));
    assert_eq!(usage.exclusive[&b], 70 + 4);
    assert_eq!((usage.shared[&a], usage.shared[&copy], usage.shared[&b]), (400, 400, 0));
    // Equal blocks of one volume are its own, and those of two are not.
    volumes.share(&mut disk, (b, range(0, 10)), (b, Vlba(100))).unwrap();
    commit(&mut volumes, &mut disk);
    assert_eq!(exclusive(&volumes, &mut disk, b), 70 + 4);
    assert_eq!(volumes.durable().usage(&mut disk).unwrap().shared[&b], 0);
    volumes.share(&mut disk, (b, range(0, 10)), (copy, Vlba(2000))).unwrap();
    commit(&mut volumes, &mut disk);
    let usage = volumes.durable().usage(&mut disk).unwrap();
    // Ten blocks that one volume maps twice, and the other once.
    assert_eq!(
        (usage.shared_data, usage.shared[&b], usage.shared[&copy], usage.shared[&a]),
        (410, 20, 410, 400)
    );
    assert_eq!(exclusive(&volumes, &mut disk, b), 60 + 4);
    clean(&volumes, &mut disk);
}

#[test]
fn deleting_frees_what_was_called_exclusive() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let a = volume(&mut volumes, "a", 4000);
    for index in 0..300 {
        write(&mut volumes, &mut disk, a, index * 3, 2).unwrap();
    }
    commit(&mut volumes, &mut disk);
    volumes.snapshot(&mut disk, a, "s", 1).unwrap();
    let copy = volumes.clone_volume(&mut disk, a, "copy", 1).unwrap();
    write(&mut volumes, &mut disk, a, 0, 500).unwrap();
    write(&mut volumes, &mut disk, copy, 300, 40).unwrap();
    volumes.unmap(&mut disk, copy, range(500, 100)).unwrap();
    commit(&mut volumes, &mut disk);
    for name in ["copy", "a", "s"] {
        let id = volumes.find(name).unwrap().id;
        let (said, before) = (exclusive(&volumes, &mut disk, id), free(&volumes));
        assert!(said > 0, "{name}");
        let catalogue = volumes.catalogue.root;
        volumes.delete(&mut disk, id).unwrap();
        commit(&mut volumes, &mut disk);
        // The catalogue's only node goes with the last volume.
        let catalogue = if catalogue.is_some() && volumes.catalogue.root.is_none() { 4 } else { 0 };
        assert_eq!(free(&volumes) - before, said + catalogue, "{name}");
        clean(&volumes, &mut disk);
    }
}

#[test]
fn a_generation_that_is_gone_has_no_answer_and_not_a_wrong_one() {
    let (mut disk, mut volumes) = store(4 * MIB, 1024);
    let a = volume(&mut volumes, "a", 1000);
    write(&mut volumes, &mut disk, a, 0, 10).unwrap();
    commit(&mut volumes, &mut disk);
    let root = volumes.volumes[&a].tree.root.unwrap();
    disk.xor(root.pointer.address * 1024 + 80, 1);
    assert!(volumes.durable().usage(&mut disk).is_err());
}
