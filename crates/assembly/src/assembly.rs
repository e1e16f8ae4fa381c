//! The running graph: started from its spec, changed while it runs, asked how it fares, drained.

mod late;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_linux::Clock;
use sidecore_nvme_subsystem::{FunctionState, NamespaceIds, Subsystems, restore};
use sidecore_peer::{Access, Service};
use sidecore_sidecore::{Sidecore, SidecoreThread};
use sidecore_units::Nanos;

use crate::AssemblyError;
use crate::controllers::{ControllerHandle, Controllers, VolumeChange};
use crate::core_watch::CoreWatch;
use crate::disk::Disk;
use crate::front_end::{NvmeParts, NvmeThreads};
use crate::left::LeftDevice;
use crate::opening::{self, Opening};
use crate::pending::PendingDisk;
use crate::report::{ClosedControllerReport, DeviceReport, SidecoreReport, Stats};
use crate::spec::{DeviceSpec, SidecoreSpec, Spec, StoreKind, StoreSpec};
use crate::stores::Stores;
use crate::volume_service::Volumes;

/// A daemon's sidecores, stores, controllers and devices. Dropping it drains it.
pub struct Assembly {
    clock: Clock,
    started_at: Nanos,
    sidecores: Vec<Sidecore>,
    /// Locked for as long as it takes to look at the list, and by no sidecore.
    disks: Arc<Mutex<Vec<Arc<Disk>>>>,
    controllers: Controllers,
    /// The devices that were there at the start, in their order.
    order: Mutex<Vec<String>>,
    /// Devices whose stores are not open.
    pending: Mutex<Vec<PendingDisk>>,
    /// What the start did not wait for.
    opening: Mutex<Option<Opening>>,
    /// Locked for as long as a change takes: the opening of a store, for instance.
    graph: Arc<Mutex<Graph>>,
    /// The controllers that a physical function's host manages.
    subsystems: Arc<Subsystems>,
}

/// What only changes take.
pub(crate) struct Graph {
    stores: Stores,
    /// Those that controllers own.
    owned: Vec<String>,
    threads: Vec<SidecoreThread>,
    /// Notices when sidecores lose their cores.
    core_watch: Option<CoreWatch>,
    /// Serves the sockets of all devices, once there is one.
    service: Option<Arc<Service>>,
    /// Those of NVMe functions, once there is one.
    nvme: Option<Arc<NvmeThreads>>,
    /// It has been drained, or is about to be: nothing is added any more.
    pub(crate) ends: bool,
}

impl Graph {
    fn service(&mut self) -> Result<Arc<Service>, AssemblyError> {
        if self.service.is_none() {
            self.service = Some(Arc::new(Service::start(NonZeroUsize::MIN).map_err(AssemblyError::Threads)?));
        }
        self.service.clone().ok_or(AssemblyError::Ending)
    }

    /// Closes the stores that no device and no controller leads to.
    pub(crate) fn close_unused(&mut self, disks: &[Arc<Disk>]) {
        let used = disks.iter().filter_map(|disk| disk.leads_to());
        self.stores.close_unused(used.chain(self.owned.clone()));
    }
}

impl Assembly {
    /// Opens the stores and the controllers, starts the sidecores, and serves each device on its socket. A volume that is
    /// damaged keeps no other device from being served: its own is listed with the reason. A store that does not answer
    /// within a few seconds, or has requests in flight of a daemon that was killed, is not waited for any longer: its
    /// devices come later, if [`Assembly::serve_late`] is called.
    ///
    /// # Errors
    /// The first thing that cannot be had; what was started until then is stopped again.
    pub fn start(spec: &Spec) -> Result<Self, AssemblyError> {
        Self::take_over(spec, &mut Vec::new())
    }

    /// The same, and goes on with the VMMs that another process has [left](Assembly::hand_over). One that this is not possible
    /// with is disconnected, and the log says why.
    ///
    /// # Errors
    /// As [`Assembly::start`]. What has not been gone on with by then is still in `left`: all of it, unless a socket cannot be
    /// made.
    pub fn take_over(spec: &Spec, left: &mut Vec<LeftDevice>) -> Result<Self, AssemblyError> {
        let clock = Clock::new();
        let mut stores = Stores::new(&spec.stores);
        let controllers = Controllers::new(&spec.controllers);
        // Stores first: they take longest, and fail most often.
        let opening = late::open_in_time(spec, &mut stores, &controllers)?;
        let mut refused: HashMap<&str, String> = HashMap::new();
        for device in &spec.devices {
            if opening::waits_for(&device.store, &stores, &controllers).is_some() {
                continue;
            }
            match stores.open(&device.store, &subject(device), &controllers) {
                Ok(_) => {}
                Err(error) if error.is_of_a_store() => {
                    refused.insert(&device.name, error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        let mut threads = Vec::new();
        for sidecore in &spec.sidecores {
            let SidecoreSpec { name, cpu } = sidecore;
            let started = SidecoreThread::start(name, *cpu, &clock);
            threads.push(started.map_err(|error| AssemblyError::sidecore(name, error))?);
        }
        let sidecores: Vec<Sidecore> = threads.iter().map(|thread| thread.sidecore().clone()).collect();
        let core_watch = CoreWatch::start(&sidecores, &clock);
        if let Err(error) = &core_watch {
            tracing::warn!("the sidecores' cores are not watched: {error}");
        }
        let started_at = clock.now();
        let owned = spec.controllers.iter().map(|controller| controller.store.clone()).collect();
        let graph = Arc::new(Mutex::new(Graph {
            stores,
            owned,
            threads,
            core_watch: core_watch.ok(),
            service: None,
            nvme: None,
            ends: false,
        }));
        let disks = Arc::default();
        let subsystems = Arc::new(Subsystems::default());
        let (pending, late) = (Mutex::default(), Mutex::default());
        let order = Mutex::new(spec.devices.iter().map(|device| device.name.clone()).collect());
        let assembly =
            Self { clock, started_at, sidecores, disks, controllers, order, pending, opening: late, graph, subsystems };
        assembly.controllers().iter().for_each(|controller| assembly.tell_disks_of_changes(controller));
        {
            let mut graph = assembly.graph();
            for device in &spec.devices {
                assembly.is_not_pending(device)?;
                if opening::waits_for(&device.store, &graph.stores, &assembly.controllers).is_some() {
                    assembly.postpone(device, &graph, &opening, left);
                    continue;
                }
                let disk = match refused.remove(device.name.as_str()) {
                    Some(reason) => assembly.refused_disk(device, &graph, reason)?,
                    None => assembly.disk(device, &mut graph, left)?,
                };
                assembly.disks().push(Arc::new(disk));
            }
        }
        assembly.restore_functions(&left.iter().flat_map(|left| left.subsystem().functions).collect());
        assembly.subsystems.refresh();
        // Physical functions last: what their hosts have asked for meanwhile may be about the others, whose clients are to be
        // there then.
        let (last, first): (Vec<_>, Vec<_>) = assembly.all_disks().into_iter().partition(|disk| disk.manages());
        for disk in first.into_iter().chain(last) {
            let at = left.iter().position(|left| left.name == disk.spec.name);
            disk.serve(access(&disk.spec)?, at.map(|at| left.remove(at)))?;
        }
        for left in left.drain(..) {
            tracing::warn!(device = left.name, "a VMM was connected to a device that is not configured any more");
            left.disconnect();
        }
        if !opening.is_done() {
            *assembly.opening.lock().unwrap_or_else(PoisonError::into_inner) = Some(opening);
        }
        Ok(assembly)
    }

    /// Serves one more device, on sidecores that are there already; one that names none is served by the sidecore with
    /// the fewest queues. `store`, if given, comes with it: it is forgotten when no device leads to it any more.
    ///
    /// This opens stores and may take a while; reports go on to be answered.
    ///
    /// # Errors
    /// A name or a socket is taken, something that is named is not there or cannot be had, a second device would write
    /// to the same file or volume, or the assembly is coming to its end. Nothing has changed then.
    pub fn add_device(&self, device: &DeviceSpec, store: Option<&StoreSpec>) -> Result<(), AssemblyError> {
        // Before anything is locked: it may take a while.
        let access = access(device)?;
        // Before the graph is locked for the change: a file may not answer.
        let opened = match self.file_below(device, store)? {
            Some(file) => Some((file.name.clone(), opening::open_alone(file)?)),
            None => None,
        };
        let mut graph = self.graph();
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        self.is_not_pending(device)?;
        let mut device = device.clone();
        if device.sidecores.is_empty() {
            device.sidecores.extend(self.least_loaded());
        }
        if let Some(store) = store {
            graph.stores.add(store)?;
        }
        if let Some((name, file)) = opened
            && !graph.stores.is_open(&name)
        {
            graph.stores.put(name, file);
        }
        let added = self.disk(&device, &mut graph, &[]).and_then(|disk| disk.serve(access, None).map(|()| disk));
        match added {
            Ok(disk) => {
                self.disks().push(Arc::new(disk));
                self.subsystems.refresh();
                tracing::info!(device = device.name, socket = %device.socket.display(), "device added");
                Ok(())
            }
            Err(error) => {
                graph.close_unused(&self.all_disks());
                // Its volume may have been made by then.
                self.subsystems.refresh();
                Err(error)
            }
        }
    }

    /// The file that a new device leads to, if it is not open.
    fn file_below(&self, device: &DeviceSpec, store: Option<&StoreSpec>) -> Result<Option<StoreSpec>, AssemblyError> {
        let graph = self.graph();
        if graph.ends {
            return Err(AssemblyError::Ending);
        }
        let bottom = store.or_else(|| graph.stores.bottom(&device.store));
        Ok(bottom.filter(|bottom| opening::is_file(bottom) && !graph.stores.is_open(&bottom.name)).cloned())
    }

    /// Serves a device no longer: its socket is removed, its queues stop when what is in flight is done, and a store
    /// that nothing else leads to is closed, which for one in memory means that its contents are gone.
    ///
    /// This waits for the device's requests; reports go on to be answered.
    ///
    /// # Errors
    /// There is no such device, or somebody else is removing it.
    pub fn remove_device(&self, name: &str) -> Result<(), AssemblyError> {
        let unknown = || AssemblyError::NoDevice { name: name.to_owned() };
        if let Some(pending) = self.remove_pending(name) {
            self.forget_place(name);
            pending.left.into_iter().for_each(LeftDevice::disconnect);
            tracing::info!(device = name, "device removed");
            return Ok(());
        }
        let disk = self.disks().iter().find(|disk| disk.spec.name == name).cloned().ok_or_else(unknown)?;
        if !disk.stop() {
            return Err(unknown());
        }
        disk.close();
        let mut graph = self.graph();
        self.disks().retain(|other| !Arc::ptr_eq(other, &disk));
        self.forget_place(name);
        graph.close_unused(&self.all_disks());
        drop(graph);
        self.subsystems.refresh();
        tracing::info!(device = name, "device removed");
        Ok(())
    }

    /// A device of this name that is added later is listed last.
    fn forget_place(&self, name: &str) {
        self.order.lock().unwrap_or_else(PoisonError::into_inner).retain(|other| other != name);
    }

    fn remove_pending(&self, name: &str) -> Option<PendingDisk> {
        // Not while it is being served.
        let _graph = self.graph();
        let mut pending = self.pending();
        let at = pending.iter().position(|disk| disk.spec.name == name)?;
        Some(pending.remove(at))
    }

    /// Serves the clients that a device turns away because writes that an earlier process answered to them may be missing.
    ///
    /// # Errors
    /// There is no such device, or it misses none.
    pub fn accept_loss(&self, name: &str) -> Result<(), AssemblyError> {
        let disk = self.disks().iter().find(|disk| disk.spec.name == name).cloned();
        let disk = disk.ok_or_else(|| AssemblyError::NoDevice { name: name.to_owned() })?;
        if !disk.accept_loss() {
            return Err(AssemblyError::NothingMissing { name: name.to_owned() });
        }
        tracing::warn!(device = name, "its operator takes the loss of writes that were answered");
        Ok(())
    }

    /// Ends it in order: no more connections, queues stopped when what is in flight is done, controllers' metadata
    /// written, files flushed, sidecores ended. Reports go on to be answered. The second call does nothing.
    pub fn drain(&self) {
        let left = self.end(|disk| {
            disk.stop();
            None
        });
        left.into_iter().for_each(LeftDevice::disconnect);
    }

    /// The same, and hands the VMMs that are connected over to another process, as far as what they see is there after
    /// this one: not if it is in memory. What has been acknowledged is as it is after [`Assembly::drain`].
    #[must_use]
    pub fn hand_over(&self) -> Vec<LeftDevice> {
        self.end(Disk::hand_over)
    }

    fn end(&self, stop: impl Fn(&Disk) -> Option<LeftDevice> + Sync) -> Vec<LeftDevice> {
        let mut left = self.end_graph(stop);
        // An earlier daemon's, not gone on with: the next one may.
        left.extend(self.pending().drain(..).filter_map(|disk| disk.left));
        // What was being done for a physical function may have waited for the graph, and finds that it has ended.
        self.subsystems.end();
        left
    }

    fn end_graph(&self, stop: impl Fn(&Disk) -> Option<LeftDevice> + Sync) -> Vec<LeftDevice> {
        if std::mem::replace(&mut self.graph().ends, true) {
            return Vec::new();
        }
        // Without the graph: what a host has asked for, which its function waits for, may wait for the graph itself. From now
        // on it finds that nothing is to be changed any more.
        let disks = self.all_disks();
        // Side by side, because each waits for its own guest's requests.
        let left: Vec<LeftDevice> = std::thread::scope(|scope| {
            let stop = &stop;
            let threads: Vec<_> = disks.iter().map(|disk| scope.spawn(move || stop(disk))).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
        });
        let mut graph = self.graph();
        disks.iter().for_each(|disk| disk.close());
        graph.nvme = None;
        graph.service = None;
        graph.stores.close_functions();
        self.controllers.shutdown();
        let unflushed = graph.stores.close_all();
        graph.core_watch = None;
        graph.threads.clear();
        let (lost, left): (Vec<_>, Vec<_>) = left.into_iter().partition(|left| {
            let disk = disks.iter().find(|disk| disk.spec.name == left.name);
            disk.is_none_or(|disk| self.has_lost_writes(disk.configured(), &graph, &unflushed))
        });
        for left in lost {
            tracing::error!(device = left.name, "its guest loses the device, what it has written may not be there");
            left.disconnect();
        }
        left
    }

    /// Whether what was written to a store, or to the one below its controller, may be lost.
    fn has_lost_writes(&self, bottom: &StoreSpec, graph: &Graph, unflushed: &[String]) -> bool {
        let Some(controller) = bottom.kind.controller() else { return unflushed.contains(&bottom.name) };
        self.controller(controller).is_none_or(|controller| {
            let below = graph.stores.bottom(controller.store());
            controller.has_lost_writes() || below.is_none_or(|below| unflushed.contains(&below.name))
        })
    }

    /// All counters as of now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let now = self.clock.now();
        let mut devices: Vec<_> = self.all_disks().iter().map(|disk| disk.stats()).collect();
        self.sort(&mut devices, |device| &device.name);
        Stats {
            uptime_ns: now.since(self.started_at).0,
            interval_ns: None,
            sidecores: self.sidecores.iter().map(|sidecore| SidecoreReport::of(sidecore, now)).collect(),
            devices,
        }
    }

    /// The devices as of now.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceReport> {
        let report = |disk: &Arc<Disk>| {
            let mut report = disk.report();
            let controller = report.controller.as_deref().and_then(|name| self.controller(name));
            report.warnings.extend(controller.iter().flat_map(|found| found.warnings(report.volume.as_deref())));
            report
        };
        // A device that is served by now may still be pending for a moment: it is served, then.
        let pending: Vec<DeviceReport> = self.pending().iter().map(PendingDisk::report).collect();
        let mut devices: Vec<DeviceReport> = self.all_disks().iter().map(report).collect();
        let is_new = |device: &DeviceReport| !devices.iter().any(|served| served.name == device.name);
        let pending: Vec<DeviceReport> = pending.into_iter().filter(is_new).collect();
        devices.extend(pending);
        self.sort(&mut devices, |device| &device.name);
        devices
    }

    /// In the order of the configuration, those that were added since last.
    fn sort<T>(&self, devices: &mut [T], name: impl Fn(&T) -> &String) {
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        devices.sort_by_key(|device| order.iter().position(|other| other == name(device)).unwrap_or(usize::MAX));
    }

    /// The controllers that are open.
    #[must_use]
    pub fn controllers(&self) -> Vec<Arc<ControllerHandle>> {
        self.controllers.all()
    }

    /// The controllers that are not open.
    #[must_use]
    pub fn closed_controllers(&self) -> Vec<ClosedControllerReport> {
        self.controllers.closed()
    }

    /// The open controller of this name.
    #[must_use]
    pub fn controller(&self, name: &str) -> Option<Arc<ControllerHandle>> {
        self.controllers.get(name)
    }

    /// That no device which is not served yet has this one's name or socket.
    fn is_not_pending(&self, device: &DeviceSpec) -> Result<(), AssemblyError> {
        let name = device.name.clone();
        for other in self.pending().iter().map(|disk| &disk.spec) {
            if other.name == name {
                return Err(AssemblyError::Duplicate { kind: "device", name });
            }
            if same_path(&other.socket, &device.socket) {
                return Err(AssemblyError::SocketTaken {
                    name,
                    socket: device.socket.clone(),
                    other: other.name.clone(),
                });
            }
        }
        Ok(())
    }

    /// A device's disk, if nothing is in its way. It is not served yet; what was left of it may be among `left`.
    fn disk(&self, device: &DeviceSpec, graph: &mut Graph, left: &[LeftDevice]) -> Result<Disk, AssemblyError> {
        let disks = self.all_disks();
        let name = || device.name.clone();
        if disks.iter().any(|other| other.spec.name == device.name) {
            return Err(AssemblyError::Duplicate { kind: "device", name: name() });
        }
        if let Some(other) = disks.iter().find(|other| same_path(&other.spec.socket, &device.socket)) {
            let (socket, other) = (device.socket.clone(), other.spec.name.clone());
            return Err(AssemblyError::SocketTaken { name: name(), socket, other });
        }
        let store = graph.stores.open(&device.store, &subject(device), &self.controllers)?;
        let unknown = || AssemblyError::Unknown { user: subject(device), kind: "store", name: device.store.clone() };
        let kind = graph.stores.kind(&device.store).ok_or_else(unknown)?;
        let bottom = graph.stores.bottom(&device.store).ok_or_else(unknown)?.clone();
        let outlives = self.outlives(&bottom, graph);
        let service = graph.service()?;
        let parts = |service| self.nvme_parts(device, &bottom, service, graph, left);
        let disk = Disk::new(device, store, (kind, bottom.clone(), outlives), &self.sidecores, service, parts)?;
        let writes_too = |other: &&Arc<Disk>| both_write(disk.writes_to().as_ref(), other.writes_to().as_ref());
        if let Some(other) = disks.iter().find(writes_too) {
            let (store, other) = (device.store.clone(), other.spec.name.clone());
            return Err(AssemblyError::SecondWriter { name: name(), store, other });
        }
        Ok(disk)
    }

    /// A device in the place of one whose store cannot be served.
    fn refused_disk(&self, device: &DeviceSpec, graph: &Graph, reason: String) -> Result<Disk, AssemblyError> {
        if self.all_disks().iter().any(|other| other.spec.name == device.name) {
            return Err(AssemblyError::Duplicate { kind: "device", name: device.name.clone() });
        }
        let unknown = || AssemblyError::Unknown { user: subject(device), kind: "store", name: device.store.clone() };
        let kind = graph.stores.kind(&device.store).ok_or_else(unknown)?;
        let bottom = graph.stores.bottom(&device.store).ok_or_else(unknown)?.clone();
        Ok(Disk::refused(device, (kind, bottom), reason))
    }

    /// Whether what is in a store is there after this process: not if it is in memory.
    fn outlives(&self, bottom: &StoreSpec, graph: &Graph) -> bool {
        let controller = bottom.kind.controller().and_then(|name| self.controller(name));
        let below = controller.and_then(|controller| graph.stores.bottom(controller.store()).cloned());
        !matches!(below.as_ref().unwrap_or(bottom).kind, StoreKind::Ram { .. })
    }

    /// What an NVMe function needs besides its store. A physical function that is only read manages nothing.
    fn nvme_parts(
        &self,
        device: &DeviceSpec,
        bottom: &StoreSpec,
        service: Arc<Service>,
        graph: &mut Graph,
        left: &[LeftDevice],
    ) -> Result<NvmeParts, AssemblyError> {
        let threads = match &graph.nvme {
            Some(threads) => Arc::clone(threads),
            None => Arc::clone(graph.nvme.insert(Arc::new(NvmeThreads::start(service)?))),
        };
        let left = left.iter().find(|left| left.name == device.name);
        let controller = bottom.kind.controller().and_then(|name| self.controller(name));
        let owner = controller.as_ref().map(|controller| (controller.name(), controller.store_uuid()));
        let ids = NamespaceIds::of_store(bottom.kind.word(), &bottom.name, owner);
        let mut parts = NvmeParts { threads, manager: None, volume: None, ids };
        let Some(controller) = controller else { return Ok(parts) };
        match &bottom.kind {
            StoreKind::PhysicalFunction { .. } if !device.read_only => {
                let numbers = left.and_then(|left| left.subsystem().numbers);
                let managed = self.subsystems.of(controller.name(), self.volumes_of(&controller), numbers);
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

    /// Gives NVMe functions the state that they had under another process.
    fn restore_functions(&self, states: &BTreeMap<String, FunctionState>) {
        self.controllers().iter().for_each(|controller| restore(&self.volumes_of(controller), states));
    }

    fn volumes_of(&self, controller: &Arc<ControllerHandle>) -> Volumes {
        Volumes::new(controller, &self.graph, &self.disks)
    }

    /// When a volume has changed, the guests that see it are told, and whoever manages it.
    fn tell_disks_of_changes(&self, controller: &ControllerHandle) {
        let (disks, subsystems) = (Arc::downgrade(&self.disks), Arc::downgrade(&self.subsystems));
        let name = controller.name().to_owned();
        controller.on_change(move |change| {
            let (Some(disks), Some(subsystems)) = (disks.upgrade(), subsystems.upgrade()) else { return };
            let disks = disks.lock().unwrap_or_else(PoisonError::into_inner).clone();
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

    /// The sidecore that the fewest queues were given to, the first of several.
    fn least_loaded(&self) -> Option<String> {
        let disks = self.all_disks();
        let load = |sidecore: &&Sidecore| disks.iter().map(|disk| disk.queues_on(sidecore.name())).sum::<usize>();
        self.sidecores.iter().min_by_key(load).map(|sidecore| sidecore.name().to_owned())
    }

    fn all_disks(&self) -> Vec<Arc<Disk>> {
        self.disks().clone()
    }

    fn disks(&self) -> MutexGuard<'_, Vec<Arc<Disk>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> MutexGuard<'_, Vec<PendingDisk>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn graph(&self) -> MutexGuard<'_, Graph> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Assembly {
    fn drop(&mut self) {
        self.drain();
    }
}

/// Who may connect to a device's socket.
fn access(device: &DeviceSpec) -> Result<Access, AssemblyError> {
    device.access.resolve().map_err(|error| AssemblyError::Account { name: device.name.clone(), error })
}

/// The name of a device in messages.
fn subject(device: &DeviceSpec) -> String {
    format!("device \"{}\"", device.name)
}

/// Whether both are the same file or volume. In memory nothing is lost that the end would not take as well.
pub(crate) fn both_write(one: Option<&StoreSpec>, other: Option<&StoreSpec>) -> bool {
    let (Some(one), Some(other)) = (one, other) else { return false };
    match (&one.kind, &other.kind) {
        (StoreKind::File(_), StoreKind::File(_)) | (StoreKind::HostFile(_), StoreKind::HostFile(_)) => {
            one.name == other.name
        }
        (StoreKind::Volume(one), StoreKind::Volume(other)) => {
            (&one.controller, &one.volume) == (&other.controller, &other.volume)
        }
        _ => false,
    }
}

/// Whether two sockets are one file, as far as their names tell; the kernel tells the rest.
fn same_path(one: &Path, other: &Path) -> bool {
    one.components().eq(other.components())
}
