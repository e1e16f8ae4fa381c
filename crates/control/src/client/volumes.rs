//! The client's requests for controllers and volumes.

use hyper::Method;
use sidecore_assembly::report::{
    CheckReport, ControllerReport, DedupReport, ExtentsReport, VolumeReport,
};

use super::{Client, ClientError, DISK_PATIENCE, LONG_PATIENCE, escaped};
use crate::api::{
    CONTROLLERS_PATH, Controllers, CreateVolume, Dedup, ExtentsQuery, Named, Prune, Quota, Resize,
    Share, Volumes,
};

fn controller_path(controller: &str) -> String {
    format!("{CONTROLLERS_PATH}/{}", escaped(controller))
}

fn volumes_path(controller: &str) -> String {
    format!("{}/volumes", controller_path(controller))
}

fn volume_path(controller: &str, volume: &str) -> String {
    format!("{}/{}", volumes_path(controller), escaped(volume))
}

/// Every method fails with a [`ClientError`]; a refusal by the daemon is [`ClientError::Denied`],
/// in the daemon's words.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Returns the controllers, open or not.
    pub fn all_controllers(&self) -> Result<Controllers, ClientError> {
        let body = self.ask(Method::GET, CONTROLLERS_PATH, None, DISK_PATIENCE)?;
        self.parse(&body)
    }

    /// Returns the controllers that are open.
    pub fn controllers(&self) -> Result<Vec<ControllerReport>, ClientError> {
        self.all_controllers().map(|answer| answer.controllers)
    }

    /// Returns the report of one controller.
    pub fn controller(&self, controller: &str) -> Result<ControllerReport, ClientError> {
        let body = self.ask(Method::GET, &controller_path(controller), None, DISK_PATIENCE)?;
        self.parse(&body)
    }

    /// Returns a controller's volumes.
    pub fn volumes(&self, controller: &str) -> Result<Vec<VolumeReport>, ClientError> {
        let body = self.ask(Method::GET, &volumes_path(controller), None, DISK_PATIENCE)?;
        self.parse::<Volumes>(&body).map(|answer| answer.volumes)
    }

    /// Returns the report of one volume.
    pub fn volume(&self, controller: &str, volume: &str) -> Result<VolumeReport, ClientError> {
        let body = self.ask(Method::GET, &volume_path(controller, volume), None, DISK_PATIENCE)?;
        self.parse(&body)
    }

    /// Makes a volume.
    pub fn create_volume(
        &self,
        controller: &str,
        new: &CreateVolume,
    ) -> Result<VolumeReport, ClientError> {
        self.post(&volumes_path(controller), new, DISK_PATIENCE)
    }

    /// Deletes a volume.
    pub fn delete_volume(&self, controller: &str, volume: &str) -> Result<(), ClientError> {
        self.ask(Method::DELETE, &volume_path(controller, volume), None, DISK_PATIENCE).map(drop)
    }

    /// Makes a snapshot of a volume.
    pub fn snapshot_volume(
        &self,
        controller: &str,
        volume: &str,
        name: &str,
    ) -> Result<VolumeReport, ClientError> {
        self.of_volume(controller, volume, "snapshot", &Named { name: name.to_owned() })
    }

    /// Makes a volume from a volume or a snapshot.
    pub fn clone_volume(
        &self,
        controller: &str,
        volume: &str,
        name: &str,
    ) -> Result<VolumeReport, ClientError> {
        self.of_volume(controller, volume, "clone", &Named { name: name.to_owned() })
    }

    /// Changes a volume's size.
    pub fn resize_volume(
        &self,
        controller: &str,
        volume: &str,
        size_bytes: u64,
    ) -> Result<VolumeReport, ClientError> {
        self.of_volume(controller, volume, "resize", &Resize { size_bytes })
    }

    /// Changes a volume's name.
    pub fn rename_volume(
        &self,
        controller: &str,
        volume: &str,
        name: &str,
    ) -> Result<VolumeReport, ClientError> {
        self.of_volume(controller, volume, "rename", &Named { name: name.to_owned() })
    }

    /// Sets a volume's quota, or removes it.
    pub fn set_quota(
        &self,
        controller: &str,
        volume: &str,
        quota_bytes: Option<u64>,
    ) -> Result<VolumeReport, ClientError> {
        self.of_volume(controller, volume, "quota", &Quota { quota_bytes })
    }

    fn of_volume(
        &self,
        controller: &str,
        volume: &str,
        operation: &str,
        body: &impl serde::Serialize,
    ) -> Result<VolumeReport, ClientError> {
        self.post(&format!("{}/{operation}", volume_path(controller, volume)), body, DISK_PATIENCE)
    }

    /// Returns the mapping of a volume from a block on, up to a number of extents.
    pub fn extents(
        &self,
        controller: &str,
        volume: &str,
        query: ExtentsQuery,
    ) -> Result<ExtentsReport, ClientError> {
        let path = format!(
            "{}/extents?from={}&max={}",
            volume_path(controller, volume),
            query.from,
            query.max
        );
        let body = self.ask(Method::GET, &path, None, DISK_PATIENCE)?;
        self.parse(&body)
    }

    /// Checks all of a controller's metadata, while the controller serves requests.
    pub fn check_controller(&self, controller: &str) -> Result<CheckReport, ClientError> {
        self.post(
            &format!("{}/check", controller_path(controller)),
            &serde_json::json!({}),
            LONG_PATIENCE,
        )
    }

    /// Drops extent trees from memory.
    pub fn prune(&self, controller: &str, volume: Option<&str>) -> Result<(), ClientError> {
        let body = Prune { volume: volume.map(str::to_owned) };
        self.post_only(&format!("{}/prune", controller_path(controller)), &body, DISK_PATIENCE)
            .map(drop)
    }

    /// Empties the controller's translation buffers.
    pub fn flush_btlb(&self, controller: &str) -> Result<(), ClientError> {
        self.post_only(
            &format!("{}/flush-btlb", controller_path(controller)),
            &serde_json::json!({}),
            DISK_PATIENCE,
        )
        .map(drop)
    }

    /// Starts a deduplication.
    pub fn start_dedup(&self, controller: &str, dedup: &Dedup) -> Result<DedupReport, ClientError> {
        self.post(&format!("{}/dedup", controller_path(controller)), dedup, DISK_PATIENCE)
    }

    /// Returns the report of the deduplication in progress, or of the last one.
    pub fn dedup(&self, controller: &str) -> Result<DedupReport, ClientError> {
        let path = format!("{}/dedup", controller_path(controller));
        self.parse(&self.ask(Method::GET, &path, None, DISK_PATIENCE)?)
    }

    /// Stops a deduplication.
    pub fn stop_dedup(&self, controller: &str) -> Result<DedupReport, ClientError> {
        let path = format!("{}/dedup", controller_path(controller));
        self.parse(&self.ask(Method::DELETE, &path, None, DISK_PATIENCE)?)
    }

    /// Maps equal blocks to the same place in the store.
    pub fn share(&self, controller: &str, blocks: &Share) -> Result<(), ClientError> {
        self.post_only(&format!("{}/share", controller_path(controller)), blocks, LONG_PATIENCE)
            .map(drop)
    }
}
