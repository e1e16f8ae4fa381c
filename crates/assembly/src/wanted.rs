//! The wanted specification of an assembly, and the refused devices.

use std::collections::{BTreeMap, BTreeSet};

use crate::controllers::Controllers;
use crate::disk::idle_word;
use crate::plan::{Parts, needed};
use crate::remote::Remote;
use crate::report::{DeviceReport, DeviceState, QueueCounters};
use crate::spec::{DeviceSpec, Spec, StoreSpec};

/// Locked only while it is read or replaced.
#[derive(Default)]
pub(crate) struct Wanted {
    pub(crate) spec: Spec,
    /// Names of stores that were added with a device. Each is forgotten with the last device that
    /// leads to it.
    passing: BTreeSet<String>,
    /// The reasons of devices that cannot be served, by name.
    pub(crate) refused: BTreeMap<String, String>,
}

impl Wanted {
    pub(crate) fn new(spec: &Spec) -> Self {
        Self { spec: spec.clone(), ..Self::default() }
    }

    /// Returns the specification with one more device and the device's store.
    pub(crate) fn with(&self, device: &DeviceSpec, store: Option<&StoreSpec>) -> Spec {
        let mut spec = self.spec.clone();
        spec.devices.push(device.clone());
        spec.stores.extend(store.cloned());
        spec
    }

    /// Returns the specification without a device; `None` if there is no such device.
    pub(crate) fn without(&self, name: &str) -> Option<Spec> {
        let mut spec = self.spec.clone();
        spec.devices.retain(|device| device.name != name);
        if spec.devices.len() == self.spec.devices.len() {
            return None;
        }
        let needed: BTreeSet<String> =
            needed(&Parts::of(&spec), |_| true).into_iter().map(str::to_owned).collect();
        spec.stores
            .retain(|store| !self.passing.contains(&store.name) || needed.contains(&store.name));
        Some(spec)
    }

    /// Replaces the specification after the assembly has been changed to it. New stores belong to
    /// the added device.
    pub(crate) fn set(&mut self, spec: Spec) {
        let (before, next) = (Parts::of(&self.spec), Parts::of(&spec));
        let is_new = |store: &&StoreSpec| before.store(&store.name).is_none();
        self.passing.extend(spec.stores.iter().filter(is_new).map(|store| store.name.clone()));
        self.passing.retain(|name| next.store(name).is_some());
        self.refused.retain(|name, _| next.device(name).is_some());
        self.spec = spec;
    }

    /// The position of a device in the specification. An unknown device comes last.
    pub(crate) fn place(&self, name: &str) -> usize {
        self.spec.devices.iter().position(|device| device.name == name).unwrap_or(usize::MAX)
    }

    /// Reports the devices that are not in `served`.
    pub(crate) fn unserved(
        &self,
        served: &[DeviceReport],
        controllers: &Controllers,
        remote: &Remote,
    ) -> Vec<DeviceReport> {
        let served: BTreeSet<&str> = served.iter().map(|served| served.name.as_str()).collect();
        let parts = Parts::of(&self.spec);
        let unserved = self.spec.devices.iter().filter(|device| !served.contains(&*device.name));
        unserved.map(|device| self.report(device, &parts, (controllers, remote))).collect()
    }

    fn report(
        &self,
        device: &DeviceSpec,
        parts: &Parts<'_>,
        (controllers, remote): (&Controllers, &Remote),
    ) -> DeviceReport {
        let bottom = parts.bottom(&device.store);
        let kind = bottom.map(|bottom| &bottom.kind);
        let controller = kind.and_then(|kind| kind.controller());
        let closed = controller.and_then(|name| controllers.closed_one(name));
        // A refused device on an open controller is broken. On another store, the next daemon may
        // serve the device.
        let controller = controller.filter(|_| closed.is_none()).map(str::to_owned);
        let refusal = self.refused.get(&device.name).cloned();
        let state = match (&refusal, &controller) {
            (None, _) => DeviceState::Opening,
            (Some(_), None) => DeviceState::Refused,
            (Some(_), Some(_)) => DeviceState::Broken,
        };
        let waits = || match closed {
            _ if device.front_end.switch().is_some() => "its switch has not started".to_owned(),
            Some(closed) => format!(
                "controller \"{}\" is not open yet; the device is served when it is",
                closed.name
            ),
            None => {
                let name = bottom.map_or("", |bottom| &bottom.name);
                let waits = remote.waits_for(name);
                let waits =
                    waits.unwrap_or_else(|| format!("store \"{name}\" does not answer yet"));
                format!("{waits}; the device is served when it does")
            }
        };
        DeviceReport {
            name: device.name.clone(),
            front_end: device.front_end.word().to_owned(),
            store: device.store.clone(),
            store_type: parts.store(&device.store).map_or("", StoreSpec::word).to_owned(),
            stages: parts.stages(&device.store),
            volume: kind
                .filter(|_| controller.is_some())
                .and_then(|kind| Some(kind.volume()?.volume.clone())),
            controller,
            switch: device.front_end.switch().map(str::to_owned),
            socket: device.socket.display().to_string(),
            capacity_bytes: 0,
            block_bytes: 0,
            read_only: device.read_only,
            queues: device.queues,
            queues_running: 0,
            sidecores: device.sidecores.clone(),
            idle: idle_word(device.idle).to_owned(),
            state,
            reason: Some(refusal.unwrap_or_else(waits)),
            warnings: Vec::new(),
            needs_reset: false,
            disconnect: None,
            counters: QueueCounters::default(),
        }
    }
}
