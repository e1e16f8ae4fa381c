//! Checks whether controllers and their functions fit together.

use std::collections::HashMap;

use sidecore_assembly::spec::{ControllerSpec, DeviceSpec, StoreKind};

use super::check::{by_name, chain, known, refers, store_of};
use super::draft::{Draft, Part, StoreDraft};
use super::problem::Collector;
use super::size;

/// Reports every contradiction of controllers.
pub(super) fn check(draft: &Draft, problems: &mut Collector<'_>) {
    let stores = by_name(&draft.stores);
    let owners = owners(draft, &stores, problems);
    functions(draft, problems);
    schedules(draft, problems);
    for device in &draft.devices {
        past_the_controller(device, &stores, &owners, problems);
    }
}

/// Returns the controller of each owned store, by the name of the store at the bottom.
fn owners<'a>(
    draft: &'a Draft,
    stores: &HashMap<&str, &'a Part<StoreDraft>>,
    problems: &mut Collector<'_>,
) -> HashMap<&'a str, &'a Part<ControllerSpec>> {
    let mut owners: HashMap<&str, &Part<ControllerSpec>> = HashMap::new();
    for controller in &draft.controllers {
        let Some((store, place)) = refers(&controller.head, "store", Some(&controller.spec.store))
        else {
            continue;
        };
        let subject = &controller.head.subject;
        known("store", (store, place.clone()), stores.keys().copied(), subject, problems);
        let chain = chain(stores, store);
        let Some(bottom) = chain.last().copied() else { continue };
        let Some(name) = bottom.head.name() else { continue };
        let unfit = match &bottom.spec.kind {
            _ if chain.iter().any(|store| store.spec.is_read_only()) => {
                Some("is behind a stage that refuses writes")
            }
            Some(StoreKind::Null { .. }) => Some("keeps nothing, and so no volumes either"),
            Some(StoreKind::Volume(_) | StoreKind::PhysicalFunction { .. }) => {
                Some("is itself a function of a controller")
            }
            Some(StoreKind::Remote(_)) => {
                Some("is a device of an IOhost, which can have the volumes")
            }
            Some(StoreKind::HostFile(_)) => Some("belongs to the host's filesystem"),
            Some(StoreKind::File(options)) if options.read_only => Some("is read-only"),
            Some(StoreKind::Ram { .. }) if controller.spec.format.is_none() => {
                let message =
                    format!("store \"{name}\" is blank at every start; add `format = \"blank\"`");
                problems.add(place.clone(), subject, message);
                None
            }
            _ => None,
        };
        if let Some(unfit) = unfit {
            let message = format!("store \"{name}\" {unfit}; choose a file or ram store");
            problems.add(place.clone(), subject, message);
        }
        if let Some(other) = owners.get(name) {
            let other = &other.head.subject;
            let message = format!(
                "store \"{name}\" belongs to {other} already; give each controller its own"
            );
            problems.add(place, subject, message);
            continue;
        }
        owners.insert(name, controller);
    }
    owners
}

/// Returns the controller that owns `store`, if there is one.
pub(super) fn owner<'a>(
    draft: &'a Draft,
    store: &Part<StoreDraft>,
) -> Option<&'a Part<ControllerSpec>> {
    let stores = by_name(&draft.stores);
    draft.controllers.iter().find(|controller| {
        let bottom = chain(&stores, &controller.spec.store).last().copied();
        bottom.is_some_and(|bottom| std::ptr::eq(bottom, store))
    })
}

/// Checks the stores that are functions: their controller exists and allows them.
fn functions(draft: &Draft, problems: &mut Collector<'_>) {
    let controllers: HashMap<&str, &Part<ControllerSpec>> = draft
        .controllers
        .iter()
        .filter_map(|controller| Some((controller.head.name()?, controller)))
        .collect();
    let mut volumes: HashMap<(&str, &str), &Part<StoreDraft>> = HashMap::new();
    for store in &draft.stores {
        let Some(kind) = &store.spec.kind else { continue };
        let Some((wanted, place)) = refers(&store.head, "controller", kind.controller()) else {
            continue;
        };
        let subject = &store.head.subject;
        known(
            "controller",
            (wanted, place.clone()),
            controllers.keys().copied(),
            subject,
            problems,
        );
        let controller = controllers.get(wanted);
        match kind {
            StoreKind::Volume(volume) => {
                if let Some(other) = volumes.insert((wanted, &volume.volume), store) {
                    let other = &other.head.subject;
                    let message = format!(
                        "this volume is that of {other} already; let several devices use one store"
                    );
                    problems.add(store.head.place("volume").unwrap_or(place), subject, message);
                }
                // A controller that this file does not format may have any granularity.
                let granularity = controller.and_then(|controller| controller.spec.format.as_ref());
                let block_bytes = granularity.map_or(512, |format| u64::from(format.block_bytes));
                if let (Some(size), Some(place)) = (volume.size_bytes, store.head.place("size"))
                    && size.checked_rem(block_bytes) != Some(0)
                {
                    let message = format!(
                        "a size of {} is not a multiple of the controller's block size of {}",
                        size::show(size),
                        size::show(block_bytes)
                    );
                    problems.add(place, subject, message);
                }
            }
            StoreKind::PhysicalFunction { .. } => {
                if let Some(controller) =
                    controller.filter(|controller| !controller.spec.physical_function)
                {
                    let message = format!(
                        "the physical function reaches every block of every volume; if that is \
                         meant, set `physical_function = true` in {}",
                        controller.head.subject
                    );
                    problems.add(place, subject, message);
                }
            }
            _ => {}
        }
    }
}

/// Reports schedules of missing controllers, and of none.
fn schedules(draft: &Draft, problems: &mut Collector<'_>) {
    let there = draft.controllers.iter().filter_map(|controller| controller.head.name());
    for Part { spec, head } in &draft.schedules {
        let controller = spec.as_ref().and_then(|spec| spec.controller.as_deref());
        if let Some(wanted) = refers(head, "controller", controller) {
            known("controller", wanted, there.clone(), &head.subject, problems);
        } else if draft.controllers.is_empty() && spec.is_some() {
            let message = "there is no [[controller]], whose volumes could have snapshots";
            problems.add(head.heading.clone(), &head.subject, message);
        }
    }
}

/// Reports a device on a controller's own store: its guest would destroy the volumes.
fn past_the_controller(
    device: &Part<DeviceSpec>,
    stores: &HashMap<&str, &Part<StoreDraft>>,
    owners: &HashMap<&str, &Part<ControllerSpec>>,
    problems: &mut Collector<'_>,
) {
    let Some((store, place)) = store_of(device) else { return };
    let bottom = chain(stores, store).last().and_then(|bottom| bottom.head.name());
    let Some((bottom, controller)) = bottom.and_then(|bottom| Some((bottom, owners.get(bottom)?)))
    else {
        return;
    };
    let message = format!(
        "store \"{bottom}\" belongs to {}; put a store of type = \"volume\" in between",
        controller.head.subject
    );
    problems.add(place, &device.head.subject, message);
}
