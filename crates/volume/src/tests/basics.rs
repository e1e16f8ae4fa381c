//! The effect of each operation, and its errors.

use sidecore_units::Vlba;

use crate::testing::{MemoryDisk, clean, commit, mapping, range, reopen, store, volume, write};
use crate::{
    Content, FormatError, FormatOptions, NewVolume, OpenError, VolumeError, VolumeId, Volumes,
    format, probe,
};

const MIB: u64 = 1 << 20;

#[test]
fn an_empty_store_opens_and_is_clean() {
    for block_bytes in [512, 1024, 4096] {
        let (mut disk, volumes) = store(16 * MIB, block_bytes);
        assert_eq!(volumes.blocks() * u64::from(block_bytes), 16 * MIB);
        assert_eq!(
            (volumes.block_bytes(), volumes.generation(), volumes.list().count()),
            (block_bytes, 1, 0)
        );
        clean(&volumes, &mut disk);
        assert!(!volumes.needs_commit());
    }
}

#[test]
fn what_is_linked_and_committed_is_there_after_opening_again() {
    for block_bytes in [512, 1024, 4096] {
        let (mut disk, mut volumes) = store(16 * MIB, block_bytes);
        let id = volume(&mut volumes, "root.img", 1000);
        write(&mut volumes, &mut disk, id, 10, 20).unwrap();
        write(&mut volumes, &mut disk, id, 30, 5).unwrap();
        write(&mut volumes, &mut disk, id, 900, 100).unwrap();
        let before = mapping(&mut volumes, &mut disk, id);
        assert_eq!(
            before.iter().map(|extent| (extent.0, extent.1)).collect::<Vec<_>>(),
            [(10, 25), (900, 100)]
        );
        clean(&volumes, &mut disk);
        assert!(volumes.is_dirty(id) && volumes.needs_commit());
        commit(&mut volumes, &mut disk);
        assert!(!volumes.is_dirty(id) && !volumes.needs_commit());
        let mut volumes = reopen(volumes, &mut disk);
        clean(&volumes, &mut disk);
        let info = volumes.find("root.img").unwrap().clone();
        assert_eq!((info.id, info.blocks, info.allocated_blocks, info.extents), (id, 1000, 125, 2));
        assert_eq!(mapping(&mut volumes, &mut disk, id), before);
    }
}

#[test]
fn what_is_not_committed_is_not() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1000);
    commit(&mut volumes, &mut disk);
    write(&mut volumes, &mut disk, id, 0, 100).unwrap();
    volume(&mut volumes, "b", 1000);
    let mut volumes = reopen(volumes, &mut disk);
    assert_eq!((volumes.list().count(), mapping(&mut volumes, &mut disk, id).len()), (1, 0));
    clean(&volumes, &mut disk);
}

#[test]
fn a_grant_is_neither_free_nor_mapped_and_comes_back_when_released() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1000);
    let before = volumes.space();
    let grant = volumes.allocate(&mut disk, id, range(5, 50)).unwrap();
    assert_eq!((volumes.space().granted, volumes.space().free), (50, before.free - 50));
    assert_eq!(clean(&volumes, &mut disk).granted_blocks, 50);
    assert_eq!(mapping(&mut volumes, &mut disk, id), []);
    volumes.release(grant);
    assert_eq!(volumes.space(), before);
    clean(&volumes, &mut disk);
}

#[test]
fn a_snapshot_keeps_what_was_and_the_volume_goes_on() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1000);
    write(&mut volumes, &mut disk, id, 0, 100).unwrap();
    let before = mapping(&mut volumes, &mut disk, id);
    let snapshot = volumes.snapshot(&mut disk, id, "a-1", 7).unwrap();
    let shared: Vec<_> = before
        .iter()
        .map(|(first, count, physical, _)| (*first, *count, *physical, true))
        .collect();
    assert_eq!(mapping(&mut volumes, &mut disk, id), shared);
    assert_eq!(mapping(&mut volumes, &mut disk, snapshot), shared);

    write(&mut volumes, &mut disk, id, 10, 5).unwrap();
    let (_, _, physical, _) = before[0];
    // On the disk the volume refers to these five still.
    assert_eq!(mapping(&mut volumes, &mut disk, snapshot), shared);
    commit(&mut volumes, &mut disk);
    assert_eq!(
        mapping(&mut volumes, &mut disk, snapshot),
        [(0, 10, physical, true), (10, 5, physical + 10, false), (15, 85, physical + 15, true)]
    );
    let live = mapping(&mut volumes, &mut disk, id);
    assert_eq!(
        live.iter().map(|extent| (extent.0, extent.1, extent.3)).collect::<Vec<_>>(),
        [(0, 10, true), (10, 5, false), (15, 85, true)]
    );
    clean(&volumes, &mut disk);
    commit(&mut volumes, &mut disk);
    let mut volumes = reopen(volumes, &mut disk);
    assert_eq!(mapping(&mut volumes, &mut disk, id), live);
    let info = volumes.get(snapshot).unwrap().clone();
    assert_eq!((info.read_only, info.origin, info.created_at_unix_s), (true, Some(id), 7));
    assert!(matches!(
        volumes.allocate(&mut disk, snapshot, range(0, 1)),
        Err(VolumeError::VolumeReadOnly(found)) if found == snapshot
    ));
    assert!(matches!(
        volumes.unmap(&mut disk, snapshot, range(0, 1)),
        Err(VolumeError::VolumeReadOnly(_))
    ));
    assert!(matches!(volumes.resize(&mut disk, snapshot, 5), Err(VolumeError::VolumeReadOnly(_))));

    volumes.delete(&mut disk, id).unwrap();
    commit(&mut volumes, &mut disk);
    assert_eq!(mapping(&mut volumes, &mut disk, snapshot), [(0, 100, physical, false)]);
    clean(&volumes, &mut disk);
    volumes.delete(&mut disk, snapshot).unwrap();
    commit(&mut volumes, &mut disk);
    assert_eq!((volumes.space().data, clean(&volumes, &mut disk).nodes), (0, 0));
}

#[test]
fn a_clone_of_a_snapshot_is_writable_and_its_own() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1000);
    write(&mut volumes, &mut disk, id, 0, 100).unwrap();
    commit(&mut volumes, &mut disk);
    let snapshot = volumes.snapshot(&mut disk, id, "s", 2).unwrap();
    let copy = volumes.clone_volume(&mut disk, snapshot, "c", 3).unwrap();
    let writes = write(&mut volumes, &mut disk, copy, 50, 500).unwrap();
    assert_eq!(volumes.get(copy).unwrap().allocated_blocks, 550);
    assert_eq!(volumes.get(id).unwrap().allocated_blocks, 100);
    let mapped = mapping(&mut volumes, &mut disk, copy);
    assert_eq!(
        (mapped[0].1, mapped[0].3, mapped[1].2, mapped[1].3),
        (50, true, writes[0].0, false)
    );
    for gone in [id, snapshot] {
        volumes.delete(&mut disk, gone).unwrap();
        commit(&mut volumes, &mut disk);
        clean(&volumes, &mut disk);
    }
    assert_eq!(volumes.space().data, 550);
    let mut volumes = reopen(volumes, &mut disk);
    assert!(mapping(&mut volumes, &mut disk, copy).iter().all(|extent| !extent.3));
}

#[test]
fn unmapped_blocks_are_free_after_commit_and_the_word() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1000);
    write(&mut volumes, &mut disk, id, 0, 100).unwrap();
    commit(&mut volumes, &mut disk);
    volumes.unmap(&mut disk, id, range(20, 30)).unwrap();
    assert_eq!(mapping(&mut volumes, &mut disk, id).len(), 2);
    let data = volumes.space();
    assert_eq!(data.data, 70);
    let commit = volumes.begin_commit().unwrap();
    commit.write(&mut disk).unwrap();
    assert_eq!(volumes.space().pending, data.pending);
    let freed = volumes.end_commit(commit, Ok(()));
    assert_eq!(volumes.space().pending, data.pending);
    assert_eq!(freed.ranges().map(|range| range.count).sum::<u64>(), data.pending);
    clean(&volumes, &mut disk);
    volumes.reuse(freed);
    assert_eq!((volumes.space().pending, volumes.space().free), (0, data.free + data.pending));
    volumes.unmap(&mut disk, id, range(20, 30)).unwrap();
    assert!(!volumes.needs_commit(), "nothing was there to unmap");
}

#[test]
fn sharing_maps_the_same_blocks_and_writing_parts_them() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let (a, b) = (volume(&mut volumes, "a", 1000), volume(&mut volumes, "b", 1000));
    write(&mut volumes, &mut disk, a, 0, 100).unwrap();
    write(&mut volumes, &mut disk, b, 500, 100).unwrap();
    volumes.share(&mut disk, (a, range(90, 20)), (b, Vlba(500))).unwrap();
    let (from, to) = (mapping(&mut volumes, &mut disk, a), mapping(&mut volumes, &mut disk, b));
    assert_eq!(
        from.iter().map(|extent| (extent.0, extent.1, extent.3)).collect::<Vec<_>>(),
        [(0, 90, false), (90, 10, true)]
    );
    assert_eq!((to[0].0, to[0].1, to[0].2, to[0].3), (500, 10, from[1].2, true));
    // The source's hole is a hole here as well.
    assert_eq!((to[1].0, to[1].1, to[1].3), (520, 80, false));
    assert_eq!(volumes.space().data, 100 + 80);
    clean(&volumes, &mut disk);
    // Inside of one volume, too.
    volumes.share(&mut disk, (a, range(0, 10)), (a, Vlba(200))).unwrap();
    volumes.share(&mut disk, (a, range(0, 10)), (a, Vlba(0))).unwrap();
    assert!(matches!(
        volumes.share(&mut disk, (a, range(0, 10)), (a, Vlba(5))),
        Err(VolumeError::Overlap)
    ));
    commit(&mut volumes, &mut disk);
    let mut volumes = reopen(volumes, &mut disk);
    clean(&volumes, &mut disk);
    write(&mut volumes, &mut disk, a, 0, 100).unwrap();
    write(&mut volumes, &mut disk, a, 200, 10).unwrap();
    commit(&mut volumes, &mut disk);
    assert!(mapping(&mut volumes, &mut disk, b).iter().all(|extent| !extent.3));
    clean(&volumes, &mut disk);
}

#[test]
fn a_quota_counts_what_is_referred_to() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volumes
        .create(&NewVolume { name: "a".to_owned(), blocks: 1000, quota_blocks: Some(100) }, 1)
        .unwrap();
    write(&mut volumes, &mut disk, id, 0, 60).unwrap();
    let grant = volumes.allocate(&mut disk, id, range(100, 30)).unwrap();
    // Ten are left, and blocks already mapped cost nothing.
    let second = volumes.allocate(&mut disk, id, range(50, 30)).unwrap();
    assert_eq!(second.range(), range(50, 20));
    assert!(matches!(
        volumes.allocate(&mut disk, id, range(70, 1)),
        Err(VolumeError::QuotaExceeded { quota_blocks: 100 })
    ));
    volumes.link(&mut disk, second).unwrap();
    volumes.release(grant);
    write(&mut volumes, &mut disk, id, 70, 30).unwrap();
    assert_eq!(volumes.get(id).unwrap().allocated_blocks, 100);
    // A full volume can still be overwritten after a snapshot.
    volumes.snapshot(&mut disk, id, "s", 1).unwrap();
    write(&mut volumes, &mut disk, id, 0, 100).unwrap();
    assert!(write(&mut volumes, &mut disk, id, 100, 1).is_err());
    volumes.set_quota(id, None).unwrap();
    write(&mut volumes, &mut disk, id, 100, 1).unwrap();
    clean(&volumes, &mut disk);
}

#[test]
fn shrinking_gives_blocks_up_and_growing_makes_hole() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1000);
    write(&mut volumes, &mut disk, id, 0, 1000).unwrap();
    let grant = volumes.allocate(&mut disk, id, range(990, 10)).unwrap();
    volumes.resize(&mut disk, id, 500).unwrap();
    assert!(matches!(volumes.link(&mut disk, grant), Err(VolumeError::OutOfRange { .. })));
    volumes.resize(&mut disk, id, 2000).unwrap();
    assert_eq!(volumes.get(id).unwrap().allocated_blocks, 500);
    commit(&mut volumes, &mut disk);
    let volumes = reopen(volumes, &mut disk);
    assert_eq!((volumes.get(id).unwrap().blocks, volumes.space().data), (2000, 500));
    clean(&volumes, &mut disk);
}

#[test]
fn names_sizes_and_ranges_are_checked() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 10);
    let new = |name: &str, blocks| NewVolume { name: name.to_owned(), blocks, quota_blocks: None };
    assert!(matches!(volumes.create(&new("a", 1), 1), Err(VolumeError::NameTaken(_))));
    assert!(matches!(volumes.create(&new(".a", 1), 1), Err(VolumeError::BadName(_))));
    assert!(matches!(volumes.create(&new("b", 0), 1), Err(VolumeError::BadSize { .. })));
    assert!(matches!(
        volumes.create(&new("b", (1 << 38) + 1), 1),
        Err(VolumeError::BadSize { .. })
    ));
    volumes.create(&new("b", 1 << 38), 1).unwrap();
    assert!(matches!(volumes.rename(id, "b"), Err(VolumeError::NameTaken(_))));
    volumes.rename(id, "c").unwrap();
    assert_eq!((volumes.find("a"), volumes.find("c").map(|found| found.id)), (None, Some(id)));
    volumes.create(&new("a", 1), 1).unwrap();
    for (first, count) in [(0, 11), (10, 1), (u64::MAX, 2), (1, u64::MAX)] {
        assert!(matches!(
            volumes.map(&mut disk, id, range(first, count), 9),
            Err(VolumeError::OutOfRange { .. })
        ));
        assert!(matches!(
            volumes.allocate(&mut disk, id, range(first, count)),
            Err(VolumeError::OutOfRange { .. })
        ));
        assert!(matches!(
            volumes.unmap(&mut disk, id, range(first, count)),
            Err(VolumeError::OutOfRange { .. })
        ));
    }
    let missing = VolumeId(99);
    assert!(matches!(volumes.delete(&mut disk, missing), Err(VolumeError::NoSuchVolume(_))));
    assert!(matches!(volumes.rename(missing, "x"), Err(VolumeError::NoSuchVolume(_))));
    commit(&mut volumes, &mut disk);
    clean(&reopen(volumes, &mut disk), &mut disk);
}

#[test]
fn a_map_with_a_limit_says_how_far_it_got() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1000);
    for index in 0..10 {
        write(&mut volumes, &mut disk, id, index * 20, 10).unwrap();
    }
    let mapped = volumes.map(&mut disk, id, range(5, 900), 3).unwrap();
    assert_eq!((mapped.extents.len(), mapped.covered), (3, range(5, 45)));
    assert_eq!((mapped.extents[0].first.0, mapped.extents[0].count), (5, 5));
    let mapped = volumes.map(&mut disk, id, range(5, 44), 3).unwrap();
    assert_eq!((mapped.extents.len(), mapped.covered), (3, range(5, 44)));
    let mapped = volumes.map(&mut disk, id, range(10, 10), 3).unwrap();
    assert_eq!((mapped.extents.len(), mapped.covered), (0, range(10, 10)));
    assert_eq!(volumes.map(&mut disk, id, range(0, 10), 0).unwrap().covered, range(0, 0));
}

#[test]
fn a_store_grows_with_its_disk_and_does_not_open_on_a_smaller_one() {
    let (mut disk, mut volumes) = store(16 * MIB, 1024);
    let id = volume(&mut volumes, "a", 1 << 20);
    write(&mut volumes, &mut disk, id, 0, 1000).unwrap();
    commit(&mut volumes, &mut disk);
    disk.resize(32 * MIB);
    let mut volumes = reopen(volumes, &mut disk);
    assert_eq!(volumes.blocks(), 32 << 10);
    write(&mut volumes, &mut disk, id, 0, 20_000).unwrap();
    commit(&mut volumes, &mut disk);
    let volumes = reopen(volumes, &mut disk);
    clean(&volumes, &mut disk);
    disk.resize(16 * MIB);
    let opened = Volumes::open(&mut disk);
    assert!(matches!(opened, Err(OpenError::Shrunk { disk_blocks: 16384, store_blocks: 32768 })));
}

#[test]
fn formatting_asks_before_it_destroys() {
    let mut disk = MemoryDisk::new(4 * MIB);
    let options = FormatOptions { label: "shelf".to_owned(), ..FormatOptions::default() };
    assert_eq!(probe(&mut disk).unwrap(), Content::Blank);
    assert!(
        matches!(Volumes::open(&mut disk), Err(OpenError::NotFormatted(what)) if what == "nothing")
    );
    for (at, mark, name) in [
        (1080, &[0x53, 0xef][..], "ext"),
        (510, &[0x55, 0xaa], "MBR"),
        (0, b"XFSB", "XFS"),
        (0x20000, &[0xc, 0xb1, 0xba], "ZFS"),
    ] {
        let mut disk = MemoryDisk::new(4 * MIB);
        for (index, byte) in mark.iter().enumerate() {
            disk.xor(at + index as u64, *byte);
        }
        let found = probe(&mut disk).unwrap();
        assert!(matches!(found, Content::Foreign(found) if found.contains(name)), "{found:?}");
        assert!(matches!(
            format(&mut disk, &options),
            Err(FormatError::NotBlank(found)) if found.contains(name)
        ));
        assert!(matches!(
            Volumes::open(&mut disk),
            Err(OpenError::NotFormatted(found)) if found.contains(name)
        ));
        format(&mut disk, &FormatOptions { force: true, ..options.clone() }).unwrap();
        assert_eq!(Volumes::open(&mut disk).unwrap().label(), "shelf");
    }
    disk.xor(4 * MIB - 5, 1);
    assert_eq!(probe(&mut disk).unwrap(), Content::Unknown);
    assert!(matches!(format(&mut disk, &options), Err(FormatError::NotBlank(_))));
    disk.xor(4 * MIB - 5, 1);
    format(&mut disk, &options).unwrap();
    assert_eq!(probe(&mut disk).unwrap(), Content::Ours);
    assert!(matches!(format(&mut disk, &options), Err(FormatError::NotBlank(_))));
    let wrong = |change: &dyn Fn(&mut FormatOptions)| {
        let mut options = FormatOptions { force: true, ..options.clone() };
        change(&mut options);
        format(&mut disk.clone(), &options)
    };
    assert!(matches!(
        wrong(&|options| options.block_bytes = 2048),
        Err(FormatError::BadBlockSize(2048))
    ));
    assert!(matches!(wrong(&|options| options.label = "x".repeat(65)), Err(FormatError::BadLabel)));
    assert!(matches!(
        format(&mut MemoryDisk::new(4096), &options),
        Err(FormatError::TooSmall { .. })
    ));
}

#[test]
fn a_quota_that_stands_for_none_is_none() {
    let (mut disk, mut volumes) = store(4 * MIB, 1024);
    let new = NewVolume { name: "v".to_owned(), blocks: 10, quota_blocks: Some(u64::MAX) };
    let id = volumes.create(&new, 1).unwrap();
    assert_eq!(volumes.get(id).unwrap().quota_blocks, None);
    commit(&mut volumes, &mut disk);
    clean(&volumes, &mut disk);
}
