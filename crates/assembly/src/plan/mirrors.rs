//! Mirrors whose legs do not fit.

use std::collections::{BTreeMap, BTreeSet};

use super::check::unknown;
use super::{Parts, subject};
use crate::AssemblyError;
use crate::spec::{
    Below, MirrorSpec, StoreKind, StoreSpec, unfit_as_leg, unfit_number_of_legs, used_twice,
};

/// Refuses mirrors with legs that something else uses, or that cannot be legs.
pub(super) fn check_mirrors(parts: &Parts<'_>) -> Result<(), AssemblyError> {
    let stores = &parts.spec().stores;
    if stores.iter().all(|store| store.kind.mirror().is_none()) {
        return Ok(());
    }
    let (users, volumes) = (users(parts), volumes(parts));
    for store in stores {
        if let Some(mirror) = store.kind.mirror() {
            let refused = |why| AssemblyError::Mirror { name: store.name.clone(), why };
            check_mirror(store, mirror, parts)?;
            for leg in mirror.legs.iter().flat_map(|leg| parts.down(leg)) {
                let why = used_otherwise(leg, &users, &volumes);
                why.map_or(Ok(()), |why| Err(refused(why)))?;
            }
        }
    }
    Ok(())
}

/// Whether a store is below a mirror, which opens without it if it cannot be opened.
pub(crate) fn is_leg(store: &str, parts: &Parts<'_>) -> bool {
    let mirrors = parts.spec().stores.iter().filter_map(|store| store.kind.mirror());
    let mut legs = mirrors.flat_map(|mirror| &mirror.legs).flat_map(|leg| parts.down(leg));
    legs.any(|below| below.name == store)
}

/// The parts that use each store, by its name.
fn users<'a>(parts: &Parts<'a>) -> BTreeMap<&'a str, Vec<String>> {
    let mut users = BTreeMap::<&str, Vec<String>>::new();
    let spec = parts.spec();
    let mut add = |below, user| users.entry(below).or_default().push(user);
    for store in &spec.stores {
        for below in store.kind.stores_below() {
            add(below, format!("store \"{}\"", store.name));
        }
    }
    for controller in &spec.controllers {
        add(&controller.store, format!("controller \"{}\"", controller.name));
    }
    for device in spec.devices.iter().filter(|device| device.front_end.switch().is_none()) {
        add(&device.store, subject(device));
    }
    users
}

/// The stores of each volume, by its controller and its name.
fn volumes<'a>(parts: &Parts<'a>) -> BTreeMap<(&'a str, &'a str), Vec<&'a str>> {
    let mut volumes = BTreeMap::<_, Vec<&str>>::new();
    for store in &parts.spec().stores {
        if let Some(of) = store.kind.volume() {
            volumes.entry((&*of.controller, &*of.volume)).or_default().push(&store.name);
        }
    }
    volumes
}

fn check_mirror(
    store: &StoreSpec,
    mirror: &MirrorSpec,
    parts: &Parts<'_>,
) -> Result<(), AssemblyError> {
    let refused = |why| Err(AssemblyError::Mirror { name: store.name.clone(), why });
    if let Some(unfit) = unfit_number_of_legs(mirror.legs.len()) {
        return refused(unfit);
    }
    if let Some(read) = mirror.read.as_ref().filter(|read| !mirror.legs.contains(read)) {
        return refused(format!("`read` names \"{read}\", which is none of its legs"));
    }
    let mut seen = BTreeSet::new();
    for leg in &mirror.legs {
        if parts.store(leg).is_none() {
            return Err(unknown(format!("store \"{}\"", store.name), "store", leg));
        }
        if !seen.insert(leg) {
            return refused(format!("leg \"{leg}\" is listed twice; name each store once"));
        }
        if parts.bottom(leg).is_none() {
            return Err(AssemblyError::Cycle { name: leg.clone() });
        }
        if let Some(unfit) = unfit_as_leg(leg, parts) {
            return refused(unfit);
        }
    }
    Ok(())
}

impl Below for Parts<'_> {
    fn store(&self, name: &str) -> Option<&StoreKind> {
        Parts::store(self, name).map(|store| &store.kind)
    }

    fn store_of_controller(&self, controller: &str) -> Option<&str> {
        self.controller(controller).map(|controller| &*controller.store)
    }

    fn waits_for(&self, iohost: &str) -> bool {
        self.iohost(iohost).is_some_and(|iohost| iohost.fail_after.is_none())
    }
}

/// The device of an IOhost that a store is or lies on, and whether a controller is in between.
pub(crate) fn device_below<'a>(leg: &str, parts: &Parts<'a>) -> Option<(&'a StoreSpec, bool)> {
    let mut bottom = parts.bottom(leg)?;
    // Each step reaches a new store, unless the parts form a cycle.
    for step in 0..=parts.spec().stores.len() {
        if bottom.kind.remote().is_some() {
            return Some((bottom, step > 0));
        }
        let controller = parts.controller(bottom.kind.controller()?)?;
        bottom = parts.bottom(&controller.store)?;
    }
    None
}

/// The other user of a store below a mirror, if there is one.
fn used_otherwise(
    store: &StoreSpec,
    users: &BTreeMap<&str, Vec<String>>,
    volumes: &BTreeMap<(&str, &str), Vec<&str>>,
) -> Option<String> {
    let name = &store.name;
    if let Some([one, other, ..]) = users.get(&**name).map(Vec::as_slice) {
        return Some(used_twice(name, one, other));
    }
    let of = store.kind.volume()?;
    let [one, other, ..] = volumes.get(&(&*of.controller, &*of.volume))?.as_slice() else {
        return None;
    };
    let quoted = |name: &str| format!("store \"{name}\"");
    Some(used_twice(&of.volume, &quoted(one), &quoted(other)))
}
