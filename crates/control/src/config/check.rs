//! Whether the sections of the file fit together; what needs no look at the machine.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use sidecore_assembly::spec::StageSpec;
use toml::Spanned;

use super::draft::{DEFAULT_CONTROL_SOCKET, DeviceDraft, Draft, Head, KindDraft, StoreDraft};
use super::functions;
use super::nearest;
use super::problem::Collector;
use super::rules;

/// Reports everything that does not fit.
pub(super) fn check(draft: &Draft, problems: &mut Collector<'_>) {
    unique_names("sidecore", draft.sidecores.iter().map(|sidecore| &sidecore.head), problems);
    unique_names("store", draft.stores.iter().map(|store| &store.head), problems);
    unique_names("controller", draft.controllers.iter().map(|controller| &controller.head), problems);
    unique_names("device", draft.devices.iter().map(|device| &device.head), problems);
    sidecores(draft, problems);
    stores(draft, problems);
    devices(draft, problems);
    sockets(draft, problems);
    writers(draft, problems);
    functions::check(draft, problems);
}

fn unique_names<'a>(kind: &str, heads: impl Iterator<Item = &'a Head>, problems: &mut Collector<'_>) {
    let mut seen = HashSet::new();
    for head in heads {
        if let Some(name) = &head.name
            && !seen.insert(name.get_ref())
        {
            let message = format!("there is another [[{kind}]] of this name; rename one of them");
            problems.add(name.span(), &head.subject, message);
        }
    }
}

fn sidecores(draft: &Draft, problems: &mut Collector<'_>) {
    if let (Some(device), true) = (draft.devices.first(), draft.sidecores.is_empty()) {
        let message = "nothing serves it; add a section [[sidecore]] with `name = \"sc0\"`";
        problems.add(device.head.heading.clone(), &device.head.subject, message);
    }
    let mut pinned = HashMap::new();
    for sidecore in &draft.sidecores {
        let Some(cpu) = &sidecore.cpu else { continue };
        if let Some(other) = pinned.insert(*cpu.get_ref(), &sidecore.head.subject) {
            let message = format!("CPU {} is taken by {other}; give each sidecore its own", cpu.get_ref());
            problems.add(cpu.span(), &sidecore.head.subject, message);
        }
    }
}

fn stores(draft: &Draft, problems: &mut Collector<'_>) {
    let by_name = by_name(&draft.stores);
    for store in &draft.stores {
        let Some(inner) = store.kind.as_ref().and_then(KindDraft::inner) else { continue };
        known("store", inner, by_name.keys().copied(), &store.head.subject, problems);
        let own = store.head.name.as_ref().map(Spanned::get_ref);
        let below = chain(&by_name, inner.get_ref());
        // Each store of a cycle is told: any of them may be the one that is wrong.
        if below.iter().any(|below| below.head.name.as_ref().map(Spanned::get_ref) == own) {
            let names: Vec<_> =
                below.iter().filter_map(|below| Some(below.head.name.as_ref()?.get_ref().as_str())).collect();
            let message = format!(
                "it is put in front of itself (through {}); end the chain in a null, ram, file or volume store",
                names.join(", ")
            );
            problems.add(inner.span(), &store.head.subject, message);
        }
    }
}

fn devices(draft: &Draft, problems: &mut Collector<'_>) {
    let stores = by_name(&draft.stores);
    let sidecores = || draft.sidecores.iter().filter_map(|sidecore| sidecore.head.name());
    for device in &draft.devices {
        let subject = &device.head.subject;
        if let Some(store) = &device.store {
            known("store", store, stores.keys().copied(), subject, problems);
        }
        let mut seen = HashSet::new();
        for sidecore in &device.sidecores {
            known("sidecore", sidecore, sidecores(), subject, problems);
            if !seen.insert(sidecore.get_ref()) {
                let message =
                    format!("sidecore \"{}\" is listed twice; its queues go round the list anyway", sidecore.get_ref());
                problems.add(sidecore.span(), subject, message);
            }
        }
    }
}

fn sockets(draft: &Draft, problems: &mut Collector<'_>) {
    let mut seen: HashMap<&Path, &str> = HashMap::new();
    let control = draft.control_socket.as_ref().map(|socket| (socket, "control_socket"));
    match control {
        Some((socket, _)) => drop(seen.insert(socket.get_ref(), "the control API")),
        None => drop(seen.insert(Path::new(DEFAULT_CONTROL_SOCKET), "the control API")),
    }
    if let Some((socket, subject)) = control {
        short_enough(socket, subject, problems);
    }
    for device in &draft.devices {
        let Some(socket) = &device.socket else { continue };
        short_enough(socket, &device.head.subject, problems);
        if let Some(other) = seen.insert(socket.get_ref(), &device.head.subject) {
            let message = format!("this socket is that of {other}; give each its own");
            problems.add(socket.span(), &device.head.subject, message);
        }
    }
}

fn short_enough(socket: &Spanned<PathBuf>, subject: &str, problems: &mut Collector<'_>) {
    if let Err(message) = rules::short_enough(socket.get_ref()) {
        problems.add(socket.span(), subject, message);
    }
}

/// Whether a guest of this device can write to the store at the end of this chain.
pub(super) fn writes(device: &DeviceDraft, chain: &[&StoreDraft]) -> bool {
    let is_read_only = |store: &&StoreDraft| store.stages.iter().any(StageSpec::is_read_only);
    !device.spec.read_only && !chain.iter().any(is_read_only)
}

/// A file belongs to one guest that writes. Guests do not expect that what they cached changes underneath them, and a
/// filesystem that two of them write is lost. In memory nothing is lost that the daemon's end would not lose as well,
/// so null and ram stores may be shared: benches do.
fn writers(draft: &Draft, problems: &mut Collector<'_>) {
    let by_name = by_name(&draft.stores);
    let mut writers: HashMap<&str, &str> = HashMap::new();
    for device in &draft.devices {
        let Some(store) = &device.store else { continue };
        let chain = chain(&by_name, store.get_ref());
        let bottom = chain.last().copied().filter(|_| writes(device, &chain));
        let Some((bottom, Some(KindDraft::File(options, _)))) = bottom.map(|store| (store, &store.kind)) else {
            continue;
        };
        if options.get_ref().read_only {
            continue;
        }
        let Some(file) = bottom.head.name() else { continue };
        if let Some(other) = writers.insert(file, &device.head.subject) {
            let message = format!(
                "{other} writes to the file of store \"{file}\" too, which would destroy it; set `read_only = true` on all of them but one"
            );
            problems.add(store.span(), &device.head.subject, message);
        }
    }
}

/// Reports a name that leads nowhere.
pub(super) fn known<'a>(
    kind: &str,
    wanted: &Spanned<String>,
    names: impl Iterator<Item = &'a str> + Clone,
    subject: &str,
    problems: &mut Collector<'_>,
) {
    if names.clone().any(|name| name == wanted.get_ref()) {
        return;
    }
    let remedy = match nearest(wanted.get_ref(), names) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("add a section [[{kind}]] of that name"),
    };
    problems.add(wanted.span(), subject, format!("there is no {kind} \"{}\"; {remedy}", wanted.get_ref()));
}

pub(super) fn by_name(stores: &[StoreDraft]) -> HashMap<&str, &StoreDraft> {
    stores.iter().filter_map(|store| Some((store.head.name()?, store))).collect()
}

/// The store of this name and those that it is put in front of, from the top down; ends where a cycle closes.
pub(super) fn chain<'a>(by_name: &HashMap<&str, &'a StoreDraft>, top: &str) -> Vec<&'a StoreDraft> {
    let mut chain: Vec<&StoreDraft> = Vec::new();
    let mut next = by_name.get(top).copied();
    while let Some(store) = next {
        if chain.iter().any(|above| std::ptr::eq(*above, store)) {
            break;
        }
        chain.push(store);
        next = store
            .kind
            .as_ref()
            .and_then(KindDraft::inner)
            .and_then(|inner| by_name.get(inner.get_ref().as_str()).copied());
    }
    chain
}
