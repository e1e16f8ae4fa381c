//! Damaged and hostile disks: never a panic, never a wrong mapping.

use std::collections::BTreeMap;

use crate::geometry::checksum;
use crate::limits::NODE_BYTES;
use crate::node::{Body, Child, Entry, Kind, Node, Pointer, Root};
use crate::superblock::{Superblock, slot_offset_bytes, slots_of};
use crate::testing::{MemoryDisk, clean, commit, mapping, random, range, store, volume, write};
use crate::{Disk, OpenError, OpenOptions, Place, VolumeError, VolumeId, VolumeState, Volumes};

const MIB: u64 = 1 << 20;

pub(super) type Truth = BTreeMap<VolumeId, (String, Vec<(u64, u64, u64, bool)>)>;

pub(super) fn truth(volumes: &mut Volumes, disk: &mut MemoryDisk) -> Truth {
    let ids: Vec<(VolumeId, String)> =
        volumes.list().map(|info| (info.id, info.name.clone())).collect();
    ids.into_iter().map(|(id, name)| (id, (name, mapping(volumes, disk, id)))).collect()
}

/// A few volumes, snapshots of them, trees of one and two levels.
pub(super) fn small_store() -> (MemoryDisk, Volumes) {
    let (mut disk, mut volumes) = store(2 * MIB, 1024);
    let (a, b) = (volume(&mut volumes, "a", 1000), volume(&mut volumes, "b", 1000));
    volume(&mut volumes, "empty", 7);
    for index in 0..180 {
        write(&mut volumes, &mut disk, a, index * 2, 1).unwrap();
    }
    write(&mut volumes, &mut disk, b, 5, 300).unwrap();
    commit(&mut volumes, &mut disk);
    volumes.snapshot(&mut disk, a, "a-1", 1).unwrap();
    volumes.clone_volume(&mut disk, b, "b-2", 1).unwrap();
    write(&mut volumes, &mut disk, a, 20, 30).unwrap();
    volumes.unmap(&mut disk, b, range(50, 5)).unwrap();
    commit(&mut volumes, &mut disk);
    clean(&volumes, &mut disk);
    (disk, volumes)
}

/// The addresses of all live nodes, in bytes.
pub(super) fn node_offsets(volumes: &Volumes, disk: &mut MemoryDisk) -> Vec<u64> {
    let mut source = crate::open::FromDisk { disk, geometry: volumes.superblock.geometry() };
    let mut walk =
        crate::walk::Walk::new(volumes.superblock.geometry(), volumes.generation, &mut source);
    let _ = walk.catalogue(volumes.catalogue.root);
    for record in std::mem::take(&mut walk.records) {
        let _ = walk.volume(&record);
    }
    let mut offsets: Vec<u64> = walk.seen.keys().map(|address| address * 1024).collect();
    offsets.sort_unstable();
    offsets
}

/// Opens a damaged disk: whatever it serves has to be right.
fn check_against(disk: &mut MemoryDisk, truth: &Truth, generation: u64, what: &str) {
    let mut volumes = match Volumes::open(disk) {
        Ok(volumes) => volumes,
        Err(error) => panic!("{what}: one flipped bit is survived: {error}"),
    };
    assert_eq!(volumes.generation(), generation, "{what}: no silent way back");
    let served: Vec<VolumeId> = volumes.list().map(|info| info.id).collect();
    for id in truth.keys() {
        assert!(
            served.contains(id) || volumes.read_only().is_some(),
            "{what}: volume {id} is lost"
        );
    }
    for id in served {
        let info = volumes.get(id).unwrap().clone();
        let (name, wanted) = &truth[&id];
        assert_eq!(info.name, *name, "{what}");
        match volumes.map(disk, id, range(0, info.blocks), usize::MAX - 1) {
            Ok(mapped) => {
                let flat =
                    |(first, count, physical, _): (u64, u64, u64, bool)| (first, count, physical);
                let found = mapped
                    .extents
                    .iter()
                    .map(|extent| (extent.first.0, extent.count, extent.physical.0));
                // In a damaged store sharing is not always known: then a block counts as shared.
                // Other blocks are written in place.
                let shared: Vec<_> = wanted.iter().filter(|(.., shared)| *shared).collect();
                for own in mapped.extents.iter().filter(|extent| !extent.shared) {
                    let (first, end) = (own.first.0, own.first.0 + own.count);
                    let not = shared
                        .iter()
                        .all(|(start, count, ..)| *start >= end || start + count <= first);
                    assert!(not, "{what}: volume {id}: {own:?} is shared");
                }
                assert_eq!(
                    merged(found.collect()),
                    merged(wanted.iter().copied().map(flat).collect()),
                    "{what}: volume {id}"
                );
            }
            Err(error) => {
                assert!(matches!(error, VolumeError::Damaged { .. }), "{what}: {error}");
                assert!(
                    info.state == VolumeState::Damaged && volumes.read_only().is_some(),
                    "{what}"
                );
            }
        }
    }
    if volumes.read_only().is_some() {
        assert!(!volumes.damage().is_empty(), "{what}");
    }
}

pub(super) fn merged(extents: Vec<(u64, u64, u64)>) -> Vec<(u64, u64, u64)> {
    let mut merged: Vec<(u64, u64, u64)> = Vec::new();
    for (first, count, physical) in extents {
        match merged.last_mut() {
            Some(last) if last.0 + last.1 == first && last.2 + last.1 == physical => {
                last.1 += count
            }
            _ => merged.push((first, count, physical)),
        }
    }
    merged
}

#[test]
fn no_flipped_bit_of_the_metadata_leads_to_a_wrong_mapping() {
    let (mut disk, mut volumes) = small_store();
    let truth = truth(&mut volumes, &mut disk);
    let generation = volumes.generation();
    let nodes = node_offsets(&volumes, &mut disk);
    assert!(nodes.len() >= 8, "{nodes:?}");
    let slots: Vec<u64> = (0..4).map(slot_offset_bytes).collect();
    for offset in slots.iter().chain(&nodes) {
        let mut intact = vec![0; 4096];
        disk.read(*offset, &mut intact).unwrap();
        for at in 0..4096 {
            // Every bit takes minutes without optimisation. Then it is one of each of the first
            // bytes, and a few more; that the checksum covers all of them is tested in
            // superblock.rs and below.
            let all = !cfg!(debug_assertions);
            let some = at < 96 && at % 3 == 0 || at % 64 == 5 || at > 4086;
            for bit in (0..8).filter(|bit| all || some && *bit == at / 3 % 8) {
                let bit = (offset + at) * 8 + bit;
                disk.flip(bit);
                check_against(
                    &mut disk,
                    &truth,
                    generation,
                    &format!("bit {bit}, byte {at} at {offset}"),
                );
                // A superblock may be whole again, a node never is.
                disk.write(*offset, &intact).unwrap();
            }
        }
    }
}

#[test]
fn every_bit_of_a_node_is_covered() {
    let (mut disk, volumes) = small_store();
    let root = volumes.catalogue.root.unwrap();
    let geometry = volumes.superblock.geometry();
    let mut bytes = vec![0; 4096];
    disk.read(geometry.offset_bytes(root.pointer.address), &mut bytes).unwrap();
    assert_eq!(checksum(&bytes), root.pointer.checksum);
    for bit in 0..4096 * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(checksum(&bytes), root.pointer.checksum, "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn a_superblock_pair_that_is_half_written_is_no_fault() {
    let (mut disk, mut volumes) = small_store();
    let a = volumes.find("a").unwrap().id;
    let mut old = vec![0; NODE_BYTES];
    for (round, name) in ["y", "z"].into_iter().enumerate() {
        // The slot as it was two generations ago: the kill came before it was written again.
        let [_, second] = slots_of(volumes.generation() + 1);
        disk.read(slot_offset_bytes(second), &mut old).unwrap();
        volumes.rename(a, name).unwrap();
        commit(&mut volumes, &mut disk);
        disk.write(slot_offset_bytes(second), &old).unwrap();

        // As the offline check looks, which repairs nothing.
        let looks = OpenOptions { read_only: true, ..OpenOptions::default() };
        let looked = Volumes::open_with(&mut disk, &looks).unwrap();
        assert_eq!(
            (looked.damage(), looked.generation()),
            (&[][..], volumes.generation()),
            "round {round}"
        );
        clean(&looked, &mut disk);
        // A writer repairs the copy first.
        let opened = Volumes::open(&mut disk).unwrap();
        assert_eq!((opened.damage(), opened.read_only()), (&[][..], None));
        let mut now = vec![0; NODE_BYTES];
        disk.read(slot_offset_bytes(second), &mut now).unwrap();
        assert_ne!(now, old);
    }
    // An older one was lost: no kill leaves it behind.
    let [_, second] = slots_of(volumes.generation());
    volumes.rename(a, "x").unwrap();
    commit(&mut volumes, &mut disk);
    disk.read(slot_offset_bytes(second), &mut old).unwrap();
    for name in ["w", "v", "u"] {
        volumes.rename(a, name).unwrap();
        commit(&mut volumes, &mut disk);
    }
    disk.write(slot_offset_bytes(second), &old).unwrap();
    assert_eq!(Volumes::open(&mut disk).unwrap().damage()[0].place, Place::Superblock(second));
}

#[test]
fn a_damaged_copy_of_the_superblock_is_noted_and_repaired() {
    let (mut disk, mut volumes) = small_store();
    let before = truth(&mut volumes, &mut disk);
    let [first, second] = slots_of(volumes.generation());
    disk.flip(slot_offset_bytes(second) * 8 + 300);
    let mut volumes = Volumes::open(&mut disk).unwrap();
    assert_eq!(
        volumes.damage().iter().map(|damage| damage.place).collect::<Vec<_>>(),
        [Place::Superblock(second)]
    );
    assert_eq!(volumes.read_only(), None);
    assert_eq!(truth(&mut volumes, &mut disk), before);
    // The copy is whole again already.
    let mut volumes = Volumes::open(&mut disk).unwrap();
    assert_eq!(volumes.damage(), []);
    clean(&volumes, &mut disk);
    let a = volumes.find("a").unwrap().id;
    volumes.rename(a, "z").unwrap();
    commit(&mut volumes, &mut disk);

    // Both copies: that is what a torn commit looks like.
    let [third, fourth] = slots_of(volumes.generation());
    assert_ne!(first, third);
    disk.flip(slot_offset_bytes(third) * 8 + 300);
    disk.flip(slot_offset_bytes(fourth) * 8 + 300);
    let mut older = Volumes::open(&mut disk).unwrap();
    assert_eq!(older.generation() + 1, volumes.generation());
    assert_eq!(truth(&mut older, &mut disk), before);
    // All four.
    disk.flip(slot_offset_bytes(first) * 8 + 300);
    disk.flip(slot_offset_bytes(second) * 8 + 300);
    let error = Volumes::open(&mut disk).unwrap_err();
    assert!(matches!(&error, OpenError::NoSuperblock(damage) if damage.len() == 4), "{error}");
}

#[test]
fn a_damaged_node_takes_only_the_volumes_with_it() {
    let (mut disk, volumes) = small_store();
    let a = volumes.find("a").unwrap().id;
    let root = volumes.volumes[&a].tree.root.unwrap();
    disk.xor(root.pointer.address * 1024 + 100, 4);
    let mut volumes = Volumes::open(&mut disk).unwrap();
    let damaged: Vec<&str> = volumes
        .list()
        .filter(|info| info.state == VolumeState::Damaged)
        .map(|info| info.name.as_str())
        .collect();
    assert_eq!(damaged, ["a"]);
    assert!(volumes.is_frozen() && volumes.read_only().unwrap().contains("checksum"));
    assert_eq!(volumes.damage()[0].place, Place::Node(root.pointer.address));
    let map = volumes.map(&mut disk, a, range(0, 1), 1);
    assert!(matches!(
        map, Err(VolumeError::Damaged { id, what }) if id == a && what.contains("checksum")
    ));
    let b = volumes.find("b").unwrap().id;
    assert_eq!(mapping(&mut volumes, &mut disk, b).len(), 2);
    assert!(matches!(volumes.delete(&mut disk, b), Err(VolumeError::StoreDamaged(_))));
    assert!(matches!(volumes.unmap(&mut disk, b, range(0, 50)), Err(VolumeError::StoreDamaged(_))));
    assert!(volumes.begin_commit().is_none());
    assert!(!volumes.check(&mut disk).is_clean());
}

#[test]
fn damage_that_comes_later_is_found_when_the_node_is_read() {
    let (mut disk, _) = small_store();
    let mut volumes =
        Volumes::open_with(&mut disk, &OpenOptions { cache_nodes: 1, ..Default::default() })
            .unwrap();
    let (a, b) = (volumes.find("a").unwrap().id, volumes.find("b").unwrap().id);
    let root = volumes.volumes[&a].tree.root.unwrap();
    disk.xor(root.pointer.address * 1024 + 100, 4);
    assert!(matches!(volumes.map(&mut disk, a, range(0, 9), 9), Err(VolumeError::Damaged { .. })));
    assert_eq!(volumes.get(a).unwrap().state, VolumeState::Damaged);
    assert!(matches!(
        volumes.allocate(&mut disk, b, range(0, 9)),
        Err(VolumeError::StoreDamaged(_))
    ));
    volumes.map(&mut disk, b, range(0, 9), 9).unwrap();
}

#[test]
fn a_store_opened_read_only_is_not_written() {
    let (mut disk, _) = small_store();
    let (writes, flushes) = (disk.writes, disk.flushes);
    let mut volumes =
        Volumes::open_with(&mut disk, &OpenOptions { read_only: true, ..OpenOptions::default() })
            .unwrap();
    let b = volumes.find("b").unwrap().id;
    mapping(&mut volumes, &mut disk, b);
    assert!(matches!(volumes.delete(&mut disk, b), Err(VolumeError::StoreReadOnly(_))));
    volumes.commit_now(&mut disk).unwrap();
    assert_eq!((disk.writes, disk.flushes), (writes, flushes));
}

/// Puts a node on the disk, checksum and all, and returns the pointer to it.
pub(super) fn forge(
    disk: &mut MemoryDisk,
    volumes: &Volumes,
    address: u64,
    level: u8,
    body: Body,
) -> Pointer {
    let node = Node { kind: Kind::Extents, owner: 1, generation: 1, level, body };
    let bytes = node.encode(address, &volumes.superblock.geometry());
    disk.write(address * 1024, &bytes).unwrap();
    Pointer { address, checksum: checksum(&bytes) }
}

/// Opens the store with volume "a" made to have this tree.
pub(super) fn with_tree(
    disk: &mut MemoryDisk,
    volumes: &Volumes,
    root: Root,
    extents: u64,
    blocks: u64,
) -> Volumes {
    let generation = volumes.generation();
    let mut volumes = Volumes::open(disk).unwrap();
    assert_eq!(volumes.generation(), generation);
    let id = volumes.find("a").unwrap().id;
    volumes.set_quota(id, Some(5)).unwrap();
    let entry = volumes.volumes.get_mut(&id).unwrap();
    entry.tree.root = Some(root);
    (entry.info.extents, entry.info.allocated_blocks) = (extents, blocks);
    let commit = volumes.begin_commit().unwrap();
    commit.write(disk).unwrap();
    Volumes::open(disk).unwrap()
}

#[test]
fn trees_with_right_checksums_and_wrong_contents_are_damage() {
    let entry = |first, count, physical| Entry { first, count, physical };
    let leaf = |entries: &[Entry]| Body::Extents(entries.to_vec());
    let at = 1900;
    let bad_leaves = [
        ("outside", leaf(&[entry(0, 1, 2048)])),
        ("outside", leaf(&[entry(0, u64::MAX, 100)])),
        ("outside", leaf(&[entry(0, 1, 15)])),
        ("maps 0 blocks", leaf(&[entry(0, 0, 100)])),
        ("virtual block", leaf(&[entry(u64::MAX, 2, 100)])),
        ("order", leaf(&[entry(5, 2, 100), entry(6, 1, 110)])),
        ("order", leaf(&[entry(5, 2, 100), entry(1, 1, 110)])),
        ("blocks up to 1001", leaf(&[entry(1000, 1, 100)])),
        ("says that there is data", leaf(&[entry(0, 4, at)])),
    ];
    for (what, body) in bad_leaves {
        let (mut disk, volumes) = small_store();
        let pointer = forge(&mut disk, &volumes, at, 0, body);
        let volumes = with_tree(&mut disk, &volumes, Root { pointer, level: 0 }, 1, 1);
        let damage =
            volumes.damage().iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        assert!(damage.contains(what), "{what}: {damage}");
        assert_eq!(volumes.find("a").unwrap().state, VolumeState::Damaged, "{what}");
    }
    // Counts that are wrong.
    let (mut disk, volumes) = small_store();
    let pointer = forge(&mut disk, &volumes, at, 0, leaf(&[entry(0, 4, 100)]));
    let volumes = with_tree(&mut disk, &volumes, Root { pointer, level: 0 }, 1, 5);
    assert!(volumes.damage()[0].what.contains("not 1 of 5"), "{:?}", volumes.damage());
}

#[test]
fn inner_nodes_that_go_in_circles_or_overlap_are_damage() {
    let entry = |first, count| Body::Extents(vec![Entry { first, count, physical: 100 }]);
    let inner = |at_0, at_9| {
        Body::Inner(vec![Child { key: 0, pointer: at_0 }, Child { key: 9, pointer: at_9 }])
    };
    type Forgery<'a> = &'a dyn Fn(&mut MemoryDisk, &Volumes) -> Pointer;
    let wrong: [(&str, Forgery<'_>); 6] = [
        ("kind 2 and level 1", &|disk, volumes| {
            // A node that is its own child.
            let child = Child { key: 0, pointer: Pointer { address: 1900, checksum: 1 } };
            let pointer = forge(disk, volumes, 1900, 1, Body::Inner(vec![child]));
            forge(disk, volumes, 1904, 2, inner(pointer, pointer));
            forge(disk, volumes, 1908, 1, Body::Inner(vec![Child { key: 0, pointer }]))
        }),
        ("two pointers", &|disk, volumes| {
            let pointer = forge(disk, volumes, 1900, 0, entry(0, 1));
            let other = Pointer { checksum: 5, ..pointer };
            forge(disk, volumes, 1904, 1, inner(pointer, other))
        }),
        ("begins at 0, not 9", &|disk, volumes| {
            let pointer = forge(disk, volumes, 1900, 0, entry(0, 1));
            forge(disk, volumes, 1904, 1, inner(pointer, pointer))
        }),
        ("overlaps", &|disk, volumes| {
            let first = forge(disk, volumes, 1900, 0, entry(0, 10));
            let second = forge(disk, volumes, 1912, 0, entry(9, 1));
            forge(disk, volumes, 1904, 1, inner(first, second))
        }),
        ("where none can be", &|disk, volumes| {
            let pointer = Pointer { address: 1901, checksum: 1 };
            forge(disk, volumes, 1904, 1, Body::Inner(vec![Child { key: 0, pointer }]))
        }),
        ("belongs at block 1900", &|disk, volumes| {
            let pointer = forge(disk, volumes, 1900, 0, entry(0, 10));
            let mut bytes = vec![0; 4096];
            disk.read(1900 * 1024, &mut bytes).unwrap();
            disk.write(1912 * 1024, &bytes).unwrap();
            let moved = Pointer { address: 1912, ..pointer };
            forge(disk, volumes, 1904, 1, Body::Inner(vec![Child { key: 0, pointer: moved }]))
        }),
    ];
    for (what, tree) in wrong {
        let (mut disk, volumes) = small_store();
        let pointer = tree(&mut disk, &volumes);
        let volumes = with_tree(&mut disk, &volumes, Root { pointer, level: 1 }, 1, 1);
        let damage =
            volumes.damage().iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        assert!(damage.contains(what), "{what}: {damage}");
        assert_eq!(volumes.find("a").unwrap().state, VolumeState::Damaged, "{what}");
        assert!(volumes.read_only().is_some());
    }
}

#[test]
fn superblocks_that_cannot_be_are_refused() {
    let (disk, volumes) = small_store();
    let put = |change: &dyn Fn(&mut Superblock, u32)| {
        let mut disk = disk.clone();
        for slot in slots_of(volumes.generation()) {
            let mut superblock = volumes.superblock.clone();
            change(&mut superblock, slot);
            disk.write(slot_offset_bytes(slot), &superblock.encode(slot)).unwrap();
        }
        Volumes::open(&mut disk)
    };
    assert!(matches!(
        put(&|superblock, _| superblock.features = 2),
        Err(OpenError::UnknownFeatures(2))
    ));
    let written = put(&|superblock, _| superblock.features_to_write = 2).unwrap();
    assert!(written.read_only().unwrap().contains("features"));
    assert!(matches!(
        put(&|superblock, _| superblock.total_blocks = 1 << 30),
        Err(OpenError::Shrunk { .. })
    ));
    assert!(matches!(
        put(&|superblock, slot| superblock.next_volume += u64::from(slot)),
        Err(OpenError::Invalid(_))
    ));
    let fewer = put(&|superblock, _| superblock.volume_count -= 1).unwrap();
    assert!(fewer.read_only().is_some() && fewer.damage()[0].place == Place::Store);
    // Whole, and impossible: that is no torn commit, and there is no way back.
    assert!(matches!(put(&|superblock, _| superblock.next_volume = 2), Err(OpenError::Invalid(_))));
    // After these numbers there would be no next one.
    for number in [1 << 63, u64::MAX - 1, u64::MAX] {
        assert!(matches!(
            put(&|superblock, _| superblock.next_volume = number),
            Err(OpenError::Invalid(_))
        ));
        let mut disk = disk.clone();
        for slot in 0..4 {
            let late = Superblock { generation: number, ..volumes.superblock.clone() };
            disk.write(slot_offset_bytes(slot), &late.encode(slot)).unwrap();
        }
        assert!(matches!(Volumes::open(&mut disk), Err(OpenError::Invalid(_))));
    }
    let reused =
        put(&|superblock, _| (superblock.next_volume, superblock.volume_count) = (5, 4)).unwrap();
    assert!(reused.read_only().is_some());
}

#[test]
fn arbitrary_bytes_never_panic() {
    let (disk, volumes) = small_store();
    let geometry = volumes.superblock.geometry();
    let mut bytes = vec![0; 2 << 20];
    disk.clone().read(0, &mut bytes).unwrap();
    let interesting: Vec<usize> = (0..16384)
        .chain(
            (0..volumes.blocks()).rev().take(60).map(|block| geometry.offset_bytes(block) as usize),
        )
        .collect();
    for seed in 0..300 {
        let mut random = random(seed);
        let mut bytes = bytes.clone();
        for _ in 0..1 + random() % 20 {
            let at = interesting[(random() % interesting.len() as u64) as usize]
                + (random() % 512) as usize;
            let at = at.min(bytes.len() - 1);
            bytes[at] = random() as u8;
        }
        if seed % 50 == 0 {
            bytes.iter_mut().for_each(|byte| *byte = random() as u8);
        }
        let mut disk = MemoryDisk::of_bytes(&bytes);
        if let Ok(volumes) = Volumes::open(&mut disk) {
            volumes.check(&mut disk);
        }
    }
}
