//! Devices whose stores are not open when the assembly starts.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::{Assembly, Graph, access};
use crate::AssemblyError;
use crate::controllers::Controllers;
use crate::left::LeftDevice;
use crate::opening::{Opened, Opening, START_PATIENCE, waits_for};
use crate::pending::PendingDisk;
use crate::spec::{DeviceSpec, Spec};
use crate::stores::Stores;

/// Opens what the devices and controllers need, as far as it answers in time.
pub(super) fn open_in_time(
    spec: &Spec,
    stores: &mut Stores,
    controllers: &Controllers,
) -> Result<Opening, AssemblyError> {
    let deadline = Instant::now().checked_add(START_PATIENCE);
    let mut opening = Opening::start(spec, stores)?;
    opening.go_on(stores, controllers)?;
    while let Some(opened) = opening.next(deadline) {
        let subject = opened.subject();
        match opened.keep(stores, controllers) {
            Err(error) if error.is_of_a_store() => opening.refuse(subject, &error, controllers),
            kept => kept?,
        }
        opening.go_on(stores, controllers)?;
    }
    Ok(opening)
}

impl Assembly {
    /// Serves the devices whose stores were not open at the start as soon as they are, on a thread of its own. Without
    /// such a device, and the second time, it does nothing.
    ///
    /// # Errors
    /// There is no thread.
    pub fn serve_late(self: &Arc<Self>) -> Result<(), AssemblyError> {
        let late = self.opening.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut opening) = late else { return Ok(()) };
        let assembly = Arc::downgrade(self);
        let serve = move || {
            while let Some(opened) = opening.next(None) {
                let Some(assembly) = assembly.upgrade() else { return };
                assembly.opened_late(opened, &mut opening);
            }
        };
        std::thread::Builder::new().name("late-stores".to_owned()).spawn(serve).map_err(AssemblyError::Threads)?;
        Ok(())
    }

    fn opened_late(&self, opened: Opened, opening: &mut Opening) {
        let mut graph = self.graph();
        if graph.ends {
            return;
        }
        if let Opened::Controller(_, Ok(controller)) = &opened {
            self.tell_disks_of_changes(controller);
        }
        let subject = opened.subject();
        if let Err(error) = opened.keep(&mut graph.stores, &self.controllers) {
            opening.refuse(subject, &error, &self.controllers);
        }
        // Controllers that cannot be begun with are refused by that.
        let _ = opening.go_on(&mut graph.stores, &self.controllers);
        let names: Vec<String> = self.pending().iter().map(|disk| disk.spec.name.clone()).collect();
        for name in names {
            self.serve_pending(&name, &mut graph, opening);
        }
        graph.close_unused(&self.all_disks());
        drop(graph);
        self.subsystems.refresh();
    }

    /// Serves a device if its store is open. It is in one of the two lists at any time.
    fn serve_pending(&self, name: &str, graph: &mut Graph, opening: &Opening) {
        let (spec, left) = {
            let mut pending = self.pending();
            let is_it = |disk: &&mut PendingDisk| disk.spec.name == name && disk.refusal.is_none();
            let Some(disk) = pending.iter_mut().find(is_it) else { return };
            if let Some(waits_for) = waits_for(&disk.spec.store, &graph.stores, &self.controllers) {
                if let Some(reason) = opening.refusal(&waits_for, &self.controllers) {
                    disk.refuse(&reason);
                }
                return;
            }
            (disk.spec.clone(), disk.left.take())
        };
        let left: Vec<LeftDevice> = left.into_iter().collect();
        let functions = left.iter().flat_map(|left| left.subsystem().functions).collect();
        let served = self.disk(&spec, graph, &left).and_then(|disk| Ok((Arc::new(disk), access(&spec)?)));
        let served = served.and_then(|(disk, access)| {
            self.disks().push(Arc::clone(&disk));
            self.restore_functions(&functions);
            disk.serve(access, left.into_iter().next()).inspect_err(|_| {
                self.disks().retain(|other| !Arc::ptr_eq(other, &disk));
            })
        });
        let mut pending = self.pending();
        match served {
            Ok(()) => {
                pending.retain(|disk| disk.spec.name != name);
                tracing::info!(device = name, "its store is open: served");
            }
            Err(error) => {
                let disk = pending.iter_mut().find(|disk| disk.spec.name == name);
                disk.into_iter().for_each(|disk| disk.refuse(&error.to_string()));
            }
        }
    }

    /// Keeps a device for later, and what an earlier daemon left of it.
    pub(super) fn postpone(&self, device: &DeviceSpec, graph: &Graph, opening: &Opening, left: &mut Vec<LeftDevice>) {
        let Some(waits_for) = waits_for(&device.store, &graph.stores, &self.controllers) else { return };
        let store_type = graph.stores.kind(&device.store).unwrap_or_default();
        let at = left.iter().position(|left| left.name == device.name);
        let left = at.map(|at| left.remove(at));
        let reason = opening.refusal(&waits_for, &self.controllers);
        let mut disk = PendingDisk { spec: device.clone(), store_type, waits_for, refusal: None, left };
        match reason {
            Some(reason) => disk.refuse(&reason),
            None => tracing::warn!(device = device.name, store = device.store, "its store does not answer yet"),
        }
        self.pending().push(disk);
    }
}
