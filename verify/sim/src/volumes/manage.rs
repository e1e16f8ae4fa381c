//! The operator's actions on volumes.

use std::collections::BTreeMap;
use std::rc::Rc;

use sidecore_extent::BlockRange;
use sidecore_units::Vlba;
use sidecore_volume::{MAX_VOLUME_BYTES, NewVolume, VolumeError, VolumeId};

use super::model::ModelVolume;
use super::world::World;
use crate::history::{Step, System as _};

/// Commits after which an operation that must succeed on a full store may still fail.
const PATIENCE: u32 = 3;

/// The reserve of metadata of a small store, while nothing has used any of it: 32 nodes.
const RESERVE_BYTES: u64 = 32 * 4096;

/// The room that an operation may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// There must always be enough.
    Nothing,
    /// There is enough unless earlier changes of shared blocks have used it up.
    OfShared,
}

impl World {
    /// A random operation, and usually a commit, because the operator is then told of its end.
    pub(super) fn manage(&mut self) -> Step {
        let count = self.state.0.len();
        match self.random.below(16) {
            0..3 if count < self.tuning.most_volumes => self.create()?,
            3..6 if count < self.tuning.most_volumes => self.derive(true)?,
            6..8 if count < self.tuning.most_volumes => self.derive(false)?,
            8..10 => self.resize()?,
            10 => self.rename()?,
            11 => self.set_quota()?,
            _ if count == 0 => self.create()?,
            _ if count >= self.tuning.most_volumes || self.random.once_in(3) => self.delete()?,
            _ => {}
        }
        if self.random.once_in(self.tuning.operations_per_lazy) { Ok(()) } else { self.commit() }
    }

    pub(super) fn any_volume(&mut self) -> Option<u64> {
        let index = self.random.below(self.state.0.len().max(1) as u64) as usize;
        self.state.0.keys().nth(index).copied()
    }

    fn fresh_name(&mut self) -> String {
        self.ledger.names += 1;
        let longest = sidecore_volume::MAX_NAME_BYTES;
        let name = format!("v{}", self.ledger.names);
        if self.random.once_in(8) { format!("{name:_<longest$}") } else { name }
    }

    fn some_size(&mut self) -> u64 {
        if self.random.once_in(self.tuning.volumes_per_huge) {
            let largest = MAX_VOLUME_BYTES / u64::from(self.tuning.block_bytes);
            return if self.random.once_in(2) {
                largest
            } else {
                4097 + self.random.below(largest - 4097)
            };
        }
        1 + self.random.below(self.tuning.largest_volume)
    }

    fn some_quota(&mut self) -> Option<u64> {
        if self.random.once_in(4) {
            Some(1 + self.random.below(self.tuning.largest_volume))
        } else {
            None
        }
    }

    /// Checks that the id of a new volume was never used.
    fn check_id(&mut self, id: VolumeId) -> Step {
        let newest = self.newest_id.replace(id.0);
        if newest.is_some_and(|newest| newest >= id.0) {
            Err(format!("volume id {id} once more"))
        } else {
            Ok(())
        }
    }

    fn create(&mut self) -> Step {
        let (name, blocks, quota_blocks) = (self.fresh_name(), self.some_size(), self.some_quota());
        self.note(format!("create {name}: {blocks} blocks, quota {quota_blocks:?}"));
        let now = self.ledger.now_unix_s;
        let new = NewVolume { name: name.clone(), blocks, quota_blocks };
        let id = match self.volumes.create(&new, now) {
            Ok(id) => id,
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            Err(error) => return Err(format!("create {new:?}: {error}")),
        };
        self.note(format!("... is volume {id}"));
        let volume = ModelVolume {
            name,
            blocks,
            quota_blocks,
            read_only: false,
            origin: None,
            created_at_unix_s: now,
            cells: Rc::new(BTreeMap::new()),
        };
        self.state.0.insert(id.0, volume);
        self.check_id(id)
    }

    /// A snapshot or a clone.
    fn derive(&mut self, read_only: bool) -> Step {
        let Some(origin) = self.any_volume() else { return Ok(()) };
        let (name, now) = (self.fresh_name(), self.ledger.now_unix_s);
        self.note(format!(
            "{} of volume {origin}: {name}",
            if read_only { "snapshot" } else { "clone" }
        ));
        let disk = &mut self.disk.clone();
        let made = if read_only {
            self.volumes.snapshot(disk, VolumeId(origin), &name, now)
        } else {
            self.volumes.clone_volume(disk, VolumeId(origin), &name, now)
        };
        let id = match made {
            Ok(id) => id,
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            // The format may refuse a snapshot of a snapshot.
            Err(VolumeError::VolumeReadOnly(_)) if read_only => return Ok(()),
            Err(error) => return Err(format!("a copy of volume {origin}: {error}")),
        };
        self.note(format!("... is volume {id}"));
        let info =
            self.volumes.get(id).cloned().ok_or_else(|| format!("there is no volume {id}"))?;
        let Some(model) = self.state.0.get(&origin) else {
            return Err(format!("volume {origin} is gone"));
        };
        // The format decides whether a quota is inherited.
        let volume = ModelVolume {
            name,
            read_only,
            quota_blocks: info.quota_blocks,
            origin: Some(origin),
            created_at_unix_s: now,
            ..model.clone()
        };
        self.state.0.insert(id.0, volume);
        self.check_id(id)
    }

    fn resize(&mut self) -> Step {
        let Some(id) = self.any_volume() else { return Ok(()) };
        let blocks = self.some_size();
        self.note(format!("resize volume {id} to {blocks} blocks"));
        self.cancel_range(id, BlockRange::between(Vlba(blocks), Vlba(u64::MAX)));
        let read_only = self.state.0.get(&id).is_some_and(|volume| volume.read_only);
        if read_only {
            return match self.volumes.resize(&mut self.disk.clone(), VolumeId(id), blocks) {
                Err(VolumeError::VolumeReadOnly(_)) => Ok(()),
                result => Err(format!("resize of snapshot {id}: {result:?}")),
            };
        }
        let done = self.until_there_is_space(Needs::OfShared, |world| {
            match world.state.0.contains_key(&id) {
                true => world.volumes.resize(&mut world.disk.clone(), VolumeId(id), blocks),
                // The volume was deleted during a commit that this operation waited for.
                false => Ok(()),
            }
        })?;
        if let (true, Some(volume)) = (done, self.state.0.get_mut(&id)) {
            volume.blocks = blocks;
            Rc::make_mut(&mut volume.cells).retain(|block, _| *block < blocks);
        }
        Ok(())
    }

    fn rename(&mut self) -> Step {
        let Some(id) = self.any_volume() else { return Ok(()) };
        let name = self.fresh_name();
        self.note(format!("rename volume {id} to {name}"));
        match self.volumes.rename(VolumeId(id), &name) {
            Ok(()) => {}
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            Err(error) => return Err(format!("rename {id} to {name}: {error}")),
        }
        if let Some(volume) = self.state.0.get_mut(&id) {
            volume.name = name;
        }
        Ok(())
    }

    fn set_quota(&mut self) -> Step {
        let Some(id) = self.any_volume() else { return Ok(()) };
        let quota_blocks = self.some_quota();
        self.note(format!("quota of volume {id}: {quota_blocks:?}"));
        match self.volumes.set_quota(VolumeId(id), quota_blocks) {
            Ok(()) => {}
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            Err(error) => return Err(format!("quota {quota_blocks:?} for {id}: {error}")),
        }
        if let Some(volume) = self.state.0.get_mut(&id) {
            volume.quota_blocks = quota_blocks;
        }
        Ok(())
    }

    fn delete(&mut self) -> Step {
        let Some(id) = self.any_volume() else { return Ok(()) };
        self.delete_volume(id)
    }

    fn delete_volume(&mut self, id: u64) -> Step {
        self.note(format!("delete volume {id}"));
        if !self.random.once_in(4) {
            self.cancel_range(id, BlockRange::new(Vlba(0), u64::MAX));
        }
        let deleted = self.until_there_is_space(Needs::Nothing, |world| {
            match world.state.0.contains_key(&id) {
                true => world.volumes.delete(&mut world.disk.clone(), VolumeId(id)),
                // The volume was deleted during a commit that this operation waited for.
                false => Ok(()),
            }
        });
        if deleted? {
            self.state.0.remove(&id);
        }
        Ok(())
    }

    /// Cancels the writes to fresh blocks in this range.
    fn cancel_range(&mut self, volume: u64, range: BlockRange) {
        let concerned = |fresh: &super::guest::FreshWrite| {
            fresh.volume == volume && fresh.range.intersect(range).is_some()
        };
        let (cancelled, others) =
            std::mem::take(&mut self.fresh_writes).into_iter().partition(concerned);
        self.fresh_writes = others;
        let cancelled: Vec<_> = cancelled;
        for fresh in cancelled {
            self.cancel(fresh);
        }
    }

    /// Cancels all writes to fresh blocks.
    fn cancel_all(&mut self) {
        for fresh in std::mem::take(&mut self.fresh_writes) {
            self.cancel(fresh);
        }
    }

    /// Does an operation that must be possible on a full store, after commits if necessary. False
    /// if a commit is in progress, so that the operation has to wait.
    pub(super) fn until_there_is_space(
        &mut self,
        needs: Needs,
        mut operation: impl FnMut(&mut Self) -> Result<(), VolumeError>,
    ) -> Result<bool, String> {
        for round in 0..PATIENCE {
            match operation(self) {
                Ok(()) => return Ok(true),
                Err(VolumeError::NoSpace { .. }) if self.is_committing() => {
                    self.ledger.outcome.refusals += 1;
                    return Ok(false);
                }
                Err(VolumeError::NoSpace { .. })
                    if round > 0 && self.volumes.log_room() == Some(0) =>
                {
                    // The writes in flight have reserved the whole log.
                    self.ledger.outcome.refusals += 1;
                    return Ok(false);
                }
                Err(VolumeError::NoSpace { .. }) => {
                    self.note("... has to wait for a commit");
                    self.commit()?;
                    if self.volumes.read_only().is_some() {
                        return Ok(false);
                    }
                    self.reuse_all();
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        let space = self.volumes.space();
        let reserve = RESERVE_BYTES / u64::from(self.tuning.block_bytes);
        if needs == Needs::OfShared && space.reserved < reserve {
            // Changes of shared blocks have used the reserve up: they take nodes and free nothing.
            self.ledger.outcome.refusals += 1;
            return Ok(false);
        }
        Err(format!("no space for what needs none: {space:?}"))
    }

    /// Ends a history: deletes all volumes, after which no block may be in use.
    pub(super) fn delete_everything(&mut self) -> Step {
        if self.volumes.read_only().is_some() {
            return Ok(());
        }
        // From here on no step runs in the middle of a commit, so no new volume appears.
        self.tuning.writes_per_meanwhile = u64::MAX;
        while let Some(id) = self.any_volume() {
            self.delete_volume(id)?;
        }
        self.cancel_all();
        self.commit()?;
        self.reuse_all();
        let space = self.volumes.space();
        let used = space.data + space.granted + space.pending;
        if self.volumes.read_only().is_some() || used == 0 {
            Ok(())
        } else {
            Err(format!("nothing is left, and yet {space:?}"))
        }
    }
}
