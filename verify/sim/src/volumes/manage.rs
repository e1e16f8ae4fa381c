//! What the operator does to volumes.

use std::collections::BTreeMap;
use std::rc::Rc;

use sidecore_extent::BlockRange;
use sidecore_units::Vlba;
use sidecore_volume::{MAX_VOLUME_BYTES, NewVolume, VolumeError, VolumeId};

use super::model::ModelVolume;
use super::world::{Step, World};

/// How often an operation that must succeed on a full store may ask for a commit first.
const PATIENCE: u32 = 3;

impl World {
    /// Some operation, and usually a commit, because the operator is told that it is done.
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
        self.lore.names += 1;
        let longest = sidecore_volume::MAX_NAME_BYTES;
        let name = format!("v{}", self.lore.names);
        if self.random.once_in(8) { format!("{name:_<longest$}") } else { name }
    }

    fn some_size(&mut self) -> u64 {
        if self.random.once_in(self.tuning.volumes_per_huge) {
            let largest = MAX_VOLUME_BYTES / u64::from(self.tuning.block_bytes);
            return if self.random.once_in(2) { largest } else { 4097 + self.random.below(largest - 4097) };
        }
        1 + self.random.below(self.tuning.largest_volume)
    }

    fn some_quota(&mut self) -> Option<u64> {
        if self.random.once_in(4) { Some(1 + self.random.below(self.tuning.largest_volume)) } else { None }
    }

    /// The new volume's id must be new.
    fn check_id(&mut self, id: VolumeId) -> Step {
        let newest = self.newest_id.replace(id.0);
        if newest.is_some_and(|newest| newest >= id.0) { Err(format!("volume id {id} once more")) } else { Ok(()) }
    }

    fn create(&mut self) -> Step {
        let (name, blocks, quota_blocks) = (self.fresh_name(), self.some_size(), self.some_quota());
        self.tell(format!("create {name}: {blocks} blocks, quota {quota_blocks:?}"));
        let now = self.lore.now_unix_s;
        let new = NewVolume { name: name.clone(), blocks, quota_blocks };
        let id = match self.volumes.create(&new, now) {
            Ok(id) => id,
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            Err(error) => return Err(format!("create {new:?}: {error}")),
        };
        self.tell(format!("... is volume {id}"));
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
        let (name, now) = (self.fresh_name(), self.lore.now_unix_s);
        self.tell(format!("{} of volume {origin}: {name}", if read_only { "snapshot" } else { "clone" }));
        let disk = &mut self.disk.clone();
        let made = if read_only {
            self.volumes.snapshot(disk, VolumeId(origin), &name, now)
        } else {
            self.volumes.clone_volume(disk, VolumeId(origin), &name, now)
        };
        let id = match made {
            Ok(id) => id,
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            // A snapshot of a snapshot may be refused.
            Err(VolumeError::VolumeReadOnly(_)) if read_only => return Ok(()),
            Err(error) => return Err(format!("a copy of volume {origin}: {error}")),
        };
        self.tell(format!("... is volume {id}"));
        let info = self.volumes.get(id).cloned().ok_or_else(|| format!("there is no volume {id}"))?;
        let Some(model) = self.state.0.get(&origin) else { return Err(format!("volume {origin} is gone")) };
        // Whether a quota is inherited is the format's business.
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
        self.tell(format!("resize volume {id} to {blocks} blocks"));
        self.ground(id, BlockRange::between(Vlba(blocks), Vlba(u64::MAX)));
        let read_only = self.state.0.get(&id).is_some_and(|volume| volume.read_only);
        if read_only {
            return match self.volumes.resize(&mut self.disk.clone(), VolumeId(id), blocks) {
                Err(VolumeError::VolumeReadOnly(_)) => Ok(()),
                result => Err(format!("resize of snapshot {id}: {result:?}")),
            };
        }
        let done = self.until_there_is_space(|world| match world.state.0.contains_key(&id) {
            true => world.volumes.resize(&mut world.disk.clone(), VolumeId(id), blocks),
            // It was deleted while this waited for a commit.
            false => Ok(()),
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
        self.tell(format!("rename volume {id} to {name}"));
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
        self.tell(format!("quota of volume {id}: {quota_blocks:?}"));
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
        self.tell(format!("delete volume {id}"));
        if !self.random.once_in(4) {
            self.ground(id, BlockRange::new(Vlba(0), u64::MAX));
        }
        let deleted = self.until_there_is_space(|world| match world.state.0.contains_key(&id) {
            true => world.volumes.delete(&mut world.disk.clone(), VolumeId(id)),
            // It was deleted while this waited for a commit.
            false => Ok(()),
        });
        if deleted? {
            self.state.0.remove(&id);
        }
        Ok(())
    }

    /// No write to these blocks goes on.
    fn ground(&mut self, volume: u64, range: BlockRange) {
        let concerned =
            |flight: &super::guest::Flight| flight.volume == volume && flight.range.intersect(range).is_some();
        let (cancelled, others) = std::mem::take(&mut self.flights).into_iter().partition(concerned);
        self.flights = others;
        let cancelled: Vec<_> = cancelled;
        for flight in cancelled {
            self.cancel(flight);
        }
    }

    /// No write goes on.
    fn ground_all(&mut self) {
        for flight in std::mem::take(&mut self.flights) {
            self.cancel(flight);
        }
    }

    /// Does what must be possible on a full store, if necessary after commits. False if a commit is under way, so that
    /// it has to wait.
    pub(super) fn until_there_is_space(
        &mut self,
        mut operation: impl FnMut(&mut Self) -> Result<(), VolumeError>,
    ) -> Result<bool, String> {
        for round in 0..PATIENCE {
            match operation(self) {
                Ok(()) => return Ok(true),
                Err(VolumeError::NoSpace { .. }) if self.is_committing() => {
                    self.lore.refusals += 1;
                    return Ok(false);
                }
                Err(VolumeError::NoSpace { .. }) if round > 0 && self.volumes.log_room() == Some(0) => {
                    // The writes on their way have reserved all of the log.
                    self.lore.refusals += 1;
                    return Ok(false);
                }
                Err(VolumeError::NoSpace { .. }) => {
                    self.tell("... has to wait for a commit");
                    self.commit()?;
                    if self.volumes.read_only().is_some() {
                        return Ok(false);
                    }
                    self.end_all_grace();
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Err(format!("no space for what needs none: {:?}", self.volumes.space()))
    }

    /// The end of a history: everything is deleted, and nothing must be left.
    pub(super) fn delete_everything(&mut self) -> Step {
        if self.volumes.read_only().is_some() {
            return Ok(());
        }
        // Nobody makes new ones meanwhile.
        self.tuning.writes_per_meanwhile = u64::MAX;
        while let Some(id) = self.any_volume() {
            self.delete_volume(id)?;
        }
        self.ground_all();
        self.commit()?;
        self.end_all_grace();
        let space = self.volumes.space();
        let used = space.data + space.granted + space.pending;
        if self.volumes.read_only().is_some() || used == 0 {
            Ok(())
        } else {
            Err(format!("nothing is left, and yet {space:?}"))
        }
    }
}
