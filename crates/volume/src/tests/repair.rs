//! Damage of every kind, the service in spite of it, and repair.

use super::flips::{Truth, forge, merged, node_offsets, small_store, truth, with_tree};
use crate::node::{Body, Entry, Root};
use crate::superblock::slot_offset_bytes;
use crate::testing::{MemoryDisk, clean, commit, mapping, random, range, store, volume, write};
use crate::{
    Loss, OpenError, RepairError, VolumeError, VolumeId, VolumeState, Volumes, plan_repair,
};

const MIB: u64 = 1 << 20;

/// A catalogue of two levels, trees of two levels, snapshots that share inner nodes, and volumes
/// that share nothing.
fn large_store() -> (MemoryDisk, Volumes) {
    let (mut disk, mut volumes) = store(4 * MIB, 1024);
    let (a, b) = (volume(&mut volumes, "a", 1000), volume(&mut volumes, "b", 1000));
    for index in 0..400 {
        write(&mut volumes, &mut disk, a, index * 2, 1).unwrap();
    }
    write(&mut volumes, &mut disk, b, 5, 300).unwrap();
    for index in 0..24 {
        let id = volume(&mut volumes, &format!("v{index}"), 100);
        write(&mut volumes, &mut disk, id, index, 2).unwrap();
    }
    commit(&mut volumes, &mut disk);
    volumes.snapshot(&mut disk, a, "a-1", 1).unwrap();
    let clone = volumes.clone_volume(&mut disk, b, "b-2", 1).unwrap();
    write(&mut volumes, &mut disk, a, 20, 30).unwrap();
    write(&mut volumes, &mut disk, clone, 500, 10).unwrap();
    volumes.unmap(&mut disk, b, range(50, 5)).unwrap();
    commit(&mut volumes, &mut disk);
    clean(&volumes, &mut disk);
    assert!(
        volumes.catalogue.root.unwrap().level == 1
            && volumes.volumes[&a].tree.root.unwrap().level == 1
    );
    (disk, volumes)
}

/// The mappings without these virtual blocks, block by block.
fn without(mapping: &[(u64, u64, u64, bool)], lost: &[(u64, u64)]) -> Vec<(u64, u64, u64)> {
    let blocks = mapping.iter().flat_map(|(first, count, physical, _)| {
        (0..*count).map(move |index| (first + index, 1, physical + index))
    });
    let kept = blocks.filter(|(block, ..)| {
        !lost.iter().any(|(first, count)| (*first..first + count).contains(block))
    });
    merged(kept.collect())
}

/// Repairs, and compares the result with the contents before, without the parts reported as lost.
/// Returns the size of the loss: (volumes, parts).
fn repair(disk: &mut MemoryDisk, truth: &Truth, what: &str) -> (u64, usize) {
    let repair = plan_repair(disk, &[]).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(repair.is_needed() && repair.is_decided(), "{what}");
    let losses = repair.losses.clone();
    let generation = repair.write(disk).unwrap();
    let mut volumes = Volumes::open(disk).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(
        (volumes.damage(), volumes.read_only(), volumes.generation()),
        (&[][..], None, generation),
        "{what}"
    );
    clean(&volumes, disk);
    assert!(!plan_repair(disk, &[]).unwrap().is_needed(), "{what}");
    let mut missing = 0;
    let mut parts = 0;
    for (id, (name, wanted)) in truth {
        let lost: Vec<(u64, u64)> = losses
            .iter()
            .filter_map(|loss| match loss {
                Loss::Blocks { volume, first, count, .. } if volume == id => Some((*first, *count)),
                _ => None,
            })
            .collect();
        parts += lost.len();
        if volumes.get(*id).is_none() {
            missing += 1;
            let said = losses.iter().any(|loss| {
                matches!(loss, Loss::Volumes { numbers, .. }
                    if numbers.iter().any(|(first, count)| (*first..first + count).contains(&id.0)))
            });
            assert!(said, "{what}: volume {name} is lost without a word: {losses:?}");
            continue;
        }
        assert_eq!(volumes.get(*id).unwrap().name, *name);
        assert_eq!(
            without(&mapping(&mut volumes, disk, *id), &[]),
            without(wanted, &lost),
            "{what}: {name}"
        );
    }
    let said: u64 = losses
        .iter()
        .map(|loss| if let Loss::Volumes { count, .. } = loss { *count } else { 0 })
        .sum();
    assert_eq!(said, missing, "{what}");
    // It can be used again.
    let id = volume(&mut volumes, "new", 1000);
    write(&mut volumes, disk, id, 0, 200).unwrap();
    commit(&mut volumes, disk);
    clean(&volumes, disk);
    (missing, parts)
}

#[test]
fn every_kind_of_block_can_be_damaged_and_repaired() {
    let (intact, mut volumes) = large_store();
    let mut disk = intact.clone();
    let truth = truth(&mut volumes, &mut disk);
    let nodes = node_offsets(&volumes, &mut disk);
    assert!(nodes.len() > 30, "{}", nodes.len());
    let mut worst = (0, 0);
    let (mut of_volumes, mut of_parts) = (0, 0);
    for offset in &nodes {
        let mut disk = intact.clone();
        disk.xor(offset + 100, 1);
        let opened = Volumes::open(&mut disk).unwrap();
        assert!(opened.is_frozen());
        let named = opened.list().filter(|info| info.state == VolumeState::Damaged).count();
        drop(opened);
        let lost = repair(&mut disk, &truth, &format!("node at {offset}"));
        // Each volume listed as damaged has lost data, and no other has.
        assert_eq!(named > 0, lost.1 > 0, "node at {offset}: {lost:?}");
        of_volumes += u64::from(lost.0 > 0);
        of_parts += u64::from(lost.1 > 0);
        worst = worst.max(lost);
    }
    // The catalogue's root and its two leaves; all others are volumes'.
    assert_eq!((worst.0, of_volumes), (28, 3));
    assert_eq!(of_parts, nodes.len() as u64 - 3);
    // Superblocks: one at a time nothing is lost.
    for slot in 0..4 {
        let mut disk = intact.clone();
        disk.xor(slot_offset_bytes(slot) + 100, 1);
        let newest = crate::superblock::slots_of(volumes.generation()).contains(&slot);
        if newest {
            assert_eq!(repair(&mut disk, &truth, &format!("slot {slot}")), (0, 0));
        } else {
            assert!(!plan_repair(&mut disk, &[]).unwrap().is_needed());
        }
    }
    let mut disk = intact.clone();
    (0..4).for_each(|slot| disk.xor(slot_offset_bytes(slot) + 100, 1));
    let refused = plan_repair(&mut disk, &[]).unwrap_err();
    assert!(matches!(refused, RepairError::Open(OpenError::NoSuperblock(_))), "{refused}");
}

#[test]
fn several_damaged_nodes_are_repaired_together() {
    let (intact, mut volumes) = large_store();
    let mut disk = intact.clone();
    let truth = truth(&mut volumes, &mut disk);
    let nodes = node_offsets(&volumes, &mut disk);
    for seed in 0..60 {
        let mut random = random(seed);
        let mut disk = intact.clone();
        for _ in 0..2 + random() % 4 {
            let offset = nodes[(random() % nodes.len() as u64) as usize];
            disk.xor(offset + random() % 4096, 1 + (random() % 255) as u8);
        }
        if plan_repair(&mut disk, &[]).unwrap().is_needed() {
            repair(&mut disk, &truth, &format!("seed {seed}"));
        }
    }
}

#[test]
fn a_plan_writes_nothing_and_a_repair_that_is_cut_off_can_be_done_again() {
    let (mut disk, mut volumes) = large_store();
    let truth = truth(&mut volumes, &mut disk);
    let a = volumes.volumes[&volumes.find("a").unwrap().id].tree.root.unwrap();
    disk.xor(a.pointer.address * 1024 + 9, 255);
    let (writes, flushes) = (disk.writes, disk.flushes);
    let steps = {
        let mut disk = disk.clone();
        let plan = plan_repair(&mut disk, &[]).unwrap();
        assert_eq!((disk.writes, disk.flushes), (writes, flushes));
        plan.write(&mut disk).unwrap();
        disk.writes + disk.flushes - writes - flushes
    };
    for seed in 0..(steps as u64) * 8 {
        let mut random = random(seed);
        let mut disk = disk.clone();
        disk.fail_after = Some((seed / 8) as usize);
        assert!(plan_repair(&mut disk, &[]).unwrap().write(&mut disk).is_err());
        disk.cut(&mut random);
        let opened = Volumes::open(&mut disk).unwrap();
        if opened.is_frozen() {
            repair(&mut disk, &truth, &format!("seed {seed}"));
        } else {
            clean(&opened, &mut disk);
        }
    }
}

#[test]
fn a_healthy_store_needs_no_repair() {
    let (mut disk, volumes) = large_store();
    let (writes, generation) = (disk.writes, volumes.generation());
    let plan = plan_repair(&mut disk, &[]).unwrap();
    assert!(!plan.is_needed() && plan.is_decided() && plan.losses.is_empty());
    assert_eq!(plan.write(&mut disk).unwrap(), generation);
    assert_eq!(disk.writes, writes);
}

#[test]
fn beside_a_damaged_volume_only_what_is_proved_unshared_is_written_in_place() {
    let (mut disk, mut volumes) = large_store();
    let a = volumes.find("a").unwrap().id;
    // The last leaf of "a", which its snapshot shares.
    let root = volumes.volumes[&a].tree.root.unwrap();
    let node =
        volumes.forest.nodes.get(&mut disk, root.pointer, crate::node::Kind::Extents, 1).unwrap();
    let last = *node.body.children().last().unwrap();
    disk.xor(last.pointer.address * 1024 + 70, 1);
    let mut volumes = Volumes::open(&mut disk).unwrap();
    let state = |volumes: &Volumes, name: &str| volumes.find(name).unwrap().state;
    assert_eq!(
        (state(&volumes, "a"), state(&volumes, "a-1")),
        (VolumeState::Damaged, VolumeState::Damaged)
    );
    for index in 0..24 {
        let id = volumes.find(&format!("v{index}")).unwrap().id;
        assert!(volumes.takes_writes(id));
        assert!(mapping(&mut volumes, &mut disk, id).iter().all(|(.., shared)| !shared));
    }
    let b = volumes.find("b-2").unwrap().id;
    let own: Vec<_> =
        mapping(&mut volumes, &mut disk, b).into_iter().filter(|(.., shared)| !shared).collect();
    // Where its origin has unmapped blocks, and where it has written.
    let own: Vec<(u64, u64)> = own.iter().map(|(first, count, ..)| (*first, *count)).collect();
    assert_eq!(own, [(50, 5), (500, 10)]);
    // Fresh blocks, and holes, there are none.
    let refused = volumes.allocate(&mut disk, b, range(900, 1)).unwrap_err();
    assert!(
        matches!(&refused, VolumeError::StoreDamaged(why) if why.contains("checksum")),
        "{refused}"
    );
    assert!(refused.to_string().contains("volume repair"), "{refused}");
    assert!(matches!(volumes.unmap(&mut disk, b, range(0, 9)), Err(VolumeError::StoreDamaged(_))));
    assert!(
        volumes.snapshot(&mut disk, b, "s", 1).is_err() && volumes.delete(&mut disk, b).is_err()
    );
    assert!(!volumes.needs_commit() && volumes.cannot_commit().is_none());
}

#[test]
fn a_relative_is_in_doubt_where_the_damage_is_and_everybody_after_deduplication() {
    let (mut disk, mut volumes) = store(4 * MIB, 1024);
    let (a, b) = (volume(&mut volumes, "a", 2000), volume(&mut volumes, "b", 2000));
    for index in 0..400 {
        write(&mut volumes, &mut disk, a, index * 2, 1).unwrap();
    }
    write(&mut volumes, &mut disk, b, 0, 50).unwrap();
    commit(&mut volumes, &mut disk);
    let copy = volumes.clone_volume(&mut disk, a, "copy", 1).unwrap();
    write(&mut volumes, &mut disk, copy, 0, 1000).unwrap();
    commit(&mut volumes, &mut disk);
    let before = disk.clone();
    // The clone has rewritten everything: nothing is shared any more. Its origin's last leaf begins
    // at key `from`.
    let root = volumes.volumes[&a].tree.root.unwrap();
    let node =
        volumes.forest.nodes.get(&mut disk, root.pointer, crate::node::Kind::Extents, 1).unwrap();
    let last = *node.body.children().last().unwrap();
    disk.xor(last.pointer.address * 1024 + 70, 1);
    let mut opened = Volumes::open(&mut disk).unwrap();
    let shared = |opened: &mut Volumes, disk: &mut MemoryDisk, id: VolumeId| -> Vec<(u64, u64)> {
        let all = mapping(opened, disk, id).into_iter().filter(|(.., shared)| *shared);
        merged(all.map(|(first, count, ..)| (first, count, first)).collect())
            .iter()
            .map(|e| (e.0, e.1))
            .collect()
    };
    assert_eq!(shared(&mut opened, &mut disk, copy), [(last.key, 1000 - last.key)]);
    assert_eq!(shared(&mut opened, &mut disk, b), []);
    assert!(opened.takes_writes(copy) && opened.takes_writes(b) && !opened.takes_writes(a));

    // Once blocks were shared by what they hold, a block may be anywhere.
    let mut disk = before;
    let mut volumes = Volumes::open(&mut disk).unwrap();
    volumes.share(&mut disk, (b, range(0, 1)), (b, sidecore_units::Vlba(60))).unwrap();
    commit(&mut volumes, &mut disk);
    disk.xor(last.pointer.address * 1024 + 70, 1);
    let mut opened = Volumes::open(&mut disk).unwrap();
    assert_eq!(shared(&mut opened, &mut disk, b), [(0, 50), (60, 1)]);
    assert!(!opened.takes_writes(b));
}

#[test]
fn two_volumes_that_claim_one_block_are_named_and_the_caller_says_which_loses_it() {
    let (mut disk, mut volumes) = small_store();
    let before = truth(&mut volumes, &mut disk);
    let b = volumes.find("b").unwrap().id;
    let of_b = mapping(&mut volumes, &mut disk, b)[0];
    let root_of_b = volumes.volumes[&b].tree.root.unwrap().pointer.address;
    let entry = |first, count, physical| Entry { first, count, physical };
    // Data of both, and then data of the one where the other has a node.
    for (first, physical, count) in [(3, of_b.2 + 1, 2), (0, root_of_b, 4)] {
        let mut disk = disk.clone();
        let body = Body::Extents(vec![entry(first, count, physical), entry(500, 1, 1000)]);
        let pointer = forge(&mut disk, &volumes, 1900, 0, body);
        let opened = with_tree(&mut disk, &volumes, Root { pointer, level: 0 }, 2, count + 1);
        drop(opened);
        let plan = plan_repair(&mut disk, &[]).unwrap();
        assert!(plan.is_needed() && !plan.is_decided());
        let names: Vec<&str> =
            plan.rivals[0].volumes.iter().map(|(_, name)| name.as_str()).collect();
        assert!(names.contains(&"a") && names.contains(&"b"), "{names:?}");
        assert!(plan.write(&mut disk).is_err());
        let missing = plan_repair(&mut disk, &["missing".to_owned()]).unwrap_err();
        assert!(matches!(missing, RepairError::NoSuchVolume(_)));
        let innocent = plan_repair(&mut disk, &["empty".to_owned()]).unwrap_err();
        assert!(matches!(innocent, RepairError::NoRival(_)));

        let plan = plan_repair(&mut disk, &["a".to_owned()]).unwrap();
        assert!(plan.is_decided(), "{:?}", plan.rivals);
        assert!(
            plan.losses.iter().all(|loss| matches!(loss, Loss::Blocks { name, .. } if name == "a"))
        );
        assert_eq!(plan.losses.len(), 1);
        plan.write(&mut disk).unwrap();
        let mut repaired = Volumes::open(&mut disk).unwrap();
        clean(&repaired, &mut disk);
        let a = repaired.find("a").unwrap().id;
        assert_eq!(mapping(&mut repaired, &mut disk, a), [(500, 1, 1000, false)]);
        for (id, (name, wanted)) in before.iter().filter(|(_, (name, _))| name != "a") {
            let found = mapping(&mut repaired, &mut disk, *id);
            assert_eq!(without(&found, &[]), without(wanted, &[]), "{name}");
        }
        assert!(!plan_repair(&mut disk, &[]).unwrap().is_needed());
    }
}

#[test]
fn only_the_volumes_that_claim_a_nodes_block_are_refused() {
    let (mut disk, mut volumes) = small_store();
    volume(&mut volumes, "other", 10);
    commit(&mut volumes, &mut disk);
    let b = volumes.find("b").unwrap().id;
    let root_of_b = volumes.volumes[&b].tree.root.unwrap().pointer.address;
    let body = Body::Extents(vec![Entry { first: 0, count: 4, physical: root_of_b }]);
    let pointer = forge(&mut disk, &volumes, 1900, 0, body);
    let opened = with_tree(&mut disk, &volumes, Root { pointer, level: 0 }, 1, 4);
    let damaged: Vec<&str> = opened
        .list()
        .filter(|info| info.state == VolumeState::Damaged)
        .map(|info| info.name.as_str())
        .collect();
    assert_eq!(damaged, ["a", "b"]);
}

#[test]
fn damage_found_while_it_runs_freezes_the_store_and_what_was_done_before_is_kept() {
    let (mut disk, _) = large_store();
    let options = crate::OpenOptions { cache_nodes: 1, ..Default::default() };
    let mut volumes = Volumes::open_with(&mut disk, &options).unwrap();
    let (a, b) = (volumes.find("a").unwrap().id, volumes.find("b").unwrap().id);
    write(&mut volumes, &mut disk, b, 700, 3).unwrap();
    let root = volumes.volumes[&a].tree.root.unwrap();
    disk.xor(root.pointer.address * 1024 + 100, 4);
    assert!(matches!(volumes.map(&mut disk, a, range(0, 9), 9), Err(VolumeError::Damaged { .. })));
    assert!(volumes.is_frozen() && volumes.needs_commit() && volumes.is_dirty(b));
    assert!(matches!(write(&mut volumes, &mut disk, b, 800, 1), Err(VolumeError::StoreDamaged(_))));
    // Changes answered before become durable.
    commit(&mut volumes, &mut disk);
    assert!(!volumes.is_dirty(b));
    let mut opened = Volumes::open(&mut disk).unwrap();
    assert!(opened.is_frozen());
    assert!(
        mapping(&mut opened, &mut disk, b)
            .iter()
            .any(|(first, count, ..)| (*first, *count) == (700, 3))
    );
}
