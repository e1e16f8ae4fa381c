//! Equal blocks become one (thesis 6.3: deduplication under the controller).
//!
//! A remap changes a mapping and no contents, so nothing has to answer for it: it is not in the log
//! of the open transaction, and after the death of the process before the commit the volume has its
//! former blocks, which nothing has overwritten meanwhile.

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::Vlba;

use super::blocks::inside;
use super::{Volume, Volumes};
use crate::allocator::Need;
use crate::disk::Disk;
use crate::doubt;
use crate::error::VolumeError;
use crate::forest::{Item, MAX_ITEMS};
use crate::grant::PhysicalRange;
use crate::info::VolumeId;
use crate::node::Entry;

impl Volumes {
    /// Guards these blocks, and no others, until [`end_guard`](Self::end_guard): they count as
    /// shared, so that no write to them in place begins.
    ///
    /// The caller withdraws what it has said of them before, and waits for the writes in flight.
    pub fn guard(&mut self, ranges: &[PhysicalRange]) {
        let ranges = ranges.iter().map(|range| (range.first.0, range.count));
        self.forest.allocator.set_guard(ranges);
    }

    /// Whether the guarded blocks have the contents that they had when the writes in flight at
    /// [`guard`](Self::guard) had ended: none of them was freed since.
    #[must_use]
    pub fn guard_holds(&self) -> bool {
        self.forest.allocator.guard().holds()
    }

    /// Guards nothing.
    pub fn end_guard(&mut self) {
        self.forest.allocator.set_guard(std::iter::empty());
    }

    /// Ends the guard if it is on some of these blocks: a write that finds no fresh ones may go to
    /// them in place then. Returns whether it was.
    pub fn yield_guard(&mut self, extents: &[Extent]) -> bool {
        let guard = self.forest.allocator.guard();
        let is_on =
            |extent: &Extent| guard.inside(extent.physical.0, extent.count).next().is_some();
        let yields = extents.iter().any(is_on);
        if yields {
            self.end_guard();
        }
        yields
    }

    /// Maps the blocks of `from` in its range at `to` as well; holes there become holes here. The
    /// former blocks lose a reference.
    ///
    /// # Errors
    /// [`VolumeError`]: no such volume or range, ranges of a volume that
    /// overlap, a read-only or damaged volume, the quota, no space, the disk. A first part may have
    /// been shared then.
    pub fn share(
        &mut self,
        disk: &mut dyn Disk,
        from: (VolumeId, BlockRange),
        to: (VolumeId, Vlba),
    ) -> Result<(), VolumeError> {
        self.changeable(to.0)?;
        self.remap(disk, from, to)
    }

    /// As [`share`](Self::share), of blocks with equal contents: a snapshot may be remapped too.
    ///
    /// The caller guarantees that the contents are equal and stay so: see [`guard`](Self::guard).
    ///
    /// # Errors
    /// As [`share`](Self::share), but for snapshots.
    pub fn remap(
        &mut self,
        disk: &mut dyn Disk,
        from: (VolumeId, BlockRange),
        to: (VolumeId, Vlba),
    ) -> Result<(), VolumeError> {
        let source = self.healthy(from.0)?;
        let (first, end) = inside(from.1, source.info.blocks)?;
        let target = BlockRange { first: to.1, count: from.1.count };
        let (to_first, to_end) = inside(target, self.remappable(to.0)?.info.blocks)?;
        if from.0 == to.0 {
            if first == to_first || first == end {
                return Ok(());
            }
            if first < to_end && to_first < end {
                return Err(VolumeError::Overlap);
            }
        }
        let is_copy = first == to_first && self.may_be_related(from.0, to.0);
        let mut at = first;
        while at < end {
            // The source may be the target: its tree changes as we go.
            let tree = self.healthy(from.0)?.tree;
            let looked = self.forest.look(disk, &tree, at, end, MAX_ITEMS);
            let (found, reached) = looked.map_err(|error| self.fail(from.0, error))?;
            let to_at = to_first.saturating_add(at.saturating_sub(first));
            let to_reached = to_first.saturating_add(reached.saturating_sub(first));
            let items = found.iter().map(|found| Entry {
                first: to_first.saturating_add(found.entry.first.saturating_sub(first)),
                ..found.entry
            });
            self.remap_part(disk, to.0, (to_at, to_reached), items.collect(), is_copy)?;
            at = reached.max(at.saturating_add(1));
        }
        Ok(())
    }

    fn remap_part(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        (first, end): (u64, u64),
        entries: Vec<Entry>,
        is_copy: bool,
    ) -> Result<(), VolumeError> {
        let volume = self.remappable(id)?;
        let (tree, quota_blocks) = (volume.tree, volume.info.quota_blocks);
        let used_blocks = volume.info.allocated_blocks.saturating_add(volume.charged_blocks);
        let looked = self.forest.look(disk, &tree, first, end, usize::MAX.saturating_sub(1));
        let (mapped, _) = looked.map_err(|error| self.fail(id, error))?;
        let blocks = |counts: &mut dyn Iterator<Item = u64>| counts.fold(0, u64::saturating_add);
        let more = blocks(&mut entries.iter().map(|entry| entry.count));
        let less = blocks(&mut mapped.iter().map(|found| found.entry.count));
        if let Some(quota_blocks) = quota_blocks
            && more > less
            && used_blocks.saturating_add(more).saturating_sub(less) > quota_blocks
        {
            return Err(VolumeError::QuotaExceeded { quota_blocks });
        }
        self.touch(id, Need::Growth)?;
        if !is_copy {
            // From the generation on that has this, equal blocks may lie anywhere.
            self.superblock.only_copies = false;
        }
        for entry in &entries {
            self.forest.allocator.refer(entry.physical, entry.count);
        }
        let items = entries.iter().copied().map(Item::Extent).collect();
        let shared = self.change(disk, id, (first, end), items, Need::Growth);
        if shared.is_err() {
            for entry in &entries {
                self.forest.allocator.drop_reference(entry.physical, entry.count);
            }
        }
        shared
    }

    /// Makes blocks of zeros a hole, also in a snapshot. Blocks without another reference are freed
    /// with the next commit.
    ///
    /// The caller guarantees that there are only zeros: see [`guard`](Self::guard).
    ///
    /// # Errors
    /// [`VolumeError`]: no such volume or range, a damaged volume, no space, the disk.
    pub fn remap_zeros(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        range: BlockRange,
    ) -> Result<(), VolumeError> {
        let blocks = self.remappable(id)?.info.blocks;
        self.drop_mappings(disk, id, inside(range, blocks)?, blocks, Need::Growth)
    }

    /// A volume whose mappings may be changed if its contents stay the same.
    fn remappable(&self, id: VolumeId) -> Result<&Volume, VolumeError> {
        self.writable()?;
        self.healthy(id)
    }

    /// Whether blocks that the two share at the same virtual block are like those of a volume and
    /// its copy. Once that is so it stays so, whichever volumes are deleted.
    fn may_be_related(&self, one: VolumeId, other: VolumeId) -> bool {
        let origin_of =
            |id| self.get(VolumeId(id)).map(|volume| volume.origin.map_or(0, |origin| origin.0));
        doubt::may_be_related(origin_of, one.0, other.0)
    }
}
