//! The side of an IOhost: links to clients, and the devices that are exported to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use sidecore_block::BlockDevice;
use sidecore_reactor::Unit;
use sidecore_remote::export::{
    ClientId, ClientLimits, ClientShare, ClientSpec as ExportClient, Export, ExportError,
    ExportedDevice, ExportedNic, Helper, Load, helper,
};
use sidecore_remote::{NicMonitor, NicState, RemoteNic, remote_nic};
use sidecore_sidecore::{Handle, NotStarted, Sidecore, Stopped};
use sidecore_trust::{Admission, ClientName, KeyDirectory, KeyError, PrivateKey};
use sidecore_vrio::{HostOptions, ServerOptions};

use super::link::{Granted, Side, open_queues};
use super::trust::{SharedTrust, admission};
use crate::AssemblyError;
use crate::controllers::limits;
use crate::spec::{ClientSpec, LinkSpec};

pub(super) type ExportUnit = Export<SharedTrust>;

/// The numbers of a device at the queues of a client's links.
type Numbers = Vec<(Arc<Handle<ExportUnit>>, u16)>;

/// How long a unit may take to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// A link to clients.
pub(super) struct OpenLink {
    pub(super) spec: LinkSpec,
    pub(super) granted: Granted,
    trust: SharedTrust,
    pub(super) queues: Vec<Arc<Handle<ExportUnit>>>,
    /// The clients that are admitted, by their names.
    admitted: BTreeMap<String, (ClientName, Admission)>,
}

/// A client, with its devices.
pub(super) struct ServedClient {
    pub(super) spec: ClientSpec,
    pub(super) name: ClientName,
    /// Its names at the queues of its links.
    ids: Vec<(Arc<Handle<ExportUnit>>, ClientId)>,
    /// By their names.
    pub(super) devices: BTreeMap<String, ServedDevice>,
    /// Its NICs by their names.
    pub(super) nics: BTreeMap<String, ServedNic>,
    share: ClientShare,
    /// Whether it is admitted on a link.
    pub(super) is_admitted: bool,
    /// Whether no new requests of it are taken.
    pub(super) is_drained: bool,
}

/// A device of a client.
pub(super) struct ServedDevice {
    device: ExportedDevice,
    /// Its numbers at the queues of the client's links.
    numbers: Numbers,
}

/// A NIC of a client.
pub(super) struct ServedNic {
    pub(super) nic: ExportedNic,
    /// Its numbers at the queues of the client's links, and its states there.
    numbers: Numbers,
    monitors: Vec<NicMonitor>,
}

impl ServedNic {
    /// The state at the queue that is furthest.
    pub(super) fn state(&self) -> NicState {
        NicState::furthest(self.monitors.iter().map(NicMonitor::state)).unwrap_or(NicState::Away)
    }
}

/// The sidecores of the remote channel, with their loads.
#[derive(Default)]
pub(super) struct Loads(BTreeMap<String, Arc<Load>>);

impl Loads {
    fn of(&mut self, sidecore: &str) -> Arc<Load> {
        Arc::clone(self.0.entry(sidecore.to_owned()).or_default())
    }
}

impl OpenLink {
    /// Opens a link, and starts a unit for each of its queues. Requests are steered to the other
    /// sidecores of the link, too.
    pub(super) fn open(
        spec: &LinkSpec,
        sidecores: &[Sidecore],
        (incarnation, keys): (u64, &KeyDirectory),
        loads: &mut Loads,
    ) -> Result<Self, AssemblyError> {
        let failed = |error: String| AssemblyError::Link { name: spec.name.clone(), error };
        // An IOhost without a key admits clients without encryption alone.
        let key = match keys.clients() {
            Ok(clients) if clients.invited.is_empty() => None,
            Ok(_) => Some(keys.own_key().map_err(|error| failed(error.to_string()))?),
            Err(error) => return Err(failed(error.to_string())),
        };
        let trust = SharedTrust::new(key);
        let links = open_queues(spec, Side::Iohost)?;
        let granted = links.first().map(|link| Granted::of(link.properties())).unwrap_or_default();
        let mut open = Self {
            spec: spec.clone(),
            granted,
            trust: trust.clone(),
            queues: Vec::new(),
            admitted: BTreeMap::new(),
        };
        let cores: Vec<&Sidecore> = spec
            .sidecores
            .iter()
            .filter_map(|name| sidecores.iter().find(|sidecore| sidecore.name() == name))
            .collect();
        for (index, (link, core)) in links.into_iter().zip(&cores).enumerate() {
            let options = HostOptions {
                incarnation,
                // A secret of its own: a cookie is good at one queue, and no two give sessions the
                // same name.
                secret: super::random().map_err(AssemblyError::Random)?,
                queue: u8::try_from(index).unwrap_or(u8::MAX),
                server: ServerOptions { frame_bytes: spec.frame_bytes, ..ServerOptions::default() },
                ..HostOptions::default()
            };
            let (load, trust, idle) = (loads.of(core.name()), trust.clone(), spec.idle);
            let unit = core
                .start(move |context| Export::new(context, link, (options, trust), &load, idle));
            let unit = Arc::new(unit.map_err(|error| failed(not_started(error)))?);
            for other in cores.iter().filter(|other| other.name() != core.name()) {
                let load = loads.of(other.name());
                let (end, seed) = helper(&load).map_err(|error| failed(error.to_string()))?;
                let helper = other.start(move |context| Helper::new(context, seed, idle));
                // It ends with the unit that gives it requests.
                drop(helper.map_err(|error| failed(not_started(error)))?);
                asked(unit.ask(move |unit| unit.add_helper(end))).map_err(failed)?;
            }
            open.queues.push(unit);
        }
        Ok(open)
    }

    /// Sets this host's key, which is made with the first invitation.
    pub(super) fn set_key(&self, key: PrivateKey) {
        self.trust.set_key(key);
    }

    fn admit(&mut self, client: &ClientSpec, name: ClientName, admission: Option<Admission>) {
        match admission {
            Some(admission) => drop(self.admitted.insert(client.name.clone(), (name, admission))),
            None => drop(self.admitted.remove(&client.name)),
        }
        self.trust.admit(self.admitted.values().copied().collect());
    }

    /// Ends the sessions, and closes the link.
    pub(super) fn close(self) {
        let Self { queues, spec, .. } = self;
        let queues = queues.into_iter().filter_map(Arc::into_inner);
        queues.for_each(|unit| stop(unit, &spec.name));
    }
}

impl ServedClient {
    /// Lets a client come on its links.
    pub(super) fn start(
        spec: &ClientSpec,
        links: &mut BTreeMap<String, OpenLink>,
        keys: &KeyDirectory,
    ) -> Result<Self, AssemblyError> {
        let failed = |error: String| AssemblyError::Client { name: spec.name.clone(), error };
        let name: ClientName =
            spec.name.parse().map_err(|error: KeyError| failed(error.to_string()))?;
        let mut client = Self {
            spec: spec.clone(),
            name,
            share: share(spec),
            ids: Vec::new(),
            devices: BTreeMap::new(),
            nics: BTreeMap::new(),
            is_admitted: false,
            is_drained: false,
        };
        match client.join(links).and_then(|()| client.admit(links, keys)) {
            Ok(()) => Ok(client),
            Err(error) => {
                client.stop(links);
                Err(failed(error))
            }
        }
    }

    /// Admits the client on its links, as far as it was invited.
    pub(super) fn admit(
        &mut self,
        links: &mut BTreeMap<String, OpenLink>,
        keys: &KeyDirectory,
    ) -> Result<(), String> {
        self.is_admitted = false;
        let mut failed = Ok(());
        for name in &self.spec.links {
            let Some(link) = links.get_mut(name) else { continue };
            let encrypts = self.spec.encrypts(&link.spec.kind);
            // A client whose key cannot be read does not come.
            let admission = admission(keys, self.name, encrypts).unwrap_or_else(|error| {
                failed = Err(error.to_string());
                None
            });
            self.is_admitted |= admission.is_some();
            link.admit(&self.spec, self.name, admission);
        }
        if !self.is_admitted && failed.is_ok() {
            tracing::warn!(
                client = self.spec.name,
                "the client cannot come: it was not invited, see `sidecore remote invite`"
            );
        }
        failed
    }

    /// Whether its frames are sealed on one of its links.
    pub(super) fn encrypts(&self, links: &BTreeMap<String, OpenLink>) -> bool {
        let mut links = self.spec.links.iter().filter_map(|name| links.get(name));
        links.any(|link| self.spec.encrypts(&link.spec.kind))
    }

    fn join(&mut self, links: &BTreeMap<String, OpenLink>) -> Result<(), String> {
        let client = ExportClient {
            name: self.spec.name.as_str().into(),
            id: self.name.to_wire(),
            queues: self.spec.sessions,
            share: self.share.clone(),
        };
        for link in self.spec.links.iter().filter_map(|name| links.get(name)) {
            for unit in &link.queues {
                let client = client.clone();
                let id = asked(unit.ask(move |unit| unit.add_client(&client)))?;
                self.ids.push((Arc::clone(unit), id));
            }
        }
        self.drain(self.is_drained)
    }

    /// Takes no new requests of the client, or takes them again.
    pub(super) fn drain(&mut self, drains: bool) -> Result<(), String> {
        self.is_drained = drains;
        for (unit, id) in &self.ids {
            let id = *id;
            asked(unit.ask(move |unit| unit.drain_client(id, drains)))?;
        }
        Ok(())
    }

    /// Requests of the client that stores have, or are to be given.
    pub(super) fn executing(&self) -> usize {
        let ask = |(unit, id): &(Arc<Handle<ExportUnit>>, ClientId)| {
            let id = *id;
            unit.ask(move |unit| unit.executing(id)).ok().flatten()
        };
        self.ids.iter().filter_map(ask).sum()
    }

    /// The stores that the client may have written to, with the names of its devices.
    pub(super) fn written(&self) -> Vec<(String, Arc<dyn BlockDevice>)> {
        let devices = self.devices.values().map(|served| &served.device);
        let is_written =
            |device: &&ExportedDevice| !device.read_only && !device.store.geometry().read_only;
        let named = |device: &ExportedDevice| (device.name.to_string(), Arc::clone(&device.store));
        devices.filter(is_written).map(named).collect()
    }

    /// Ends the client's sessions at once, and lets it have none any more. Its devices are gone
    /// from its links.
    fn leave(&mut self) {
        self.part();
        self.devices.values_mut().for_each(|device| drop(device.remove()));
    }

    /// Ends the client's sessions at once. Its devices stay until they are withdrawn, which the
    /// client does not learn: for it, the IOhost is away, and its requests wait.
    pub(super) fn part(&mut self) {
        for (unit, id) in self.ids.drain(..) {
            unit.tell(move |unit| drop(unit.remove_client(id)));
        }
    }

    /// Ends the client's sessions at once. It may come again if it is admitted.
    pub(super) fn disconnect(&mut self, links: &BTreeMap<String, OpenLink>) -> Result<(), String> {
        self.leave();
        self.join(links)?;
        let Self { ids, devices, nics, .. } = self;
        // The client has other names there now.
        for (unit, number) in nics.values().flat_map(|nic| &nic.numbers) {
            let of_unit = ids.iter().find(|(other, _)| Arc::ptr_eq(other, unit));
            if let Some((_, id)) = of_unit {
                let (id, number) = (*id, *number);
                asked(unit.ask(move |unit| unit.assign_nic(number, id)))?;
            }
        }
        devices.values_mut().try_for_each(|device| device.add(ids))
    }

    /// The client may not come any more.
    pub(super) fn stop(mut self, links: &mut BTreeMap<String, OpenLink>) {
        for name in &self.spec.links {
            if let Some(link) = links.get_mut(name) {
                link.admit(&self.spec, self.name, None);
            }
        }
        self.leave();
    }

    /// Gives the client a device.
    pub(super) fn export(&mut self, device: ExportedDevice) -> Result<(), String> {
        let name = device.name.to_string();
        let mut served = ServedDevice { device, numbers: Vec::new() };
        served.add(&self.ids)?;
        self.devices.insert(name, served);
        Ok(())
    }

    /// Gives the client a NIC. Returns its queues for the port of a switch: one for each queue of
    /// the client's links, of which that is up which has the client's session.
    pub(super) fn export_nic(&mut self, nic: &ExportedNic) -> Result<Vec<RemoteNic>, String> {
        let (mut queues, mut numbers) = (Vec::new(), Vec::new());
        for (unit, id) in &self.ids {
            let added = remote_nic(nic.mtu).map_err(|error| error.to_string());
            let added = added.and_then(|(queue, end)| {
                let (id, nic) = (*id, nic.clone());
                queues.push(queue);
                asked(unit.ask(move |unit| unit.add_nic(id, &nic, end)))
            });
            match added {
                Ok(number) => numbers.push((Arc::clone(unit), number)),
                Err(error) => {
                    remove_nics(numbers);
                    return Err(error);
                }
            }
        }
        let monitors = queues.iter().map(RemoteNic::monitor).collect();
        let served = ServedNic { nic: nic.clone(), numbers, monitors };
        self.nics.insert(nic.name.to_string(), served);
        Ok(queues)
    }

    /// Takes a NIC from the client.
    pub(super) fn withdraw_nic(&mut self, nic: &str) {
        remove_nics(self.nics.remove(nic).map_or_else(Vec::new, |served| served.numbers));
    }

    /// Takes a device from the client. The receiver gets a message for each queue that has closed
    /// the device's store, of which there are so many.
    pub(super) fn withdraw(&mut self, device: &str) -> Option<(Receiver<()>, usize)> {
        self.devices.remove(device).map(|mut device| device.remove())
    }

    /// A device's store has another size.
    pub(super) fn resize(&self, device: &str, capacity_bytes: u64) {
        let numbers = self.devices.get(device).map(|device| &device.numbers);
        for (unit, number) in numbers.into_iter().flatten() {
            let number = *number;
            unit.tell(move |unit| drop(unit.resize_device(number, capacity_bytes)));
        }
    }
}

impl ServedDevice {
    fn add(&mut self, ids: &[(Arc<Handle<ExportUnit>>, ClientId)]) -> Result<(), String> {
        for (unit, id) in ids {
            let (id, device) = (*id, self.device.clone());
            match asked(unit.ask(move |unit| unit.add_device(id, &device))) {
                Ok(number) => self.numbers.push((Arc::clone(unit), number)),
                Err(error) => {
                    drop(self.remove());
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn remove(&mut self) -> (Receiver<()>, usize) {
        let (sender, receiver) = channel();
        let count = self.numbers.len();
        for (unit, number) in self.numbers.drain(..) {
            let sender = sender.clone();
            unit.tell(move |unit| {
                // Without a receiver, the caller does not wait.
                let removed = Box::new(move || {
                    let _ = sender.send(());
                });
                let _ = unit.remove_device(number, removed);
            });
        }
        (receiver, count)
    }
}

fn remove_nics(numbers: Numbers) {
    for (unit, number) in numbers {
        unit.tell(move |unit| drop(unit.remove_nic(number)));
    }
}

/// A client's part of what is short. Its links share its limits.
fn share(spec: &ClientSpec) -> ClientShare {
    let limits = limits(&spec.limits);
    let limits = (!limits.is_empty()).then(|| Arc::new(ClientLimits::new(&limits)));
    ClientShare { weight: spec.weight, limits, ..ClientShare::default() }
}

/// The result of a question to a unit.
fn asked<T, C>(answer: Result<Option<Result<T, ExportError>>, C>) -> Result<T, String> {
    match answer {
        Ok(Some(answer)) => answer.map_err(|error| error.to_string()),
        Ok(None) | Err(_) => Err("its sidecore has ended, the log says why".to_owned()),
    }
}

/// The reason why a unit was not started.
pub(super) fn not_started<E: std::fmt::Display>(error: NotStarted<E>) -> String {
    match error {
        NotStarted::Unit(error) => error.to_string(),
        NotStarted::Watch(error) => error.to_string(),
        NotStarted::Gone => "its sidecore has ended, the log says why".to_owned(),
    }
}

/// Stops a unit, and waits for it.
pub(super) fn stop<U: Unit>(unit: Handle<U>, of: &str) {
    match unit.stop().wait(STOP_PATIENCE) {
        Stopped::Stopped(_) | Stopped::Gone => {}
        Stopped::StillInFlight => {
            tracing::warn!(of, "requests of the remote channel are still in flight");
        }
    }
}
