//! The parts that a change stops.

use std::collections::{BTreeMap, BTreeSet};

use super::uses::{Name, uses};
use super::{Part, Parts, State, links_to_clients};
use crate::spec::{DeviceSpec, LinkSpec, StoreSpec};

/// The parts to be stopped: parts that have changed or are not needed, and the parts above them.
#[derive(Default)]
pub(super) struct Stale {
    pub(super) sidecores: BTreeSet<String>,
    pub(super) links: BTreeSet<String>,
    pub(super) clients: BTreeSet<String>,
    pub(super) iohosts: BTreeSet<String>,
    pub(super) switches: BTreeSet<String>,
    pub(super) stores: BTreeSet<String>,
    pub(super) controllers: BTreeSet<String>,
    pub(super) devices: BTreeSet<String>,
}

impl Stale {
    pub(super) fn of(state: &State, next: &Parts<'_>) -> Self {
        let needed = state.needed(next);
        let mut stale = Self::default();
        for (name, spec) in &state.sidecores {
            if next.sidecore(name) != Some(spec) {
                stale.sidecores.insert(name.clone());
            }
        }
        for (name, switch) in &state.switches {
            if stale.sidecores.contains(&switch.sidecore) || next.switch(name) != Some(switch) {
                stale.switches.insert(name.clone());
            }
        }
        stale.remote(state, next);
        let mut changed = Vec::new();
        for (name, Part { spec, .. }) in &state.stores {
            if stale.changes_store(spec, next) || !needed.contains(name.as_str()) {
                changed.push(Name::Store(name));
            }
        }
        for (name, Part { spec, .. }) in &state.controllers {
            if next.controller(name) != Some(spec) {
                changed.push(Name::Controller(name));
            }
        }
        for (name, Part { spec, .. }) in &state.devices {
            if stale.changes_device(spec, next) {
                changed.push(Name::Device(name));
            }
        }
        stale.spread(changed, state, next);
        stale
    }

    fn changes_store(&self, spec: &StoreSpec, next: &Parts<'_>) -> bool {
        let is_away = |iohost: &String| self.iohosts.contains(iohost);
        spec.kind.remote().is_some_and(|remote| is_away(&remote.iohost))
            || next.store(&spec.name) != Some(spec)
    }

    fn changes_device(&self, spec: &DeviceSpec, next: &Parts<'_>) -> bool {
        spec.sidecores.iter().any(|sidecore| self.sidecores.contains(sidecore))
            || spec.front_end.clients().any(|name| self.clients.contains(name))
            || spec.front_end.iohost().is_some_and(|name| self.iohosts.contains(name))
            || spec.front_end.switch().is_some_and(|name| self.switches.contains(name))
            || next.device(&spec.name) != Some(spec)
    }

    /// Adds parts, and all parts above them.
    fn spread<'a>(&mut self, mut parts: Vec<Name<'a>>, state: &'a State, next: &Parts<'_>) {
        let mut above = BTreeMap::<_, Vec<_>>::new();
        for each in uses(state) {
            next.step();
            above.entry(each.below).or_default().push(each.above);
        }
        while let Some(part) = parts.pop() {
            next.step();
            let is_new = match part {
                Name::Store(name) => self.stores.insert(name.to_owned()),
                Name::Controller(name) => self.controllers.insert(name.to_owned()),
                Name::Device(name) => self.devices.insert(name.to_owned()),
            };
            if is_new {
                parts.extend(above.remove(&part).unwrap_or_default());
            }
        }
    }

    /// Adds links, clients and IOhosts, which lie on sidecores alone.
    fn remote(&mut self, state: &State, next: &Parts<'_>) {
        let links = links_to_clients(next.spec());
        let moves = |sidecores: &BTreeSet<String>, link: &LinkSpec| {
            next.link(&link.name) != Some(link)
                || link.sidecores.iter().any(|name| sidecores.contains(name))
        };
        for (name, link) in &state.links {
            if moves(&self.sidecores, link) || !links.contains(name.as_str()) {
                self.links.insert(name.clone());
            }
        }
        for (name, client) in &state.clients {
            let stops = |link: &String| self.links.contains(link);
            if client.links.iter().any(stops) || next.client(name) != Some(client) {
                self.clients.insert(name.clone());
            }
        }
        for (name, (iohost, links)) in &state.iohosts {
            if links.iter().any(|link| moves(&self.sidecores, link))
                || next.iohost(name) != Some(iohost)
            {
                self.iohosts.insert(name.clone());
            }
        }
    }
}
