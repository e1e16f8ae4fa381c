//! The invariants.

use std::collections::BTreeMap;

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::Vlba;
use sidecore_volume::{
    Place, RepairError, VolumeError, VolumeId, VolumeState, Volumes, plan_repair,
};

use crate::disk::{PAGE, SparseDisk};
use crate::reader::{Image, Mapping};

/// Blocks or bytes: first and count.
pub type Range = (u64, u64);

/// A set of blocks or bytes.
#[derive(Clone, Debug, Default)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range, which may overlap ranges in the set.
    pub fn add(&mut self, (first, count): Range) {
        let (mut first, mut end) = (first, first.saturating_add(count));
        if count == 0 {
            return;
        }
        while let Some((start, before)) =
            self.0.range(..=end).next_back().map(|(start, end)| (*start, *end))
        {
            if before < first {
                break;
            }
            self.0.remove(&start);
            (first, end) = (first.min(start), end.max(before));
        }
        self.0.insert(first, end);
    }

    /// Whether the set has any part of this range.
    pub fn overlaps(&self, (first, count): Range) -> bool {
        let end = first.saturating_add(count);
        count > 0 && self.0.range(..end).next_back().is_some_and(|(_, before)| *before > first)
    }

    pub fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        self.0.iter().map(|(first, end)| (*first, end - first))
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl Extend<Range> for Ranges {
    fn extend<T: IntoIterator<Item = Range>>(&mut self, ranges: T) {
        ranges.into_iter().for_each(|range| self.add(range));
    }
}

pub fn range(first: u64, count: u64) -> BlockRange {
    BlockRange::new(Vlba(first), count)
}

pub fn physical(extent: &Extent) -> Range {
    (extent.physical.0, extent.count)
}

/// Whether the store has no damage, except in a copy of the superblock.
pub fn is_sound(volumes: &Volumes) -> bool {
    volumes.damage().iter().all(|damage| matches!(damage.place, Place::Superblock(_)))
}

/// All mappings of a volume, queried in parts of so many extents. On any disk, they are in order,
/// inside of the volume, and inside of the store.
pub fn map_all(
    volumes: &mut Volumes,
    disk: &mut SparseDisk,
    id: VolumeId,
    part: usize,
) -> Result<Vec<Extent>, VolumeError> {
    let blocks = volumes.get(id).map_or(0, |info| info.blocks);
    let mut extents = Vec::new();
    let mut at = 0;
    while at < blocks {
        let mapped = volumes.map(disk, id, range(at, blocks - at), part.max(1))?;
        mapped_is_right(volumes, range(at, blocks - at), &mapped);
        assert!(mapped.covered.count > 0, "no progress at {at} of {blocks}");
        at += mapped.covered.count;
        extents.extend(mapped.extents);
    }
    Ok(extents)
}

/// Checks an answer of `map` for a range inside of the volume.
pub fn mapped_is_right(volumes: &Volumes, asked: BlockRange, mapped: &sidecore_volume::Mapped) {
    let covered = mapped.covered;
    assert!(
        covered.first == asked.first && covered.count <= asked.count,
        "{covered:?} of {asked:?}"
    );
    let end = covered.end().unwrap().0;
    let first_block = 4 * PAGE / u64::from(volumes.block_bytes());
    let mut at = covered.first.0;
    for extent in &mapped.extents {
        assert!(extent.count > 0 && extent.first.0 >= at, "{extent:?} at {at}");
        at = extent.first.0.checked_add(extent.count).unwrap();
        assert!(at <= end, "{extent:?} of {covered:?}");
        let (physical, count) = physical(extent);
        let physical_end = physical.checked_add(count).unwrap();
        assert!(physical >= first_block && physical_end <= volumes.blocks(), "outside: {extent:?}");
    }
}

/// The mappings of all healthy volumes.
pub type Maps = Vec<(VolumeId, Vec<Extent>)>;

/// Queries all mappings, which a healthy volume always has, and checks them against each other.
pub fn survey(volumes: &mut Volumes, disk: &mut SparseDisk, part: usize) -> Maps {
    let healthy = volumes.list().filter(|info| info.state == VolumeState::Healthy);
    let ids: Vec<VolumeId> = healthy.map(|info| info.id).collect();
    let mut maps = Vec::new();
    for id in ids {
        let extents =
            map_all(volumes, disk, id, part).unwrap_or_else(|error| panic!("volume {id}: {error}"));
        let blocks: u64 = extents.iter().map(|extent| extent.count).sum();
        assert_eq!(volumes.get(id).unwrap().allocated_blocks, blocks, "volume {id}");
        maps.push((id, extents));
    }
    sharing(&maps, false);
    maps
}

/// Checks that no block is mapped twice and reported as exclusive. With `exactly`, also that no
/// block is mapped once and reported as shared.
pub fn sharing(maps: &Maps, exactly: bool) {
    let extents = || maps.iter().flat_map(|(_, extents)| extents);
    let mut borders: Vec<(u64, i64)> = Vec::new();
    for (first, count) in extents().map(physical) {
        borders.extend([(first, 1), (first + count, -1)]);
    }
    borders.sort_unstable();
    let mut counts: Vec<(u64, i64)> = Vec::new();
    for (at, change) in borders {
        let before = counts.last().map_or(0, |(_, count)| *count);
        match counts.last_mut() {
            Some(last) if last.0 == at => last.1 += change,
            _ => counts.push((at, before + change)),
        }
    }
    for extent in extents() {
        let (first, count) = physical(extent);
        let from = counts.partition_point(|(at, _)| *at <= first) - 1;
        let to = counts.partition_point(|(at, _)| *at < first + count);
        for (at, count) in &counts[from..to] {
            assert!(
                extent.shared || *count == 1,
                "{extent:?} is mapped {count} times at block {at}"
            );
            assert!(
                !exactly || !extent.shared || *count > 1,
                "{extent:?} is mapped once at block {at}"
            );
        }
    }
}

/// Compares the maps of a store without uncommitted changes with the disk. Returns the blocks
/// (nodes and data) that a healthy volume needs.
pub fn is_on_disk(volumes: &Volumes, maps: &Maps, image: &mut Image<'_>) -> Ranges {
    let mut data = Ranges::default();
    for (id, extents) in maps {
        let info = volumes.get(*id).unwrap();
        let volume =
            image.volumes.get(&id.0).unwrap_or_else(|| panic!("volume {id} is not on the disk"));
        assert_eq!(
            (info.blocks, info.read_only, &info.name),
            (volume.blocks, volume.read_only, &volume.name)
        );
        let mappings = image.mappings(id.0);
        let found = extents.iter().map(|extent| (extent.first.0, extent.count, extent.physical.0));
        assert_eq!(joined(found), joined(mappings.iter().copied()), "volume {id}");
        data.extend(mappings.iter().map(|(_, count, physical)| (*physical, *count)));
    }
    let node_blocks = image.superblock.node_blocks();
    for node in &image.nodes {
        assert!(
            !data.overlaps((node * node_blocks, node_blocks)),
            "data in the node of page {node}"
        );
    }
    data.extend(image.nodes.iter().map(|node| (node * node_blocks, node_blocks)));
    data
}

/// Joins mappings that continue each other.
fn joined(mappings: impl Iterator<Item = Mapping>) -> Vec<Mapping> {
    let mut joined: Vec<Mapping> = Vec::new();
    for (first, count, physical) in mappings {
        match joined.last_mut() {
            Some(last) if last.0 + last.1 == first && last.2 + last.1 == physical => {
                last.1 += count
            }
            _ => joined.push((first, count, physical)),
        }
    }
    joined
}

/// Checks that a repair makes a damaged store sound, and that it then needs no second one.
pub fn repair(disk: &SparseDisk) {
    let mut disk = disk.clone();
    disk.guard.clear();
    let repair = match plan_repair(&mut disk, &[]) {
        Ok(repair) if repair.is_decided() => repair,
        Ok(_) => return,
        Err(error) => {
            assert!(!matches!(error, RepairError::Unsound(_)), "{error}");
            return;
        }
    };
    repair.write(&mut disk).unwrap();
    let volumes = Volumes::open(&mut disk).unwrap();
    assert!(is_sound(&volumes) && volumes.read_only().is_none(), "{:?}", volumes.damage());
    assert_eq!(volumes.check(&mut disk).problems, []);
    assert!(!plan_repair(&mut disk, &[]).unwrap().is_needed());
}

/// Checks that a full check finds a problem if, and only if, there is one.
pub fn check(volumes: &Volumes, disk: &mut SparseDisk, maps: &Maps, sound: bool) {
    let report = volumes.check(disk);
    let serious =
        report.problems.iter().filter(|problem| !matches!(problem.place, Place::Superblock(_)));
    let serious: Vec<_> = serious.collect();
    assert_eq!(serious.is_empty(), sound, "{serious:?} {:?}", volumes.damage());
    if !sound {
        return;
    }
    let parts = [
        report.superblock_blocks,
        report.metadata_blocks,
        report.data_blocks,
        report.granted_blocks,
        report.pending_blocks,
        report.free_blocks,
    ];
    assert_eq!(parts.iter().sum::<u64>(), volumes.blocks(), "{report:?}");
    let space = volumes.space();
    let parts =
        [space.free, space.data, space.metadata, space.reserved, space.granted, space.pending];
    assert_eq!(
        (space.total, parts.iter().sum::<u64>()),
        (volumes.blocks(), volumes.blocks()),
        "{space:?}"
    );
    let mut data: Vec<Range> = maps.iter().flat_map(|(_, extents)| extents).map(physical).collect();
    data.sort_unstable();
    let mut end = 0;
    let different = data.iter().map(|(first, count)| {
        let new = (first + count).saturating_sub(end.max(*first));
        end = end.max(first + count);
        new
    });
    assert_eq!(different.sum::<u64>(), report.data_blocks, "{report:?}");
}
