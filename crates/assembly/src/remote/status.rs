//! The report of the remote channel, refreshed by a thread, and the events that it shows.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sidecore_link::{LinkCounts, LinkState};
use sidecore_net::MacAddress;
use sidecore_remote::NicState;
use sidecore_remote::client::{Iohost, OpenedReport, SessionReport};
use sidecore_remote::export::{ExecutorCounts, ExportStatus};
use sidecore_telemetry::{CounterSet as _, Counts as _};
use sidecore_units::Nanos;
use sidecore_vrio::VrioCounts;
use sidecore_vrio::wire::{DeviceEntry, device_flag};

use super::hosting::{ServedClient, ServedNic};
use super::link::Granted;
use super::using::{DrainRest, UsedDevice, UsedIohost, UsedNic};
use super::{Parts, Remote, SizeListener, unix_s};
use crate::report::{
    ClientReport, ExecutorReport, ExportReport, ExportedNicReport, IohostReport, LinkReport,
    RemoteDeviceReport, RemoteNicReport, RemoteReport,
};
use crate::spec::LinkSpec;

/// The time between two reports. A report wakes the sidecores of links.
const PERIOD: Duration = Duration::from_millis(500);

/// A sidecore that does not answer in this time is shown as it was.
const PATIENCE: Duration = Duration::from_millis(200);

/// A client that was not heard of for this time is away: it sends PINGs more often, and repeats one
/// that is lost (docs/vrio.md). Its session lasts, and continues if the client comes back.
const SILENCE: Nanos = Nanos::from_millis(1_000);

/// A thread that refreshes the report, until its drop.
pub(super) struct Watch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(remote: &Arc<Remote>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let remote = Arc::downgrade(remote);
        let watch = move || {
            let mut history = History::default();
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                if !refresh(&remote, &mut history) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("remote-watch".to_owned()).spawn(watch)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches the remote channel has panicked");
        }
    }
}

/// The states of clients, IOhosts and devices, with the times of their last changes.
#[derive(Default)]
struct History {
    states: BTreeMap<(&'static str, String), (String, u64)>,
    /// The newest answers of units, those of exports with their times.
    exports: BTreeMap<(String, usize), (ExportStatus, Nanos)>,
    sessions: BTreeMap<(String, usize), SessionReport>,
    /// The sizes of remote stores in bytes that devices have adopted, or are about to.
    sizes: BTreeMap<String, (u64, Option<JoinHandle<()>>)>,
}

impl History {
    /// Has devices adopt a new size of their store, on a thread of its own: an NVMe function waits
    /// for the requests that it has.
    fn note_size(&mut self, store: &str, capacity_bytes: u64, listener: Option<&SizeListener>) {
        let (known, adoption) = self.sizes.entry(store.to_owned()).or_default();
        let is_busy = adoption.as_ref().is_some_and(|thread| !thread.is_finished());
        let Some(listener) = listener.filter(|_| *known != capacity_bytes && !is_busy) else {
            return;
        };
        let (listener, name) = (Arc::clone(listener), store.to_owned());
        let thread = std::thread::Builder::new().name(format!("size-{store}"));
        if let Ok(thread) = thread.spawn(move || listener(&name)) {
            (*known, *adoption) = (capacity_bytes, Some(thread));
        }
    }

    /// Notes a state, and logs its change. Returns the time of the last change.
    fn note(&mut self, kind: &'static str, name: &str, state: &str) -> u64 {
        let entry = self.states.entry((kind, name.to_owned()));
        let is_new = matches!(entry, std::collections::btree_map::Entry::Vacant(_));
        let (last, since) = entry.or_insert_with(|| (String::new(), 0));
        if last != state {
            (*last, *since) = (state.to_owned(), unix_s());
            match state {
                "away" | "down" | "closed" => tracing::warn!(name, "{kind} is {state}"),
                _ if is_new => tracing::debug!(name, "{kind} is {state}"),
                _ => tracing::info!(name, "{kind} is {state}"),
            }
        }
        *since
    }
}

/// The answers that are awaited.
struct Asked {
    exports: Vec<((String, usize), Receiver<ExportStatus>)>,
    sessions: Vec<((String, usize), Receiver<SessionReport>)>,
}

/// Makes a new report. False if the assembly is gone.
fn refresh(remote: &Weak<Remote>, history: &mut History) -> bool {
    let Some(remote) = remote.upgrade() else { return false };
    let asked = match remote.parts.try_lock() {
        Ok(parts) => ask(&parts),
        Err(std::sync::TryLockError::Poisoned(parts)) => ask(&parts.into_inner()),
        // A change is being made.
        Err(std::sync::TryLockError::WouldBlock) => return true,
    };
    let deadline = Instant::now() + PATIENCE;
    let left = || deadline.saturating_duration_since(Instant::now());
    for (unit, answer) in asked.exports {
        let status = answer.recv_timeout(left()).ok();
        history.exports.extend(status.map(|status| (unit, (status, remote.clock.now()))));
    }
    for (unit, answer) in asked.sessions {
        history.sessions.extend(answer.recv_timeout(left()).ok().map(|report| (unit, report)));
    }
    let parts = match remote.parts.try_lock() {
        Ok(parts) => parts,
        Err(std::sync::TryLockError::Poisoned(parts)) => parts.into_inner(),
        Err(std::sync::TryLockError::WouldBlock) => return true,
    };
    history.forget(&parts);
    keep_promises(&remote, &parts);
    let now = remote.clock.now();
    let report = RemoteReport {
        links: links(&parts, history),
        clients: clients(&parts, history),
        iohosts: parts.iohosts.values().map(|used| iohost(used, history, now)).collect(),
        serves: Vec::new(),
    };
    drop(parts);
    let devices: Vec<_> = report.iohosts.iter().flat_map(|iohost| &iohost.devices).collect();
    history.sizes.retain(|store, _| devices.iter().any(|device| device.store == *store));
    for device in devices.into_iter().filter(|device| device.capacity_bytes > 0) {
        history.note_size(&device.store, device.capacity_bytes, remote.sizes.get());
    }
    *remote.report.lock().unwrap_or_else(PoisonError::into_inner) = report;
    true
}

/// Keeps the devices of stores as their IOhosts have them, for the next process.
fn keep_promises(remote: &Remote, parts: &Parts) {
    for (iohost, used) in &parts.iohosts {
        for used in used.stores.values() {
            let status = used.canceller.status();
            if let Some(entry) = status.entry.filter(|_| status.waiting.is_none()) {
                remote.promises.note(iohost, &used.device, &entry);
            }
        }
    }
    remote.promises.retain(|(iohost, device)| {
        let used = parts.iohosts.get(iohost);
        used.is_some_and(|used| used.stores.values().any(|used| used.device == *device))
    });
}

/// Has each unit report its state.
fn ask(parts: &Parts) -> Asked {
    let (mut exports, mut sessions) = (Vec::new(), Vec::new());
    for (name, link) in &parts.links {
        for (index, unit) in link.queues.iter().enumerate() {
            let (sender, receiver) = channel();
            unit.tell(move |unit| drop(sender.send(unit.status())));
            exports.push(((name.clone(), index), receiver));
        }
    }
    for (name, used) in &parts.iohosts {
        for (index, (_, unit)) in used.sessions.iter().enumerate() {
            let (sender, receiver) = channel();
            unit.tell(move |unit| drop(sender.send(unit.report())));
            sessions.push(((name.clone(), index), receiver));
        }
    }
    Asked { exports, sessions }
}

impl History {
    /// Drops the answers of units that are gone.
    fn forget(&mut self, parts: &Parts) {
        self.exports.retain(|(name, _), _| parts.links.contains_key(name));
        self.sessions.retain(|(name, _), _| parts.iohosts.contains_key(name));
    }

    fn exports_of<'a>(&'a self, link: &'a str) -> impl Iterator<Item = &'a (ExportStatus, Nanos)> {
        self.exports.iter().filter(move |((name, _), _)| name == link).map(|(_, status)| status)
    }

    /// A device of an IOhost, as of the session that has it.
    fn opened(&self, iohost: &str, device: &UsedDevice) -> Option<&OpenedReport> {
        let session = self.sessions.get(&(iohost.to_owned(), device.session))?;
        session.opened.iter().find(|opened| opened.device == device.device)
    }

    fn sessions_of<'a>(&'a self, iohost: &'a str) -> impl Iterator<Item = &'a SessionReport> {
        self.sessions.iter().filter(move |((name, _), _)| name == iohost).map(|(_, report)| report)
    }
}

fn state_word(state: LinkState) -> (&'static str, Option<String>) {
    match state {
        LinkState::Up => ("up", None),
        LinkState::Down(reason) => ("down", Some(reason.to_owned())),
        LinkState::Closed(reason) => ("closed", Some(reason.to_owned())),
    }
}

fn links(parts: &Parts, history: &mut History) -> Vec<LinkReport> {
    let mut reports = Vec::new();
    for link in parts.links.values() {
        let mut counts = LinkCounts::default();
        let mut state = None;
        for (status, _) in history.exports_of(&link.spec.name) {
            counts.add(&status.link_counts);
            state = worse(state, status.link);
        }
        let executors = executors(&link.spec, history);
        let report = link_report(history, (&link.spec, &link.granted), state, counts);
        reports.push(LinkReport { executors, ..report });
    }
    for used in parts.iohosts.values() {
        for (index, link) in used.links.iter().enumerate() {
            let is_first = index == 0;
            let mut counts = LinkCounts::default();
            let stats = |(iohost, _): &(Iohost, _)| {
                let stats = if is_first { iohost.link_stats() } else { iohost.second_link_stats() };
                stats.cloned()
            };
            used.sessions.iter().filter_map(stats).for_each(|stats| stats.add_to(&mut counts));
            let state = history.sessions_of(&used.spec.name).fold(None, |state, session| {
                let queue = if is_first { Some(session.link) } else { session.second_link };
                queue.map_or(state, |queue| worse(state, queue))
            });
            reports.push(link_report(history, (&link.spec, &link.granted), state, counts));
        }
    }
    reports
}

/// The share of each sidecore of a link. Each queue of the link has its own sidecore first, and
/// then the others, in the order of the specification.
fn executors(spec: &LinkSpec, history: &History) -> Vec<ExecutorReport> {
    let sum = |sidecore: &String| {
        let mut counts = ExecutorCounts::default();
        for ((name, queue), (status, _)) in &history.exports {
            let Some(own) = spec.sidecores.get(*queue).filter(|_| *name == spec.name) else {
                continue;
            };
            let others = spec.sidecores.iter().filter(|other| *other != own);
            let order = std::iter::once(own).chain(others);
            let its = order.zip(&status.executors).find(|(name, _)| *name == sidecore);
            counts.add(its.map_or(&ExecutorCounts::default(), |(_, counts)| counts));
        }
        ExecutorReport { sidecore: sidecore.clone(), counts }
    };
    spec.sidecores.iter().map(sum).collect()
}

/// The state of a link of which one queue is in this state: that of the queue which is worst off.
fn worse(state: Option<LinkState>, queue: LinkState) -> Option<LinkState> {
    Some(state.filter(|state| *state != LinkState::Up).unwrap_or(queue))
}

fn link_report(
    history: &mut History,
    (spec, granted): (&LinkSpec, &Granted),
    state: Option<LinkState>,
    counts: LinkCounts,
) -> LinkReport {
    let (state, reason) = state.map_or(("opening", None), state_word);
    history.note("link", &spec.name, state);
    LinkReport {
        name: spec.name.clone(),
        link_type: spec.kind.word().to_owned(),
        mode: granted.mode.clone(),
        address: granted.address.clone(),
        frame_bytes: granted.frame_bytes,
        state: state.to_owned(),
        reason,
        sidecores: spec.sidecores.clone(),
        executors: Vec::new(),
        dropped: counts.dropped(),
        counts,
    }
}

fn clients(parts: &Parts, history: &mut History) -> Vec<ClientReport> {
    let mut reports = Vec::new();
    for (name, client) in &parts.clients {
        let mut report = ClientReport {
            name: name.clone(),
            links: client.spec.links.clone(),
            ..ClientReport::default()
        };
        let mut seals = Vec::new();
        let mut newest = Nanos::ZERO;
        let mut counts = VrioCounts::default();
        for link in client.spec.links.iter().filter_map(|name| parts.links.get(name)) {
            seals.push(if client.spec.encrypts(&link.spec.kind) { "on" } else { "off" });
            let units = history.exports_of(&link.spec.name);
            let sessions = units
                .flat_map(|(status, at)| status.sessions.iter().map(move |session| (session, *at)));
            for (session, at) in sessions {
                if *session.client != **name {
                    continue;
                }
                counts.add(&session.counts);
                report.executing = report.executing.saturating_add(session.in_flight as u64);
                if session.session == 0 || at.since(session.heard_at) > SILENCE {
                    continue;
                }
                report.sessions_open = report.sessions_open.saturating_add(1);
                report.credits = report.credits.saturating_add(session.credit.into());
                if session.heard_at >= newest {
                    newest = session.heard_at;
                    report.address = session.peer.map(|peer| peer.to_string());
                }
            }
        }
        seals.dedup();
        report.encryption = seals.join(", ");
        report.counts = counts;
        let has_come = report.counts.sessions > 0;
        report.state = match (report.sessions_open, client.is_admitted, has_come) {
            _ if client.is_drained && report.executing > 0 => "draining",
            _ if client.is_drained => "drained",
            (1.., ..) => "connected",
            (0, false, _) => "not invited",
            (0, true, true) => "away",
            (0, true, false) => "waiting",
        }
        .to_owned();
        report.since_unix_s = history.note("client", name, &report.state);
        report.devices = exports(client, parts, history);
        report.nics = exported_nics(client, report.sessions_open > 0, history);
        reports.push(report);
    }
    reports
}

fn exports(client: &ServedClient, parts: &Parts, history: &History) -> Vec<ExportReport> {
    let epoch = parts.incarnation.unwrap_or(0);
    let status = |device: &str| {
        let links = client.spec.links.iter();
        let units = links.flat_map(|link| history.exports_of(link));
        units.flat_map(|(status, _)| &status.devices).find(|found| *found.name == *device)
    };
    let report = |device: &String| ExportReport {
        device: device.clone(),
        epoch: format!("{epoch:016x}"),
        capacity_bytes: status(device).map_or(0, |status| status.capacity_bytes),
        in_flight: status(device).map_or(0, |status| status.in_flight.into()),
    };
    client.devices.keys().map(report).collect()
}

fn exported_nics(
    client: &ServedClient,
    is_there: bool,
    history: &mut History,
) -> Vec<ExportedNicReport> {
    let report = |(device, served): (&String, &ServedNic)| {
        // A session lasts while its client is silent.
        let state = Some(served.state()).filter(|state| is_there || *state != NicState::Up);
        let state = state.unwrap_or(NicState::Away).word();
        ExportedNicReport {
            device: device.clone(),
            state: state.to_owned(),
            since_unix_s: history.note("NIC of a client", device, state),
            mac: MacAddress(served.nic.mac).to_string(),
            mtu: served.nic.mtu,
        }
    };
    client.nics.iter().map(report).collect()
}

fn used_nics(used: &UsedIohost, history: &mut History) -> Vec<RemoteNicReport> {
    let report = |(device, used): (&String, &UsedNic)| {
        let (state, entry) = (used.monitor.state().word(), used.monitor.address());
        RemoteNicReport {
            device: device.clone(),
            nic: used.nic.clone(),
            state: state.to_owned(),
            since_unix_s: history.note("remote NIC", device, state),
            mac: entry.map(|(mac, _)| MacAddress(mac).to_string()),
            mtu: entry.map(|(_, mtu)| mtu),
        }
    };
    used.nics.iter().map(report).collect()
}

fn iohost(used: &UsedIohost, history: &mut History, now: Nanos) -> IohostReport {
    let name = &used.spec.name;
    let mut counts = VrioCounts::default();
    for (iohost, _) in &used.sessions {
        iohost.vrio_stats().add_to(&mut counts);
    }
    let at = usize::from(history.sessions_of(name).any(|session| session.is_on_second));
    let mut report = IohostReport {
        name: name.clone(),
        client: used.spec.client.clone(),
        ..IohostReport::default()
    };
    if let Some(link) = used.links.get(at).or(used.links.first()) {
        report.link.clone_from(&link.spec.name);
        report.address = link.address.to_string();
        let encrypts = used.spec.encrypts(&link.spec.kind);
        report.encryption = if encrypts { "on" } else { "off" }.to_owned();
    }
    let mut is_connected = false;
    let mut rest = DrainRest::default();
    for session in history.sessions_of(name) {
        rest.add(session);
        report.frame_bytes = report.frame_bytes.max(session.frame_bytes);
        report.round_trip_ns = report.round_trip_ns.max(session.round_trip.0);
        if session.is_connected {
            is_connected = true;
            report.announced = report.announced.or_else(|| Some(names(session.devices.as_ref()?)));
            report.incarnation = Some(format!("{:016x}", session.incarnation));
            report.credits = report.credits.saturating_add(session.slot_limit.into());
        }
    }
    report.state = match (is_connected, counts.sessions > 0) {
        _ if used.is_drained && rest.is_complete() => "drained",
        _ if used.is_drained => "draining",
        (true, _) => "connected",
        (false, true) => "away",
        (false, false) => "connecting",
    }
    .to_owned();
    report.counts = counts;
    report.since_unix_s = history.note("iohost", name, &report.state);
    for (store, device) in &used.stores {
        let status = device.canceller.status();
        let opened = history.opened(name, device).cloned();
        let waited = status.waiting.map(|waiting| now.since(waiting.since).0 / 1_000_000_000);
        let state = if waited.is_some() { "waiting" } else { "ready" };
        let changed = history.note("remote device", store, state);
        report.devices.push(RemoteDeviceReport {
            store: store.clone(),
            device: device.device.clone(),
            in_flight: opened.as_ref().map_or(0, |opened| opened.in_flight as u64),
            kept_writes: opened.map_or(0, |opened| opened.kept_writes),
            ready: status.waiting.is_none() && status.entry.is_some(),
            waits_for: status.waiting.map(|waiting| waiting.waits_for.to_string()),
            wait_reason: status.waiting.map(|waiting| waiting.waits_for.word().to_owned()),
            since_unix_s: waited.map_or(changed, |waited| unix_s().saturating_sub(waited)),
            epoch: status.entry.map(|entry| format!("{:016x}", entry.epoch)),
            capacity_bytes: status.entry.map_or(0, |entry| entry.capacity_bytes),
        });
    }
    report.nics = used_nics(used, history);
    report
}

/// The names of disks. An IOhost may send any bytes.
fn names(devices: &[DeviceEntry]) -> Vec<String> {
    let name = |entry: &DeviceEntry| {
        let end = entry.name.iter().position(|byte| *byte == 0).unwrap_or(entry.name.len());
        String::from_utf8_lossy(entry.name.get(..end).unwrap_or_default()).into_owned()
    };
    devices.iter().filter(|entry| !entry.has(device_flag::NIC)).map(name).collect()
}

#[cfg(test)]
mod tests {
    use sidecore_vrio::wire::{DEVICE_NAME_BYTES, NicEntry};

    use super::*;

    #[test]
    fn patterns_see_disks_and_no_nics() {
        let name = |text: &[u8]| {
            let mut name = [0; DEVICE_NAME_BYTES];
            name[..text.len()].copy_from_slice(text);
            name
        };
        let flags = device_flag::PRESENT;
        let disk = DeviceEntry { name: name(b"db-1"), flags, ..DeviceEntry::default() };
        let odd = DeviceEntry { name: [0xff; DEVICE_NAME_BYTES], flags, ..DeviceEntry::default() };
        let nic = NicEntry { name: name(b"db-net"), ..NicEntry::default() }.to_device();
        let listed = names(&[disk, nic, odd]);
        assert_eq!(listed, ["db-1".to_owned(), "\u{fffd}".repeat(DEVICE_NAME_BYTES)]);
    }
}
