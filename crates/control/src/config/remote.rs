//! Checks whether links, clients, IOhosts, exported devices and remote stores fit together.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use sidecore_assembly::spec::{
    ClientSpec, FrontEndSpec, IohostSpec, LinkKind, LinkSpec, StoreKind,
};

use super::check::{by_name, chain, known, refers, store_of};
use super::draft::{Draft, Part};
use super::problem::Collector;

/// Reports every contradiction of remote devices.
pub(super) fn check(draft: &Draft, problems: &mut Collector<'_>) {
    let links: HashMap<&str, &Part<LinkSpec>> =
        draft.links.iter().filter_map(|link| Some((link.head.name()?, link))).collect();
    sidecores(draft, problems);
    media(draft, problems);
    for client in &draft.clients {
        client_links(client, &links, problems);
    }
    for iohost in &draft.iohosts {
        iohost_links(iohost, &links, problems);
    }
    serves(draft, problems);
    users(draft, problems);
    exports(draft, problems);
    stores(draft, problems);
    nics(draft, problems);
}

/// Reports names in a list that no section has, and names that are listed twice.
fn list<'a>(
    kind: &str,
    names: impl Iterator<Item = (&'a String, Range<usize>)>,
    there: impl Iterator<Item = &'a str> + Clone,
    subject: &str,
    problems: &mut Collector<'_>,
) {
    let mut seen = HashSet::new();
    for (name, place) in names {
        known(kind, (name, place.clone()), there.clone(), subject, problems);
        if !seen.insert(name) {
            problems.add(place, subject, format!("{kind} \"{name}\" is listed twice"));
        }
    }
}

/// Checks the sidecores that poll links.
fn sidecores(draft: &Draft, problems: &mut Collector<'_>) {
    let there = draft.sidecores.iter().filter_map(|sidecore| sidecore.head.name());
    for link in &draft.links {
        let places = link.head.places("sidecores").iter().cloned();
        let named = link.spec.sidecores.iter().zip(places);
        list("sidecore", named, there.clone(), &link.head.subject, problems);
    }
}

/// Checks that no two links have the same socket, port, or queue of an interface. Packet sockets
/// can share an interface.
fn media(draft: &Draft, problems: &mut Collector<'_>) {
    let mut seen: HashMap<String, &str> = HashMap::new();
    for link in &draft.links {
        let head = &link.head;
        let (key, medium) = match &link.spec.kind {
            LinkKind::Packet(_) => continue,
            LinkKind::Udp(udp) if udp.listen.port() == 0 => continue,
            LinkKind::Xdp(xdp) => ("interface", xdp.interface.clone()),
            LinkKind::Udp(udp) => ("listen", udp.listen.to_string()),
            LinkKind::Memory(memory) => ("socket", memory.socket.display().to_string()),
        };
        let place = match head.place(key) {
            Some(place) => place,
            None if key == "listen" => head.heading.clone(),
            None => continue,
        };
        if let Some(other) = seen.insert(medium.clone(), &head.subject) {
            let message = format!("{medium} is that of {other} already; give each link its own");
            problems.add(place, &head.subject, message);
        }
    }
    for device in &draft.devices {
        let Some(place) = device.head.place("socket") else { continue };
        if let Some(link) = seen.get(&device.spec.socket.display().to_string()) {
            let message = format!("this socket is that of {link}; give each its own");
            problems.add(place, &device.head.subject, message);
        }
    }
}

/// Checks the IOhosts and sidecores of patterns.
fn serves(draft: &Draft, problems: &mut Collector<'_>) {
    let iohosts = draft.iohosts.iter().filter_map(|iohost| iohost.head.name());
    let there = draft.sidecores.iter().filter_map(|sidecore| sidecore.head.name());
    for Part { head, spec } in &draft.serves {
        if let Some((iohost, place)) = refers(head, "iohost", Some(&spec.iohost)) {
            known("iohost", (iohost, place), iohosts.clone(), &head.subject, problems);
        }
        let places = head.places("sidecores").iter().cloned();
        let named = spec.device.sidecores.iter().zip(places.chain(head.place("sidecore")));
        list("sidecore", named, there.clone(), &head.subject, problems);
    }
}

fn client_links(
    client: &Part<ClientSpec>,
    links: &HashMap<&str, &Part<LinkSpec>>,
    problems: &mut Collector<'_>,
) {
    let places = client.head.places("links").iter().cloned();
    let named = client.spec.links.iter().zip(places);
    list("link", named, links.keys().copied(), &client.head.subject, problems);
}

/// Checks an IOhost's links, its addresses there, and its invitation.
fn iohost_links(
    iohost: &Part<IohostSpec>,
    links: &HashMap<&str, &Part<LinkSpec>>,
    problems: &mut Collector<'_>,
) {
    let Part { head, spec } = iohost;
    let first = iohost_link(iohost, ("link", &spec.link), links, problems);
    let address = ("address", spec.address.as_deref());
    let Some(first) = first else { return };
    iohost_address(iohost, first, address, problems);
    let complain = |key: &str, message: String, problems: &mut Collector<'_>| {
        let place = head.place(key).unwrap_or_else(|| head.heading.clone());
        problems.add(place, &head.subject, message);
    };
    if spec.encrypts(&first.kind) && spec.invitation.is_none() {
        let message = "`invitation` is missing: have the IOhost write one with `sidecore remote \
                       invite`, or set `encryption = \"off\"` if no other host is on the cable";
        complain("invitation", message.to_owned(), problems);
    }
    let Some((name, address)) = &spec.second else { return };
    let second = iohost_link(iohost, ("second_link", name), links, problems);
    let Some(second) = second else { return };
    iohost_address(iohost, second, ("second_address", address.as_deref()), problems);
    if second.sidecores != first.sidecores {
        let message = format!(
            "link \"{name}\" has other sidecores than link \"{}\", and a session is on both; give \
             them the same `sidecores`",
            first.name
        );
        complain("second_link", message, problems);
    }
    if spec.encryption.is_none() && first.kind.is_memory() != second.kind.is_memory() {
        let message = "`encryption` is missing: a `memory` link has none unless told so, and the \
                       other link has it; write `encryption = \"on\"` or `\"off\"` here, and in \
                       the [[client]] of both IOhosts";
        complain("second_link", message.to_owned(), problems);
    }
}

/// Finds a link of an IOhost.
fn iohost_link<'a>(
    Part { head, .. }: &Part<IohostSpec>,
    (key, name): (&str, &String),
    links: &HashMap<&str, &'a Part<LinkSpec>>,
    problems: &mut Collector<'_>,
) -> Option<&'a LinkSpec> {
    let (name, place) = refers(head, key, Some(name))?;
    known("link", (name, place), links.keys().copied(), &head.subject, problems);
    links.get(name).map(|link| &link.spec)
}

/// Checks an IOhost's address on a link.
fn iohost_address(
    Part { head, .. }: &Part<IohostSpec>,
    LinkSpec { kind, .. }: &LinkSpec,
    (key, address): (&str, Option<&str>),
    problems: &mut Collector<'_>,
) {
    let message = match (address, kind.is_memory()) {
        (Some(_), true) => Some(format!("a memory link leads to one IOhost; leave `{key}` out")),
        (None, false) => {
            let example =
                if kind.word() == "udp" { "192.0.2.1:34997" } else { "02:00:00:00:00:01" };
            Some(format!("`{key}` is missing; add for instance `{key} = \"{example}\"`"))
        }
        _ => kind.address(address).err(),
    };
    if let Some(message) = message {
        let place = head.place(key).unwrap_or_else(|| head.heading.clone());
        problems.add(place, &head.subject, message);
    }
}

/// Checks that each link leads to clients, or to one IOhost.
fn users(draft: &Draft, problems: &mut Collector<'_>) {
    let mut iohosts: HashMap<&str, &str> = HashMap::new();
    for Part { head, spec } in &draft.iohosts {
        for (key, link) in ["link", "second_link"].into_iter().zip(spec.links()) {
            let Some((link, place)) = refers(head, key, Some(link)) else { continue };
            if let Some(other) = iohosts.insert(link, &head.subject) {
                let message = format!(
                    "link \"{link}\" is that of {other} already; give each IOhost a [[link]], also \
                     to one interface"
                );
                problems.add(place, &head.subject, message);
            }
        }
    }
    for Part { head, spec } in &draft.clients {
        for (link, place) in spec.links.iter().zip(head.places("links")) {
            if let Some(iohost) = iohosts.get(link.as_str()) {
                let message = format!(
                    "link \"{link}\" leads to {iohost}; give clients a [[link]] of their own"
                );
                problems.add(place.clone(), &head.subject, message);
            }
        }
    }
}

/// Checks devices that are exported to clients.
fn exports(draft: &Draft, problems: &mut Collector<'_>) {
    let stores = by_name(&draft.stores);
    let clients = draft.clients.iter().filter_map(|client| client.head.name());
    for device in &draft.devices {
        let head = &device.head;
        let Some(first) = device.spec.front_end.client() else { continue };
        for client in device.spec.front_end.clients() {
            let key = if client == first { "client" } else { "migrates_to" };
            if let Some((client, place)) = refers(head, key, Some(client)) {
                known("client", (client, place), clients.clone(), &head.subject, problems);
            }
        }
        let Some((store, place)) = store_of(device) else { continue };
        let bottom = chain(&stores, store).last().copied();
        if bottom.is_some_and(|store| matches!(store.spec.kind, Some(StoreKind::Remote(_)))) {
            let message =
                "its store is itself a device of an IOhost; export that one at the IOhost";
            problems.add(place, &head.subject, message);
        }
    }
}

/// Checks the ports that are NICs of IOhosts.
fn nics(draft: &Draft, problems: &mut Collector<'_>) {
    let there = draft.iohosts.iter().filter_map(|iohost| iohost.head.name());
    let mut seen: HashMap<(&str, &str), &str> = HashMap::new();
    for Part { head, spec } in &draft.devices {
        let FrontEndSpec::RemoteNet(own) = &spec.front_end else { continue };
        let Some((iohost, place)) = refers(head, "iohost", Some(&own.iohost)) else { continue };
        known("iohost", (iohost, place.clone()), there.clone(), &head.subject, problems);
        let device = own.device.as_deref().unwrap_or(&spec.name);
        if let Some(other) = seen.insert((iohost, device), &head.subject) {
            let message = format!(
                "NIC \"{device}\" of this IOhost is that of {other} already; give each its own"
            );
            problems.add(head.place("device").unwrap_or(place), &head.subject, message);
        }
    }
}

/// Checks the stores that are devices of IOhosts.
fn stores(draft: &Draft, problems: &mut Collector<'_>) {
    let there = draft.iohosts.iter().filter_map(|iohost| iohost.head.name());
    let mut seen: HashMap<(&str, &str), &str> = HashMap::new();
    for store in &draft.stores {
        let (Some(StoreKind::Remote(remote)), Some(name)) = (&store.spec.kind, store.head.name())
        else {
            continue;
        };
        let subject = &store.head.subject;
        let Some((iohost, place)) = refers(&store.head, "iohost", Some(&remote.iohost)) else {
            continue;
        };
        known("iohost", (iohost, place.clone()), there.clone(), subject, problems);
        let device = remote.device.as_deref().unwrap_or(name);
        if let Some(other) = seen.insert((iohost, device), subject) {
            let message = format!(
                "device \"{device}\" of this IOhost is that of {other} already; let several \
                 devices use one store"
            );
            problems.add(store.head.place("device").unwrap_or(place), subject, message);
        }
    }
}
