//! Whether the sections of the file fit together; what needs no look at the machine.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use sidecore_assembly::spec::{
    CoreId, DeviceSpec, IdleMode, Nanos, SidecoreSpec, Spec, StoreKind, StoreSpec,
};
use toml::Spanned;

use super::draft::{DEFAULT_CONTROL_SOCKET, DeviceDraft, Draft, Head, KindDraft, StoreDraft};
use super::problem::Collector;
use super::{Config, nearest};

/// How long adaptive devices spin when nothing says otherwise.
pub const DEFAULT_SPIN_US: u64 = 50;

/// A socket's address holds this many bytes of path, and a zero byte (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Reports everything that does not fit.
pub(super) fn check(draft: &Draft, problems: &mut Collector<'_>) {
    unique_names("sidecore", draft.sidecores.iter().map(|sidecore| &sidecore.head), problems);
    unique_names("store", draft.stores.iter().map(|store| &store.head), problems);
    unique_names("device", draft.devices.iter().map(|device| &device.head), problems);
    sidecores(draft, problems);
    stores(draft, problems);
    devices(draft, problems);
    sockets(draft, problems);
    writers(draft, problems);
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
            let names: Vec<_> = below.iter().filter_map(|below| Some(below.head.name.as_ref()?.get_ref().as_str())).collect();
            let message = format!("it is put in front of itself (through {}); end the chain in a null, ram or file store", names.join(", "));
            problems.add(inner.span(), &store.head.subject, message);
        }
    }
}

fn devices(draft: &Draft, problems: &mut Collector<'_>) {
    let stores = by_name(&draft.stores);
    let sidecores = || draft.sidecores.iter().filter_map(|sidecore| name(&sidecore.head));
    for device in &draft.devices {
        let subject = &device.head.subject;
        if let Some(store) = &device.store {
            known("store", store, stores.keys().copied(), subject, problems);
        }
        let mut seen = HashSet::new();
        for sidecore in &device.sidecores {
            known("sidecore", sidecore, sidecores(), subject, problems);
            if !seen.insert(sidecore.get_ref()) {
                let message = format!("sidecore \"{}\" is listed twice; its queues go round the list anyway", sidecore.get_ref());
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
    let bytes = socket.get_ref().as_os_str().len();
    if bytes > SOCKET_PATH_MAX {
        let message = format!("a socket's path holds {SOCKET_PATH_MAX} bytes and this one has {bytes}; use a shorter directory");
        problems.add(socket.span(), subject, message);
    }
}

/// A file belongs to one guest that writes. Guests do not expect that what they cached changes underneath them, and a
/// filesystem that two of them write is lost. In memory nothing is lost that the daemon's end would not lose as well,
/// so null and ram stores may be shared: benches do.
fn writers(draft: &Draft, problems: &mut Collector<'_>) {
    let by_name = by_name(&draft.stores);
    let mut writers: HashMap<&str, &str> = HashMap::new();
    for device in draft.devices.iter().filter(|device| !device.read_only) {
        let Some(store) = &device.store else { continue };
        let bottom = chain(&by_name, store.get_ref()).last().copied();
        let Some((bottom, Some(KindDraft::File(options)))) = bottom.map(|store| (store, &store.kind)) else { continue };
        if options.get_ref().read_only {
            continue;
        }
        let Some(file) = name(&bottom.head) else { continue };
        if let Some(other) = writers.insert(file, &device.head.subject) {
            let message = format!("{other} writes to the file of store \"{file}\" too, which would destroy it; set `read_only = true` on all of them but one");
            problems.add(store.span(), &device.head.subject, message);
        }
    }
}

/// Reports a name that leads nowhere.
fn known<'a>(
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

fn name(head: &Head) -> Option<&str> {
    head.name.as_ref().map(|name| name.get_ref().as_str())
}

fn by_name(stores: &[StoreDraft]) -> HashMap<&str, &StoreDraft> {
    stores.iter().filter_map(|store| Some((name(&store.head)?, store))).collect()
}

/// The store of this name and those that it is put in front of, from the top down; ends where a cycle closes.
fn chain<'a>(by_name: &HashMap<&str, &'a StoreDraft>, top: &str) -> Vec<&'a StoreDraft> {
    let mut chain: Vec<&StoreDraft> = Vec::new();
    let mut next = by_name.get(top).copied();
    while let Some(store) = next {
        if chain.iter().any(|above| std::ptr::eq(*above, store)) {
            break;
        }
        chain.push(store);
        next = store.kind.as_ref().and_then(KindDraft::inner).and_then(|inner| by_name.get(inner.get_ref().as_str()).copied());
    }
    chain
}

/// The configuration that a faultless draft means.
pub(super) fn settle(draft: Draft) -> Config {
    let control_socket = draft.control_socket.map_or_else(|| DEFAULT_CONTROL_SOCKET.into(), Spanned::into_inner);
    let mut load = Load::new(&draft.devices, draft.sidecores.iter().filter_map(|sidecore| name(&sidecore.head)));
    let spin_us: HashMap<String, u64> = draft
        .sidecores
        .iter()
        .filter_map(|sidecore| Some((name(&sidecore.head)?.to_owned(), sidecore.spin_us.unwrap_or(DEFAULT_SPIN_US))))
        .collect();
    let devices = draft.devices.into_iter().filter_map(|device| settle_device(device, &mut load, &spin_us)).collect();
    let sidecores = draft.sidecores.into_iter().filter_map(|sidecore| {
        let cpu = sidecore.cpu.map(|cpu| CoreId(cpu.into_inner()));
        Some(SidecoreSpec { name: sidecore.head.name?.into_inner(), cpu })
    });
    let stores = draft.stores.into_iter().filter_map(settle_store);
    Config { control_socket, spec: Spec { sidecores: sidecores.collect(), stores: stores.collect(), devices } }
}

fn settle_store(store: StoreDraft) -> Option<StoreSpec> {
    let kind = match store.kind? {
        KindDraft::Null { size_bytes, block_bytes } => StoreKind::Null { size_bytes, block_bytes },
        KindDraft::Ram { size_bytes, block_bytes } => {
            StoreKind::Ram { size_bytes: size_bytes.into_inner(), block_bytes }
        }
        KindDraft::File(options) => StoreKind::File(options.into_inner()),
        KindDraft::Delay { store, delay_us } => {
            StoreKind::Delay { store: store.into_inner(), delay: Nanos::from_micros(delay_us) }
        }
        KindDraft::Fault { store, plan } => StoreKind::Fault { store: store.into_inner(), plan },
    };
    Some(StoreSpec { name: store.head.name?.into_inner(), kind })
}

fn settle_device(device: DeviceDraft, load: &mut Load, spin_us: &HashMap<String, u64>) -> Option<DeviceSpec> {
    let mut sidecores: Vec<String> = device.sidecores.into_iter().map(Spanned::into_inner).collect();
    if sidecores.is_empty() {
        sidecores.push(load.least(device.queues)?);
    }
    let idle = match device.idle {
        "poll" => IdleMode::Poll,
        "interrupt" => IdleMode::Interrupt,
        _ => {
            let usual = sidecores.iter().filter_map(|sidecore| spin_us.get(sidecore)).max().copied();
            IdleMode::Adaptive { spin: Nanos::from_micros(device.spin_us.or(usual).unwrap_or(DEFAULT_SPIN_US)) }
        }
    };
    Some(DeviceSpec {
        name: device.head.name?.into_inner(),
        store: device.store?.into_inner(),
        socket: device.socket?.into_inner(),
        queues: device.queues,
        queue_size_max: device.queue_size_max,
        sidecores,
        idle,
        packed: device.packed,
        read_only: device.read_only,
        seg_max: device.seg_max,
        size_max_bytes: device.size_max_bytes,
        serial: device.serial,
    })
}

/// How many queues each sidecore serves: devices that name none go where there are fewest.
struct Load(Vec<(String, usize)>);

impl Load {
    /// What the devices that name their sidecores lay on them.
    fn new<'a>(devices: &[DeviceDraft], sidecores: impl Iterator<Item = &'a str>) -> Self {
        let queues_on = |sidecore: &str| {
            let share = |device: &DeviceDraft| {
                let position = device.sidecores.iter().position(|name| name.get_ref() == sidecore)?;
                Some((0..usize::from(device.queues)).skip(position).step_by(device.sidecores.len()).count())
            };
            devices.iter().filter_map(share).fold(0, usize::saturating_add)
        };
        Self(sidecores.map(|sidecore| (sidecore.to_owned(), queues_on(sidecore))).collect())
    }

    /// Picks the sidecore with the fewest queues, the first of several, and gives it these.
    fn least(&mut self, queues: u16) -> Option<String> {
        let (name, load) = self.0.iter_mut().min_by_key(|(_, load)| *load)?;
        *load = load.saturating_add(usize::from(queues));
        Some(name.clone())
    }
}
