//! The parts of a specification by their names.

use std::collections::BTreeMap;

use crate::spec::{
    ClientSpec, ControllerSpec, DeviceSpec, IohostSpec, LinkSpec, SidecoreSpec, Spec, StoreSpec,
    SwitchSpec,
};

/// The parts of a specification by their names, so that a check and a plan take n log n steps for n
/// parts: each change of one device has all devices checked and planned. Of two parts with one
/// name, the first one counts.
pub(crate) struct Parts<'a> {
    spec: &'a Spec,
    sidecores: BTreeMap<&'a str, &'a SidecoreSpec>,
    stores: BTreeMap<&'a str, &'a StoreSpec>,
    controllers: BTreeMap<&'a str, &'a ControllerSpec>,
    links: BTreeMap<&'a str, &'a LinkSpec>,
    clients: BTreeMap<&'a str, &'a ClientSpec>,
    iohosts: BTreeMap<&'a str, &'a IohostSpec>,
    switches: BTreeMap<&'a str, &'a SwitchSpec>,
    devices: BTreeMap<&'a str, &'a DeviceSpec>,
    /// Parts that were looked up or visited, for tests that their number does not grow with the
    /// square of the parts.
    #[cfg(test)]
    pub(crate) steps: std::cell::Cell<usize>,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(spec: &'a Spec) -> Self {
        Self {
            spec,
            sidecores: by_name(&spec.sidecores, |sidecore| &sidecore.name),
            stores: by_name(&spec.stores, |store| &store.name),
            controllers: by_name(&spec.controllers, |controller| &controller.name),
            links: by_name(&spec.links, |link| &link.name),
            clients: by_name(&spec.clients, |client| &client.name),
            iohosts: by_name(&spec.iohosts, |iohost| &iohost.name),
            switches: by_name(&spec.switches, |switch| &switch.name),
            devices: by_name(&spec.devices, |device| &device.name),
            #[cfg(test)]
            steps: std::cell::Cell::new(0),
        }
    }

    pub(crate) fn spec(&self) -> &'a Spec {
        self.spec
    }

    /// Counts a part that is looked up or visited.
    pub(crate) fn step(&self) {
        #[cfg(test)]
        self.steps.set(self.steps.get() + 1);
    }

    pub(crate) fn sidecore(&self, name: &str) -> Option<&'a SidecoreSpec> {
        self.step();
        self.sidecores.get(name).copied()
    }

    pub(crate) fn store(&self, name: &str) -> Option<&'a StoreSpec> {
        self.step();
        self.stores.get(name).copied()
    }

    pub(crate) fn controller(&self, name: &str) -> Option<&'a ControllerSpec> {
        self.step();
        self.controllers.get(name).copied()
    }

    pub(crate) fn link(&self, name: &str) -> Option<&'a LinkSpec> {
        self.step();
        self.links.get(name).copied()
    }

    pub(crate) fn client(&self, name: &str) -> Option<&'a ClientSpec> {
        self.step();
        self.clients.get(name).copied()
    }

    pub(crate) fn iohost(&self, name: &str) -> Option<&'a IohostSpec> {
        self.step();
        self.iohosts.get(name).copied()
    }

    /// The links to an IOhost; `None` if one is missing.
    pub(crate) fn links_of(&self, iohost: &IohostSpec) -> Option<Vec<&'a LinkSpec>> {
        iohost.links().map(|name| self.link(name)).collect()
    }

    pub(crate) fn switch(&self, name: &str) -> Option<&'a SwitchSpec> {
        self.step();
        self.switches.get(name).copied()
    }

    pub(crate) fn device(&self, name: &str) -> Option<&'a DeviceSpec> {
        self.step();
        self.devices.get(name).copied()
    }

    /// The store of this name, and those below it in their order. Each is a new one, unless the
    /// stores form a cycle, which ends after as many steps as there are stores.
    pub(crate) fn down(&self, name: &str) -> impl Iterator<Item = &'a StoreSpec> {
        let inner = |store: &&'a StoreSpec| store.kind.inner().and_then(|name| self.store(name));
        std::iter::successors(self.store(name), inner).take(self.spec.stores.len())
    }

    /// As [`bottom`](super::bottom).
    pub(crate) fn bottom(&self, name: &str) -> Option<&'a StoreSpec> {
        self.down(name).last().filter(|store| store.kind.inner().is_none())
    }

    /// The types of the stages between the store of this name and its bottom.
    pub(crate) fn stages(&self, name: &str) -> Vec<String> {
        let stages = self.down(name).flat_map(|store| &store.stages);
        stages.map(|stage| stage.word().to_owned()).collect()
    }
}

fn by_name<T>(parts: &[T], name: impl Fn(&T) -> &String) -> BTreeMap<&str, &T> {
    parts.iter().rev().map(|part| (name(part).as_str(), part)).collect()
}
