//! The mappings of a volume.

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::{Plba, Vlba};

use super::Volumes;
use crate::allocator::{Need, Wish};
use crate::disk::Disk;
use crate::error::VolumeError;
use crate::forest::{Found, Item};
use crate::grant::{Grant, Mapped};
use crate::info::VolumeId;
use crate::log::Change;
use crate::node::Entry;

/// Pieces of one grant.
const MAX_PIECES: usize = 32;
/// The most mapped pieces that one grant looks at.
const MAX_LOOKED_AT: usize = 1024;

impl Volumes {
    /// The mappings in `range`, at most `max_extents` of them. Extents are clipped to the range and
    /// in order; gaps between them are holes.
    ///
    /// # Errors
    /// [`VolumeError`]: no such volume or range, a damaged volume, the disk.
    pub fn map(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        range: BlockRange,
        max_extents: usize,
    ) -> Result<Mapped, VolumeError> {
        let volume = self.healthy(id)?;
        let (first, end) = inside(range, volume.info.blocks)?;
        let tree = volume.tree;
        let looked = self.forest.look(disk, &tree, first, end, max_extents);
        let (found, reached) = looked.map_err(|error| self.fail(id, error))?;
        let covered = BlockRange { first: range.first, count: reached.saturating_sub(first) };
        Ok(Mapped { extents: found.iter().map(extent).collect(), covered })
    }

    /// Allocates fresh blocks for `range`, or for its first part if they are scattered: behind the
    /// blocks in front of the range, if possible. Nothing is mapped yet. Holes in the range are
    /// charged to the quota.
    ///
    /// # Errors
    /// [`VolumeError`]: no such volume or range, a read-only or damaged volume,
    /// no space, the quota, the disk.
    pub fn allocate(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        range: BlockRange,
    ) -> Result<Grant, VolumeError> {
        let volume = self.changeable(id)?;
        let (first, end) = inside(range, volume.info.blocks)?;
        let tree = volume.tree;
        if self.disk_is_full.is_some() {
            // Data written there could not be made durable.
            return Err(self.no_space());
        }
        let quota_blocks = volume.info.quota_blocks;
        let used_blocks = volume.info.allocated_blocks.saturating_add(volume.charged_blocks);

        let looked = self.forest.look(disk, &tree, first, end, MAX_LOOKED_AT);
        let (mapped, end) = looked.map_err(|error| self.fail(id, error))?;
        let holes_left = quota_blocks.map_or(u64::MAX, |quota| quota.saturating_sub(used_blocks));
        let end = end_of_holes(&mapped, first, end, holes_left);
        if let (true, Some(quota_blocks)) = (end == first && range.count > 0, quota_blocks) {
            return Err(VolumeError::QuotaExceeded { quota_blocks });
        }

        let last = self.forest.before(disk, &tree, first).map_err(|error| self.fail(id, error))?;
        let behind = last
            .filter(|entry| entry.end() <= first)
            .map(|entry| (entry.end(), entry.physical_end()));
        let row_blocks = last.filter(|entry| entry.end() == first).map_or(0, |entry| entry.count);
        let after = self
            .forest
            .look(disk, &tree, end, u64::MAX, 1)
            .map_err(|error| self.fail(id, error))?;
        let next = mapped.iter().chain(&after.0).find(|found| found.entry.first > first);
        let before = next.map(|found| (found.entry.first, found.entry.physical));
        let wish = Wish {
            volume: id.0,
            first,
            count: end.saturating_sub(first),
            behind,
            before,
            row_blocks,
        };
        let extents = self.grant(wish)?;
        let at = extents.last().map_or(first, |last| last.first.0.saturating_add(last.count));
        if at == first && range.count > 0 {
            return Err(self.no_space());
        }
        if let Some(log) = &mut self.log {
            log.reserve(extents.len() as u64);
        }
        let charged_blocks = holes_in(&mapped, first, at);
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.charged_blocks = volume.charged_blocks.saturating_add(charged_blocks);
        }
        let range = BlockRange { first: range.first, count: at.saturating_sub(first) };
        Ok(Grant { volume: id, range, extents, charged_blocks })
    }

    /// Grants blocks for the wish, or for the part of it that has space and room in the log.
    fn grant(&mut self, mut wish: Wish) -> Result<Vec<Extent>, VolumeError> {
        let mut extents: Vec<Extent> = Vec::new();
        let room = self.log.as_ref().map_or(u64::MAX, |log| log.room());
        let pieces = usize::try_from(room).map_or(MAX_PIECES, |room| room.min(MAX_PIECES));
        if pieces == 0 {
            return Err(self.no_room_in_the_log());
        }
        while wish.count > 0 && extents.len() < pieces {
            let Some((physical, count)) = self.forest.allocator.grant(&wish) else { break };
            match extents.last_mut() {
                Some(last) if last.physical.0.saturating_add(last.count) == physical => {
                    last.count = last.count.saturating_add(count);
                }
                _ => extents.push(Extent {
                    first: Vlba(wish.first),
                    count,
                    physical: Plba(physical),
                    shared: false,
                }),
            }
            wish.first = wish.first.saturating_add(count);
            wish.count = wish.count.saturating_sub(count);
            wish.behind = Some((wish.first, physical.saturating_add(count)));
        }
        Ok(extents)
    }

    /// Maps the granted blocks. The former blocks lose a reference.
    ///
    /// The data has to be in them already: with the next commit they are what the volume has.
    ///
    /// # Errors
    /// [`VolumeError`]: the volume is gone, smaller, damaged; no space for
    /// nodes, the disk. The grant's blocks are free again then.
    pub fn link(&mut self, disk: &mut dyn Disk, grant: Grant) -> Result<(), VolumeError> {
        let linked = self.link_extents(disk, &grant, Need::Growth);
        match linked {
            Ok(()) => {
                self.uncharge(&grant);
                if let Some(log) = &mut self.log {
                    let volume = grant.volume.0;
                    let changes = grant.extents.iter().map(|extent| Change::Map {
                        volume,
                        first: extent.first.0,
                        count: extent.count,
                        physical: extent.physical.0,
                    });
                    log.publish(self.forest.generation, changes);
                }
            }
            Err(_) => self.release(grant),
        }
        linked
    }

    /// A commit makes room in the log, unless the disk has no space for one.
    fn no_room_in_the_log(&self) -> VolumeError {
        match &self.disk_is_full {
            Some(why) => VolumeError::DiskFull(why.clone()),
            None => VolumeError::NoSpace { after_commit: true },
        }
    }

    /// Maps granted blocks, which are data from now on; on an error they stay granted.
    pub(super) fn link_extents(
        &mut self,
        disk: &mut dyn Disk,
        grant: &Grant,
        need: Need,
    ) -> Result<(), VolumeError> {
        let (first, end) = inside(grant.range, self.changeable(grant.volume)?.info.blocks)?;
        self.touch(grant.volume, need)?;
        let items = grant.extents.iter().map(|extent| {
            Item::Extent(Entry {
                first: extent.first.0,
                count: extent.count,
                physical: extent.physical.0,
            })
        });
        self.change(disk, grant.volume, (first, end), items.collect(), need)?;
        for extent in &grant.extents {
            self.forest.allocator.use_granted(extent.physical.0, extent.count);
        }
        Ok(())
    }

    /// Returns granted blocks. They may become another volume's at once: no write to them may
    /// follow.
    pub fn release(&mut self, grant: Grant) {
        if let Some(log) = &mut self.log {
            log.release(grant.extents.len() as u64);
        }
        for extent in &grant.extents {
            self.forest.allocator.release(extent.physical.0, extent.count);
        }
        self.uncharge(&grant);
    }

    fn uncharge(&mut self, grant: &Grant) {
        if let Some(volume) = self.volumes.get_mut(&grant.volume) {
            volume.charged_blocks = volume.charged_blocks.saturating_sub(grant.charged_blocks);
        }
    }

    /// Makes `range` a hole. Blocks without another reference are freed with the next commit.
    ///
    /// # Errors
    /// [`VolumeError`]: no such volume or range, a read-only or damaged volume,
    /// the disk; no space if the reserve is used up by unmapping what is shared, which takes nodes
    /// and frees nothing.
    pub fn unmap(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        range: BlockRange,
    ) -> Result<(), VolumeError> {
        let volume = self.changeable(id)?;
        let (first, end) = inside(range, volume.info.blocks)?;
        let tree = volume.tree;
        if self.log.as_ref().is_some_and(|log| log.room() == 0) {
            return Err(self.no_room_in_the_log());
        }
        // A guest that discards the same again changes nothing. Only in a durable volume: what made
        // the hole in another one need not be in the log.
        let (found, _) =
            self.forest.look(disk, &tree, first, end, 1).map_err(|error| self.fail(id, error))?;
        if found.is_empty() && !self.is_dirty(id) {
            return Ok(());
        }
        self.unmap_for(disk, id, (first, end), Need::Shrink)?;
        if let Some(log) = &mut self.log {
            log.reserve(1);
            let change = Change::Unmap { volume: id.0, first, count: range.count };
            log.publish(self.forest.generation, [change]);
        }
        Ok(())
    }

    /// Makes these blocks, which are inside the volume, a hole.
    pub(super) fn unmap_for(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        (first, end): (u64, u64),
        need: Need,
    ) -> Result<(), VolumeError> {
        let blocks = self.changeable(id)?.info.blocks;
        self.drop_mappings(disk, id, (first, end), blocks, need)
    }

    /// As [`unmap_for`](Self::unmap_for), of a volume of so many blocks that may be changed.
    pub(super) fn drop_mappings(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        (first, end): (u64, u64),
        blocks: u64,
        need: Need,
    ) -> Result<(), VolumeError> {
        self.touch(id, need)?;
        let end = if end == blocks { u64::MAX } else { end };
        self.change(disk, id, (first, end), Vec::new(), need)
    }

    /// Makes `items` all that the volume has in `first..end`.
    pub(super) fn change(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        keys: (u64, u64),
        items: Vec<Item>,
        need: Need,
    ) -> Result<(), VolumeError> {
        let volume = self.volumes.get_mut(&id).ok_or(VolumeError::NoSuchVolume(id))?;
        // The tree is kept whatever comes out: nodes of it may have moved.
        let changed = self.forest.replace(disk, &mut volume.tree, keys, items, need);
        if let Ok(delta) = &changed {
            volume.info.extents = delta.extents(volume.info.extents);
            volume.info.allocated_blocks = delta.blocks(volume.info.allocated_blocks);
        }
        changed.map(|_| ()).map_err(|error| self.fail(id, error))
    }
}

/// The range as first block and end, if it lies in a volume of that size.
pub(super) fn inside(range: BlockRange, blocks: u64) -> Result<(u64, u64), VolumeError> {
    let (first, count) = (range.first.0, range.count);
    match first.checked_add(count) {
        Some(end) if end <= blocks => Ok((first, end)),
        _ => Err(VolumeError::OutOfRange { first, count, blocks }),
    }
}

fn extent(found: &Found) -> Extent {
    let Entry { first, count, physical } = found.entry;
    Extent { first: Vlba(first), count, physical: Plba(physical), shared: found.shared }
}

/// Blocks in `first..end` that are not mapped.
fn holes_in(mapped: &[Found], first: u64, end: u64) -> u64 {
    let parts = mapped.iter().filter_map(|found| found.entry.clip(first, end));
    let blocks = parts.map(|part| part.count).fold(0, u64::saturating_add);
    end.saturating_sub(first).saturating_sub(blocks)
}

/// How far one can go from `first` with so many blocks for holes.
fn end_of_holes(mapped: &[Found], first: u64, end: u64, mut left: u64) -> u64 {
    let mut at = first;
    for entry in mapped.iter().map(|found| found.entry).filter(|entry| entry.end() > first) {
        let hole = entry.first.saturating_sub(at);
        if hole > left {
            return at.saturating_add(left);
        }
        left = left.saturating_sub(hole);
        at = entry.end().min(end);
    }
    at.saturating_add(left).min(end)
}
