//! The part of a controller that schedules of snapshots use.

use sidecore_schedule::{NAME_MAX_BYTES, name, time_of};
use sidecore_volume::{VolumeError, VolumeId, VolumeInfo};

use super::{ControllerHandle, VolumeChange};
use crate::operation::{ErrorKind, OperationError};

/// Refuses a name that schedules give to their snapshots: they would delete the volume.
pub(super) fn check_name(name: &str) -> Result<(), OperationError> {
    if time_of(name).is_none() {
        return Ok(());
    }
    let why = format!(
        "\"{name}\" is a name of snapshots that a schedule makes and deletes; choose one that does \
         not end in `.auto-` and a time"
    );
    Err(OperationError::new(ErrorKind::Invalid, why))
}

impl ControllerHandle {
    /// The volumes and snapshots, by number.
    pub(crate) fn infos(&self) -> Vec<VolumeInfo> {
        self.controller.volumes()
    }

    /// Makes a snapshot of this very volume, which may have been renamed since, with the name of
    /// this minute. Returns when it is durable.
    pub(crate) fn snapshot_of_schedule(
        &self,
        volume: &VolumeInfo,
        now_unix_s: u64,
    ) -> Result<(), OperationError> {
        let VolumeInfo { id, name: volume, .. } = volume;
        let bytes = volume.len();
        if bytes > NAME_MAX_BYTES {
            let why = format!(
                "the volume's name has {bytes} bytes, and those of its snapshots have room for \
                 {NAME_MAX_BYTES}: rename it"
            );
            return Err(OperationError::new(ErrorKind::Invalid, why));
        }
        let snapshot = name(volume, now_unix_s);
        self.controller.snapshot_volume_at(*id, &snapshot, now_unix_s)?;
        tracing::info!(controller = self.spec.name, volume, snapshot, "scheduled snapshot made");
        self.notify(VolumeChange::Listed);
        Ok(())
    }

    /// Whether a volume is as it was when this snapshot of it was made.
    pub(crate) fn is_unchanged_since(&self, volume: VolumeId, snapshot: VolumeId) -> bool {
        self.controller.is_unchanged_since(volume, snapshot)
    }

    /// Makes the changes durable whose commit has failed.
    pub(crate) fn settle_changes(&self) -> Result<(), OperationError> {
        Ok(self.controller.settle_changes()?)
    }

    /// Why the store takes no changes, if it takes none.
    pub(crate) fn read_only(&self) -> Option<String> {
        let health = self.controller.health(None);
        let error = if health.is_frozen {
            VolumeError::StoreDamaged(health.read_only?)
        } else {
            VolumeError::StoreReadOnly(health.read_only?)
        };
        Some(error.to_string())
    }

    /// Adds an event for the operator.
    pub(crate) fn note(&self, what: String) {
        self.controller.note(what);
    }
}
