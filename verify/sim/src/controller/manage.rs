//! The operator's actions while guests use the volumes.

use sidecore_controller::{Change, ControllerError};
use sidecore_volume::{VolumeError, VolumeId};

use super::Bug;
use super::model::ModelVolume;
use super::register::Moment;
use super::settle::Settling;
use super::world::World;
use crate::history::{Step, System as _};

impl World {
    /// A random operation.
    pub(super) fn manage(&mut self) -> Step {
        let has_room = self.model.present().count() < self.tuning.most_volumes.min(8);
        match self.random.below(16) {
            0..3 if has_room => self.create(),
            3..7 if has_room => self.derive(true),
            7..10 if has_room => self.derive(false),
            10..12 => self.resize(),
            _ if self.model.present().count() == 0 => self.create(),
            12..16 => self.delete(),
            _ => Ok(()),
        }
    }

    fn some_blocks(&mut self) -> u64 {
        if self.random.once_in(self.tuning.volumes_per_huge) {
            1 << 30
        } else {
            1 + self.random.below(self.tuning.largest_volume)
        }
    }

    fn fresh_name(&mut self) -> String {
        self.ledger.names += 1;
        format!("v{}", self.ledger.names)
    }

    /// Notes a change whose end the operator waits for.
    fn settle(&mut self, change: Change, volume: u64, begun: Moment) {
        let settling = Settling { change, volume, begun, is_in_commit: false };
        if self.bug == Some(Bug::NoCommit) {
            let position = self.disk.position();
            return self.settled(&settling, position);
        }
        self.settling.push(settling);
    }

    /// Checks whether an operation may fail with this error.
    fn refused(&mut self, error: &ControllerError) -> Step {
        match error {
            ControllerError::Volume(VolumeError::NoSpace { .. } | VolumeError::DiskFull(_)) => {
                self.ledger.outcome.refusals += 1;
                Ok(())
            }
            // A snapshot cannot be resized, nor perhaps have snapshots.
            ControllerError::Volume(VolumeError::VolumeReadOnly(_)) => Ok(()),
            ControllerError::Volume(VolumeError::StoreReadOnly(_))
                if self.has_failed || self.is_committing =>
            {
                Ok(())
            }
            _ => Err(error.to_string()),
        }
    }

    fn made(
        &mut self,
        made: Result<(VolumeId, Change), ControllerError>,
        begun: Moment,
        new: ModelVolume,
    ) -> Step {
        let (id, change) = match made {
            Ok(made) => made,
            Err(error) => return self.refused(&error),
        };
        self.note(format!("... is volume {id}"));
        if self.model.volumes.insert(id.0, new).is_some() {
            return Err(format!("volume id {id} once more"));
        }
        self.settle(change, id.0, begun);
        Ok(())
    }

    fn create(&mut self) -> Step {
        let (name, blocks) = (self.fresh_name(), self.some_blocks());
        let block_bytes = u64::from(self.tuning.block_bytes);
        let quota =
            self.random.once_in(6).then(|| 1 + self.random.below(self.tuning.largest_volume));
        self.note(format!("create {name}: {blocks} blocks, quota {quota:?}"));
        let begun = self.now();
        let quota_bytes = quota.map(|blocks| blocks * block_bytes);
        let made =
            self.controller.begin_create(&name, blocks * block_bytes, quota_bytes, begun.clock);
        let now = self.now();
        self.made(made, begun, ModelVolume::new(name, blocks, begun, now))
    }

    /// A snapshot or a clone.
    fn derive(&mut self, read_only: bool) -> Step {
        let (Some(origin), name) = (self.any_volume(), self.fresh_name()) else { return Ok(()) };
        let Some(model) = self.model.volumes.get(&origin).cloned() else { return Ok(()) };
        self.note(format!(
            "{} of volume {origin}: {name}",
            if read_only { "snapshot" } else { "clone" }
        ));
        let begun = self.now();
        let disk = &mut self.store.clone();
        let made = if read_only {
            self.controller.begin_snapshot(&model.name, &name, begun.clock, disk)
        } else {
            self.controller.begin_clone(&model.name, &name, begun.clock, disk)
        };
        let now = self.now();
        self.made(made, begun, model.copy(name, read_only, begun, now))
    }

    fn resize(&mut self) -> Step {
        let (Some(id), blocks) = (self.any_volume(), self.some_blocks()) else { return Ok(()) };
        let Some(model) = self.model.volumes.get(&id) else { return Ok(()) };
        let (name, shrinks) = (model.name.clone(), blocks < model.size);
        self.note(format!("resize volume {id} to {blocks} blocks"));
        let begun = self.now();
        let size_bytes = blocks * u64::from(self.tuning.block_bytes);
        let change = match self.controller.begin_resize(&name, size_bytes, &mut self.store.clone())
        {
            Ok((_, change)) => change,
            Err(ControllerError::InUse { .. }) if shrinks && self.is_in_use(id) => return Ok(()),
            Err(error) => return self.refused(&error),
        };
        let (now, spb) = (self.now(), self.model.sectors_per_block);
        if let Some(volume) = self.model.volumes.get_mut(&id) {
            volume.resize(blocks, spb, begun, now);
        }
        self.settle(change, id, begun);
        Ok(())
    }

    fn is_in_use(&self, volume: u64) -> bool {
        self.guests.iter().any(|guest| guest.volume == volume)
    }

    fn delete(&mut self) -> Step {
        let Some(id) = self.any_volume() else { return Ok(()) };
        let Some(name) = self.model.volumes.get(&id).map(|volume| volume.name.clone()) else {
            return Ok(());
        };
        if self.is_in_use(id) && self.depth == 0 && self.random.once_in(2) {
            self.drain()?;
            self.guests.retain(|guest| guest.volume != id);
        }
        // Another operator may have deleted the volume while the guests' requests ended.
        if !self.model.present().any(|(present, _)| present == id) {
            return Ok(());
        }
        self.note(format!("delete volume {id}"));
        let begun = self.now();
        let change = match self.controller.begin_delete(&name, &mut self.store.clone()) {
            Ok(((), change)) => change,
            Err(ControllerError::InUse { .. }) if self.is_in_use(id) => return Ok(()),
            Err(error) => return self.refused(&error),
        };
        let now = self.now();
        if let Some(volume) = self.model.volumes.get_mut(&id) {
            volume.delete(begun, now);
        }
        self.settle(change, id, begun);
        Ok(())
    }

    /// Drops trees from memory, or the cache of their extents.
    pub(super) fn forget(&mut self) -> Step {
        if self.random.once_in(2) {
            self.note("flush the BTLB");
            self.controller.flush_btlb();
            return Ok(());
        }
        let Some(id) = self.any_volume() else { return Ok(()) };
        let name = self.model.volumes.get(&id).map(|volume| volume.name.clone());
        let name = if self.random.once_in(2) { name } else { None };
        self.note(format!("prune {name:?}"));
        self.controller.prune(name.as_deref()).map_err(|error| error.to_string())
    }
}
