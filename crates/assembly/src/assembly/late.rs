//! Devices whose stores are not open when the assembly starts.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::{Assembly, Graph, access};
use crate::AssemblyError;
use crate::controllers::Controllers;
use crate::left::LeftDevice;
use crate::opening::{self, Opened, Opening, START_PATIENCE};
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
            Err(error) if opening::is_passing(&error) => opening.refuse(subject, &error),
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
        let subject = opened.subject();
        let known = self.controllers().len();
        let kept = opened.keep(&mut graph.stores, &self.controllers);
        if let Err(error) = kept {
            opening.refuse(subject.clone(), &error);
        }
        self.controllers().iter().skip(known).for_each(|controller| self.tell_disks_of_changes(controller));
        if let Err(error) = opening.go_on(&mut graph.stores, &self.controllers) {
            opening.refuse(subject, &error);
        }
        let pending = std::mem::take(&mut *self.pending());
        let pending: Vec<_> =
            pending.into_iter().filter_map(|disk| self.serve_pending(disk, &mut graph, opening)).collect();
        self.pending().extend(pending);
        graph.close_unused(&self.all_disks());
        drop(graph);
        self.subsystems.refresh();
    }

    /// Serves a device if its store is open; the device, if not.
    fn serve_pending(&self, mut disk: PendingDisk, graph: &mut Graph, opening: &Opening) -> Option<PendingDisk> {
        if disk.refusal.is_some() {
            return Some(disk);
        }
        if let Some(waits_for) = opening.waits_for(&disk.spec.store, &graph.stores, &self.controllers) {
            if let Some(reason) = opening.refusal(&waits_for) {
                disk.refuse(reason);
            }
            return Some(disk);
        }
        let left: Vec<LeftDevice> = disk.left.take().into_iter().collect();
        let standings = left.iter().flat_map(|left| left.known().standings).collect();
        let served = self.disk(&disk.spec, graph, &left).and_then(|served| {
            let (served, access) = (Arc::new(served), access(&disk.spec)?);
            self.disks().push(Arc::clone(&served));
            self.subsystems.stand(&standings, &self.controllers());
            served.serve(access, left.into_iter().next()).inspect_err(|_| {
                self.disks().retain(|other| !Arc::ptr_eq(other, &served));
            })
        });
        match served {
            Ok(()) => {
                tracing::info!(device = disk.spec.name, "its store is open: served");
                None
            }
            Err(error) => {
                disk.refuse(&error.to_string());
                Some(disk)
            }
        }
    }

    /// Keeps a device for later, and what an earlier daemon left of it.
    pub(super) fn postpone(&self, device: &DeviceSpec, graph: &Graph, opening: &Opening, left: &mut Vec<LeftDevice>) {
        let Some(waits_for) = opening.waits_for(&device.store, &graph.stores, &self.controllers) else { return };
        let store_type = graph.stores.kind(&device.store).unwrap_or_default();
        let at = left.iter().position(|left| left.name == device.name);
        let left = at.map(|at| left.remove(at));
        let reason = opening.refusal(&waits_for).cloned();
        let mut disk = PendingDisk { spec: device.clone(), store_type, waits_for, refusal: None, left };
        match reason {
            Some(reason) => disk.refuse(&reason),
            None => tracing::warn!(device = device.name, store = device.store, "its store does not answer yet"),
        }
        self.pending().push(disk);
    }
}
