//! The volumes of a controller and the NVMe functions in front of them, as the controller's
//! subsystem manages them.

use std::sync::{Arc, Mutex, Weak};

use sidecore_nvme::ManageError;
use sidecore_nvme_subsystem::{Function, Store, Volume, VolumeService};

use crate::controllers::ControllerHandle;
use crate::disk::Disk;
use crate::graph::{Graph, Writers, lock};
use crate::operation::{ErrorKind, OperationError};
use crate::report::VolumeReport;
use crate::spec::{StoreKind, StoreSpec, VOLUME_MAX_BYTES, VolumeSpec};

/// The volumes of one controller and the devices of its assembly, by weak references.
pub(crate) struct Volumes {
    controller: Weak<ControllerHandle>,
    graph: Weak<Mutex<Graph>>,
    disks: Weak<Mutex<Vec<Arc<Disk>>>>,
}

impl Volumes {
    pub(crate) fn new(
        controller: &Arc<ControllerHandle>,
        graph: &Weak<Mutex<Graph>>,
        disks: &Arc<Mutex<Vec<Arc<Disk>>>>,
    ) -> Self {
        Self {
            controller: Arc::downgrade(controller),
            graph: graph.clone(),
            disks: Arc::downgrade(disks),
        }
    }

    fn controller(&self) -> Result<Arc<ControllerHandle>, ManageError> {
        self.controller.upgrade().ok_or(ManageError::Denied)
    }

    fn disks(&self) -> Vec<Arc<Disk>> {
        self.disks.upgrade().map(|disks| lock(&disks).clone()).unwrap_or_default()
    }

    /// Changes a device that is an NVMe function. Waits for the end of other changes of the graph.
    fn change<T>(
        &self,
        device: &str,
        change: impl FnOnce(&Disk, &mut Graph) -> Result<T, ManageError>,
    ) -> Result<T, ManageError> {
        let graph = self.graph.upgrade().ok_or(ManageError::Denied)?;
        let mut graph = lock(&graph);
        // The device may have been exported already, with the state that it has now.
        if graph.ends {
            return Err(ManageError::Denied);
        }
        let disk = self.disks().into_iter().find(|disk| disk.spec.name == device);
        change(&*disk.ok_or(ManageError::NoSuchController)?, &mut graph)
    }
}

impl VolumeService for Volumes {
    fn store(&self) -> Option<Store> {
        let controller = self.controller.upgrade()?;
        let volumes = controller.volumes();
        let volumes = volumes.inspect_err(|error| {
            tracing::warn!(controller = controller.name(), %error, "the volumes cannot be listed");
        });
        let served: Vec<VolumeSpec> =
            self.disks().iter().filter_map(|disk| disk.volume()).collect();
        let is_served = |name: &str| {
            served
                .iter()
                .any(|served| served.controller == controller.name() && served.volume == name)
        };
        let volume = |volume: VolumeReport| Volume {
            id: volume.id,
            capacity_bytes: volume.size_bytes,
            nguid: controller.namespace_ids(&volume).nguid,
            read_only: volume.read_only,
            is_served: is_served(&volume.name),
            name: volume.name,
        };
        let volumes = volumes.ok()?.into_iter().map(volume).collect();
        let space = controller.report().space;
        Some(Store {
            block_bytes: controller.logical_block_bytes(),
            total_bytes: space.total_bytes,
            free_bytes: space.free_bytes,
            volumes,
        })
    }

    fn functions(&self) -> Vec<Function> {
        let Some(controller) = self.controller.upgrade() else { return Vec::new() };
        let function = |disk: &Arc<Disk>| {
            let of = disk.configured().and_then(|store| store.kind.controller());
            let is_its = of == Some(controller.name());
            Some(Function {
                device: disk.spec.name.clone(),
                state: disk.nvme().filter(|_| is_its)?.state()?,
            })
        };
        self.disks().iter().filter_map(function).collect()
    }

    fn create(&self, name: &str, capacity_bytes: u64) -> Result<u64, ManageError> {
        if capacity_bytes > VOLUME_MAX_BYTES {
            return Err(ManageError::NoSpace);
        }
        let volume = self
            .controller()?
            .create_volume(name, capacity_bytes, None)
            .map_err(|error| refusal(&error))?;
        Ok(volume.id)
    }

    fn delete(&self, volume: u64) -> Result<(), ManageError> {
        let controller = self.controller()?;
        let name = controller.name_of(volume).ok_or(ManageError::NoSuchNamespace)?;
        controller.delete_volume(&name).map_err(|error| refusal(&error))
    }

    fn attach(&self, device: &str, volume: u64) -> Result<(), ManageError> {
        self.change(device, |disk, _| {
            let configured = configured_volume(disk).ok_or(ManageError::Denied)?;
            if disk.bottom().is_some() {
                return Err(ManageError::AttachmentLimit);
            }
            let controller = self.controller()?;
            let volume = controller.name_of(volume).ok_or(ManageError::NoSuchNamespace)?;
            let report = controller.volume(&volume).map_err(|error| refusal(&error))?;
            // Weight and limits belong to the function, size and quota to the volume.
            let spec = VolumeSpec {
                volume: volume.clone(),
                size_bytes: None,
                quota_bytes: None,
                ..configured
            };
            let store = controller.open_function(&spec).map_err(|error| refusal(&error))?;
            let writes = !disk.spec.read_only && !store.geometry().read_only;
            let bottom = StoreSpec::new(&disk.spec.store, StoreKind::Volume(spec));
            if writes && Writers::of(&self.disks()).to(&bottom).is_some() {
                return Err(ManageError::Private);
            }
            let function = disk.nvme().ok_or(ManageError::NoSuchController)?;
            let ids = controller.namespace_ids(&report);
            match function.attach(Arc::clone(&store), report.id, ids) {
                Ok(true) => {
                    disk.set_bottom(Some((store, bottom)));
                    tracing::info!(device, volume, "volume attached");
                    Ok(())
                }
                Ok(false) => Err(ManageError::NoSuchController),
                Err(error) => {
                    tracing::warn!(device, volume, %error, "the volume cannot be attached");
                    Err(ManageError::InvalidFormat)
                }
            }
        })
    }

    fn detach(&self, device: &str) -> Result<(), ManageError> {
        self.change(device, |disk, graph| {
            configured_volume(disk).ok_or(ManageError::Denied)?;
            disk.bottom().ok_or(ManageError::NotAttached)?;
            disk.nvme().ok_or(ManageError::NoSuchController)?.detach();
            disk.set_bottom(None);
            graph.close_unneeded();
            tracing::info!(device, "volume detached");
            Ok(())
        })
    }

    fn set_online(&self, device: &str, is_online: bool) -> Result<(), ManageError> {
        self.change(device, |disk, _| {
            disk.nvme().ok_or(ManageError::NoSuchController)?.set_online(is_online);
            tracing::info!(device, is_online, "controller taken online or offline");
            Ok(())
        })
    }
}

/// The configured volume of a function, if no stage lies in between.
fn configured_volume(disk: &Disk) -> Option<VolumeSpec> {
    let configured = disk.configured()?;
    let is_direct = configured.name == disk.spec.store && configured.stages.is_empty();
    configured.kind.volume().filter(|_| is_direct && disk.nvme().is_some()).cloned()
}

/// Translates a controller's error to NVMe's.
fn refusal(error: &OperationError) -> ManageError {
    tracing::info!(%error, "a host's management of namespaces is refused");
    match error.kind {
        ErrorKind::NotFound => ManageError::NoSuchNamespace,
        ErrorKind::NoSpace => ManageError::NoSpace,
        ErrorKind::Invalid => ManageError::InvalidFormat,
        ErrorKind::Conflict | ErrorKind::Ending => ManageError::Denied,
        ErrorKind::Failed => ManageError::Internal,
    }
}
