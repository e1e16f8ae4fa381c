//! Sockets that listen before the stores of their devices are open.

use std::sync::Mutex;

use sidecore_peer::Listening;

use super::{Graph, lock};
use crate::AssemblyError;
use crate::plan::bottom;
use crate::spec::{DeviceSpec, Spec};

/// Whether a device is added although its store is not open: that is a mirror, or a device of an
/// IOhost, which may come much later while a VMM waits.
pub(crate) fn may_come_late(device: &DeviceSpec, spec: &Spec) -> bool {
    bottom(spec, &device.store).is_some_and(|bottom| {
        let is_remote = bottom.kind.remote().is_some();
        bottom.kind.mirror().is_some() || is_remote && device.front_end.has_socket()
    })
}

/// Makes the sockets of devices that wait for their IOhosts: their VMMs can connect, and wait for
/// the first answer. The graph is locked for each device, so the caller must not have locked it.
///
/// # Errors
/// The first failure.
pub(crate) fn listen_early(graph: &Mutex<Graph>) -> Result<(), AssemblyError> {
    let waiting = lock(graph).waiting_for_iohosts();
    for device in waiting {
        let name = &device.name;
        // The name service may take a while to answer.
        let access = device.access.resolve();
        let access =
            access.map_err(|error| AssemblyError::Account { name: name.clone(), error })?;
        let mut graph = lock(graph);
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        // Opened or removed meanwhile.
        if !graph.lists.wanted().spec.devices.contains(&device) || !graph.has_no_socket(name) {
            continue;
        }
        let listening = Listening::new(&device.socket, access)
            .map_err(|error| AssemblyError::Server { name: name.clone(), error })?;
        tracing::info!(device = name, "its VMM can connect, and waits for the store");
        graph.listening.insert(name.clone(), listening);
    }
    Ok(())
}

impl Graph {
    /// The devices that wait for their IOhosts, and have no socket yet.
    fn waiting_for_iohosts(&self) -> Vec<DeviceSpec> {
        let wanted = self.lists.wanted();
        let waits = |device: &&DeviceSpec| {
            device.front_end.has_socket()
                && may_come_late(device, &wanted.spec)
                && !wanted.refused.contains_key(&device.name)
                && self.has_no_socket(&device.name)
        };
        wanted.spec.devices.iter().filter(waits).cloned().collect()
    }

    fn has_no_socket(&self, device: &str) -> bool {
        !self.listening.contains_key(device) && self.lists.disk(device).is_none()
    }
}
