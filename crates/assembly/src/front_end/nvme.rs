//! An NVMe controller over a vfio-user socket.

mod runner;

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};

use sidecore_block::{BlockChannel, BlockDevice, Geometry};
use sidecore_linux::peer_event;
use sidecore_nvme::io::{IoOptions, QueueSet};
use sidecore_nvme::{
    ControllerWorker, Done, FunctionSetup, Manager, Namespace, NvmeFunction, PciFunction,
    QueueHost, Statistics,
};
use sidecore_nvme_subsystem::{FunctionState, NamespaceIds, Subsystem, SubsystemState, identity};
use sidecore_peer::{Disconnect, Service, Socket};
use sidecore_reactor::{CoreContext, IdleMode};
use sidecore_ring::nvme::Doorbells;
use sidecore_sidecore::Sidecore;
use sidecore_vfio_user::PciEndpoint;

use self::runner::Runner;
use super::socket::{DeviceSocket, Place, Watched};
use super::{FrontEnd, LastStart};
use crate::AssemblyError;
use crate::flush::flush_and_wait;
use crate::left::LeftDevice;
use crate::report::QueueCounters;
use crate::spec::{DeviceSpec, NvmeSpec};
use crate::swap::{Line, NotSwapped, Swapped, is_same, swap};

/// A virtual function has one namespace.
const NAMESPACE: u32 = 1;

/// The threads that all NVMe functions share.
pub(crate) struct NvmeThreads {
    service: Arc<Service>,
    worker: ControllerWorker,
}

impl NvmeThreads {
    pub(crate) fn start(service: Arc<Service>) -> Result<Self, AssemblyError> {
        Ok(Self { service, worker: ControllerWorker::start().map_err(AssemblyError::Threads)? })
    }
}

/// The parts of a function besides its store.
pub(crate) struct NvmeParts {
    pub(crate) threads: Arc<NvmeThreads>,
    /// The subsystem of the controller, if the function is a primary controller.
    pub(crate) manager: Option<Arc<Subsystem>>,
    /// The number of the volume that the function serves, if its store is a volume.
    pub(crate) volume: Option<u64>,
    pub(crate) ids: NamespaceIds,
}

/// A function and its queues.
pub(crate) struct Nvme {
    spec: DeviceSpec,
    own: NvmeSpec,
    /// The number of the configured volume, if the function is a virtual one.
    configured: Option<u64>,
    function: Arc<NvmeFunction>,
    queues: Arc<QueueSet>,
    sidecores: Vec<Sidecore>,
    threads: Arc<NvmeThreads>,
    /// The managed subsystem, if the function is a primary controller.
    manager: Option<Arc<Subsystem>>,
    socket: DeviceSocket,
    last_start: Arc<LastStart>,
    /// The present namespace, and the geometry as last announced to the guest.
    served: Arc<Mutex<Served>>,
    /// Locked while the namespace is replaced.
    changing: Mutex<()>,
}

struct Served {
    namespace: Option<Arc<Namespace>>,
    /// The store of the namespace, which may be wrapped there.
    store: Option<Arc<dyn BlockDevice>>,
    geometry: Geometry,
    /// Whether the store was dropped for good.
    is_closed: bool,
    /// Whether the controller can be enabled, as set by the host of the physical function.
    is_online: bool,
    /// The number of the attached volume, if the function is a virtual one.
    volume: Option<u64>,
}

impl Nvme {
    /// Creates a function without a socket; `sidecores` has one for each queue pair.
    pub(crate) fn new(
        (spec, own): (&DeviceSpec, &NvmeSpec),
        store: Arc<dyn BlockDevice>,
        sidecores: Vec<Sidecore>,
        NvmeParts { threads, manager, volume, ids }: NvmeParts,
    ) -> Result<Self, AssemblyError> {
        let failed = |error| AssemblyError::Function { name: spec.name.clone(), error };
        let serial = spec.serial.as_deref().unwrap_or(&spec.name);
        let (namespace, geometry) = namespace((spec, own), Arc::clone(&store), ids)?;
        let doorbells = Arc::new(Doorbells::new(spec.queues).map_err(failed)?);
        let options = IoOptions {
            name: spec.name.clone(),
            queue_pairs: spec.queues,
            vectors: own.interrupts.vectors(),
            namespaces: NAMESPACE,
            idle: spec.idle,
            doorbells: Arc::clone(&doorbells),
            flush: flush_and_wait,
            signal: peer_event,
        };
        let last_start = Arc::new(LastStart::default());
        let runners =
            sidecores.iter().map(|sidecore| Runner::boxed(sidecore, &last_start)).collect();
        // The queues report to the function, which is created with them.
        let function: Arc<OnceLock<Weak<NvmeFunction>>> = Arc::default();
        let reporter = Arc::clone(&function);
        let report = Box::new(move |event| {
            if let Some(function) = reporter.get().and_then(Weak::upgrade) {
                function.report(event);
            }
        });
        let queues = Arc::new(QueueSet::new(options, runners, report).map_err(failed)?);
        let mut identity = identity(&spec.name, &spec.store, serial, manager.is_some());
        if let Some(model) = &own.model {
            identity.model.clone_from(model);
        }
        let setup = FunctionSetup {
            name: spec.name.clone(),
            identity,
            queue_pairs: spec.queues,
            interrupts: own.interrupts,
            doorbells,
            doorbells_are_mapped: spec.idle == IdleMode::Poll,
            host: Arc::clone(&queues) as Arc<dyn QueueHost>,
            statistics: Arc::clone(&queues) as Arc<dyn Statistics>,
            manager: manager.clone().map(|manager| manager as Arc<dyn Manager>),
            namespace: Some(Arc::clone(&namespace)),
            worker: Some(threads.worker.clone()),
            signal: peer_event,
        };
        let made = NvmeFunction::new(setup);
        let _ = function.set(Arc::downgrade(&made));
        let (namespace, store) = (Some(namespace), Some(store));
        let served =
            Served { namespace, store, geometry, is_closed: false, is_online: true, volume };
        Ok(Self {
            spec: spec.clone(),
            own: own.clone(),
            configured: volume,
            function: made,
            queues,
            sidecores,
            threads,
            manager,
            last_start,
            socket: DeviceSocket::default(),
            served: Arc::new(Mutex::new(served)),
            changing: Mutex::new(()),
        })
    }

    fn served(&self) -> MutexGuard<'_, Served> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves this store, which is a volume's, as the namespace. False if the function is closed.
    pub(crate) fn attach(
        &self,
        store: Arc<dyn BlockDevice>,
        volume: u64,
        ids: NamespaceIds,
    ) -> Result<bool, AssemblyError> {
        let (namespace, geometry) = namespace((&self.spec, &self.own), Arc::clone(&store), ids)?;
        let _one = self.change();
        {
            let mut served = self.served();
            if served.is_closed {
                return Ok(false);
            }
            (served.namespace, served.geometry) = (Some(Arc::clone(&namespace)), geometry);
            (served.store, served.volume) = (Some(store), Some(volume));
        }
        self.replace(Some(namespace));
        Ok(true)
    }

    /// Removes the namespace. Returns when no request uses the store.
    pub(crate) fn detach(&self) {
        let _one = self.change();
        self.replace(None);
        let mut served = self.served();
        (served.namespace, served.store, served.volume) = (None, None, None);
        served.geometry.capacity_bytes = 0;
    }

    /// Takes the function online or offline, which resets it, and waits for the requests in flight.
    pub(crate) fn set_online(&self, is_online: bool) {
        let _one = self.change();
        let (reply, done) = mpsc::sync_channel::<()>(1);
        self.function.set_online(is_online, Done::new(move || drop(reply)));
        let _ = done.recv();
        self.served().is_online = is_online;
    }

    /// Whether the function's host manages other functions.
    pub(crate) const fn manages(&self) -> bool {
        self.manager.is_some()
    }

    /// The state that the host of the physical function has set, if the function serves volumes.
    pub(crate) fn state(&self) -> Option<FunctionState> {
        let served = self.served();
        Some(FunctionState {
            configured: self.configured?,
            volume: served.volume,
            is_online: served.is_online,
        })
    }

    /// Whether the controller can be enabled.
    fn is_online(&self) -> bool {
        self.served().is_online
    }

    /// Replaces the namespace, and waits until no request uses the old one.
    fn replace(&self, namespace: Option<Arc<Namespace>>) {
        let (reply, done) = mpsc::sync_channel::<()>(1);
        self.function.set_namespace(namespace, Done::new(move || drop(reply)));
        // The reply is dropped when the replacement is done.
        let _ = done.recv();
    }
}

impl FrontEnd for Nvme {
    fn serve(
        &self,
        socket: &Path,
        place: Place,
        left: Option<LeftDevice>,
    ) -> Result<(), AssemblyError> {
        let endpoint = PciEndpoint(Arc::clone(&self.function) as Arc<dyn PciFunction>);
        let (served, read_only) = (Arc::clone(&self.served), self.spec.read_only);
        let gone = move || {
            let served = served.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(store) = served.store.as_ref().filter(|_| !read_only) {
                store.user_gone();
            }
        };
        let endpoint = Watched { endpoint, gone };
        let service = &self.threads.service;
        self.socket.serve(&self.spec.name, service, endpoint, (socket, place), left)
    }

    fn stop(&self) -> bool {
        self.socket.stop()
    }

    fn hand_over(&self) -> Option<LeftDevice> {
        let left = self.socket.export()?;
        let mut state =
            self.manager.as_ref().map_or_else(SubsystemState::default, |manager| manager.state());
        state.functions.extend(self.state().map(|state| (self.spec.name.clone(), state)));
        LeftDevice::pack(&self.spec.name, left, state)
    }

    fn close(&self) {
        let _one = self.change();
        self.replace(None);
        let mut served = self.served();
        (served.namespace, served.store, served.is_closed) = (None, None, true);
    }

    fn swap_store(
        &self,
        from: &Arc<dyn BlockDevice>,
        to: &Arc<dyn BlockDevice>,
    ) -> Result<Swapped, NotSwapped> {
        let _one = self.change();
        let present = {
            let served = self.served();
            served.namespace.clone().filter(|_| is_same(served.store.as_ref(), from))
        };
        let present = present.ok_or(NotSwapped::Changed)?;
        let store = wrapped(&self.spec, Arc::clone(to));
        let next = Namespace { store: Arc::clone(&store), ..Namespace::clone(&present) };
        let next = Arc::new(next);
        let senders = self.queues.senders();
        let lines: Vec<&dyn Line> = senders.iter().map(|send| send as &dyn Line).collect();
        swap(&lines, &store, || {
            self.queues.adopt_namespace(&next, &senders);
            self.function.adopt_namespace(Arc::clone(&next));
            let mut served = self.served();
            (served.namespace, served.store) = (Some(next), Some(Arc::clone(to)));
            true
        })
    }

    fn refresh(&self) {
        let _one = self.change();
        let changed = {
            let mut served = self.served();
            let Some(namespace) = served.namespace.clone() else { return };
            let capacity_bytes = namespace.store.geometry().capacity_bytes;
            if capacity_bytes == served.geometry.capacity_bytes {
                return;
            }
            served.geometry.capacity_bytes = capacity_bytes;
            namespace
        };
        self.replace(Some(Arc::new(Namespace::clone(&changed))));
    }

    fn geometry(&self) -> Geometry {
        self.served().geometry
    }

    fn nvme(&self) -> Option<&Nvme> {
        Some(self)
    }

    fn queues_on(&self, sidecore: &str) -> usize {
        self.sidecores.iter().filter(|its| its.name() == sidecore).count()
    }

    fn running_count(&self) -> u16 {
        u16::try_from(self.queues.running_count()).unwrap_or(u16::MAX)
    }

    fn is_connected(&self) -> bool {
        self.socket.ask(Socket::is_connected).unwrap_or(false)
    }

    fn disconnect(&self) -> Option<Disconnect> {
        self.socket.last_disconnect(&self.last_start)
    }

    fn broken(&self) -> Option<String> {
        let is_fatal = self.is_online() && self.function.is_fatal();
        is_fatal.then(|| "the controller is in a fatal state, the log says why".to_owned())
    }

    fn is_offline(&self) -> bool {
        !self.is_online()
    }

    fn lost_sidecore(&self) -> Option<String> {
        super::lost(self.sidecores.iter())
    }

    fn queues(&self) -> Vec<QueueCounters> {
        let queue = |id| self.queues.stats(id).map(|stats| QueueCounters::of(id, stats));
        (1..=self.queues.queue_pairs()).filter_map(queue).collect()
    }
}

/// The namespace on a store, and the store's geometry.
fn namespace(
    (spec, own): (&DeviceSpec, &NvmeSpec),
    store: Arc<dyn BlockDevice>,
    NamespaceIds { nguid, uuid }: NamespaceIds,
) -> Result<(Arc<Namespace>, Geometry), AssemblyError> {
    let store = wrapped(spec, store);
    let geometry = store.geometry();
    let refuse = |why| Err(AssemblyError::Device { name: spec.name.clone(), why });
    let block_bytes = own.block_bytes.unwrap_or(geometry.block_bytes);
    if ![512, 4096].contains(&block_bytes) {
        return refuse("an NVMe namespace has blocks of 512 or 4096 bytes; set `block_size`");
    }
    if block_bytes < geometry.block_bytes {
        return refuse(
            "the blocks of its namespace are smaller than those of its store; set `block_size = \
             4096`",
        );
    }
    Ok((Arc::new(Namespace { id: NAMESPACE, store, block_bytes, nguid, uuid }), geometry))
}

/// The store as the function shows it.
fn wrapped(spec: &DeviceSpec, store: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    if spec.read_only { Arc::new(ReadOnly(store)) } else { store }
}

/// A store that reports itself as read-only. The front end refuses writes.
struct ReadOnly(Arc<dyn BlockDevice>);

impl BlockDevice for ReadOnly {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..self.0.geometry() }
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        self.0.open_channel(core, depth)
    }

    fn fallback(&self) -> Option<String> {
        self.0.fallback()
    }
}
