//! Specifications whose parts do not fit together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::mirrors::check_mirrors;
use super::{Parts, subject};
use crate::AssemblyError;
use crate::spec::{DeviceSpec, QUEUE_PAIRS_MAX, QUEUES_MAX, Spec};

/// Refuses a specification whose parts do not fit together: duplicate names and sockets, names of
/// missing parts, stores that lead to themselves, and impossible numbers of queues.
pub(crate) fn check(next: &Spec) -> Result<(), AssemblyError> {
    Checker::of(&Parts::of(next)).check()
}

pub(super) struct Checker<'a> {
    parts: &'a Parts<'a>,
    /// Stores with a bottom. A way that reaches one of them is not followed further.
    sound: BTreeSet<&'a str>,
}

impl<'a> Checker<'a> {
    pub(super) fn of(parts: &'a Parts<'a>) -> Self {
        Self { parts, sound: BTreeSet::new() }
    }

    pub(super) fn check(&mut self) -> Result<(), AssemblyError> {
        let next = self.parts.spec();
        self.check_duplicates(next)?;
        self.check_links(next)?;
        self.check_switches(next)?;
        check_mirrors(self.parts)?;
        next.devices.iter().try_for_each(|device| self.check_queues(device))?;
        for device in next.devices.iter().filter(|device| device.front_end.switch().is_none()) {
            self.check_below(subject(device), &device.store)?;
        }
        next.controllers.iter().try_for_each(|spec| {
            self.check_below(format!("controller \"{}\"", spec.name), &spec.store)
        })
    }

    fn check_duplicates(&self, next: &Spec) -> Result<(), AssemblyError> {
        let (mut names, mut sockets) = (BTreeMap::new(), BTreeMap::<&Path, _>::new());
        let mut numbers = BTreeMap::new();
        for (index, device) in next.devices.iter().enumerate() {
            self.parts.step();
            let named = names.insert(device.name.as_str(), index);
            // Paths are compared by their components.
            let is_local = device.front_end.has_socket();
            let place = (index, &device.name);
            let taken = if is_local { sockets.insert(&device.socket, place) } else { None };
            let name = device.name.clone();
            // The first of the earlier devices is reported, and its name before its socket.
            if named.is_some_and(|named| taken.is_none_or(|(taken, _)| named <= taken)) {
                return Err(AssemblyError::Duplicate { kind: "device", name });
            }
            if let Some((_, other)) = taken {
                let (socket, other) = (device.socket.clone(), other.clone());
                return Err(AssemblyError::SocketTaken { name, socket, other });
            }
            if let Some(number) = device.front_end.number()
                && let Some(other) = numbers.insert(number, &device.name)
            {
                return Err(AssemblyError::NumberTaken { name, number, other: other.clone() });
            }
        }
        Ok(())
    }

    /// Refuses clients and IOhosts of missing links, and links on missing sidecores.
    fn check_links(&self, next: &Spec) -> Result<(), AssemblyError> {
        for link in &next.links {
            let is_missing = |name: &&String| self.parts.sidecore(name).is_none();
            if let Some(name) = link.sidecores.iter().find(is_missing) {
                return Err(unknown(format!("link \"{}\"", link.name), "sidecore", name));
            }
        }
        let is_missing = |name: &&String| self.parts.link(name).is_none();
        for client in &next.clients {
            if let Some(name) = client.links.iter().find(is_missing) {
                return Err(unknown(format!("client \"{}\"", client.name), "link", name));
            }
        }
        for iohost in &next.iohosts {
            if let Some(link) = iohost.links().find(is_missing) {
                return Err(unknown(format!("iohost \"{}\"", iohost.name), "link", link));
            }
        }
        let is_missing = |name: &String| self.parts.iohost(name).is_none();
        if let Some(spec) = next.serves.iter().find(|serve| is_missing(&serve.iohost)) {
            return Err(unknown(format!("serve \"{}\"", spec.name), "iohost", &spec.iohost));
        }
        check_users_of_links(next)
    }

    /// Refuses NICs of missing switches, and switches on missing sidecores.
    fn check_switches(&self, next: &Spec) -> Result<(), AssemblyError> {
        let is_missing = |name: &str| self.parts.sidecore(name).is_none();
        if let Some(spec) = next.switches.iter().find(|switch| is_missing(&switch.sidecore)) {
            return Err(unknown(format!("switch \"{}\"", spec.name), "sidecore", &spec.sidecore));
        }
        for device in &next.devices {
            if let Some(switch) = device.front_end.switch()
                && self.parts.switch(switch).is_none()
            {
                return Err(unknown(subject(device), "switch", switch));
            }
        }
        Ok(())
    }

    fn check_queues(&self, device: &DeviceSpec) -> Result<(), AssemblyError> {
        if device.front_end.switch().is_some() {
            let is_possible = (1..=QUEUE_PAIRS_MAX).contains(&device.queues);
            let why = "it needs 1 to 16 pairs of queues";
            let name = device.name.clone();
            is_possible.then_some(()).ok_or(AssemblyError::Device { name, why })?;
            let missing = device.front_end.iohost().filter(|of| self.parts.iohost(of).is_none());
            if let Some(name) = missing {
                return Err(unknown(subject(device), "iohost", name));
            }
            return self.check_clients(device);
        }
        if device.front_end.client().is_some() {
            return self.check_clients(device);
        }
        for name in &device.sidecores {
            if self.parts.sidecore(name).is_none() {
                return Err(unknown(subject(device), "sidecore", name));
            }
        }
        let wrong = |why| Err(AssemblyError::Device { name: device.name.clone(), why });
        if !(1..=QUEUES_MAX).contains(&device.queues) {
            return wrong("it needs 1 to 64 queues");
        }
        if device.sidecores.is_empty() { wrong("it has no sidecore") } else { Ok(()) }
    }

    fn check_clients(&self, device: &DeviceSpec) -> Result<(), AssemblyError> {
        let mut clients = device.front_end.clients();
        let missing = clients.find(|client| self.parts.client(client).is_none());
        missing.map_or(Ok(()), |name| Err(unknown(subject(device), "client", name)))
    }

    /// Follows a store to its bottom, through the controllers whose functions lie on the way.
    fn check_below(&mut self, user: String, store: &'a str) -> Result<(), AssemblyError> {
        self.check_chain(user, store, BTreeSet::new())
    }

    /// As [`check_below`](Self::check_below), with the stores that lead to this one. The legs of a
    /// mirror end in no other mirror, so this calls itself once at most.
    fn check_chain(
        &mut self,
        mut user: String,
        store: &'a str,
        mut above: BTreeSet<&'a str>,
    ) -> Result<(), AssemblyError> {
        let mut name = store;
        loop {
            self.parts.step();
            if self.sound.contains(name) {
                break;
            }
            let Some(store) = self.parts.store(name) else {
                return Err(unknown(user, "store", name));
            };
            if !above.insert(name) {
                return Err(AssemblyError::Cycle { name: name.to_owned() });
            }
            user = format!("store \"{name}\"");
            if let Some(remote) = store.kind.remote()
                && self.parts.iohost(&remote.iohost).is_none()
            {
                return Err(unknown(user, "iohost", &remote.iohost));
            }
            let legs = store.kind.mirror().map_or(&[][..], |mirror| &mirror.legs);
            for leg in legs {
                self.check_chain(user.clone(), leg, above.clone())?;
            }
            name = match (store.kind.inner(), store.kind.controller()) {
                (Some(inner), _) => inner,
                (None, None) => break,
                (None, Some(controller)) => match self.parts.controller(controller) {
                    None => return Err(unknown(user, "controller", controller)),
                    Some(spec) => {
                        user = format!("controller \"{controller}\"");
                        &spec.store
                    }
                },
            };
        }
        self.sound.extend(above);
        Ok(())
    }
}

pub(super) fn unknown(user: String, kind: &'static str, name: &str) -> AssemblyError {
    AssemblyError::Unknown { user, kind, name: name.to_owned() }
}

/// Refuses two IOhosts on one link, and clients on an IOhost's.
fn check_users_of_links(next: &Spec) -> Result<(), AssemblyError> {
    let taken = |link: &str, iohost: &str, user: String| {
        let (name, other) = (link.to_owned(), format!("iohost \"{iohost}\""));
        Err(AssemblyError::LinkTaken { name, other, user })
    };
    let mut iohosts = BTreeMap::<&str, &str>::new();
    for iohost in &next.iohosts {
        for link in iohost.links() {
            if let Some(other) = iohosts.insert(link, &iohost.name) {
                return taken(link, other, format!("iohost \"{}\"", iohost.name));
            }
        }
    }
    for client in &next.clients {
        for link in &client.links {
            if let Some(iohost) = iohosts.get(link.as_str()) {
                return taken(link, iohost, format!("client \"{}\"", client.name));
            }
        }
    }
    Ok(())
}
