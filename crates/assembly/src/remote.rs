//! Links, clients of this host, and IOhosts that this host is a client of.

mod away;
mod drain;
mod hosting;
mod link;
mod moving;
mod nics;
mod promises;
mod status;
mod trust;
mod using;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sidecore_linux::Clock;
use sidecore_remote::export::ExportedDevice;
use sidecore_sidecore::Sidecore;
use sidecore_trust::KeyDirectory;

use crate::AssemblyError;
use crate::operation::{ErrorKind, OperationError};
use crate::report::RemoteReport;
use crate::spec::{ClientSpec, IohostSpec, LinkSpec, RemoteSpec};
pub use away::GivenUp;
pub(crate) use away::waiting_below;
use hosting::{Loads, OpenLink, ServedClient};
use promises::Promises;
use status::Watch;
use using::{OpeningDevice, UsedIohost};

/// The time between two warnings of a removal that waits for requests in flight.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(5);

/// The specifications of the parts that run, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RemoteParts {
    pub(crate) links: BTreeMap<String, LinkSpec>,
    pub(crate) clients: BTreeMap<String, ClientSpec>,
    /// Each with its link.
    pub(crate) iohosts: BTreeMap<String, (IohostSpec, Vec<LinkSpec>)>,
}

/// The remote channel of an assembly.
pub(crate) struct Remote {
    clock: Clock,
    keys: KeyDirectory,
    parts: Mutex<Parts>,
    /// The newest report. Never locked while a sidecore is waited for.
    report: Mutex<RemoteReport>,
    /// The devices of IOhosts as guests know them.
    promises: Arc<Promises>,
    /// Called with the name of a store whose size has changed, by a thread that may wait.
    sizes: OnceLock<SizeListener>,
}

type SizeListener = Arc<dyn Fn(&str) + Send + Sync>;

/// The parts that run. Locked while a change waits for a sidecore.
#[derive(Default)]
struct Parts {
    /// A random number of this start of the daemon, not 0; `None` before the first part.
    incarnation: Option<u64>,
    links: BTreeMap<String, OpenLink>,
    clients: BTreeMap<String, ServedClient>,
    iohosts: BTreeMap<String, UsedIohost>,
    loads: Loads,
    /// Refreshes the report.
    watch: Option<Watch>,
}

impl Remote {
    pub(crate) fn new(clock: Clock, keys: PathBuf, promises: Option<PathBuf>) -> Self {
        Self {
            clock,
            keys: KeyDirectory::new(keys),
            parts: Mutex::default(),
            report: Mutex::default(),
            promises: Arc::new(Promises::load(promises)),
            sizes: OnceLock::new(),
        }
    }

    /// The IOhosts and the names of the devices that guests of an earlier process may know.
    pub(crate) fn promised(&self) -> Vec<(String, String)> {
        self.promises.keys()
    }

    /// Whether devices that no store uses are forgotten: not while the daemon begins or ends.
    pub(crate) fn forget_unused(&self, forgets: bool) {
        self.promises.forget(forgets);
    }

    /// Sets the one listener to changes of the sizes of stores.
    pub(crate) fn follow_sizes(&self, listener: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.sizes.set(Arc::new(listener));
    }

    fn lock(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn parts(&self) -> RemoteParts {
        let parts = self.lock();
        let named = |name: &String| name.clone();
        RemoteParts {
            links: parts
                .links
                .iter()
                .map(|(name, link)| (named(name), link.spec.clone()))
                .collect(),
            clients: parts
                .clients
                .iter()
                .map(|(name, client)| (named(name), client.spec.clone()))
                .collect(),
            iohosts: parts
                .iohosts
                .iter()
                .map(|(name, used)| {
                    (named(name), (used.spec.clone(), used.links().cloned().collect()))
                })
                .collect(),
        }
    }

    /// The parts, for a start of another one, and the incarnation.
    fn begin(self: &Arc<Self>) -> Result<(MutexGuard<'_, Parts>, u64), AssemblyError> {
        let mut parts = self.lock();
        let incarnation = match parts.incarnation {
            Some(incarnation) => incarnation,
            None => {
                let [random] = random().map_err(AssemblyError::Random)?;
                *parts.incarnation.insert(random.max(1))
            }
        };
        if parts.watch.is_none() {
            parts.watch = Some(Watch::start(self).map_err(AssemblyError::Threads)?);
        }
        Ok((parts, incarnation))
    }

    pub(crate) fn start_link(
        self: &Arc<Self>,
        spec: &LinkSpec,
        sidecores: &[Sidecore],
    ) -> Result<(), AssemblyError> {
        let (mut parts, incarnation) = self.begin()?;
        let link = OpenLink::open(spec, sidecores, (incarnation, &self.keys), &mut parts.loads)?;
        tracing::info!(
            link = spec.name,
            kind = spec.kind.word(),
            mode = link.granted.mode,
            frame_bytes = link.granted.frame_bytes,
            "link open for clients"
        );
        parts.links.insert(spec.name.clone(), link);
        Ok(())
    }

    pub(crate) fn stop_link(&self, name: &str) {
        let link = self.lock().links.remove(name);
        if let Some(link) = link {
            link.close();
        }
    }

    pub(crate) fn start_client(self: &Arc<Self>, spec: &ClientSpec) -> Result<(), AssemblyError> {
        let (mut parts, _) = self.begin()?;
        let client = ServedClient::start(spec, &mut parts.links, &self.keys)?;
        parts.clients.insert(spec.name.clone(), client);
        Ok(())
    }

    pub(crate) fn stop_client(&self, name: &str) {
        let mut parts = self.lock();
        if let Some(client) = parts.clients.remove(name) {
            client.stop(&mut parts.links);
        }
    }

    pub(crate) fn start_iohost(
        self: &Arc<Self>,
        spec: &IohostSpec,
        links: &[&LinkSpec],
        sidecores: &[Sidecore],
    ) -> Result<(), AssemblyError> {
        let (mut parts, _) = self.begin()?;
        // Not the daemon's: the numbers of sessions begin anew with these units, and an IOhost
        // takes no lower number of one life.
        let [life] = random().map_err(AssemblyError::Random)?;
        let used = UsedIohost::start(spec, links, sidecores, life)?;
        parts.iohosts.insert(spec.name.clone(), used);
        Ok(())
    }

    pub(crate) fn stop_iohost(&self, name: &str) {
        let used = self.lock().iohosts.remove(name);
        if let Some(used) = used {
            used.close();
        }
    }

    /// Begins to open a device of an IOhost as a store.
    pub(crate) fn open_store(
        &self,
        store: &str,
        remote: &RemoteSpec,
    ) -> Result<OpeningDevice, AssemblyError> {
        let unknown = || AssemblyError::Unknown {
            user: format!("store \"{store}\""),
            kind: "iohost",
            name: remote.iohost.clone(),
        };
        let mut parts = self.lock();
        let used = parts.iohosts.get_mut(&remote.iohost).ok_or_else(unknown)?;
        used.open(store, remote, &self.promises)
    }

    /// Forgets a store, and gives up the attempt to open it.
    pub(crate) fn close_store(&self, store: &str) {
        for used in self.lock().iohosts.values_mut() {
            if let Some(used) = used.stores.remove(store) {
                used.canceller.cancel();
            }
        }
    }

    /// The cause for which requests of a store wait; `None` if they do not, or if the store is no
    /// device of an IOhost.
    pub(crate) fn waits_for(&self, store: &str) -> Option<String> {
        let report = self.report();
        let mut stores = report
            .iohosts
            .iter()
            .flat_map(|iohost| iohost.devices.iter().map(move |device| (iohost, device)));
        let (iohost, device) = stores.find(|(_, device)| device.store == store)?;
        let waits_for = device.waits_for.as_ref()?;
        let waited_s = unix_s().saturating_sub(device.since_unix_s);
        Some(format!(
            "store \"{store}\" has waited {waited_s} s for {waits_for} (device \"{}\" of iohost \
             \"{}\")",
            device.device, iohost.name
        ))
    }

    /// Whether a store's requests are carried out now, or it is no device of an IOhost.
    pub(crate) fn is_ready(&self, store: &str) -> bool {
        self.presence(store).0
    }

    /// The same, and how often its requests have begun to wait until now.
    pub(crate) fn presence(&self, store: &str) -> (bool, u64) {
        let parts = self.lock();
        let used = parts.iohosts.values().filter_map(|used| used.stores.get(store));
        used.fold((true, 0), |(is_ready, waits), used| {
            let status = used.canceller.status();
            (is_ready && status.waiting.is_none(), waits.saturating_add(status.waits))
        })
    }

    /// Fails the requests of a store whose IOhost is away.
    pub(crate) fn abandon(&self, store: &str) {
        let parts = self.lock();
        for used in parts.iohosts.values().filter_map(|used| used.stores.get(store)) {
            used.canceller.abandon();
        }
    }

    /// Gives a client a device.
    pub(crate) fn export(
        &self,
        client: &str,
        mut device: ExportedDevice,
    ) -> Result<(), AssemblyError> {
        let name = device.name.to_string();
        let mut parts = self.lock();
        // Without a lease of a cluster, each start is another owner (docs/vrio.md).
        device.epoch = parts.incarnation.unwrap_or(1);
        let unknown = || AssemblyError::Unknown {
            user: format!("device \"{name}\""),
            kind: "client",
            name: client.to_owned(),
        };
        let served = parts.clients.get_mut(client).ok_or_else(unknown)?;
        let failed = |error| AssemblyError::Client { name: client.to_owned(), error };
        served.export(device).map_err(failed)
    }

    /// Takes a device from a client, and waits until its store has no request of it.
    pub(crate) fn withdraw(&self, client: &str, device: &str) {
        let removed = self.lock().clients.get_mut(client).and_then(|found| found.withdraw(device));
        let Some((closed, mut count)) = removed else { return };
        while count > 0 {
            match closed.recv_timeout(REMOVAL_PATIENCE) {
                Ok(()) => count = count.saturating_sub(1),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    tracing::warn!(device, client, "removing: requests are still in flight");
                }
                // The sidecores of the link have ended.
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Tells a client of the new size of a device.
    pub(crate) fn resize(&self, client: &str, device: &str, capacity_bytes: u64) {
        if let Some(client) = self.lock().clients.get(client) {
            client.resize(device, capacity_bytes);
        }
    }

    /// Whether a client has a session, as of the newest report.
    pub(crate) fn is_connected(&self, client: &str) -> bool {
        let report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        report.clients.iter().any(|found| found.name == client && found.sessions_open > 0)
    }

    /// Makes a key for a client. Returns the text of the invitation.
    pub(crate) fn invite(&self, client: &str) -> Result<String, OperationError> {
        let mut parts = self.lock();
        let Parts { links, clients, .. } = &mut *parts;
        let served = known_client(clients, client)?;
        if !served.encrypts(links) {
            let message =
                format!("client \"{client}\" needs no invitation: its `encryption` is off");
            return Err(OperationError::new(ErrorKind::Conflict, message));
        }
        let text = self.keys.invite(served.name, unix_s()).map_err(key_error)?.to_text();
        let failed = |error| OperationError::new(ErrorKind::Failed, error);
        let key = self.keys.own_key().map_err(key_error)?;
        for link in served.spec.links.iter().filter_map(|name| links.get(name)) {
            link.set_key(key.clone());
        }
        served.admit(links, &self.keys).map_err(failed)?;
        tracing::info!(client, "invited");
        Ok(text.to_string())
    }

    /// Forgets a client's key, and ends its sessions.
    pub(crate) fn revoke(&self, client: &str) -> Result<(), OperationError> {
        let mut parts = self.lock();
        let Parts { links, clients, .. } = &mut *parts;
        let served = known_client(clients, client)?;
        self.keys.revoke(served.name).map_err(key_error)?;
        let failed = |error| OperationError::new(ErrorKind::Failed, error);
        let admitted = served.admit(links, &self.keys);
        served.disconnect(links).map_err(failed)?;
        admitted.map_err(failed)?;
        tracing::warn!(client, "revoked: its sessions have ended");
        Ok(())
    }

    /// The newest report.
    pub(crate) fn report(&self) -> RemoteReport {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the sessions of all clients, before their devices are removed with the daemon: requests
    /// for a device that a client sees removed fail.
    pub(crate) fn part_from_clients(&self) {
        self.lock().clients.values_mut().for_each(ServedClient::part);
    }

    /// Ends the thread that refreshes the report.
    pub(crate) fn end(&self) {
        let watch = self.lock().watch.take();
        drop(watch);
    }
}

fn known_client<'a>(
    clients: &'a mut BTreeMap<String, ServedClient>,
    name: &str,
) -> Result<&'a mut ServedClient, OperationError> {
    known(clients, "client", name)
}

/// The part of this kind and name.
fn known<'a, T>(
    parts: &'a mut BTreeMap<String, T>,
    kind: &str,
    name: &str,
) -> Result<&'a mut T, OperationError> {
    let there: Vec<String> = parts.keys().map(|name| format!("\"{name}\"")).collect();
    parts.get_mut(name).ok_or_else(|| {
        let there = match &there[..] {
            [] => format!("the configuration has no [[{kind}]]"),
            _ => format!("there are {}", there.join(", ")),
        };
        OperationError::new(ErrorKind::NotFound, format!("there is no {kind} \"{name}\"; {there}"))
    })
}

fn key_error(error: sidecore_trust::KeyError) -> OperationError {
    use sidecore_trust::KeyError;
    let kind = match &error {
        KeyError::Exists { .. } => ErrorKind::Conflict,
        KeyError::Unknown { .. } => ErrorKind::NotFound,
        KeyError::Name { .. } => ErrorKind::Invalid,
        _ => ErrorKind::Failed,
    };
    OperationError::new(kind, error.to_string())
}

/// Random numbers of the kernel's.
pub(crate) fn random<const COUNT: usize>() -> io::Result<[u64; COUNT]> {
    let mut bytes = vec![0; COUNT * size_of::<u64>()];
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = bytes.get_mut(filled..).unwrap_or_default();
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
    }
    let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    Ok(std::array::from_fn(|_| words.next().unwrap_or_default()))
}

/// The time in seconds since 1970.
fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
