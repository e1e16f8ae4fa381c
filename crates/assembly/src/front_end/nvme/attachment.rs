//! Which volume a virtual function serves, changed while it runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use sidecore_nvme::ManageError;

use crate::assembly::{Graph, both_write};
use crate::controllers::ControllerHandle;
use crate::disk::Disk;
use crate::operation::{ErrorKind, OperationError};
use crate::spec::{StoreKind, StoreSpec, VolumeSpec};

/// The devices of an assembly, and who may change them.
#[derive(Clone)]
pub(super) struct Devices {
    graph: Weak<Mutex<Graph>>,
    disks: Weak<Mutex<Vec<Arc<Disk>>>>,
}

impl Devices {
    pub(super) fn new(graph: &Arc<Mutex<Graph>>, disks: &Arc<Mutex<Vec<Arc<Disk>>>>) -> Self {
        Self { graph: Arc::downgrade(graph), disks: Arc::downgrade(disks) }
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<Arc<Disk>> {
        self.disks.upgrade().map(|disks| lock(&disks).clone()).unwrap_or_default()
    }

    fn find(&self, name: &str) -> Result<Arc<Disk>, ManageError> {
        self.all().into_iter().find(|disk| disk.spec.name == name).ok_or(ManageError::NoSuchController)
    }

    /// Has a function serve a volume. Waits for other changes of the graph, and for the function.
    pub(super) fn attach(&self, device: &str, controller: &ControllerHandle, volume: &str) -> Result<(), ManageError> {
        let graph = self.graph.upgrade().ok_or(ManageError::Denied)?;
        let graph = lock(&graph);
        if graph.ends {
            return Err(ManageError::Denied);
        }
        let disk = self.find(device)?;
        let configured = volume_of(&disk).ok_or(ManageError::Denied)?;
        if disk.bottom().is_some() {
            return Err(ManageError::AttachmentLimit);
        }
        // Weight and limits are the function's; the volume has the size and quota that it has.
        let spec = VolumeSpec { volume: volume.to_owned(), size_bytes: None, quota_bytes: None, ..configured };
        let told = controller.volume(volume).map_err(|error| refusal(&error))?;
        let store = controller.open_function(&spec).map_err(|error| refusal(&error))?;
        let writes = !disk.spec.read_only && !store.geometry().read_only;
        let bottom = StoreSpec { name: disk.spec.store.clone(), kind: StoreKind::Volume(spec) };
        let writer = writes.then_some(&bottom);
        if self.all().iter().any(|other| both_write(writer, other.writes_to().as_ref())) {
            return Err(ManageError::Private);
        }
        let function = disk.nvme().ok_or(ManageError::NoSuchController)?;
        match function.attach(store, &told, controller.store_uuid()) {
            Ok(true) => {
                disk.set_bottom(Some(bottom));
                tracing::info!(device, volume, "volume attached");
                Ok(())
            }
            Ok(false) => Err(ManageError::NoSuchController),
            Err(error) => {
                tracing::warn!(device, volume, %error, "the volume cannot be attached");
                Err(ManageError::InvalidFormat)
            }
        }
    }

    /// Has a function serve nothing. Waits for other changes of the graph, and for what the function has in flight.
    pub(super) fn detach(&self, device: &str) -> Result<(), ManageError> {
        let graph = self.graph.upgrade().ok_or(ManageError::Denied)?;
        let mut graph = lock(&graph);
        if graph.ends {
            return Err(ManageError::Denied);
        }
        let disk = self.find(device)?;
        volume_of(&disk).ok_or(ManageError::Denied)?;
        disk.bottom().ok_or(ManageError::NotAttached)?;
        disk.nvme().ok_or(ManageError::NoSuchController)?.detach();
        disk.set_bottom(None);
        graph.close_unused(&self.all());
        tracing::info!(device, "volume detached");
        Ok(())
    }

    /// Takes a function online or offline. Waits for other changes of the graph, and for what the function has in flight.
    pub(super) fn set_online(&self, device: &str, is_online: bool) -> Result<(), ManageError> {
        let graph = self.graph.upgrade().ok_or(ManageError::Denied)?;
        let graph = lock(&graph);
        // It may be left to the next daemon just now, as it is.
        if graph.ends {
            return Err(ManageError::Denied);
        }
        self.find(device)?.nvme().ok_or(ManageError::NoSuchController)?.set_online(is_online);
        tracing::info!(device, is_online, "controller told to be so");
        Ok(())
    }
}

/// The volume that a function was configured to serve, if it is an NVMe one and nothing is in between.
fn volume_of(disk: &Disk) -> Option<VolumeSpec> {
    let configured = disk.configured();
    let is_direct = configured.name == disk.spec.store && disk.nvme().is_some();
    configured.kind.volume().filter(|_| is_direct).cloned()
}

/// Why a volume cannot be had, in NVMe's terms.
pub(super) fn refusal(error: &OperationError) -> ManageError {
    tracing::info!(%error, "a host's management of namespaces is refused");
    match error.kind {
        ErrorKind::NotFound => ManageError::NoSuchNamespace,
        ErrorKind::NoSpace => ManageError::NoSpace,
        ErrorKind::Invalid => ManageError::InvalidFormat,
        ErrorKind::Conflict | ErrorKind::Ending => ManageError::Denied,
        ErrorKind::Failed => ManageError::Internal,
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
