//! Stages that come and go while a device is in use.

use std::sync::Arc;

use super::Assembly;
use crate::disk::Disk;
use crate::operation::{ErrorKind, OperationError};
use crate::report::{StageChange, StagesReport};
use crate::{AddedStage, recordings};

impl Assembly {
    /// Reports the stages of a device.
    ///
    /// # Errors
    /// There is no such device, or it is not served yet.
    pub fn stages(&self, device: &str) -> Result<StagesReport, OperationError> {
        self.served(device).map(|disk| disk.stages())
    }

    /// Adds a stage in front of a device's store, while the guest uses the device. The stage is at
    /// this position among those that were added; 1 is the first that a request meets. The stage
    /// goes with the device, or with the daemon. A recording is a file of the recording directory.
    ///
    /// # Errors
    /// There is no such device, the stage cannot be added or opened, its recording is elsewhere, or
    /// requests in flight do not end. Nothing has changed then.
    pub fn add_stage(
        &self,
        device: &str,
        stage: &AddedStage,
        position: usize,
    ) -> Result<StageChange, OperationError> {
        let disk = self.changeable(device)?;
        let directory = self.lists.wanted().spec.recording_directory.clone();
        disk.add_stage(&recordings::settle(stage, &directory)?, position)
    }

    /// Removes a stage that was added, by its type or its position.
    ///
    /// # Errors
    /// There is no such device or stage, or requests in flight do not end. Nothing has changed
    /// then.
    pub fn remove_stage(&self, device: &str, stage: &str) -> Result<StageChange, OperationError> {
        self.changeable(device)?.remove_stage(stage)
    }

    fn changeable(&self, device: &str) -> Result<Arc<Disk>, OperationError> {
        if self.graph().ends {
            return Err(OperationError::new(ErrorKind::Ending, "sidecored is ending"));
        }
        self.served(device)
    }

    fn served(&self, device: &str) -> Result<Arc<Disk>, OperationError> {
        if let Some(disk) = self.lists.disk(device) {
            return Ok(disk);
        }
        let is_wanted = self.lists.wanted().place(device) != usize::MAX;
        Err(if is_wanted {
            let why = format!("device \"{device}\" is not served yet; `sidecore list` says why");
            OperationError::new(ErrorKind::Conflict, why)
        } else {
            OperationError::new(ErrorKind::NotFound, format!("there is no device \"{device}\""))
        })
    }
}
