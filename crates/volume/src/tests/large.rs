//! Many extents, in little memory.

use std::time::Instant;

use crate::testing::{clean, commit, random, range, store, volume, write};
use crate::{OpenOptions, VolumeId, Volumes};

const EXTENTS: u64 = 100_000;
const CACHE: usize = 32;

#[test]
fn a_volume_of_a_hundred_thousand_extents_is_used_with_few_nodes_in_memory() {
    let (mut disk, mut volumes) = store(1 << 30, 4096);
    let id = volume(&mut volumes, "a", 1 << 20);
    let started = Instant::now();
    for index in 0..EXTENTS {
        let grant = volumes.allocate(&mut disk, id, range(index * 2, 1)).unwrap();
        volumes.link(&mut disk, grant).unwrap();
        if index % 5000 == 0 {
            commit(&mut volumes, &mut disk);
        }
    }
    commit(&mut volumes, &mut disk);
    assert_eq!(volumes.get(id).unwrap().extents, EXTENTS);
    println!("written in {:?}, {} nodes", started.elapsed(), volumes.space().metadata);

    let started = Instant::now();
    let reads = disk.reads;
    let mut volumes =
        Volumes::open_with(&mut disk, &OpenOptions { cache_nodes: CACHE, ..Default::default() })
            .unwrap();
    println!("opened in {:?}, {} reads", started.elapsed(), disk.reads - reads);
    assert_eq!(volumes.damage(), []);

    let mut random = random(3);
    for _ in 0..1000 {
        let block = random() % (EXTENTS * 2);
        let mapped = volumes.map(&mut disk, id, range(block, 1), 1).unwrap();
        assert_eq!(mapped.extents.len(), usize::from(block.is_multiple_of(2)), "block {block}");
    }
    assert!(volumes.cached_nodes() <= CACHE);

    // One random write and its commit: a leaf, two nodes above, the catalogue's.
    write(&mut volumes, &mut disk, id, 100_001, 1).unwrap();
    let commit_one = volumes.begin_commit().unwrap();
    println!("one write and its commit: {} nodes", commit_one.nodes());
    assert!(commit_one.nodes() <= 5);
    let (writes, flushes) = (disk.writes, disk.flushes);
    commit_one.write(&mut disk).unwrap();
    println!("{} writes, {} flushes", disk.writes - writes, disk.flushes - flushes);
    let freed = volumes.end_commit(commit_one, Ok(()));
    volumes.reuse(freed);

    // Half of it at once: whole subtrees go, and only two paths are written.
    volumes.unmap(&mut disk, id, range(1, EXTENTS)).unwrap();
    let half = volumes.begin_commit().unwrap();
    assert!(half.nodes() <= 8, "{} nodes", half.nodes());
    half.write(&mut disk).unwrap();
    let freed = volumes.end_commit(half, Ok(()));
    volumes.reuse(freed);
    assert_eq!(volumes.get(id).unwrap().extents, EXTENTS / 2);
    clean(&volumes, &mut disk);
    assert!(volumes.cached_nodes() <= CACHE);
}

#[test]
fn a_catalogue_of_many_volumes_is_searched_by_number_and_name() {
    let (mut disk, mut volumes) = store(64 << 20, 1024);
    for index in 0..3000_u64 {
        assert_eq!(volume(&mut volumes, &format!("v{index}"), 10), VolumeId(index + 1));
    }
    commit(&mut volumes, &mut disk);
    for index in (0..3000_u64).step_by(3) {
        volumes.delete(&mut disk, VolumeId(index + 1)).unwrap();
    }
    commit(&mut volumes, &mut disk);
    let volumes = crate::testing::reopen(volumes, &mut disk);
    clean(&volumes, &mut disk);
    assert_eq!(volumes.list().count(), 2000);
    assert_eq!(volumes.find("v3").map(|info| info.id), None);
    assert_eq!(volumes.find("v1000").map(|info| info.id), Some(VolumeId(1001)));
}
