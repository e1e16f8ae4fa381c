//! The operator's operations on the volumes of a controller, while guests use them. All of them
//! wait for the disk: call them on a thread that may block.

use std::sync::mpsc;
use std::time::Duration;

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::Vlba;
use sidecore_volume::{Disk, NewVolume, Report, VolumeError, VolumeId, VolumeInfo};

use crate::epochs::Epoch;
use crate::events::now_unix_s;
use crate::hypervisor::State;
use crate::mail::GrantId;
use crate::physical::PhysicalDisk;
use crate::{Controller, ControllerError};

/// The pause between two checks of an epoch.
const EPOCH_POLL: Duration = Duration::from_micros(100);

/// The bytes compared at a time.
const COMPARE_BYTES: u64 = 256 << 10;

/// A change that was made in memory: it is complete when all I/O that started before it has ended,
/// and when it is durable.
#[derive(Clone, Copy, Debug)]
#[must_use = "a change has to be settled"]
pub struct Change(Epoch);

impl Controller {
    fn disk(&self) -> Result<PhysicalDisk, ControllerError> {
        Ok(PhysicalDisk::open(self.store())?)
    }

    /// Whether all I/O that started before `change` has ended; then a commit makes the change
    /// durable.
    #[must_use]
    pub fn has_passed(&self, change: Change) -> bool {
        self.hypervisor.epochs.passed(change.0)
    }

    /// Waits until a change is complete.
    fn settle(&self, change: Change) -> Result<(), ControllerError> {
        while !self.has_passed(change) {
            std::thread::sleep(EPOCH_POLL);
        }
        let (reply, answer) = mpsc::sync_channel(1);
        self.hypervisor.commits.ask_for_operation(reply);
        match answer.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(ControllerError::Commit(why)),
            Err(_) => Err(ControllerError::Down),
        }
    }

    /// Changes the state and starts an epoch.
    fn change<T>(
        &self,
        act: impl FnOnce(&mut State) -> Result<T, ControllerError>,
    ) -> Result<(T, Change), ControllerError> {
        if self.is_down() {
            return Err(ControllerError::Down);
        }
        let done = act(&mut self.hypervisor.state())?;
        Ok((done, Change(self.hypervisor.epochs.advance())))
    }

    fn blocks_of(&self, size_bytes: u64) -> Result<u64, ControllerError> {
        let block_bytes = self.block_bytes();
        if !size_bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(ControllerError::PartialBlock { size_bytes, block_bytes });
        }
        Ok(size_bytes.checked_div(u64::from(block_bytes)).unwrap_or(0))
    }

    /// Creates a volume of `size_bytes` without blocks (thesis 5.3), which may use at most
    /// `quota_bytes`.
    ///
    /// # Errors
    /// The name or the size is invalid, or the disk fails.
    pub fn create_volume(
        &self,
        name: &str,
        size_bytes: u64,
        quota_bytes: Option<u64>,
    ) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.begin_create(name, size_bytes, quota_bytes, now_unix_s())?;
        self.settle(change)?;
        self.info(id)
    }

    /// The first half of [`create_volume`](Self::create_volume), with the caller's time, in seconds
    /// since 1970.
    ///
    /// # Errors
    /// As [`create_volume`](Self::create_volume).
    pub fn begin_create(
        &self,
        name: &str,
        size_bytes: u64,
        quota_bytes: Option<u64>,
        now_unix_s: u64,
    ) -> Result<(VolumeId, Change), ControllerError> {
        let blocks = self.blocks_of(size_bytes)?;
        let quota_blocks = quota_bytes.map(|bytes| self.blocks_of(bytes)).transpose()?;
        let new = NewVolume { name: name.to_owned(), blocks, quota_blocks };
        self.change(|state| Ok(state.volumes.create(&new, now_unix_s)?))
    }

    /// Makes a read-only snapshot of a volume, at once and without copying data.
    ///
    /// # Errors
    /// The volume does not exist, the snapshot's name is invalid, or the disk fails.
    pub fn snapshot_volume(
        &self,
        name: &str,
        snapshot: &str,
    ) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.begin_snapshot(name, snapshot, now_unix_s(), &mut self.disk()?)?;
        self.settle(change)?;
        self.info(id)
    }

    /// As [`snapshot_volume`](Self::snapshot_volume), of the volume with this number, whatever its
    /// name is by now, and with the caller's time, in seconds since 1970.
    ///
    /// # Errors
    /// As [`snapshot_volume`](Self::snapshot_volume).
    pub fn snapshot_volume_at(
        &self,
        origin: VolumeId,
        snapshot: &str,
        now_unix_s: u64,
    ) -> Result<VolumeInfo, ControllerError> {
        let disk = &mut self.disk()?;
        let change = |state: &mut State| self.snapshot(state, origin, snapshot, now_unix_s, disk);
        let (id, change) = self.change(change)?;
        self.settle(change)?;
        self.info(id)
    }

    /// Makes all changes durable that were made before this call, also those whose commit has
    /// failed.
    ///
    /// # Errors
    /// They cannot be made durable.
    pub fn settle_changes(&self) -> Result<(), ControllerError> {
        let ((), change) = self.change(|_| Ok(()))?;
        self.settle(change)
    }

    /// Whether a volume is as it was when this snapshot of it was made: no block was written or
    /// discarded since, and its size is the same.
    #[must_use]
    pub fn is_unchanged_since(&self, volume: VolumeId, snapshot: VolumeId) -> bool {
        self.hypervisor.state().volumes.are_same(volume, snapshot)
    }

    /// The first half of [`snapshot_volume`](Self::snapshot_volume): later writes go to other
    /// blocks; writes in flight may still be part of the snapshot.
    ///
    /// # Errors
    /// As [`snapshot_volume`](Self::snapshot_volume).
    pub fn begin_snapshot(
        &self,
        name: &str,
        snapshot: &str,
        now_unix_s: u64,
        disk: &mut dyn Disk,
    ) -> Result<(VolumeId, Change), ControllerError> {
        self.change(|state| {
            let origin = find(state, name)?;
            self.snapshot(state, origin, snapshot, now_unix_s, disk)
        })
    }

    fn snapshot(
        &self,
        state: &mut State,
        origin: VolumeId,
        snapshot: &str,
        now_unix_s: u64,
        disk: &mut dyn Disk,
    ) -> Result<VolumeId, ControllerError> {
        let id = state.volumes.snapshot(disk, origin, snapshot, now_unix_s)?;
        self.forget(state, origin);
        Ok(id)
    }

    /// Makes a writable copy of a volume or snapshot, at once and without copying data.
    ///
    /// # Errors
    /// The origin does not exist, the new name is invalid, or the disk fails.
    pub fn clone_volume(&self, origin: &str, name: &str) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.begin_clone(origin, name, now_unix_s(), &mut self.disk()?)?;
        self.settle(change)?;
        self.info(id)
    }

    /// The first half of [`clone_volume`](Self::clone_volume).
    ///
    /// # Errors
    /// As [`clone_volume`](Self::clone_volume).
    pub fn begin_clone(
        &self,
        origin: &str,
        name: &str,
        now_unix_s: u64,
        disk: &mut dyn Disk,
    ) -> Result<(VolumeId, Change), ControllerError> {
        self.change(|state| {
            let origin = find(state, origin)?;
            let id = state.volumes.clone_volume(disk, origin, name, now_unix_s)?;
            self.forget(state, origin);
            Ok(id)
        })
    }

    /// Prunes all mappings of the volume, which are out of date: a miss reads them from the
    /// metadata again.
    fn forget(&self, state: &mut State, id: VolumeId) {
        let transaction = state.transaction;
        if let Some(open) = state.open.get_mut(&id) {
            open.changed(transaction);
            open.tree.prune_all();
            open.shared_at = self.hypervisor.epochs.advance();
            let retired = open.tree.take_retired();
            state.limbo.retire(retired, &self.hypervisor.epochs);
        }
    }

    /// Changes a volume's size. A volume that is served can only grow; its guest notices when its
    /// device is restarted.
    ///
    /// # Errors
    /// The volume does not exist, the size is invalid, or the volume is served and would shrink.
    pub fn resize_volume(
        &self,
        name: &str,
        size_bytes: u64,
    ) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.begin_resize(name, size_bytes, &mut self.disk()?)?;
        self.settle(change)?;
        self.info(id)
    }

    /// The first half of [`resize_volume`](Self::resize_volume).
    ///
    /// # Errors
    /// As [`resize_volume`](Self::resize_volume).
    pub fn begin_resize(
        &self,
        name: &str,
        size_bytes: u64,
        disk: &mut dyn Disk,
    ) -> Result<(VolumeId, Change), ControllerError> {
        let blocks = self.blocks_of(size_bytes)?;
        self.change(|state| {
            let id = find(state, name)?;
            let shrinks = state.volumes.get(id).is_some_and(|info| info.blocks > blocks);
            if shrinks {
                refuse_in_use(state, id, name, "remove its device before it shrinks")?;
            }
            let before = state.served_blocks(id);
            state.volumes.resize(disk, id, blocks)?;
            // The new size is served when it is durable.
            let generation = state.volumes.open_generation();
            state.sizes.insert(id, (generation, before));
            let transaction = state.transaction;
            if let Some(open) = state.open.get_mut(&id) {
                open.changed(transaction);
            }
            Ok(id)
        })
    }

    /// Renames a volume.
    ///
    /// # Errors
    /// The volume does not exist, or the new name is invalid or taken.
    pub fn rename_volume(&self, name: &str, new_name: &str) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.change(|state| {
            let id = find(state, name)?;
            state.volumes.rename(id, new_name)?;
            Ok(id)
        })?;
        self.settle(change)?;
        self.info(id)
    }

    /// Changes a volume's quota.
    ///
    /// # Errors
    /// The volume does not exist, or the quota is invalid.
    pub fn set_quota(
        &self,
        name: &str,
        quota_bytes: Option<u64>,
    ) -> Result<VolumeInfo, ControllerError> {
        let quota_blocks = quota_bytes.map(|bytes| self.blocks_of(bytes)).transpose()?;
        let (id, change) = self.change(|state| {
            let id = find(state, name)?;
            state.volumes.set_quota(id, quota_blocks)?;
            Ok(id)
        })?;
        self.settle(change)?;
        self.info(id)
    }

    /// Deletes a volume or snapshot, and frees the blocks that no other volume refers to.
    ///
    /// # Errors
    /// The volume does not exist, or is served.
    pub fn delete_volume(&self, name: &str) -> Result<(), ControllerError> {
        let ((), change) = self.begin_delete(name, &mut self.disk()?)?;
        self.settle(change)
    }

    /// The first half of [`delete_volume`](Self::delete_volume).
    ///
    /// # Errors
    /// As [`delete_volume`](Self::delete_volume).
    pub fn begin_delete(
        &self,
        name: &str,
        disk: &mut dyn Disk,
    ) -> Result<((), Change), ControllerError> {
        self.change(|state| {
            let id = find(state, name)?;
            refuse_in_use(state, id, name, "remove its device first")?;
            state.volumes.delete(disk, id)?;
            state.sizes.remove(&id);
            Ok(())
        })
    }

    /// All volumes, by number.
    #[must_use]
    pub fn volumes(&self) -> Vec<VolumeInfo> {
        self.hypervisor.state().volumes.list().cloned().collect()
    }

    /// The volume with this name.
    ///
    /// # Errors
    /// No volume has this name.
    pub fn volume(&self, name: &str) -> Result<VolumeInfo, ControllerError> {
        let id = find(&self.hypervisor.state(), name)?;
        self.info(id)
    }

    fn info(&self, id: VolumeId) -> Result<VolumeInfo, ControllerError> {
        let state = self.hypervisor.state();
        Ok(state.volumes.get(id).cloned().ok_or(VolumeError::NoSuchVolume(id))?)
    }

    /// The extents of a volume from a block on, at most `max` of them, and the range that the
    /// result covers.
    ///
    /// # Errors
    /// The volume does not exist, or its metadata cannot be read.
    pub fn volume_extents(
        &self,
        name: &str,
        from: Vlba,
        max: usize,
    ) -> Result<(Vec<Extent>, BlockRange), ControllerError> {
        let mut disk = self.disk()?;
        let mut state = self.hypervisor.state();
        let id = find(&state, name)?;
        let blocks = state.volumes.get(id).map_or(0, |info| info.blocks);
        let range = BlockRange { first: from, count: blocks.saturating_sub(from.0) };
        if range.count == 0 {
            return Ok((Vec::new(), range));
        }
        let mapped = state.volumes.map(&mut disk, id, range, max.max(1))?;
        Ok((mapped.extents, mapped.covered))
    }

    /// Reads all metadata and accounts for every block. Misses wait meanwhile.
    ///
    /// # Errors
    /// The store cannot be opened; damage is part of the report.
    pub fn check(&self) -> Result<Report, ControllerError> {
        Ok(self.check_on(&mut self.disk()?))
    }

    /// As [`check`](Self::check), on the caller's disk.
    #[must_use]
    pub fn check_on(&self, disk: &mut dyn Disk) -> Report {
        self.hypervisor.state().volumes.check(disk)
    }

    /// Drops the mappings of one volume, or of all, from memory: misses read them again.
    ///
    /// # Errors
    /// The volume does not exist.
    pub fn prune(&self, name: Option<&str>) -> Result<(), ControllerError> {
        let mut state = self.hypervisor.state();
        let ids: Vec<VolumeId> = match name {
            Some(name) => vec![find(&state, name)?],
            None => state.open.keys().copied().collect(),
        };
        for id in ids {
            if let Some(open) = state.open.get_mut(&id) {
                open.tree.prune_all();
                let retired = open.tree.take_retired();
                let pruned = retired.len() as u64;
                self.hypervisor.stats.pruned_nodes.add(pruned);
                state.limbo.retire(retired, &self.hypervisor.epochs);
            }
        }
        Ok(())
    }

    /// Makes every sidecore drop its cached mappings (thesis 6.3).
    pub fn flush_btlb(&self) {
        for open in self.hypervisor.state().open.values() {
            open.tree.root().bump_version();
        }
    }

    /// Maps blocks of one volume to the place of equal blocks of another volume (or of the same):
    /// deduplication under live functions (thesis 6.3). Both may be in use: writes to these blocks
    /// wait until the operation is done.
    ///
    /// # Errors
    /// The blocks differ, are holes, or overlap, or the disk fails; then nothing is changed.
    pub fn share_blocks(
        &self,
        from: (&str, BlockRange),
        to: (&str, Vlba),
    ) -> Result<(), ControllerError> {
        let mut disk = self.disk()?;
        let (from_id, to_id) = {
            let state = self.hypervisor.state();
            (find(&state, from.0)?, find(&state, to.0)?)
        };
        let to_range = BlockRange { first: to.1, count: from.1.count };
        let ranges = [(from_id, from.1), (to_id, to_range)];
        let locked = self.lock_blocks(&ranges)?;
        let result = self.compare(&ranges, &mut disk).and_then(|equal| {
            if !equal {
                return Err(ControllerError::NotEqual);
            }
            let ((), change) = self.change(|state| {
                state.volumes.share(&mut disk, (from_id, from.1), (to_id, to.1))?;
                let transaction = state.transaction;
                for (id, _) in ranges {
                    if let Some(open) = state.open.get(&id) {
                        open.changed(transaction);
                    }
                }
                Ok(())
            })?;
            Ok(change)
        });
        self.unlock_blocks(locked, &mut disk);
        self.settle(result?)
    }

    /// Locks blocks: no tree maps them, no I/O to them is in flight, and requests for them wait.
    fn lock_blocks(
        &self,
        ranges: &[(VolumeId, BlockRange)],
    ) -> Result<Vec<(VolumeId, GrantId)>, ControllerError> {
        loop {
            let locked = {
                let mut state = self.hypervisor.state();
                let busy = |(id, range): &(VolumeId, BlockRange)| {
                    state.open.get(id).is_some_and(|open| open.is_busy(*range))
                };
                if ranges.iter().any(busy) {
                    None
                } else {
                    let mut locked = Vec::new();
                    for (id, range) in ranges {
                        if let Some(open) = state.open.get_mut(id) {
                            locked.push((*id, open.grants.lock(*range)));
                            open.tree.prune(*range);
                            let retired = open.tree.take_retired();
                            state.limbo.retire(retired, &self.hypervisor.epochs);
                        }
                    }
                    Some(locked)
                }
            };
            if let Some(locked) = locked {
                let epoch = self.hypervisor.epochs.advance();
                while !self.hypervisor.epochs.passed(epoch) {
                    std::thread::sleep(EPOCH_POLL);
                }
                return Ok(locked);
            }
            if self.is_down() {
                return Err(ControllerError::Down);
            }
            std::thread::sleep(EPOCH_POLL);
        }
    }

    fn unlock_blocks(&self, locked: Vec<(VolumeId, GrantId)>, disk: &mut dyn Disk) {
        let mut waiting = Vec::new();
        {
            let mut state = self.hypervisor.state();
            for (id, lock) in locked {
                if let Some(open) = state.open.get_mut(&id) {
                    let _ = open.grants.remove(lock);
                    waiting.append(&mut open.blocked);
                }
            }
        }
        for message in waiting {
            self.hypervisor.serve(message, disk);
        }
    }

    /// Whether two ranges have the same contents. A hole has none.
    fn compare(
        &self,
        ranges: &[(VolumeId, BlockRange); 2],
        disk: &mut dyn Disk,
    ) -> Result<bool, ControllerError> {
        let block_bytes = u64::from(self.block_bytes());
        let step = COMPARE_BYTES.checked_div(block_bytes).unwrap_or(1).max(1);
        let [(from, from_range), (to, to_range)] = ranges;
        let mut done = 0_u64;
        while done < from_range.count {
            let count = step.min(from_range.count.saturating_sub(done));
            let at = |range: &BlockRange| BlockRange {
                first: Vlba(range.first.0.saturating_add(done)),
                count,
            };
            let one = self.contents(*from, at(from_range), disk)?;
            let other = self.contents(*to, at(to_range), disk)?;
            if one.is_none() || one != other {
                return Ok(false);
            }
            done = done.saturating_add(count);
        }
        Ok(true)
    }

    /// The contents of `range`, `None` if some of it is a hole.
    fn contents(
        &self,
        id: VolumeId,
        range: BlockRange,
        disk: &mut dyn Disk,
    ) -> Result<Option<Vec<u8>>, ControllerError> {
        let block_bytes = u64::from(self.block_bytes());
        let mut bytes = Vec::new();
        let mut next = range.first;
        let end = range.end().unwrap_or(Vlba(u64::MAX));
        while next < end {
            let rest = BlockRange::between(next, end);
            let mapped = self.hypervisor.state().volumes.map(disk, id, rest, 64)?;
            for extent in &mapped.extents {
                if extent.first != next {
                    return Ok(None);
                }
                let len_bytes = extent.count.saturating_mul(block_bytes);
                let mut piece = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
                disk.read(extent.physical.0.saturating_mul(block_bytes), &mut piece)?;
                bytes.append(&mut piece);
                next = Vlba(next.0.saturating_add(extent.count));
            }
            if mapped.covered.end() != Some(next) {
                return Ok(None);
            }
        }
        Ok(Some(bytes))
    }
}

fn find(state: &State, name: &str) -> Result<VolumeId, ControllerError> {
    let found = state.volumes.find(name).map(|info| info.id);
    found.ok_or_else(|| ControllerError::NoSuchVolume(name.to_owned()))
}

fn refuse_in_use(
    state: &State,
    id: VolumeId,
    name: &str,
    advice: &'static str,
) -> Result<(), ControllerError> {
    match state.open.get(&id).and_then(|open| open.functions.first()) {
        Some(function) => {
            Err(ControllerError::InUse { volume: name.to_owned(), function: function.0, advice })
        }
        None => Ok(()),
    }
}
