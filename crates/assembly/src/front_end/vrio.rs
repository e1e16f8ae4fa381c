//! A device that is exported to a client on another host.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_block::{BlockDevice, Geometry};
use sidecore_peer::Disconnect;
use sidecore_remote::export::ExportedDevice;

use super::{FrontEnd, Place};
use crate::AssemblyError;
use crate::left::LeftDevice;
use crate::remote::Remote;
use crate::report::QueueCounters;
use crate::spec::{DeviceSpec, SERIAL_MAX_BYTES, VrioSpec};
use crate::swap::{NotSwapped, Swapped};

pub(crate) struct Vrio {
    remote: Arc<Remote>,
    name: String,
    /// The clients that may use it. At most one of them writes at a time, by the tenure.
    clients: Vec<String>,
    serial: String,
    read_only: bool,
    write_cache: bool,
    geometry: Mutex<Geometry>,
    /// `None` after the device was closed.
    store: Mutex<Option<Arc<dyn BlockDevice>>>,
    is_served: Mutex<bool>,
}

impl Vrio {
    pub(crate) fn new(
        spec: &DeviceSpec,
        own: &VrioSpec,
        store: Arc<dyn BlockDevice>,
        remote: Arc<Remote>,
    ) -> Self {
        let geometry = store.geometry();
        let geometry = Geometry { read_only: geometry.read_only || spec.read_only, ..geometry };
        let serial = spec.serial.as_ref().unwrap_or(&spec.name);
        Self {
            remote,
            name: spec.name.clone(),
            clients: clients(own),
            serial: serial.chars().take(SERIAL_MAX_BYTES).collect(),
            read_only: spec.read_only,
            write_cache: own.write_cache,
            geometry: Mutex::new(geometry),
            store: Mutex::new(Some(store)),
            is_served: Mutex::new(false),
        }
    }

    fn withdraw_from(&self, client: &str) {
        self.remote.withdraw(client, &self.name);
    }
}

/// The clients of a device, each once.
fn clients(own: &VrioSpec) -> Vec<String> {
    let mut clients = vec![own.client.clone()];
    for client in &own.migrates_to {
        if !clients.contains(client) {
            clients.push(client.clone());
        }
    }
    clients
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FrontEnd for Vrio {
    fn serve(&self, _: &Path, _: Place, left: Option<LeftDevice>) -> Result<(), AssemblyError> {
        if let Some(left) = left {
            left.disconnect();
        }
        let Some(store) = lock(&self.store).clone() else { return Err(AssemblyError::Ending) };
        let device = ExportedDevice {
            name: self.name.as_str().into(),
            serial: self.serial.clone(),
            store,
            read_only: self.read_only,
            write_cache: self.write_cache,
            epoch: 0,
            tenure: Arc::default(),
        };
        for (index, client) in self.clients.iter().enumerate() {
            if let Err(error) = self.remote.export(client, device.clone()) {
                self.clients.iter().take(index).for_each(|client| self.withdraw_from(client));
                return Err(error);
            }
        }
        *lock(&self.is_served) = true;
        Ok(())
    }

    fn stop(&self) -> bool {
        let mut is_served = lock(&self.is_served);
        let was_served = std::mem::take(&mut *is_served);
        if was_served {
            self.clients.iter().for_each(|client| self.withdraw_from(client));
        }
        was_served
    }

    fn close(&self) {
        *lock(&self.store) = None;
    }

    fn swap_store(
        &self,
        _: &Arc<dyn BlockDevice>,
        _: &Arc<dyn BlockDevice>,
    ) -> Result<Swapped, NotSwapped> {
        Err(NotSwapped::FrontEnd(
            "its stages cannot change while clients of other hosts use it; name the stage with its \
             store in the configuration, or add it at the host that uses the device",
        ))
    }

    fn refresh(&self) {
        let capacity_bytes =
            lock(&self.store).as_ref().map(|store| store.geometry().capacity_bytes);
        let Some(capacity_bytes) = capacity_bytes else { return };
        let old = std::mem::replace(&mut lock(&self.geometry).capacity_bytes, capacity_bytes);
        if old != capacity_bytes {
            for client in &self.clients {
                self.remote.resize(client, &self.name, capacity_bytes);
            }
        }
    }

    fn geometry(&self) -> Geometry {
        *lock(&self.geometry)
    }

    fn queues_on(&self, _: &str) -> usize {
        0
    }

    fn running_count(&self) -> u16 {
        0
    }

    fn is_connected(&self) -> bool {
        self.clients.iter().any(|client| self.remote.is_connected(client))
    }

    fn disconnect(&self) -> Option<Disconnect> {
        None
    }

    fn broken(&self) -> Option<String> {
        None
    }

    fn lost_sidecore(&self) -> Option<String> {
        None
    }

    fn queues(&self) -> Vec<QueueCounters> {
        Vec::new()
    }
}
