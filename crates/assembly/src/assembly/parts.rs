//! Links, clients and IOhosts that come and go while the assembly runs.

use std::collections::BTreeSet;

use super::Assembly;
use crate::AssemblyError;
use crate::plan::{Parts, check, needed};
use crate::spec::{RemoteKind, RemotePart, Spec};

impl Assembly {
    /// Adds a link, a client or an IOhost. A link without sidecores is polled by the first one. It
    /// is opened with the first client or IOhost that uses it.
    ///
    /// # Errors
    /// The name is taken, a part is missing or cannot be started, or the assembly is ending.
    /// Nothing has changed then.
    pub fn add_part(&self, part: &RemotePart) -> Result<(), AssemblyError> {
        let (kind, name) = (part.kind(), part.name());
        let mut graph = self.graph();
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        let mut next = self.lists.wanted().spec.clone();
        if names(&next, kind).any(|other| other == name) {
            let name = name.to_owned();
            return Err(AssemblyError::Duplicate { kind: kind.word(), name });
        }
        match part.clone() {
            RemotePart::Link(mut link) => {
                if link.sidecores.is_empty() {
                    let first = self.sidecores.first();
                    link.sidecores.extend(first.map(|sidecore| sidecore.name().to_owned()));
                }
                next.links.push(link);
            }
            RemotePart::Client(client) => next.clients.push(client),
            RemotePart::Iohost(iohost) => next.iohosts.push(iohost),
            RemotePart::Serve(serve) => next.serves.push(serve),
        }
        check(&next)?;
        graph.change(next)?;
        drop(graph);
        tracing::info!(name, "{} added", kind.word());
        Ok(())
    }

    /// Removes a link, a client or an IOhost that no part uses. The sessions of a client or with an
    /// IOhost end. Stores of an IOhost that no device needs are forgotten.
    ///
    /// # Errors
    /// There is no such part, another part uses it, or the assembly is ending.
    pub fn remove_part(&self, kind: RemoteKind, name: &str) -> Result<(), AssemblyError> {
        let mut graph = self.graph();
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        let mut next = self.lists.wanted().spec.clone();
        if !names(&next, kind).any(|other| other == name) {
            let name = name.to_owned();
            return Err(AssemblyError::NoPart { kind: kind.word(), name });
        }
        if let Some(user) = user(&next, kind, name) {
            let name = name.to_owned();
            return Err(AssemblyError::PartInUse { kind: kind.word(), name, user });
        }
        match kind {
            RemoteKind::Link => next.links.retain(|link| link.name != name),
            RemoteKind::Client => next.clients.retain(|client| client.name != name),
            RemoteKind::Serve => next.serves.retain(|serve| serve.name != name),
            RemoteKind::Iohost => {
                next.iohosts.retain(|iohost| iohost.name != name);
                next.stores
                    .retain(|store| store.kind.remote().is_none_or(|remote| remote.iohost != name));
                let stores: BTreeSet<String> =
                    next.stores.iter().map(|store| store.name.clone()).collect();
                next.stores
                    .retain(|store| store.kind.stores_below().all(|below| stores.contains(below)));
            }
        }
        check(&next)?;
        graph.change(next)?;
        drop(graph);
        tracing::info!(name, "{} removed", kind.word());
        Ok(())
    }
}

fn names(spec: &Spec, kind: RemoteKind) -> Box<dyn Iterator<Item = &String> + '_> {
    match kind {
        RemoteKind::Link => Box::new(spec.links.iter().map(|link| &link.name)),
        RemoteKind::Client => Box::new(spec.clients.iter().map(|client| &client.name)),
        RemoteKind::Iohost => Box::new(spec.iohosts.iter().map(|iohost| &iohost.name)),
        RemoteKind::Serve => Box::new(spec.serves.iter().map(|serve| &serve.name)),
    }
}

/// The first part that uses this one.
fn user(spec: &Spec, kind: RemoteKind, name: &str) -> Option<String> {
    match kind {
        RemoteKind::Link => {
            let mut clients = spec.clients.iter();
            let client = clients.find(|client| client.links.iter().any(|link| link == name));
            let iohost =
                || spec.iohosts.iter().find(|iohost| iohost.links().any(|link| link == name));
            client
                .map(|client| format!("client \"{}\"", client.name))
                .or_else(|| Some(format!("iohost \"{}\"", iohost()?.name)))
        }
        RemoteKind::Client => {
            let mut devices = spec.devices.iter();
            let device = devices.find(|device| device.front_end.clients().any(|of| of == name))?;
            Some(format!("device \"{}\"", device.name))
        }
        RemoteKind::Serve => None,
        RemoteKind::Iohost => {
            if let Some(serve) = spec.serves.iter().find(|serve| serve.iohost == name) {
                return Some(format!("serve \"{}\"", serve.name));
            }
            let mut devices = spec.devices.iter();
            if let Some(device) = devices.find(|device| device.front_end.iohost() == Some(name)) {
                return Some(format!("device \"{}\"", device.name));
            }
            let parts = Parts::of(spec);
            let needed = needed(&parts, |_| true);
            let mut stores = spec.stores.iter().filter(|store| needed.contains(&*store.name));
            let is_its = |remote: &crate::spec::RemoteSpec| remote.iohost == name;
            let store = stores.find(|store| store.kind.remote().is_some_and(is_its))?;
            Some(format!("store \"{}\", which a device needs,", store.name))
        }
    }
}
