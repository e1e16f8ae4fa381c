//! Guests' requests, and the controller's part in them.

use std::collections::BTreeMap;
use std::rc::Rc;

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::Vlba;
use sidecore_volume::{Grant, VolumeError, VolumeId};

use super::Bug;
use super::death::Answered;
use super::disk::SECTOR_BYTES;
use super::find;
use super::model::{CellId, Place, Stamp, fill, stamp_of};
use super::world::World;
use crate::history::{Step, System as _};

/// With this much free space, in bytes, an allocation must succeed. Below it, single tree nodes may
/// need the space.
const PLENTY_BYTES: u64 = 256 << 10;

/// A write to fresh blocks, from their allocation to the link.
pub(super) struct FreshWrite {
    pub(super) volume: u64,
    pub(super) range: BlockRange,
    /// `None` once the blocks are linked, which only a bug does before all writes.
    grant: Option<Grant>,
    /// The volume's quota at the allocation: the blocks are charged already, and the quota may be
    /// lowered meanwhile.
    quota_blocks: Option<u64>,
    cells: BTreeMap<u64, CellId>,
    /// The writes still to be done, the next one last.
    writes: Vec<BlockWrite>,
}

/// A write to physically consecutive fresh blocks.
struct BlockWrite {
    /// Physical.
    offset_bytes: u64,
    /// The first block.
    block: u64,
    /// By sector.
    contents: Vec<Content>,
}

/// The content of a sector of a fresh block.
#[derive(Clone, Copy)]
enum Content {
    /// The guest's data.
    New(Stamp),
    /// The current data, from this physical sector.
    Copy(u64),
    Zero,
}

impl World {
    pub(super) fn sectors_per_block(&self) -> u64 {
        self.tuning.sectors_per_block() as u64
    }

    /// The size of a volume as guests see it, if they see the volume: a new volume, and a larger
    /// size, are served once they are durable.
    pub(super) fn served_blocks(&self, id: u64) -> Option<u64> {
        let mark = self.marks.last()?;
        let durable = [Some(&mark.safe), mark.next.as_ref()]
            .into_iter()
            .flatten()
            .map(|generation| &generation.state);
        let sizes =
            durable.chain([&self.state]).map(|state| state.0.get(&id).map(|volume| volume.blocks));
        sizes.collect::<Option<Vec<u64>>>()?.into_iter().min()
    }

    /// A random volume, and sectors in it.
    pub(super) fn pick(&mut self, read_only_too: bool) -> Option<(u64, u64, u64)> {
        if let Some((id, block)) = self.compared_block() {
            let spb = self.sectors_per_block();
            return Some((id, block * spb + self.random.below(spb), 1));
        }
        let candidates =
            self.state.0.iter().filter(|(_, volume)| read_only_too || !volume.read_only);
        let candidates = candidates.filter_map(|(&id, _)| Some((id, self.served_blocks(id)?)));
        let candidates: Vec<(u64, u64)> = candidates.collect();
        if candidates.is_empty() {
            return None;
        }
        let (id, blocks) = candidates[self.random.below(candidates.len() as u64) as usize];
        let spb = self.sectors_per_block();
        let block = if blocks <= 4096 {
            self.random.below(blocks)
        } else {
            // A few places of a volume that is far larger than the disk, one of them its end.
            let near = self.random.below(64);
            match self.random.below(4) {
                0 => near,
                1 => blocks - 1 - near,
                part => blocks / 5 * part + near,
            }
        };
        let sector = block * spb + self.random.below(spb);
        let count = (1 + self.random.below(self.tuning.longest_write)).min(blocks * spb - sector);
        Some((id, sector, count))
    }

    /// The blocks that contain any of these sectors.
    pub(super) fn blocks_of(&self, sector: u64, count: u64) -> BlockRange {
        let spb = self.sectors_per_block();
        BlockRange::between(Vlba(sector / spb), Vlba((sector + count).div_ceil(spb)))
    }

    pub(super) fn is_busy(&self, volume: u64, range: BlockRange) -> bool {
        self.fresh_writes
            .iter()
            .any(|fresh| fresh.volume == volume && fresh.range.intersect(range).is_some())
    }

    /// Writes random sectors: in place where possible, otherwise to fresh blocks.
    pub(super) fn guest_write(&mut self) -> Step {
        let Some((id, sector, count)) = self.pick(false) else { return Ok(()) };
        let range = self.blocks_of(sector, count);
        if self.is_busy(id, range) || self.fresh_writes.len() >= self.tuning.most_fresh_writes {
            return self.advance_fresh_write();
        }
        self.note(format!("write {count} sectors from {sector} on, of volume {id}"));
        let disk = &mut self.disk.clone();
        let at_once = 1 + self.random.below(5) as usize;
        let extents = find::extents(&mut self.volumes, disk, VolumeId(id), range, at_once)?;
        let sectors = (sector, sector + count);
        let mut elsewhere = range.first.0;
        let overwrites_shared = self.bug == Some(Bug::OverwriteShared);
        for extent in extents.iter().filter(|extent| !extent.shared || overwrites_shared) {
            self.start_fresh_writes(
                id,
                BlockRange::between(Vlba(elsewhere), extent.first),
                sectors,
                &extents,
            )?;
            self.overwrite(id, extent, sectors)?;
            elsewhere = extent.first.0 + extent.count;
        }
        let end = range.first.0 + range.count;
        self.start_fresh_writes(
            id,
            BlockRange::between(Vlba(elsewhere), Vlba(end)),
            sectors,
            &extents,
        )?;
        if self.volumes.log_room() == Some(0) { self.commit() } else { Ok(()) }
    }

    /// Writes in place those of the sectors that lie in the extent.
    fn overwrite(&mut self, id: u64, extent: &Extent, (start, end): (u64, u64)) -> Step {
        let spb = self.sectors_per_block();
        let (first, last) = (extent.first.0 * spb, (extent.first.0 + extent.count) * spb);
        let (start, end) = (start.max(first), end.min(last));
        let offset_bytes = (extent.physical.0 * spb + (start - first)) * SECTOR_BYTES as u64;
        let position = self.disk.position();
        let mut data = Vec::new();
        for sector in start..end {
            let stamp = self.ledger.stamps.give(Some((id, sector)));
            data.extend(fill(stamp));
            let block = sector / spb;
            let cell = self.state.0.get(&id).and_then(|volume| volume.cells.get(&block));
            let cell = *cell.ok_or_else(|| {
                format!("block {block} of volume {id} is mapped and should be a hole")
            })?;
            self.cells.write(
                cell,
                (sector % spb) as usize,
                position,
                Place { volume: id, block },
                stamp,
            );
        }
        // A guest whose write fails does not know the content, and neither does the model.
        self.disk.write_sectors(offset_bytes, &data).or(Ok(()))
    }

    /// Allocates fresh blocks for the whole range.
    fn start_fresh_writes(
        &mut self,
        id: u64,
        range: BlockRange,
        sectors: (u64, u64),
        extents: &[Extent],
    ) -> Step {
        let mut rest = range;
        while rest.count > 0 {
            let free = self.volumes.space().free;
            let grant = match self.volumes.allocate(&mut self.disk.clone(), VolumeId(id), rest) {
                Ok(grant) => grant,
                Err(VolumeError::NoSpace { .. })
                    if free * u64::from(self.tuning.block_bytes) < PLENTY_BYTES =>
                {
                    return self.refused();
                }
                // A commit is not possible here: the extents that were looked up are still in use.
                Err(VolumeError::NoSpace { .. }) if self.volumes.log_room() == Some(0) => {
                    return self.refused();
                }
                Err(VolumeError::QuotaExceeded { .. }) if self.has_quota(id) => {
                    return self.refused();
                }
                Err(error) => {
                    return Err(format!(
                        "allocate {rest:?} of {id} with {free} blocks free: {error}"
                    ));
                }
            };
            let (granted, volume) = (grant.range(), grant.volume());
            let count: u64 = grant.extents().iter().map(|extent| extent.count).sum();
            if granted.first != rest.first
                || count != granted.count
                || count == 0
                || count > rest.count
                || volume.0 != id
            {
                return Err(format!("allocate {rest:?} of {id} gives {grant:?}"));
            }
            self.start_fresh_write(id, grant, sectors, extents)?;
            rest = rest.split(count).1;
        }
        Ok(())
    }

    /// Counts a refusal that is legitimate.
    pub(super) const fn refused(&mut self) -> Step {
        self.ledger.outcome.refusals += 1;
        Ok(())
    }

    pub(super) fn has_quota(&self, id: u64) -> bool {
        self.state.0.get(&id).is_some_and(|volume| volume.quota_blocks.is_some())
    }

    fn start_fresh_write(
        &mut self,
        id: u64,
        grant: Grant,
        (start, end): (u64, u64),
        extents: &[Extent],
    ) -> Step {
        let spb = self.sectors_per_block();
        let (mut cells, mut writes) = (BTreeMap::new(), Vec::new());
        for extent in grant.extents() {
            let mut contents = Vec::new();
            for block in extent.first.0..extent.first.0 + extent.count {
                cells.insert(block, self.cells.make(spb as usize));
                let so_far = extents.iter().find(|extent| extent.range().contains(Vlba(block)));
                for sector in block * spb..(block + 1) * spb {
                    contents.push(match so_far {
                        _ if (start..end).contains(&sector) => {
                            Content::New(self.ledger.stamps.give(Some((id, sector))))
                        }
                        Some(extent) => {
                            Content::Copy(extent.physical.0 * spb + sector - extent.first.0 * spb)
                        }
                        None => Content::Zero,
                    });
                }
            }
            let offset_bytes = extent.physical.0 * spb * SECTOR_BYTES as u64;
            writes.push(BlockWrite { offset_bytes, block: extent.first.0, contents });
        }
        writes.reverse();
        let quota_blocks = self.state.0.get(&id).and_then(|volume| volume.quota_blocks);
        let mut fresh = FreshWrite {
            volume: id,
            range: grant.range(),
            grant: Some(grant),
            quota_blocks,
            cells,
            writes,
        };
        if self.bug == Some(Bug::LinkBeforeData) {
            self.link(&mut fresh)?;
        }
        self.fresh_writes.push(fresh);
        Ok(())
    }

    /// Takes the next step of a random write to fresh blocks.
    pub(super) fn advance_fresh_write(&mut self) -> Step {
        if self.fresh_writes.is_empty() {
            return Ok(());
        }
        let index = self.random.below(self.fresh_writes.len() as u64) as usize;
        let mut fresh = self.fresh_writes.swap_remove(index);
        if let Some(write) = fresh.writes.pop() {
            let (volume, first) = (fresh.volume, write.block);
            self.note(format!("write fresh blocks of volume {volume}, from block {first} on"));
            if self.fill(&fresh, &write).is_err() {
                self.cancel(fresh);
            } else {
                self.fresh_writes.push(fresh);
            }
            return Ok(());
        }
        self.link(&mut fresh)
    }

    /// Writes fresh blocks.
    fn fill(&mut self, fresh: &FreshWrite, write: &BlockWrite) -> std::io::Result<()> {
        let spb = self.sectors_per_block();
        let position = self.disk.position();
        let mut data = Vec::with_capacity(write.contents.len() * SECTOR_BYTES);
        for (index, content) in write.contents.iter().enumerate() {
            let (block, sector) = (write.block + index as u64 / spb, (index as u64 % spb) as usize);
            let mut bytes = [0; SECTOR_BYTES];
            let stamp = match *content {
                Content::New(stamp) => {
                    bytes = fill(stamp);
                    stamp
                }
                Content::Copy(from) => {
                    self.disk.read_sectors(from * SECTOR_BYTES as u64, &mut bytes)?;
                    let (Ok(stamp) | Err(stamp)) = stamp_of(&bytes);
                    // The model's stamp and not the copied one, so that a copy from the wrong place
                    // is noticed.
                    let cell =
                        self.state.0.get(&fresh.volume).and_then(|volume| volume.cells.get(&block));
                    cell.and_then(|cell| self.cells.now(*cell, sector)).unwrap_or(stamp)
                }
                Content::Zero if self.bug == Some(Bug::NoZeroes) => {
                    let offset_bytes = write.offset_bytes + (index * SECTOR_BYTES) as u64;
                    self.disk.read_sectors(offset_bytes, &mut bytes)?;
                    0
                }
                Content::Zero => 0,
            };
            data.extend(bytes);
            let place = Place { volume: fresh.volume, block };
            if let Some(cell) = fresh.cells.get(&block) {
                self.cells.write(*cell, sector, position, place, stamp);
            }
        }
        self.disk.write_sectors(write.offset_bytes, &data)
    }

    /// Writes a whole block of a volume to a fresh one, in a step.
    pub(super) fn write_fresh_block(&mut self, to: Place, stamps: &[Stamp]) -> Step {
        let range = BlockRange::new(Vlba(to.block), 1);
        let grant = match self.volumes.allocate(&mut self.disk.clone(), VolumeId(to.volume), range)
        {
            Ok(grant) => grant,
            Err(VolumeError::NoSpace { .. } | VolumeError::QuotaExceeded { .. }) => {
                return self.refused();
            }
            Err(error) => return Err(format!("allocate {to:?}: {error}")),
        };
        let physical = grant.extents().first().map_or(0, |extent| extent.physical.0);
        let write = BlockWrite {
            offset_bytes: physical * u64::from(self.tuning.block_bytes),
            block: to.block,
            contents: stamps.iter().map(|stamp| Content::New(*stamp)).collect(),
        };
        let cell = self.cells.make(stamps.len());
        let mut fresh = FreshWrite {
            volume: to.volume,
            range,
            grant: Some(grant),
            quota_blocks: self.state.0.get(&to.volume).and_then(|volume| volume.quota_blocks),
            cells: BTreeMap::from([(to.block, cell)]),
            writes: Vec::new(),
        };
        if self.fill(&fresh, &write).is_err() {
            self.cancel(fresh);
            return Ok(());
        }
        self.link(&mut fresh)
    }

    /// Links the written blocks to the volume.
    fn link(&mut self, fresh: &mut FreshWrite) -> Step {
        let Some(grant) = fresh.grant.take() else { return Ok(()) };
        let id = fresh.volume;
        self.note(format!(
            "link {} blocks from {} on, of volume {id}",
            fresh.range.count, fresh.range.first
        ));
        self.log_before = self.log.to_words();
        match self.volumes.link(&mut self.disk.clone(), grant) {
            Ok(()) => {
                self.answered.push(Answered::Mapped { volume: id, cells: fresh.cells.clone() })
            }
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            Err(VolumeError::NoSuchVolume(_)) if !self.state.0.contains_key(&id) => {
                return self.refused();
            }
            Err(error) => return Err(format!("link {:?} of {id}: {error}", fresh.range)),
        }
        let volume = self
            .state
            .0
            .get_mut(&id)
            .ok_or_else(|| format!("linked to volume {id}, which is gone"))?;
        let mapped = volume.cells.len() as u64;
        Rc::make_mut(&mut volume.cells).append(&mut fresh.cells);
        let now = volume.cells.len() as u64;
        let quota_blocks =
            volume.quota_blocks.zip(fresh.quota_blocks).map(|(now, then)| now.max(then));
        match quota_blocks {
            Some(quota) if now > quota && now > mapped => {
                Err(format!("volume {id} has {now} blocks: quota {quota}"))
            }
            _ => Ok(()),
        }
    }

    /// Gives up a write to fresh blocks.
    pub(super) fn cancel(&mut self, mut fresh: FreshWrite) {
        if let Some(grant) = fresh.grant.take() {
            self.note(format!("release {} blocks of volume {}", fresh.range.count, fresh.volume));
            self.volumes.release(grant);
        }
    }

    /// Reads random sectors and compares them with the model.
    pub(super) fn read_something(&mut self) -> Step {
        let Some((id, sector, count)) = self.pick(true) else { return Ok(()) };
        let (range, spb) = (self.blocks_of(sector, count), self.sectors_per_block());
        self.note(format!("read {count} sectors from {sector} on, of volume {id}"));
        let extents =
            find::extents(&mut self.volumes, &mut self.disk.clone(), VolumeId(id), range, 2)?;
        for sector in sector..sector + count {
            let block = sector / spb;
            let extent = extents.iter().find(|extent| extent.range().contains(Vlba(block)));
            let cell = self.state.0.get(&id).and_then(|volume| volume.cells.get(&block));
            let (Some(extent), Some(cell)) = (extent, cell) else {
                if extent.is_some() || cell.is_some() {
                    return Err(format!(
                        "block {block} of volume {id} should be {cell:?} and is {extent:?}"
                    ));
                }
                continue;
            };
            let mut bytes = [0; SECTOR_BYTES];
            let physical = extent.physical.0 * spb + sector - extent.first.0 * spb;
            self.disk
                .read_sectors(physical * SECTOR_BYTES as u64, &mut bytes)
                .map_err(|error| format!("sector {sector} of volume {id}: {error}"))?;
            let expected = self.cells.now(*cell, (sector % spb) as usize);
            if stamp_of(&bytes).ok() != expected {
                let (Ok(found) | Err(found)) = stamp_of(&bytes);
                let found = self.ledger.stamps.describe(found);
                let expected = expected.map(|stamp| self.ledger.stamps.describe(stamp));
                return Err(format!(
                    "sector {sector} of volume {id} reads {found} instead of {expected:?}"
                ));
            }
        }
        Ok(())
    }
}
