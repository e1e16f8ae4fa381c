//! Whether controllers and their functions fit together.

use std::collections::HashMap;

use sidecore_assembly::spec::StageSpec;
use toml::Spanned;

use super::check::{by_name, chain, known, writes};
use super::controller::ControllerDraft;
use super::draft::{DeviceDraft, Draft, FileMap, KindDraft, StoreDraft};
use super::problem::Collector;
use super::size;

/// Reports everything about controllers that does not fit.
pub(super) fn check(draft: &Draft, problems: &mut Collector<'_>) {
    let stores = by_name(&draft.stores);
    let owners = owners(draft, &stores, problems);
    functions(draft, problems);
    for device in &draft.devices {
        past_the_controller(device, &stores, &owners, problems);
    }
    volume_writers(draft, &stores, problems);
}

/// The controller of each store that a controller owns, by the name of the store at the bottom.
fn owners<'a>(
    draft: &'a Draft,
    stores: &HashMap<&str, &'a StoreDraft>,
    problems: &mut Collector<'_>,
) -> HashMap<&'a str, &'a ControllerDraft> {
    let mut owners: HashMap<&str, &ControllerDraft> = HashMap::new();
    for controller in &draft.controllers {
        let Some(store) = &controller.store else { continue };
        let subject = &controller.head.subject;
        known("store", store, stores.keys().copied(), subject, problems);
        let chain = chain(stores, store.get_ref());
        let Some(bottom) = chain.last().copied() else { continue };
        let Some(name) = bottom.head.name() else { continue };
        let unfit = match &bottom.kind {
            _ if chain.iter().any(|store| store.stages.iter().any(StageSpec::is_read_only)) => {
                Some("is behind a stage that refuses writes")
            }
            Some(KindDraft::Null { .. }) => Some("keeps nothing, and so no volumes either"),
            Some(KindDraft::Volume(_) | KindDraft::PhysicalFunction { .. }) => {
                Some("is itself a function of a controller")
            }
            Some(KindDraft::File(_, FileMap::HostFile)) => Some("belongs to the host's filesystem"),
            Some(KindDraft::File(options, _)) if options.get_ref().read_only => Some("is read-only"),
            Some(KindDraft::Ram { .. }) if controller.format.is_none() => {
                let message = format!("store \"{name}\" is blank at every start; add `format = \"blank\"`");
                problems.add(store.span(), subject, message);
                None
            }
            _ => None,
        };
        if let Some(unfit) = unfit {
            let message = format!("store \"{name}\" {unfit}; choose a file or ram store");
            problems.add(store.span(), subject, message);
        }
        if let Some(other) = owners.get(name) {
            let other = &other.head.subject;
            let message = format!("store \"{name}\" belongs to {other} already; give each controller its own");
            problems.add(store.span(), subject, message);
            continue;
        }
        owners.insert(name, controller);
    }
    owners
}

/// The controller that owns a store, if one does.
pub(super) fn owner<'a>(draft: &'a Draft, store: &StoreDraft) -> Option<&'a ControllerDraft> {
    let stores = by_name(&draft.stores);
    draft.controllers.iter().find(|controller| {
        let bottom = controller.store.as_ref().and_then(|name| chain(&stores, name.get_ref()).last().copied());
        bottom.is_some_and(|bottom| std::ptr::eq(bottom, store))
    })
}

/// The stores that are functions: of a controller that there is, and that allows them.
fn functions(draft: &Draft, problems: &mut Collector<'_>) {
    let controllers: HashMap<&str, &ControllerDraft> =
        draft.controllers.iter().filter_map(|controller| Some((controller.head.name()?, controller))).collect();
    let mut volumes: HashMap<(&str, &str), &StoreDraft> = HashMap::new();
    for store in &draft.stores {
        let Some((kind, wanted)) = store.kind.as_ref().and_then(|kind| Some((kind, kind.controller()?))) else {
            continue;
        };
        let subject = &store.head.subject;
        known("controller", wanted, controllers.keys().copied(), subject, problems);
        let controller = controllers.get(wanted.get_ref().as_str());
        match kind {
            KindDraft::Volume(volume) => {
                let key = (wanted.get_ref().as_str(), volume.volume.get_ref().as_str());
                if let Some(other) = volumes.insert(key, store) {
                    let other = &other.head.subject;
                    let message = format!("this volume is that of {other} already; let several devices use one store");
                    problems.add(volume.volume.span(), subject, message);
                }
                // A controller that is never formatted here has the granularity that it has.
                let granularity = controller.and_then(|controller| controller.format.as_ref());
                let block_bytes = granularity.map_or(512, |format| u64::from(format.block_bytes));
                if let Some(size) = &volume.size
                    && size.get_ref().checked_rem(block_bytes) != Some(0)
                {
                    let message = format!(
                        "a size of {} is not a multiple of the controller's block size of {}",
                        size::show(*size.get_ref()),
                        size::show(block_bytes)
                    );
                    problems.add(size.span(), subject, message);
                }
            }
            KindDraft::PhysicalFunction { .. } => {
                if let Some(controller) = controller.filter(|controller| !controller.physical_function) {
                    let message = format!(
                        "the physical function reaches every block of every volume; if that is meant, set \
                         `physical_function = true` in {}",
                        controller.head.subject
                    );
                    problems.add(wanted.span(), subject, message);
                }
            }
            _ => {}
        }
    }
}

/// Reports a device that goes to a controller's store directly: its guest would destroy the volumes.
fn past_the_controller(
    device: &DeviceDraft,
    stores: &HashMap<&str, &StoreDraft>,
    owners: &HashMap<&str, &ControllerDraft>,
    problems: &mut Collector<'_>,
) {
    let Some(store) = &device.store else { return };
    let bottom = chain(stores, store.get_ref()).last().and_then(|bottom| bottom.head.name());
    let Some((bottom, controller)) = bottom.and_then(|bottom| Some((bottom, owners.get(bottom)?))) else { return };
    let message = format!(
        "store \"{bottom}\" belongs to {}; put a store of type = \"volume\" in between",
        controller.head.subject
    );
    problems.add(store.span(), &device.head.subject, message);
}

/// A volume belongs to one guest that writes, as a file does.
fn volume_writers(draft: &Draft, stores: &HashMap<&str, &StoreDraft>, problems: &mut Collector<'_>) {
    let mut writers: HashMap<(&str, &str), &str> = HashMap::new();
    for device in &draft.devices {
        let Some(store) = &device.store else { continue };
        let chain = chain(stores, store.get_ref());
        let bottom = chain.last().filter(|_| writes(device, &chain)).and_then(|bottom| bottom.kind.as_ref());
        let Some(KindDraft::Volume(volume)) = bottom else { continue };
        if volume.read_only {
            continue;
        }
        let key = (volume.controller.get_ref().as_str(), volume.volume.get_ref().as_str());
        if let Some(other) = writers.insert(key, &device.head.subject) {
            let message = format!(
                "{other} writes to volume \"{}\" too, which would destroy it; set `read_only = true` on all of them but \
                 one, or clone the volume",
                key.1
            );
            problems.add(Spanned::span(store), &device.head.subject, message);
        }
    }
}
