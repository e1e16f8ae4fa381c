//! Requests about the stages of a device.

use hyper::Method;
use sidecore_assembly::report::{StageChange, StagesReport};

use super::{Client, ClientError, DISK_PATIENCE, escaped};
use crate::api::{DEVICES_PATH, NewStage};

fn path(device: &str) -> String {
    format!("{DEVICES_PATH}/{}/stages", escaped(device))
}

impl Client {
    /// Returns the stages of a device.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stages(&self, device: &str) -> Result<StagesReport, ClientError> {
        self.json(&path(device))
    }

    /// Makes the daemon add a stage to a device in use.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn add_stage(&self, device: &str, stage: &NewStage) -> Result<StageChange, ClientError> {
        self.post(&path(device), stage, DISK_PATIENCE)
    }

    /// Makes the daemon remove a stage that was added, by its type or its position.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remove_stage(&self, device: &str, stage: &str) -> Result<StageChange, ClientError> {
        let path = format!("{}/{}", path(device), escaped(stage));
        self.parse(&self.ask(Method::DELETE, &path, None, DISK_PATIENCE)?)
    }
}
