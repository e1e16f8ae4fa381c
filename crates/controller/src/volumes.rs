//! What an operator does with the volumes of a controller, while guests use them.
//! All of it waits for the disk: call it where waiting is allowed.

use std::sync::mpsc;
use std::time::Duration;

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::Vlba;
use sidecore_volume::{Disk, NewVolume, Report, VolumeError, VolumeId, VolumeInfo};

use crate::events::now_unix_s;
use crate::grace::Epoch;
use crate::hypervisor::State;
use crate::mail::GrantId;
use crate::physical::PhysicalDisk;
use crate::{Controller, ControllerError};

/// How long a grace period is slept through at a time.
const GRACE_NAP: Duration = Duration::from_micros(100);

/// Bytes that are compared at a time.
const COMPARE_BYTES: u64 = 256 << 10;

/// A change that was made in memory: it is done when all I/O that started before it
/// has ended, and when it is durable.
#[derive(Clone, Copy, Debug)]
#[must_use = "a change has to be settled"]
pub struct Change(Epoch);

impl Controller {
    fn disk(&self) -> Result<PhysicalDisk, ControllerError> {
        Ok(PhysicalDisk::open(self.store())?)
    }

    /// Whether all I/O that started before `change` has ended; a commit makes it
    /// durable then.
    #[must_use]
    pub fn has_passed(&self, change: Change) -> bool {
        self.hypervisor.epochs.passed(change.0)
    }

    /// Waits until a change is done.
    fn settle(&self, change: Change) -> Result<(), ControllerError> {
        while !self.has_passed(change) {
            std::thread::sleep(GRACE_NAP);
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

    /// Makes a volume of `size_bytes` with no blocks (thesis 5.3), which may use at
    /// most `quota_bytes`.
    ///
    /// # Errors
    /// The name or the size cannot be, or the disk fails.
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

    /// The first half of [`create_volume`](Self::create_volume), at a time of the
    /// caller's, in seconds since 1970.
    ///
    /// # Errors
    /// As there.
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

    /// Makes a read-only copy of a volume as it is now, at once and without copying.
    ///
    /// # Errors
    /// There is no such volume, or the name cannot be, or the disk fails.
    pub fn snapshot_volume(&self, name: &str, snapshot: &str) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.begin_snapshot(name, snapshot, now_unix_s(), &mut self.disk()?)?;
        self.settle(change)?;
        self.info(id)
    }

    /// The first half of [`snapshot_volume`](Self::snapshot_volume): from now on
    /// writes go elsewhere; those under way may still be in the snapshot.
    ///
    /// # Errors
    /// As there.
    pub fn begin_snapshot(
        &self,
        name: &str,
        snapshot: &str,
        now_unix_s: u64,
        disk: &mut dyn Disk,
    ) -> Result<(VolumeId, Change), ControllerError> {
        self.change(|state| {
            let origin = find(state, name)?;
            let id = state.volumes.snapshot(disk, origin, snapshot, now_unix_s)?;
            self.forget(state, origin);
            Ok(id)
        })
    }

    /// Makes a writable copy of a volume or snapshot as it is now, at once and
    /// without copying.
    ///
    /// # Errors
    /// There is no such volume, or the name cannot be, or the disk fails.
    pub fn clone_volume(&self, origin: &str, name: &str) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.begin_clone(origin, name, now_unix_s(), &mut self.disk()?)?;
        self.settle(change)?;
        self.info(id)
    }

    /// The first half of [`clone_volume`](Self::clone_volume).
    ///
    /// # Errors
    /// As there.
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

    /// All mappings of the volume are out of date: those that are asked for are read
    /// from the metadata again.
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

    /// Changes a volume's size. A volume that is served can only grow; its guest
    /// learns of it when its device is started anew.
    ///
    /// # Errors
    /// There is no such volume, the size cannot be, or it is served and would
    /// shrink.
    pub fn resize_volume(&self, name: &str, size_bytes: u64) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.begin_resize(name, size_bytes, &mut self.disk()?)?;
        self.settle(change)?;
        self.info(id)
    }

    /// The first half of [`resize_volume`](Self::resize_volume).
    ///
    /// # Errors
    /// As there.
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
            // Served when it is durable.
            let generation = state.volumes.open_generation();
            state.sizes.insert(id, (generation, before));
            let transaction = state.transaction;
            if let Some(open) = state.open.get_mut(&id) {
                open.changed(transaction);
            }
            Ok(id)
        })
    }

    /// Gives a volume another name.
    ///
    /// # Errors
    /// There is no such volume, or the name cannot be or is taken.
    pub fn rename_volume(&self, name: &str, new_name: &str) -> Result<VolumeInfo, ControllerError> {
        let (id, change) = self.change(|state| {
            let id = find(state, name)?;
            state.volumes.rename(id, new_name)?;
            Ok(id)
        })?;
        self.settle(change)?;
        self.info(id)
    }

    /// Changes how much a volume may use.
    ///
    /// # Errors
    /// There is no such volume, or the quota cannot be.
    pub fn set_quota(&self, name: &str, quota_bytes: Option<u64>) -> Result<VolumeInfo, ControllerError> {
        let quota_blocks = quota_bytes.map(|bytes| self.blocks_of(bytes)).transpose()?;
        let (id, change) = self.change(|state| {
            let id = find(state, name)?;
            state.volumes.set_quota(id, quota_blocks)?;
            Ok(id)
        })?;
        self.settle(change)?;
        self.info(id)
    }

    /// Deletes a volume or snapshot; what nobody else refers to becomes free.
    ///
    /// # Errors
    /// There is no such volume, or it is served.
    pub fn delete_volume(&self, name: &str) -> Result<(), ControllerError> {
        let ((), change) = self.begin_delete(name, &mut self.disk()?)?;
        self.settle(change)
    }

    /// The first half of [`delete_volume`](Self::delete_volume).
    ///
    /// # Errors
    /// As there.
    pub fn begin_delete(&self, name: &str, disk: &mut dyn Disk) -> Result<((), Change), ControllerError> {
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

    /// A volume.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn volume(&self, name: &str) -> Result<VolumeInfo, ControllerError> {
        let id = find(&self.hypervisor.state(), name)?;
        self.info(id)
    }

    fn info(&self, id: VolumeId) -> Result<VolumeInfo, ControllerError> {
        let state = self.hypervisor.state();
        Ok(state.volumes.get(id).cloned().ok_or(VolumeError::NoSuchVolume(id))?)
    }

    /// The extents of a volume from a block on, at most `max` of them, and how far
    /// the answer goes.
    ///
    /// # Errors
    /// There is no such volume, or its metadata cannot be read.
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
    /// The store cannot be reached; what it finds is in the report.
    pub fn check(&self) -> Result<Report, ControllerError> {
        Ok(self.check_on(&mut self.disk()?))
    }

    /// As [`check`](Self::check), by a way to the store of the caller's.
    #[must_use]
    pub fn check_on(&self, disk: &mut dyn Disk) -> Report {
        self.hypervisor.state().volumes.check(disk)
    }

    /// Drops the mappings of one volume, or of all, from memory: they come back when
    /// they are needed.
    ///
    /// # Errors
    /// There is no such volume.
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

    /// Makes every sidecore forget the mappings that it has cached (thesis 6.3).
    pub fn flush_btlb(&self) {
        for open in self.hypervisor.state().open.values() {
            open.tree.root().bump_version();
        }
    }

    /// Makes blocks of one volume lie where equal blocks of another (or of the same)
    /// lie: deduplication under live functions (thesis 6.3). Both may be in use:
    /// writes to these blocks wait until it is done.
    ///
    /// # Errors
    /// The blocks differ, are not there, or overlap, or the disk fails; nothing is
    /// changed then.
    pub fn share_blocks(&self, from: (&str, BlockRange), to: (&str, Vlba)) -> Result<(), ControllerError> {
        let mut disk = self.disk()?;
        let (from_id, to_id) = {
            let state = self.hypervisor.state();
            (find(&state, from.0)?, find(&state, to.0)?)
        };
        let to_range = BlockRange { first: to.1, count: from.1.count };
        let ranges = [(from_id, from.1), (to_id, to_range)];
        let held = self.hold(&ranges)?;
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
        self.let_go(held, &mut disk);
        self.settle(result?)
    }

    /// Takes blocks out of every reach: no mapping of them is in a tree, no I/O to
    /// them is under way, and who asks for them waits.
    fn hold(&self, ranges: &[(VolumeId, BlockRange)]) -> Result<Vec<(VolumeId, GrantId)>, ControllerError> {
        loop {
            let held = {
                let mut state = self.hypervisor.state();
                let busy =
                    |(id, range): &(VolumeId, BlockRange)| state.open.get(id).is_some_and(|open| open.is_busy(*range));
                if ranges.iter().any(busy) {
                    None
                } else {
                    let mut held = Vec::new();
                    for (id, range) in ranges {
                        if let Some(open) = state.open.get_mut(id) {
                            held.push((*id, open.grants.hold(*range)));
                            open.tree.prune(*range);
                            let retired = open.tree.take_retired();
                            state.limbo.retire(retired, &self.hypervisor.epochs);
                        }
                    }
                    Some(held)
                }
            };
            if let Some(held) = held {
                let epoch = self.hypervisor.epochs.advance();
                while !self.hypervisor.epochs.passed(epoch) {
                    std::thread::sleep(GRACE_NAP);
                }
                return Ok(held);
            }
            if self.is_down() {
                return Err(ControllerError::Down);
            }
            std::thread::sleep(GRACE_NAP);
        }
    }

    fn let_go(&self, held: Vec<(VolumeId, GrantId)>, disk: &mut dyn Disk) {
        let mut waiting = Vec::new();
        {
            let mut state = self.hypervisor.state();
            for (id, hold) in held {
                if let Some(open) = state.open.get_mut(&id) {
                    let _ = open.grants.remove(hold);
                    waiting.append(&mut open.blocked);
                }
            }
        }
        for message in waiting {
            self.hypervisor.serve(message, disk);
        }
    }

    /// Whether the blocks of two ranges hold the same. Holes are not blocks.
    fn compare(&self, ranges: &[(VolumeId, BlockRange); 2], disk: &mut dyn Disk) -> Result<bool, ControllerError> {
        let block_bytes = u64::from(self.block_bytes());
        let step = COMPARE_BYTES.checked_div(block_bytes).unwrap_or(1).max(1);
        let [(from, from_range), (to, to_range)] = ranges;
        let mut done = 0_u64;
        while done < from_range.count {
            let count = step.min(from_range.count.saturating_sub(done));
            let at = |range: &BlockRange| BlockRange { first: Vlba(range.first.0.saturating_add(done)), count };
            let one = self.contents(*from, at(from_range), disk)?;
            let other = self.contents(*to, at(to_range), disk)?;
            if one.is_none() || one != other {
                return Ok(false);
            }
            done = done.saturating_add(count);
        }
        Ok(true)
    }

    /// The bytes of `range`, `None` if some of it is a hole.
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

fn refuse_in_use(state: &State, id: VolumeId, name: &str, advice: &'static str) -> Result<(), ControllerError> {
    match state.open.get(&id).and_then(|open| open.functions.first()) {
        Some(function) => Err(ControllerError::InUse { volume: name.to_owned(), function: function.0, advice }),
        None => Ok(()),
    }
}
