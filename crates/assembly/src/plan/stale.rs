//! The parts that a change stops.

use std::collections::BTreeSet;

use super::{Part, Phase, State, links_to_clients};
use crate::spec::{LinkSpec, Spec};

/// The parts to be stopped: parts that have changed or are not needed, and the parts above them.
#[derive(Default)]
pub(super) struct Stale {
    pub(super) sidecores: BTreeSet<String>,
    pub(super) links: BTreeSet<String>,
    pub(super) clients: BTreeSet<String>,
    pub(super) iohosts: BTreeSet<String>,
    pub(super) stores: BTreeSet<String>,
    pub(super) controllers: BTreeSet<String>,
    pub(super) devices: BTreeSet<String>,
}

impl Stale {
    pub(super) fn of(state: &State, next: &Spec) -> Self {
        let needed = state.needed(next);
        let mut stale = Self::default();
        for (name, spec) in &state.sidecores {
            if !next.sidecores.contains(spec) {
                stale.sidecores.insert(name.clone());
            }
        }
        stale.remote(state, next);
        let mut count = None;
        while count != Some(stale.count()) {
            count = Some(stale.count());
            for (name, Part { spec, .. }) in &state.stores {
                let kind = &spec.kind;
                let below = kind.inner().is_some_and(|inner| stale.stores.contains(inner))
                    || kind
                        .controller()
                        .is_some_and(|controller| stale.controllers.contains(controller));
                let away =
                    kind.remote().is_some_and(|remote| stale.iohosts.contains(&remote.iohost));
                if below || away || !needed.contains(name.as_str()) || !next.stores.contains(spec) {
                    stale.stores.insert(name.clone());
                }
            }
            for (name, Part { spec, .. }) in &state.controllers {
                if stale.stores.contains(&spec.store) || !next.controllers.contains(spec) {
                    stale.controllers.insert(name.clone());
                }
            }
            for (name, Part { spec, phase }) in &state.devices {
                let on = |sidecore: &String| stale.sidecores.contains(sidecore);
                let is_attached = *phase == Phase::Open && !state.detached.contains(name);
                if is_attached && stale.stores.contains(&spec.store)
                    || spec.sidecores.iter().any(on)
                    || spec.front_end.client().is_some_and(|name| stale.clients.contains(name))
                    || !next.devices.contains(spec)
                {
                    stale.devices.insert(name.clone());
                }
            }
        }
        stale
    }

    /// Adds links, clients and IOhosts, which lie on sidecores alone.
    fn remote(&mut self, state: &State, next: &Spec) {
        let links = links_to_clients(next);
        let moves = |sidecores: &BTreeSet<String>, link: &LinkSpec| {
            !next.links.contains(link) || link.sidecores.iter().any(|name| sidecores.contains(name))
        };
        for (name, link) in &state.links {
            if moves(&self.sidecores, link) || !links.contains(name.as_str()) {
                self.links.insert(name.clone());
            }
        }
        for (name, client) in &state.clients {
            let stops = |link: &String| self.links.contains(link);
            if client.links.iter().any(stops) || !next.clients.contains(client) {
                self.clients.insert(name.clone());
            }
        }
        for (name, (iohost, link)) in &state.iohosts {
            if moves(&self.sidecores, link) || !next.iohosts.contains(iohost) {
                self.iohosts.insert(name.clone());
            }
        }
    }

    fn count(&self) -> usize {
        self.stores.len() + self.controllers.len() + self.devices.len()
    }
}
