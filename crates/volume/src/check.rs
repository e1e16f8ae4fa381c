//! Accounting for every block.

use std::collections::HashMap;
use std::sync::Arc;

use crate::disk::Disk;
use crate::error::Place;
use crate::geometry::Geometry;
use crate::info::VolumeState;
use crate::node::{Kind, Node, Pointer};
use crate::nodes::{Nodes, TreeError, read_node};
use crate::open::newest;
use crate::record::Record;
use crate::report::{Problem, Report};
use crate::volumes::Volumes;
use crate::walk::{Problems, Source, Walk};

/// Nodes as they will be after the next commit: those not written yet from memory, all others from
/// the disk, whatever is cached.
struct Current<'a> {
    disk: &'a mut dyn Disk,
    nodes: &'a Nodes,
    geometry: Geometry,
}

impl Source for Current<'_> {
    fn node(
        &mut self,
        pointer: Pointer,
        kind: Kind,
        level: u8,
    ) -> Result<(Arc<Node>, bool), TreeError> {
        if let Some(node) = self.nodes.unwritten(pointer.address) {
            if node.kind != kind || node.level != level {
                let what = "it is of another tree".to_owned();
                return Err(TreeError::Damaged { block: pointer.address, what });
            }
            return Ok((node, false));
        }
        let node = read_node(self.disk, &self.geometry, pointer, kind, level)?;
        Ok((Arc::new(node), true))
    }
}

/// The kind of a block, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    Superblock,
    Node,
    Data,
    Granted,
    Pending,
    Free,
}

impl Use {
    fn name(self) -> &'static str {
        match self {
            Self::Superblock => "superblocks",
            Self::Node => "a node",
            Self::Data => "data",
            Self::Granted => "granted",
            Self::Pending => "pending",
            Self::Free => "free",
        }
    }
}

pub(crate) fn check(volumes: &Volumes, disk: &mut dyn Disk) -> Report {
    let geometry = volumes.superblock.geometry();
    let mut problems = Problems::default();
    check_slots(volumes, disk, &mut problems);
    for damage in volumes.damage() {
        if !matches!(damage.place, Place::Superblock(_)) {
            problems.add(damage.place, format!("{} (noticed before)", damage.what));
        }
    }

    let mut source = Current { disk, nodes: &volumes.forest.nodes, geometry };
    let mut walk = Walk::new(geometry, volumes.forest.generation, &mut source);
    walk.problems = problems;
    walk.catalogue(volumes.catalogue.root);
    compare_records(volumes, &mut walk);
    for volume in
        volumes.volumes.values().filter(|volume| volume.info.state == VolumeState::Healthy)
    {
        let _ = walk.volume(&volume.record());
    }
    let _ = walk.conflicts();
    compare_references(volumes, &mut walk);
    let mut report = account(volumes, &mut walk);
    report.generation = volumes.generation;
    report.volumes = volumes.volumes.len() as u64;
    report.nodes = walk.seen.len() as u64;
    report.extents = walk.extents;
    report.total_blocks = geometry.total_blocks;
    report.data_references = walk.references;
    report.shared_data_blocks = walk.shared_data();
    let Problems { list, more } = walk.problems;
    report.problems =
        list.into_iter().map(|damage| Problem { place: damage.place, what: damage.what }).collect();
    report.more_problems = more;
    report
}

/// The disk's newest superblock has to be the one that memory has.
fn check_slots(volumes: &Volumes, disk: &mut dyn Disk, problems: &mut Problems) {
    if volumes.is_committing() {
        return;
    }
    match newest(disk) {
        Ok(newest) => {
            if newest.superblock.generation != volumes.generation && volumes.read_only.is_none() {
                let what = format!(
                    "the disk has generation {}, not {}",
                    newest.superblock.generation, volumes.generation
                );
                problems.add(Place::Store, what);
            }
            for damage in newest.damage {
                problems.add(damage.place, damage.what);
            }
        }
        Err(error) => problems.add(Place::Store, error.to_string()),
    }
}

/// The catalogue has to list the volumes that memory has.
fn compare_records(volumes: &Volumes, walk: &mut Walk<'_>) {
    let records: HashMap<u64, Record> =
        std::mem::take(&mut walk.records).into_iter().map(|record| (record.id, record)).collect();
    if records.len() != volumes.volumes.len() {
        let what =
            format!("the catalogue lists {} volumes, not {}", records.len(), volumes.volumes.len());
        walk.problems.add(Place::Store, what);
    }
    for (id, volume) in &volumes.volumes {
        let listed = records.get(&id.0);
        let same = listed.is_some_and(|record| *record == volume.record());
        // A touched volume's record is put in its place by the commit.
        if listed.is_none() || (!same && !volumes.touched.contains(id)) {
            walk.problems.add(Place::Volume(*id), "the catalogue says otherwise");
        }
    }
}

/// Counts of references, as found and as kept in memory.
fn compare_references(volumes: &Volumes, walk: &mut Walk<'_>) {
    let mut kept: HashMap<u64, u64> = volumes.forest.nodes.shared().collect();
    let mut wrong: Vec<(u64, u64, u64)> = Vec::new();
    for (address, seen) in &walk.seen {
        let kept = kept.remove(address).unwrap_or(1);
        if kept != seen.references {
            wrong.push((*address, seen.references, kept));
        }
    }
    wrong.extend(kept.into_iter().map(|(address, kept)| (address, 0, kept)));
    wrong.sort_unstable();
    for (address, found, kept) in wrong {
        walk.problems.add(
            Place::Node(address),
            format!("it has {found} references, and {kept} are counted"),
        );
    }
    // Both keep their ranges joined, so equal counts are equal ranges.
    if *volumes.forest.allocator.shares() != walk.shares {
        let mut ours = volumes.forest.allocator.shares().iter();
        let differs =
            walk.shares.iter().map(Some).chain([None]).find(|found| ours.next() != *found);
        let block = differs.flatten().map_or(0, |(first, ..)| first);
        walk.problems.add(Place::Block(block), "its references are not those that are counted");
    }
}

/// Each block has to be exactly one thing.
fn account(volumes: &Volumes, walk: &mut Walk<'_>) -> Report {
    let geometry = walk.geometry;
    let allocator = &volumes.forest.allocator;
    let mut ranges: Vec<(u64, u64, Use)> = vec![(0, geometry.first_block(), Use::Superblock)];
    ranges.extend(walk.seen.keys().map(|address| (*address, geometry.node_blocks(), Use::Node)));
    let of = |kind: Use| move |(first, count): (u64, u64)| (first, count, kind);
    ranges.extend(walk.data.iter().map(of(Use::Data)));
    ranges.extend(allocator.granted_ranges().map(of(Use::Granted)));
    ranges.extend(allocator.pending_ranges().map(of(Use::Pending)));
    ranges.extend(allocator.free_ranges().map(of(Use::Free)));
    ranges.sort_unstable();

    let mut counts: HashMap<&'static str, u64> = HashMap::new();
    let (mut at, mut before) = (0, Use::Superblock);
    for (first, count, kind) in &ranges {
        if *first > at {
            let missing = first.saturating_sub(at);
            walk.problems.add(Place::Block(at), format!("{missing} blocks are not accounted for"));
        } else if *first < at {
            let overlap = at.min(first.saturating_add(*count)).saturating_sub(*first);
            let what = format!("{overlap} blocks are {} and {}", before.name(), kind.name());
            walk.problems.add(Place::Block(*first), what);
        }
        let sum = counts.entry(kind.name()).or_default();
        *sum = sum.saturating_add(*count);
        if first.saturating_add(*count) >= at {
            (at, before) = (first.saturating_add(*count), *kind);
        }
    }
    if at != geometry.total_blocks {
        let what = format!("the blocks end at {at}, and not at {}", geometry.total_blocks);
        walk.problems.add(Place::Store, what);
    }
    let count = |kind: Use| counts.get(kind.name()).copied().unwrap_or(0);
    let space = volumes.space();
    let metadata = count(Use::Superblock).saturating_add(count(Use::Node));
    if (space.data, space.metadata) != (count(Use::Data), metadata) {
        let what =
            format!("{} blocks of data and {} of metadata are counted", space.data, space.metadata);
        walk.problems.add(Place::Store, what);
    }
    Report {
        superblock_blocks: count(Use::Superblock),
        metadata_blocks: count(Use::Node),
        data_blocks: count(Use::Data),
        granted_blocks: count(Use::Granted),
        pending_blocks: count(Use::Pending),
        free_blocks: count(Use::Free),
        ..Report::default()
    }
}
