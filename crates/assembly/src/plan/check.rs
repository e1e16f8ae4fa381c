//! Specifications whose parts do not fit together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::subject;
use crate::AssemblyError;
use crate::spec::{ControllerSpec, DeviceSpec, QUEUES_MAX, Spec, StoreSpec};

/// Refuses a specification whose parts do not fit together: duplicate names and sockets, names of
/// missing parts, stores that lead to themselves, and impossible numbers of queues.
pub(crate) fn check(next: &Spec) -> Result<(), AssemblyError> {
    Checker::of(next).check(next)
}

/// The parts by their names, so that a check takes n log n steps for n parts: each added device has
/// all devices checked.
pub(super) struct Checker<'a> {
    sidecores: BTreeSet<&'a str>,
    stores: BTreeMap<&'a str, &'a StoreSpec>,
    controllers: BTreeMap<&'a str, &'a ControllerSpec>,
    /// Stores with a bottom. A way that reaches one of them is not followed further.
    sound: BTreeSet<&'a str>,
    /// Look-ups in the maps above, for a test that they do not grow with the square of the parts.
    #[cfg(test)]
    pub(super) steps: usize,
}

impl<'a> Checker<'a> {
    pub(super) fn of(next: &'a Spec) -> Self {
        // Of two parts with one name, the first one counts.
        let stores = next.stores.iter().rev().map(|store| (store.name.as_str(), store));
        let controllers = next.controllers.iter().rev().map(|spec| (spec.name.as_str(), spec));
        Self {
            sidecores: next.sidecores.iter().map(|sidecore| sidecore.name.as_str()).collect(),
            stores: stores.collect(),
            controllers: controllers.collect(),
            sound: BTreeSet::new(),
            #[cfg(test)]
            steps: 0,
        }
    }

    pub(super) fn check(&mut self, next: &'a Spec) -> Result<(), AssemblyError> {
        self.check_duplicates(next)?;
        next.devices.iter().try_for_each(|device| self.check_queues(device))?;
        for device in &next.devices {
            self.check_below(subject(device), &device.store)?;
        }
        next.controllers.iter().try_for_each(|spec| {
            self.check_below(format!("controller \"{}\"", spec.name), &spec.store)
        })
    }

    /// Counts a look-up.
    fn step(&mut self) {
        #[cfg(test)]
        {
            self.steps += 1;
        }
    }

    fn check_duplicates(&mut self, next: &'a Spec) -> Result<(), AssemblyError> {
        let (mut names, mut sockets) = (BTreeMap::new(), BTreeMap::<&Path, _>::new());
        for (index, device) in next.devices.iter().enumerate() {
            self.step();
            let named = names.insert(device.name.as_str(), index);
            // Paths are compared by their components.
            let taken = sockets.insert(&device.socket, (index, &device.name));
            let name = device.name.clone();
            // The first of the earlier devices is reported, and its name before its socket.
            if named.is_some_and(|named| taken.is_none_or(|(taken, _)| named <= taken)) {
                return Err(AssemblyError::Duplicate { kind: "device", name });
            }
            if let Some((_, other)) = taken {
                let (socket, other) = (device.socket.clone(), other.clone());
                return Err(AssemblyError::SocketTaken { name, socket, other });
            }
        }
        Ok(())
    }

    fn check_queues(&mut self, device: &DeviceSpec) -> Result<(), AssemblyError> {
        for name in &device.sidecores {
            self.step();
            if !self.sidecores.contains(name.as_str()) {
                return Err(unknown(subject(device), "sidecore", name));
            }
        }
        let wrong = |why| Err(AssemblyError::Device { name: device.name.clone(), why });
        if !(1..=QUEUES_MAX).contains(&device.queues) {
            return wrong("it needs 1 to 64 queues");
        }
        if device.sidecores.is_empty() { wrong("it has no sidecore") } else { Ok(()) }
    }

    /// Follows a store to its bottom, through the controllers whose functions lie on the way.
    fn check_below(&mut self, mut user: String, store: &'a str) -> Result<(), AssemblyError> {
        let mut name = store;
        let mut above = BTreeSet::new();
        loop {
            self.step();
            if self.sound.contains(name) {
                break;
            }
            let Some(store) = self.stores.get(name) else {
                return Err(unknown(user, "store", name));
            };
            if !above.insert(name) {
                return Err(AssemblyError::Cycle { name: name.to_owned() });
            }
            user = format!("store \"{name}\"");
            name = match (store.kind.inner(), store.kind.controller()) {
                (Some(inner), _) => inner,
                (None, None) => break,
                (None, Some(controller)) => match self.controllers.get(controller) {
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

fn unknown(user: String, kind: &'static str, name: &str) -> AssemblyError {
    AssemblyError::Unknown { user, kind, name: name.to_owned() }
}
