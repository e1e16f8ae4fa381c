//! Reads back all content of volumes.

use std::collections::BTreeMap;

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::Vlba;
use sidecore_volume::{Disk, Place, Problem, Report, VolumeId, VolumeInfo, VolumeState, Volumes};

use super::disk::SECTOR_BYTES;
use super::model::{Found, FoundBlock, FoundVolume, stamp_of};
use crate::Random;

/// Checks the store completely and returns the report.
///
/// # Errors
/// A problem, except damaged copies of the superblock if those are expected.
pub(crate) fn check(
    volumes: &mut Volumes,
    disk: &mut dyn Disk,
    damaged_superblocks: bool,
) -> Result<Report, String> {
    let report = volumes.check(disk);
    check_report(&report, damaged_superblocks).map(|()| report)
}

/// Fails if the report of a full check has problems.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_report(report: &Report, damaged_superblocks: bool) -> Result<(), String> {
    let is_known =
        |problem: &Problem| damaged_superblocks && matches!(problem.place, Place::Superblock(_));
    if report.more_problems == 0 && report.problems.iter().all(is_known) {
        Ok(())
    } else {
        Err(format!("check: {report:?}"))
    }
}

/// All volumes and their extents, queried in steps of a random length.
///
/// # Errors
/// A volume cannot be read, or an answer is malformed.
pub(crate) fn find(
    volumes: &mut Volumes,
    disk: &mut dyn Disk,
    random: &mut Random,
) -> Result<Vec<(VolumeInfo, Vec<Extent>)>, String> {
    let infos: Vec<VolumeInfo> = volumes.list().cloned().collect();
    let mut found = Vec::with_capacity(infos.len());
    for info in infos {
        if info.state != VolumeState::Healthy {
            return Err(format!("volume {} is damaged", info.id));
        }
        let all = BlockRange::new(Vlba(0), info.blocks);
        let at_once = [1, 3, 64, usize::MAX][random.below(4) as usize];
        let extents = extents(volumes, disk, info.id, all, at_once)?;
        found.push((info, extents));
    }
    Ok(found)
}

/// The extents in `range` of a volume, queried `at_once` extents at a time.
///
/// # Errors
/// The volume cannot be read, or an answer is malformed.
pub(crate) fn extents(
    volumes: &mut Volumes,
    disk: &mut dyn Disk,
    id: VolumeId,
    range: BlockRange,
    at_once: usize,
) -> Result<Vec<Extent>, String> {
    let (mut at, end) = (range.first.0, range.first.0 + range.count);
    let mut found: Vec<Extent> = Vec::new();
    while at < end {
        let rest = BlockRange::between(Vlba(at), Vlba(end));
        let part = volumes
            .map(disk, id, rest, at_once)
            .map_err(|error| format!("map {rest:?} of {id}: {error}"))?;
        let covered = part.covered;
        let inside = |extent: &Extent| extent.count > 0 && covered.contains_range(extent.range());
        if covered.first != rest.first
            || covered.count == 0
            || covered.count > rest.count
            || part.extents.len() > at_once
            || !part.extents.iter().all(inside)
            || !part
                .extents
                .windows(2)
                .all(|pair| pair[0].first.0 + pair[0].count <= pair[1].first.0)
        {
            return Err(format!("map {rest:?} of {id}, {at_once} extents at most, gives {part:?}"));
        }
        found.extend(part.extents);
        at += covered.count;
    }
    Ok(found)
}

/// Reads the blocks of the extents.
pub(crate) fn read(found: Vec<(VolumeInfo, Vec<Extent>)>, bytes: &[u8], block_bytes: u32) -> Found {
    let mut volumes = Found::new();
    for (info, extents) in found {
        let mut blocks = BTreeMap::new();
        for extent in extents {
            for index in 0..extent.count {
                let physical = extent.physical.0 + index;
                let start = physical as usize * block_bytes as usize;
                let sectors = bytes.get(start..start + block_bytes as usize).unwrap_or_default();
                let sectors = sectors.chunks_exact(SECTOR_BYTES).map(stamp_of).collect();
                blocks.insert(
                    extent.first.0 + index,
                    FoundBlock { physical, shared: extent.shared, sectors },
                );
            }
        }
        volumes.insert(info.id.0, FoundVolume { info, blocks });
    }
    volumes
}

/// Checks that every block is counted once, and that a store that was just opened has no pending
/// changes.
///
/// # Errors
/// A count differs.
pub(crate) fn check_space(volumes: &Volumes, report: &Report, cells: u64) -> Result<(), String> {
    let space = volumes.space();
    let sum =
        space.free + space.data + space.metadata + space.reserved + space.granted + space.pending;
    if sum != space.total
        || space.data != cells
        || space.granted + space.pending != 0
        || report.data_blocks != cells
    {
        return Err(format!(
            "{cells} blocks hold data; the space is {space:?}, the report {report:?}"
        ));
    }
    Ok(())
}
