//! Checks whether the sections of the file fit together, without looking at the machine.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use sidecore_assembly::spec::{DeviceSpec, QUEUE_PAIRS_MAX, StoreKind};

use super::draft::{Draft, Part, StoreDraft};
use super::functions;
use super::mirrors;
use super::nearest;
use super::problem::Collector;
use super::remote;
use super::section::Head;

/// More stores in front of each other are an accident.
const DEEP_MAX: usize = 32;

/// Reports every contradiction between sections.
pub(super) fn check(draft: &Draft, problems: &mut Collector<'_>) {
    unique_names("sidecore", draft.sidecores.iter().map(|sidecore| &sidecore.head), problems);
    unique_names("store", draft.stores.iter().map(|store| &store.head), problems);
    unique_names(
        "controller",
        draft.controllers.iter().map(|controller| &controller.head),
        problems,
    );
    unique_names("schedule", draft.schedules.iter().map(|schedule| &schedule.head), problems);
    unique_names("link", draft.links.iter().map(|link| &link.head), problems);
    unique_names("client", draft.clients.iter().map(|client| &client.head), problems);
    unique_names("serve", draft.serves.iter().map(|serve| &serve.head), problems);
    unique_names("iohost", draft.iohosts.iter().map(|iohost| &iohost.head), problems);
    unique_names("switch", draft.switches.iter().map(|switch| &switch.head), problems);
    unique_names("device", draft.devices.iter().map(|device| &device.head), problems);
    sidecores(draft, problems);
    stores(draft, problems);
    devices(draft, problems);
    switches(draft, problems);
    sockets(draft, problems);
    writers(draft, problems);
    mirrors::check(draft, problems);
    functions::check(draft, problems);
    remote::check(draft, problems);
}

fn unique_names<'a>(
    kind: &str,
    heads: impl Iterator<Item = &'a Head>,
    problems: &mut Collector<'_>,
) {
    let mut seen = HashSet::new();
    for head in heads {
        if let (Some(name), Some(place)) = (head.name(), head.place("name"))
            && !seen.insert(name)
        {
            let message = format!("there is another [[{kind}]] of this name; rename one of them");
            problems.add(place, &head.subject, message);
        }
    }
}

fn sidecores(draft: &Draft, problems: &mut Collector<'_>) {
    let device = draft.devices.first().map(|device| &device.head);
    let served = device.or_else(|| Some(&draft.links.first()?.head));
    let served = served.or_else(|| Some(&draft.switches.first()?.head));
    if let (Some(head), true) = (served, draft.sidecores.is_empty()) {
        let message = "nothing serves it; add a section [[sidecore]] with `name = \"sc0\"`";
        problems.add(head.heading.clone(), &head.subject, message);
    }
    let mut pinned = HashMap::new();
    for sidecore in &draft.sidecores {
        let (Some(cpu), Some(place)) = (sidecore.spec.spec.cpu, sidecore.head.place("cpu")) else {
            continue;
        };
        if let Some(other) = pinned.insert(cpu, &sidecore.head.subject) {
            let message = format!("CPU {} is taken by {other}; give each sidecore its own", cpu.0);
            problems.add(place, &sidecore.head.subject, message);
        }
    }
}

fn stores(draft: &Draft, problems: &mut Collector<'_>) {
    let by_name = by_name(&draft.stores);
    for store in &draft.stores {
        let Some(inner) = refers(&store.head, "store", store.spec.inner()) else { continue };
        known("store", inner.clone(), by_name.keys().copied(), &store.head.subject, problems);
        let below = chain(&by_name, inner.0);
        // Each store of the cycle gets a message, because any of them may be the wrong one.
        if below.iter().any(|below| below.head.name() == store.head.name()) {
            let names: Vec<_> = below.iter().filter_map(|below| below.head.name()).collect();
            let message = format!(
                "it is put in front of itself (through {}); end the chain in a null, ram, file, \
                 volume or remote store",
                names.join(", ")
            );
            problems.add(inner.1, &store.head.subject, message);
        } else if below.len() > DEEP_MAX {
            let message = format!(
                "it is put in front of more than {DEEP_MAX} stores; give one store several stages"
            );
            problems.add(inner.1, &store.head.subject, message);
        }
    }
}

fn devices(draft: &Draft, problems: &mut Collector<'_>) {
    let stores = by_name(&draft.stores);
    let sidecores = || draft.sidecores.iter().filter_map(|sidecore| sidecore.head.name());
    for device in &draft.devices {
        let subject = &device.head.subject;
        if let Some(store) = store_of(device) {
            known("store", store, stores.keys().copied(), subject, problems);
        }
        let mut seen = HashSet::new();
        let one = device.head.place("sidecore");
        let places = device.head.places("sidecores").iter().cloned();
        // A list goes before the key for one.
        let places = places.chain(one.filter(|_| device.head.place("sidecores").is_none()));
        for (sidecore, place) in device.spec.sidecores.iter().zip(places) {
            known("sidecore", (sidecore, place.clone()), sidecores(), subject, problems);
            if !seen.insert(sidecore) {
                let message = format!(
                    "sidecore \"{sidecore}\" is listed twice; its queues go round the list anyway"
                );
                problems.add(place, subject, message);
            }
        }
    }
}

/// Checks the sidecores of switches, and the switches, addresses and interfaces of their ports.
fn switches(draft: &Draft, problems: &mut Collector<'_>) {
    let sidecores = draft.sidecores.iter().filter_map(|sidecore| sidecore.head.name());
    for Part { spec, head } in &draft.switches {
        if let Some(sidecore) = refers(head, "sidecore", Some(&spec.sidecore)) {
            known("sidecore", sidecore, sidecores.clone(), &head.subject, problems);
        }
    }
    let there = draft.switches.iter().filter_map(|switch| switch.head.name());
    let (mut macs, mut interfaces) = (HashMap::new(), HashMap::new());
    for Part { spec, head } in &draft.devices {
        if let Some(switch) = refers(head, "switch", spec.front_end.switch()) {
            known("switch", switch, there.clone(), &head.subject, problems);
        }
        if let Some((interface, place)) = refers(head, "interface", spec.front_end.interface())
            && let Some(other) = interfaces.insert(interface, &head.subject)
        {
            let message = format!("this interface is that of {other}; give each its own");
            problems.add(place, &head.subject, message);
        }
        let Some(mac) = spec.front_end.mac() else { continue };
        if spec.queues > QUEUE_PAIRS_MAX
            && let Some(place) = head.place("queues")
        {
            let message = format!("a NIC has at most {QUEUE_PAIRS_MAX} pairs of queues");
            problems.add(place, &head.subject, message);
        }
        let Some(place) = head.place("mac") else { continue };
        if let Some(other) = macs.insert((spec.front_end.switch(), mac), &head.subject) {
            let message = format!("this address is that of {other}; give each its own");
            problems.add(place, &head.subject, message);
        }
    }
}

fn sockets(draft: &Draft, problems: &mut Collector<'_>) {
    let mut seen: HashMap<&Path, &str> =
        HashMap::from([(draft.control_socket.as_path(), "the control API")]);
    let mut numbers: HashMap<u32, &str> = HashMap::new();
    for Part { spec, head } in &draft.devices {
        let (Some(number), Some(place)) = (spec.front_end.number(), head.place("number")) else {
            continue;
        };
        if let Some(other) = numbers.insert(number, &head.subject) {
            let message = format!("this number is that of {other}; give each its own");
            problems.add(place, &head.subject, message);
        }
    }
    for device in &draft.devices {
        let Some(place) = device.head.place("socket") else { continue };
        if let Some(other) = seen.insert(&device.spec.socket, &device.head.subject) {
            let message = format!("this socket is that of {other}; give each its own");
            problems.add(place, &device.head.subject, message);
        }
    }
}

/// The name of another section in the value of a key, if the key obeys its rules.
pub(super) fn refers<'a>(
    head: &Head,
    key: &str,
    name: Option<&'a str>,
) -> Option<(&'a str, Range<usize>)> {
    Some((name?, head.place(key)?))
}

/// The store that a device leads to.
pub(super) fn store_of(device: &Part<DeviceSpec>) -> Option<(&str, Range<usize>)> {
    refers(&device.head, "store", Some(&device.spec.store))
}

/// Whether a guest of this device can write to the store at the end of this chain.
fn writes(device: &Part<DeviceSpec>, chain: &[&Part<StoreDraft>]) -> bool {
    !device.spec.read_only && !chain.iter().any(|store| store.spec.is_read_only())
}

/// The contents at the bottom of a store, which belong to one guest that writes.
struct Contents<'a> {
    /// The controller of a volume, and its name; or nothing, and the name of a store.
    key: (&'a str, &'a str),
    text: String,
    /// A remedy besides `read_only`.
    remedy: &'static str,
}

impl<'a> Contents<'a> {
    /// `None` if guests cannot write to the store, or may share it: null and ram stores, as benches
    /// do. Their data is lost in any case when the daemon ends.
    fn of(bottom: &'a Part<StoreDraft>) -> Option<Self> {
        let name = bottom.head.name()?;
        let is_read_only = match bottom.spec.kind.as_ref()? {
            StoreKind::File(options) => options.read_only,
            StoreKind::HostFile(options) => options.read_only,
            StoreKind::Volume(volume) => volume.read_only,
            StoreKind::Remote(_) | StoreKind::Mirror(_) => false,
            _ => return None,
        };
        if is_read_only {
            return None;
        }
        let store = |what: &str| Self {
            key: ("", name),
            text: format!("the {what} of store \"{name}\""),
            remedy: "",
        };
        Some(match bottom.spec.kind.as_ref()? {
            StoreKind::Remote(_) => store("remote device"),
            StoreKind::Mirror(_) => store("mirror"),
            StoreKind::Volume(of) => Self {
                key: (&of.controller, &of.volume),
                text: format!("volume \"{}\"", of.volume),
                remedy: ", or clone the volume",
            },
            _ => store("file"),
        })
    }
}

/// Reports contents with two writers. Guests do not expect that their cached blocks change, and two
/// writers destroy a filesystem.
fn writers(draft: &Draft, problems: &mut Collector<'_>) {
    let by_name = by_name(&draft.stores);
    let mut writers: HashMap<(&str, &str), &str> = HashMap::new();
    for device in &draft.devices {
        let Some((store, place)) = store_of(device) else { continue };
        let chain = chain(&by_name, store);
        let bottom = chain.last().filter(|_| writes(device, &chain));
        let Some(Contents { key, text, remedy }) = bottom.and_then(|bottom| Contents::of(bottom))
        else {
            continue;
        };
        if let Some(other) = writers.insert(key, &device.head.subject) {
            let message = format!(
                "{other} writes to {text} too, which would destroy it; set `read_only = true` on \
                 all of them but one{remedy}"
            );
            problems.add(place, &device.head.subject, message);
        }
    }
}

/// Reports a name that no section has.
pub(super) fn known<'a>(
    kind: &str,
    (wanted, place): (&str, Range<usize>),
    names: impl Iterator<Item = &'a str> + Clone,
    subject: &str,
    problems: &mut Collector<'_>,
) {
    // To look for similar names takes long where there are many.
    if problems.is_full() || names.clone().any(|name| name == wanted) {
        return;
    }
    let remedy = match nearest(wanted, names) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("add a section [[{kind}]] of that name"),
    };
    problems.add(place, subject, format!("there is no {kind} \"{wanted}\"; {remedy}"));
}

pub(super) fn by_name(stores: &[Part<StoreDraft>]) -> HashMap<&str, &Part<StoreDraft>> {
    stores.iter().filter_map(|store| Some((store.head.name()?, store))).collect()
}

/// The store of this name and those that it is put in front of, from the top down; ends where a
/// cycle closes, and where there are too many.
pub(super) fn chain<'a>(
    by_name: &HashMap<&str, &'a Part<StoreDraft>>,
    top: &str,
) -> Vec<&'a Part<StoreDraft>> {
    let mut chain: Vec<&Part<StoreDraft>> = Vec::new();
    let mut next = by_name.get(top).copied();
    while let Some(store) = next {
        if chain.len() > DEEP_MAX || chain.iter().any(|above| std::ptr::eq(*above, store)) {
            break;
        }
        chain.push(store);
        next = store.spec.inner().and_then(|inner| by_name.get(inner).copied());
    }
    chain
}
