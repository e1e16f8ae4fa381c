//! The parts of a running assembly, and the actions of a plan carried out on them.

mod listen;
mod network;
mod open;
mod serve;
mod writers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use sidecore_block::BlockDevice;
use sidecore_linux::Clock;
use sidecore_nvme_subsystem::{NamespaceIds, Subsystems};
use sidecore_peer::{Listening, Service};
use sidecore_sidecore::{Sidecore, SidecoreThread};

use crate::AssemblyError;
use crate::controllers::{ControllerHandle, Controllers, VolumeChange};
use crate::core_watch::CoreWatch;
use crate::disk::Disk;
use crate::flush::flush_all;
use crate::front_end::{NvmeParts, NvmeThreads};
use crate::left::LeftDevice;
use crate::mirrors::Mirrors;
use crate::operation::{ErrorKind, OperationError};
use crate::plan::{Action, Part, Parts, Phase, State, Verb, bottom, plan, subject};
use crate::remote::{Remote, RemoteParts};
use crate::spec::{DeviceSpec, SidecoreSpec, Spec, StoreKind, StoreSpec};
use crate::stores::{Progress, Stores, Unflushed};
use crate::switches::Switches;
use crate::volume_service::Volumes;
use crate::wanted::Wanted;

pub(crate) use listen::{listen_early, may_come_late};
pub(crate) use serve::serve_created;
pub(crate) use writers::Writers;

/// The time that a start, or the addition of a device, waits for stores that do not answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The time that the end of mirrors may take.
const KEEPERS_PATIENCE: Duration = Duration::from_secs(10);

/// The lists that stay readable while the graph is locked for a change.
#[derive(Clone)]
pub(crate) struct Lists {
    pub(crate) disks: Arc<Mutex<Vec<Arc<Disk>>>>,
    pub(crate) wanted: Arc<Mutex<Wanted>>,
    pub(crate) controllers: Arc<Controllers>,
    /// The controllers that hosts of physical functions manage.
    pub(crate) subsystems: Arc<Subsystems>,
    /// Links, clients and IOhosts.
    pub(crate) remote: Arc<Remote>,
    pub(crate) mirrors: Arc<Mirrors>,
    pub(crate) switches: Arc<Switches>,
}

impl Lists {
    pub(crate) fn new(clock: &Clock, spec: &Spec) -> Self {
        let lists = Self {
            disks: Arc::default(),
            wanted: Arc::new(Mutex::new(Wanted::new(spec))),
            controllers: Arc::new(Controllers::new(&spec.controllers, spec.owner)),
            subsystems: Arc::default(),
            mirrors: Arc::default(),
            switches: Arc::new(Switches::new(clock.clone())),
            remote: Arc::new(Remote::new(
                clock.clone(),
                spec.key_directory.clone(),
                spec.remote_state.clone(),
            )),
        };
        let disks = Arc::downgrade(&lists.disks);
        lists.remote.follow_sizes(move |store| {
            let disks = disks.upgrade().map(|disks| lock(&disks).clone()).unwrap_or_default();
            let is_on_it =
                |disk: &&Arc<Disk>| disk.configured().is_some_and(|below| below.name == store);
            let on_it = disks.iter().filter(is_on_it);
            on_it.for_each(|disk| disk.refresh());
        });
        lists
    }

    pub(crate) fn all_disks(&self) -> Vec<Arc<Disk>> {
        lock(&self.disks).clone()
    }

    pub(crate) fn disk(&self, name: &str) -> Option<Arc<Disk>> {
        lock(&self.disks).iter().find(|disk| disk.spec.name == name).cloned()
    }

    /// For whom the requests of a store wait, if it is a device of an IOhost that is away.
    pub(crate) fn waits_for(&self, store: &str) -> Option<String> {
        let bottom = bottom(&self.wanted().spec, store)?.name.clone();
        self.remote.waits_for(&bottom)
    }

    /// Whether the requests of a device of an IOhost, or of a mirror, are carried out now.
    pub(crate) fn is_ready(&self, store: &str) -> bool {
        self.remote.is_ready(store) && self.mirrors.waits(store).is_none()
    }

    pub(crate) fn wanted(&self) -> MutexGuard<'_, Wanted> {
        lock(&self.wanted)
    }
}

/// The result of opening a store or controller on a thread of its own.
pub(crate) enum Opened {
    Store(StoreSpec, Result<Arc<dyn BlockDevice>, AssemblyError>),
    Controller(String, Result<ControllerHandle, AssemblyError>),
    /// A remote device was closed before it came.
    GivenUp,
}

/// The occasion of a plan, which decides which failures end the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// A start, before its devices: every failure but a store's own.
    Opening,
    /// A start, with its devices: every failure but a store's own.
    Start,
    /// A late answer of a store, or a removal: no failure.
    Late,
    /// The addition of a device: every failure.
    Addition,
}

impl Occasion {
    fn tolerates(self, error: &AssemblyError) -> bool {
        match self {
            Self::Opening | Self::Start => error.is_of_a_store(),
            Self::Late => true,
            Self::Addition => false,
        }
    }
}

/// The parts that only changes use. Locked throughout a change; sidecores never lock it.
pub(crate) struct Graph {
    this: Weak<Mutex<Graph>>,
    clock: Clock,
    lists: Lists,
    pub(crate) stores: Stores,
    threads: Vec<SidecoreThread>,
    /// Detects sidecores that lose their cores.
    core_watch: Option<CoreWatch>,
    /// Serves the sockets of all devices. Started with the first device.
    service: Option<Arc<Service>>,
    /// The threads of NVMe functions. Started with the first function.
    nvme: Option<Arc<NvmeThreads>>,
    /// The devices that the present change has created, which are not served yet.
    created: Vec<Arc<Disk>>,
    /// Clients that another process has exported, and that are not resumed yet.
    pub(crate) left: Vec<LeftDevice>,
    /// The sockets of devices that wait for their IOhosts, by the devices' names.
    listening: BTreeMap<String, Listening>,
    opened: Sender<Opened>,
    /// Taken by the thread that serves late devices.
    pub(crate) receiver: Option<Receiver<Opened>>,
    /// The number of stores and controllers that are being opened.
    pub(crate) in_flight: usize,
    /// Stores that the end of the assembly has flushed.
    pub(crate) flushed: BTreeSet<String>,
    /// Whether the assembly is drained or being drained. Then no change begins.
    pub(crate) ends: bool,
}

impl Graph {
    pub(crate) fn new(clock: Clock, lists: Lists) -> Arc<Mutex<Self>> {
        let (opened, receiver) = channel();
        Arc::new_cyclic(|this| {
            Mutex::new(Self {
                this: this.clone(),
                clock,
                lists,
                stores: Stores::default(),
                threads: Vec::new(),
                core_watch: None,
                service: None,
                nvme: None,
                created: Vec::new(),
                left: Vec::new(),
                listening: BTreeMap::new(),
                opened,
                receiver: Some(receiver),
                in_flight: 0,
                flushed: BTreeSet::new(),
                ends: false,
            })
        })
    }

    /// The present state of the parts.
    pub(crate) fn now(&self) -> State {
        let disks = self.lists.all_disks();
        let sidecore = |sidecore: Sidecore| {
            let spec = SidecoreSpec { name: sidecore.name().to_owned(), cpu: sidecore.cpu() };
            (spec.name.clone(), spec)
        };
        let device =
            |spec: &DeviceSpec, phase| (spec.name.clone(), Part { spec: spec.clone(), phase });
        let wanted = self.lists.wanted();
        let refused =
            wanted.spec.devices.iter().filter(|device| wanted.refused.contains_key(&device.name));
        let served = disks.iter().map(|disk| device(&disk.spec, Phase::Open));
        let RemoteParts { links, clients, iohosts } = self.lists.remote.parts();
        State {
            sidecores: self.sidecores().map(sidecore).collect(),
            links,
            clients,
            iohosts,
            switches: self.lists.switches.parts(),
            stores: self.stores.parts(),
            controllers: self.lists.controllers.parts(),
            devices: refused.map(|spec| device(spec, Phase::Refused)).chain(served).collect(),
            detached: disks
                .iter()
                .filter(|disk| disk.is_detached())
                .map(|disk| disk.spec.name.clone())
                .collect(),
        }
    }

    pub(crate) fn sidecores(&self) -> impl Iterator<Item = Sidecore> {
        self.threads.iter().map(|thread| thread.sidecore().clone())
    }

    /// Plans and applies until every action that is possible now is done. Returns the new devices,
    /// which have no sockets yet: the caller serves them with [`serve_created`].
    ///
    /// # Errors
    /// The first failure that the occasion does not tolerate. New devices are then not served.
    pub(crate) fn come_to(
        &mut self,
        next: &Spec,
        occasion: Occasion,
    ) -> Result<Vec<Arc<Disk>>, AssemblyError> {
        let mut before = Vec::new();
        loop {
            let mut actions = plan(&self.now(), next);
            actions.retain(|action| self.includes(action, occasion));
            // Actions that have changed nothing would change nothing again.
            if actions.is_empty() || actions == before {
                return Ok(std::mem::take(&mut self.created));
            }
            if let Err(error) = self.apply(&actions, &Parts::of(next), occasion) {
                self.created.clear();
                return Err(error);
            }
            before = actions;
        }
    }

    fn includes(&self, action: &Action, occasion: Occasion) -> bool {
        let is_of_a_device = matches!(action.verb, Verb::StartDevice | Verb::RefuseDevice);
        match occasion {
            Occasion::Opening => !is_of_a_device,
            // The thread of late stores starts the devices that are wanted already.
            Occasion::Addition => {
                !is_of_a_device || self.lists.wanted().place(&action.name) == usize::MAX
            }
            Occasion::Start | Occasion::Late => true,
        }
    }

    /// Creates the one device that `next` has beyond the wanted specification, and makes `next` the
    /// wanted one. A device whose IOhost is away is created when the IOhost comes.
    ///
    /// # Errors
    /// The first failure. Nothing has changed then.
    pub(crate) fn create(
        &mut self,
        device: &DeviceSpec,
        next: Spec,
    ) -> Result<Vec<Arc<Disk>>, AssemblyError> {
        let created = match self.come_to(&next, Occasion::Addition) {
            Ok(created) if created.is_empty() && !may_come_late(device, &next) => {
                Err(self.obstacle(device, &next))
            }
            created => created,
        };
        match &created {
            Ok(_) => self.lists.wanted().set(next),
            Err(_) => self.close_unneeded(),
        }
        created
    }

    /// Removes a device from the wanted specification; `None` if the device is not there.
    pub(crate) fn unwant(&mut self, device: &str) -> Option<()> {
        let mut wanted = self.lists.wanted();
        let next = wanted.without(device)?;
        wanted.set(next);
        Some(())
    }

    /// Makes `next`, which has another link, client or IOhost, the wanted specification.
    ///
    /// # Errors
    /// A part cannot be started. Nothing has changed then.
    pub(crate) fn change(&mut self, next: Spec) -> Result<(), AssemblyError> {
        // No device is among the actions of this occasion.
        let changed = self.come_to(&next, Occasion::Addition).map(drop);
        if changed.is_ok() {
            self.lists.wanted().set(next);
        }
        self.close_unneeded();
        changed
    }

    /// Stops devices that are not wanted, and closes stores that no device needs, and the links,
    /// clients and IOhosts that are not wanted.
    pub(crate) fn close_unneeded(&mut self) {
        let next = self.lists.wanted().spec.clone();
        let mut actions = plan(&self.now(), &next);
        actions.retain(|action| {
            let remote =
                matches!(action.verb, Verb::StopClient | Verb::StopIohost | Verb::StopLink);
            let local =
                matches!(action.verb, Verb::StopDevice | Verb::CloseStore | Verb::StopSwitch);
            remote || local
        });
        // To stop and to close cannot fail.
        let _ = self.apply(&actions, &Parts::of(&next), Occasion::Late);
    }

    /// The stores that no device needs, if they can be flushed now.
    pub(crate) fn unneeded(&self) -> Vec<Unflushed> {
        let actions = plan(&self.now(), &self.lists.wanted().spec);
        let closes = actions.iter().filter(|action| action.verb == Verb::CloseStore);
        let mut stores =
            self.stores.unflushed(&closes.map(|action| action.name.as_str()).collect::<Vec<_>>());
        stores.retain(|(name, _)| self.lists.is_ready(name));
        stores
    }

    /// Carries out actions and returns the names of stores that may have lost writes. The rest of
    /// the plan is skipped when a store is refused, because the plan is then out of date.
    pub(crate) fn apply(
        &mut self,
        actions: &[Action],
        next: &Parts<'_>,
        occasion: Occasion,
    ) -> Result<Vec<String>, AssemblyError> {
        let mut unflushed = Vec::new();
        for group in actions.chunk_by(|one, other| one.verb == other.verb) {
            let names: Vec<&str> = group.iter().map(|action| action.name.as_str()).collect();
            match group[0].verb {
                Verb::StopDevice => names.iter().for_each(|name| self.stop_device(name)),
                Verb::CloseStore => unflushed.extend(self.close_stores(&names)),
                Verb::CloseController => self.lists.controllers.shutdown(&names),
                Verb::StopClient => {
                    names.iter().for_each(|name| self.lists.remote.stop_client(name));
                }
                Verb::StopIohost => {
                    names.iter().for_each(|name| self.lists.remote.stop_iohost(name));
                }
                Verb::StopLink => names.iter().for_each(|name| self.lists.remote.stop_link(name)),
                Verb::StopSwitch | Verb::StartSwitch => {
                    self.change_switches(group[0].verb, &names, next)?;
                }
                Verb::StartLink | Verb::StartClient | Verb::StartIohost => {
                    names
                        .iter()
                        .try_for_each(|name| self.start_remote(group[0].verb, name, next))?;
                }
                Verb::StopSidecore => {
                    self.core_watch = None;
                    let stopped: BTreeSet<&str> = names.iter().copied().collect();
                    self.threads.retain(|thread| !stopped.contains(thread.sidecore().name()));
                    self.watch_cores();
                }
                Verb::StartSidecore => {
                    for spec in names.iter().filter_map(|name| next.sidecore(name)) {
                        let started = SidecoreThread::start(&spec.name, spec.cpu, &self.clock);
                        self.threads.push(
                            started.map_err(|error| AssemblyError::sidecore(&spec.name, error))?,
                        );
                    }
                    self.watch_cores();
                }
                Verb::OpenStore => {
                    for spec in names.iter().filter_map(|name| next.store(name)) {
                        if !self.open_store(spec, next, occasion)? {
                            return Ok(unflushed);
                        }
                    }
                }
                Verb::OpenController => {
                    names.iter().try_for_each(|name| self.open_controller(name, next, occasion))?;
                }
                Verb::RefuseController => {
                    for spec in names.iter().filter_map(|name| next.controller(name)) {
                        let reason = self.refusal(&spec.store, next);
                        self.lists.controllers.set(&spec.name, Progress::Refused(reason));
                    }
                }
                Verb::StartDevice | Verb::RefuseDevice => {
                    let mut writers = Writers::of(&self.lists.all_disks());
                    for device in names.iter().filter_map(|name| next.device(name)) {
                        self.start_device(device, (next, &mut writers), occasion)?;
                    }
                }
            }
        }
        Ok(unflushed)
    }

    /// Flushes stores and closes them. Returns the names of those that may have lost writes.
    fn close_stores(&mut self, names: &[&str]) -> Vec<String> {
        let Lists { remote, mirrors, .. } = &self.lists;
        let mut closed = self.stores.close(names);
        // One that cannot be flushed now is closed without.
        closed.retain(|(name, _)| !self.flushed.contains(name) && self.lists.is_ready(name));
        let unflushed = flush_all(closed, (remote, mirrors));
        // Before the devices of IOhosts are closed, which may be legs.
        mirrors.close(names, KEEPERS_PATIENCE);
        names.iter().for_each(|name| remote.close_store(name));
        unflushed
    }

    /// Starts a link, a client or the sessions with an IOhost.
    fn start_remote(&self, verb: Verb, name: &str, next: &Parts<'_>) -> Result<(), AssemblyError> {
        let (remote, sidecores) = (&self.lists.remote, self.sidecores().collect::<Vec<_>>());
        match (verb, next.client(name), next.iohost(name)) {
            (Verb::StartClient, Some(client), _) => remote.start_client(client),
            (Verb::StartIohost, _, Some(iohost)) => {
                let links = next.links_of(iohost);
                links.map_or(Ok(()), |links| remote.start_iohost(iohost, &links, &sidecores))
            }
            (Verb::StartLink, ..) => {
                next.link(name).map_or(Ok(()), |link| remote.start_link(link, &sidecores))
            }
            _ => Ok(()),
        }
    }

    /// Stops a device, and forgets it. Disconnects its client if that waits for the store.
    pub(crate) fn stop_device(&mut self, name: &str) {
        if let Some(disk) = self.lists.disk(name) {
            disk.stop();
            disk.close();
            self.forget(&disk);
        }
        self.lists.wanted().refused.remove(name);
        self.disconnect(name);
    }

    fn forget(&mut self, disk: &Arc<Disk>) {
        lock(&self.lists.disks).retain(|other| !Arc::ptr_eq(other, disk));
    }

    /// Disconnects the clients of this device that are not served yet: the one that another process
    /// has exported, and those that wait for the IOhost.
    pub(crate) fn disconnect(&mut self, device: &str) {
        drop(self.listening.remove(device));
        let disconnected = self.left.extract_if(.., |left| left.name == device);
        disconnected.for_each(LeftDevice::disconnect);
    }

    fn watch_cores(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        let sidecores: Vec<Sidecore> = self.sidecores().collect();
        match CoreWatch::start(&sidecores, &self.clock) {
            Ok(watch) => self.core_watch = Some(watch),
            Err(error) => tracing::warn!("the sidecores' cores are not watched: {error}"),
        }
    }

    /// Notifies guests and managing hosts of each change of the controller's volumes.
    fn follow_volumes(&self, controller: &ControllerHandle) {
        let (disks, subsystems) =
            (Arc::downgrade(&self.lists.disks), Arc::downgrade(&self.lists.subsystems));
        let name = controller.name().to_owned();
        controller.on_change(move |change| {
            let (Some(disks), Some(subsystems)) = (disks.upgrade(), subsystems.upgrade()) else {
                return;
            };
            let disks = lock(&disks).clone();
            match change {
                VolumeChange::Listed => {}
                VolumeChange::Resized => disks.iter().for_each(|disk| disk.refresh()),
                VolumeChange::Renamed { from, to } => {
                    disks.iter().for_each(|disk| disk.volume_renamed(&name, from, to));
                }
            }
            subsystems.refresh();
        });
    }

    /// The reason for which a store, or a part below the store, was refused.
    fn refusal(&self, store: &str, next: &Parts<'_>) -> String {
        let mut name = Some(store);
        while let Some(store) = name.and_then(|name| next.store(name)) {
            let closed =
                || Some(self.lists.controllers.closed_one(store.kind.controller()?)?.reason);
            if let Some(reason) =
                self.stores.refusal(&store.name).map(str::to_owned).or_else(closed)
            {
                return reason;
            }
            name = store.kind.inner();
        }
        String::new()
    }

    /// Creates a device, or refuses the device if its store was refused.
    fn start_device(
        &mut self,
        device: &DeviceSpec,
        (next, writers): (&Parts<'_>, &mut Writers),
        occasion: Occasion,
    ) -> Result<(), AssemblyError> {
        if device.front_end.switch().is_some() {
            return self.start_port(device, occasion);
        }
        let Some(store) = self.stores.get(&device.store).cloned() else {
            if occasion == Occasion::Addition {
                return Err(self.obstacle(device, next.spec()));
            }
            let reason = self.refusal(&device.store, next);
            self.refuse_device(&device.name, reason);
            return Ok(());
        };
        let disk = self.disk(device, store, next);
        match disk.and_then(|disk| writers.add(&disk).map(|()| disk)) {
            Ok(disk) => {
                let disk = Arc::new(disk);
                lock(&self.lists.disks).push(Arc::clone(&disk));
                // A change of the size before this went to the other devices.
                disk.refresh();
                self.created.push(disk);
            }
            Err(error) if occasion == Occasion::Late => {
                self.refuse_device(&device.name, error.to_string())
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The service of all sockets, which the first device starts.
    fn service(&mut self) -> Result<Arc<Service>, AssemblyError> {
        if let Some(service) = &self.service {
            return Ok(Arc::clone(service));
        }
        let service =
            Service::start(std::num::NonZeroUsize::MIN).map_err(AssemblyError::Threads)?;
        Ok(Arc::clone(self.service.insert(Arc::new(service))))
    }

    fn refuse_device(&mut self, device: &str, reason: String) {
        tracing::error!(device, "not served: {reason}");
        self.lists.wanted().refused.insert(device.to_owned(), reason);
        self.disconnect(device);
    }

    /// The error for the addition of a device whose store is not open.
    pub(crate) fn obstacle(&self, device: &DeviceSpec, next: &Spec) -> AssemblyError {
        let Some(bottom) = bottom(next, &device.store) else { return AssemblyError::Ending };
        match bottom.kind.controller().and_then(|name| self.lists.controllers.closed_one(name)) {
            Some(closed) => AssemblyError::Controller {
                user: format!("store \"{}\"", bottom.name),
                error: OperationError::new(ErrorKind::Conflict, closed.to_string()),
            },
            None => AssemblyError::NoAnswer { name: bottom.name.clone() },
        }
    }

    fn disk(
        &mut self,
        device: &DeviceSpec,
        store: Arc<dyn BlockDevice>,
        next: &Parts<'_>,
    ) -> Result<Disk, AssemblyError> {
        let unknown = || AssemblyError::Unknown {
            user: subject(device),
            kind: "store",
            name: device.store.clone(),
        };
        let kind = next.store(&device.store).ok_or_else(unknown)?.word();
        let bottom = next.bottom(&device.store).ok_or_else(unknown)?.clone();
        let outlives = outlives(&bottom, next);
        let service = self.service()?;
        let sidecores: Vec<Sidecore> = self.sidecores().collect();
        let remote = Arc::clone(&self.lists.remote);
        let parts = |service| self.nvme_parts(device, &bottom, service);
        let below = (kind, next.stages(&device.store), bottom.clone(), outlives);
        Disk::new(device, store, below, &sidecores, (service, remote), parts)
    }

    /// Collects the parts of an NVMe function besides its store. A read-only physical function
    /// manages no other functions.
    fn nvme_parts(
        &mut self,
        device: &DeviceSpec,
        bottom: &StoreSpec,
        service: Arc<Service>,
    ) -> Result<NvmeParts, AssemblyError> {
        let threads = match &self.nvme {
            Some(threads) => Arc::clone(threads),
            None => Arc::clone(self.nvme.insert(Arc::new(NvmeThreads::start(service)?))),
        };
        let controller = bottom.kind.controller().and_then(|name| self.lists.controllers.get(name));
        let owner =
            controller.as_ref().map(|controller| (controller.name(), controller.store_uuid()));
        let ids = NamespaceIds::of_store(bottom.kind.word(), &bottom.name, owner);
        let mut parts = NvmeParts { threads, manager: None, volume: None, ids };
        let Some(controller) = controller else { return Ok(parts) };
        match &bottom.kind {
            StoreKind::PhysicalFunction { .. } if !device.read_only => {
                let left = self.left.iter().find(|left| left.name == device.name);
                let numbers = left.and_then(|left| left.subsystem().numbers);
                let volumes = Volumes::new(&controller, &self.this, &self.lists.disks);
                let managed = self.lists.subsystems.of(controller.name(), volumes, numbers);
                parts.manager = Some(managed.map_err(AssemblyError::Threads)?);
            }
            StoreKind::Volume(volume) => {
                let refused = |error| AssemblyError::Controller { user: subject(device), error };
                let report = controller.volume(&volume.volume).map_err(refused)?;
                (parts.volume, parts.ids) = (Some(report.id), controller.namespace_ids(&report));
            }
            _ => {}
        }
        Ok(parts)
    }

    /// Carries out the actions that are possible now for the wanted specification, as
    /// [`come_to`](Self::come_to).
    pub(crate) fn come_to_wanted(&mut self) -> Vec<Arc<Disk>> {
        let next = self.lists.wanted().spec.clone();
        // Each failure refuses its own part on this occasion.
        self.come_to(&next, Occasion::Late).unwrap_or_default()
    }

    /// Drops the users of stores, controllers and sidecores, so that the plan can stop those. The
    /// devices in `stuck` keep theirs.
    pub(crate) fn close_devices(&mut self, stuck: &[Arc<Disk>]) {
        self.listening.clear();
        let is_stuck = |disk: &Arc<Disk>| stuck.iter().any(|stuck| Arc::ptr_eq(stuck, disk));
        self.lists.all_disks().iter().filter(|disk| !is_stuck(disk)).for_each(|disk| disk.close());
        if stuck.is_empty() {
            self.nvme = None;
            self.service = None;
        }
    }

    /// Whether writes to a device's store, or to the store of its controller, may be lost.
    pub(crate) fn has_lost_writes(&self, bottom: &StoreSpec, unflushed: &[String]) -> bool {
        let Some(controller) = bottom.kind.controller() else {
            return unflushed.contains(&bottom.name);
        };
        let wanted = self.lists.wanted();
        self.lists.controllers.get(controller).is_none_or(|controller| {
            let below = crate::plan::bottom(&wanted.spec, controller.store());
            controller.has_lost_writes()
                || below.is_none_or(|below| unflushed.contains(&below.name))
        })
    }
}

/// Whether the contents of a store survive this process: not those of a RAM store.
fn outlives(bottom: &StoreSpec, next: &Parts<'_>) -> bool {
    let controller = bottom.kind.controller().and_then(|name| next.controller(name));
    let below = controller.and_then(|controller| next.bottom(&controller.store));
    !matches!(below.unwrap_or(bottom).kind, StoreKind::Ram { .. })
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
