//! A controller's NVM subsystem, as its physical function's host sees and manages it.
//!
//! Namespace 1 of the physical function is the whole store. The allocated namespaces are the controller's volumes and
//! snapshots; the secondary controllers are the NVMe functions that were configured in front of its volumes. To the hosts
//! of these, each is alone in a subsystem of its own; the numbers here are the physical function's:
//!
//! - A namespace's number is 2 or more. Volume `ns-N` has the number N if nobody else has it; others have the lowest that
//!   are free, in the order in which they were made. A number stays for as long as the volume lives and the daemon runs.
//! - A secondary controller's number (CNTLID) is 1 or more. It stays with the device's name for as long as the daemon runs.
//! - A host that is left to the next daemon takes both along ([`Numbers`]).
//!
//! What is told is a table that is made anew after each change, whoever makes it, so that nobody waits for the answer
//! with a function's lock held. What changes something is done one after the other by a thread of the subsystem's own.

mod table;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

use sidecore_nvme::{
    AllocatedNamespace, CreateNamespace, FlexibleResources, ManageError, Manager, Reply, Resource, SecondaryController,
};

pub(crate) use self::table::Numbers;
use self::table::Table;
use super::Nvme;
use super::attachment::{Devices, lock, refusal};
use crate::assembly::Graph;
use crate::controllers::ControllerHandle;
use crate::disk::Disk;
use crate::left::{Known, Standing};
use crate::spec::VOLUME_MAX_BYTES;

/// The subsystems of an assembly.
pub(crate) struct Subsystems {
    devices: Devices,
    /// Those that have a physical function, or had one, by their controllers' names.
    managed: Mutex<HashMap<String, Arc<Subsystem>>>,
}

impl Subsystems {
    pub(crate) fn new(graph: &Arc<Mutex<Graph>>, disks: &Arc<Mutex<Vec<Arc<Disk>>>>) -> Self {
        Self { devices: Devices::new(graph, disks), managed: Mutex::default() }
    }

    /// The manager of a controller's subsystem, whose thread is started if there is none yet; with the numbers that a host
    /// knows from another process, if there are any.
    pub(crate) fn of(
        &self,
        controller: &Arc<ControllerHandle>,
        numbers: Option<Numbers>,
    ) -> io::Result<Arc<Subsystem>> {
        let mut managed = lock(&self.managed);
        let known = managed.get(controller.name()).cloned();
        let is_new = known.is_none();
        let subsystem = known.map_or_else(|| Subsystem::start(controller, self.devices.clone()), Ok)?;
        // The hosts of two physical functions know the same numbers. Nobody knows those that were counted anew for the first
        // of the two, if nothing was left of that one: nobody is connected yet.
        let is_told = numbers.is_some();
        if let Some(numbers) = numbers {
            lock(&subsystem.table).take_over(numbers);
        }
        if is_new || is_told {
            subsystem.refresh();
        }
        managed.insert(controller.name().to_owned(), Arc::clone(&subsystem));
        Ok(subsystem)
    }

    /// Gives functions what they were given under another process; nobody is connected to them yet. A function that is
    /// configured to serve something else by now does so.
    pub(crate) fn stand(&self, standings: &BTreeMap<String, Standing>, controllers: &[Arc<ControllerHandle>]) {
        let refused =
            |device: &str, error: ManageError| tracing::warn!(device, %error, "it serves what it was configured to");
        let mut moved = Vec::new();
        for disk in self.devices.all() {
            let device = &disk.spec.name;
            let (Some(was), Some(is)) = (standings.get(device), disk.nvme().and_then(Nvme::standing)) else { continue };
            if was.configured == is.configured && was.volume != is.volume {
                match self.devices.detach(device) {
                    Ok(()) => moved.push((disk.clone(), was.volume)),
                    Err(error) => refused(device, error),
                }
            }
        }
        // When all have let go of what they are not to have.
        for (disk, volume) in moved {
            let controller = disk.configured().kind.controller();
            let controller = controllers.iter().find(|its| Some(its.name()) == controller);
            let named = controller.zip(volume).and_then(|(controller, id)| Some((controller, controller.name_of(id)?)));
            if let Some((controller, volume)) = named
                && let Err(error) = self.devices.attach(&disk.spec.name, controller, &volume)
            {
                refused(&disk.spec.name, error);
            }
        }
        for (device, _) in standings.iter().filter(|(_, was)| !was.is_online) {
            if let Err(error) = self.devices.set_online(device, false) {
                refused(device, error);
            }
        }
    }

    /// Something has changed: volumes, or devices.
    pub(crate) fn refresh(&self) {
        let managed: Vec<_> = lock(&self.managed).values().cloned().collect();
        managed.iter().for_each(|subsystem| subsystem.refresh());
    }

    /// Ends the threads, when what they are about is done.
    pub(crate) fn end(&self) {
        let managed: Vec<_> = lock(&self.managed).values().cloned().collect();
        managed.iter().for_each(|subsystem| subsystem.end());
    }
}

/// How many changes may wait for the thread. A host that resets its controller forgets those that it has asked for, and could
/// ask for more and more.
const TASKS_MAX: usize = 256;

type Task = Box<dyn FnOnce(&Subsystem) + Send>;

/// One controller's.
pub(crate) struct Subsystem {
    controller: Weak<ControllerHandle>,
    devices: Devices,
    /// Locked to look at it, or to put another one in its place.
    table: Mutex<Table>,
    /// Locked for as long as it takes to make another table.
    refreshing: Mutex<()>,
    thread: Mutex<Option<Thread>>,
}

struct Thread {
    tasks: SyncSender<Task>,
    handle: JoinHandle<()>,
}

impl Subsystem {
    fn start(controller: &Arc<ControllerHandle>, devices: Devices) -> io::Result<Arc<Self>> {
        let subsystem = Arc::new(Self {
            controller: Arc::downgrade(controller),
            devices,
            table: Mutex::default(),
            refreshing: Mutex::default(),
            thread: Mutex::default(),
        });
        let (tasks, asked) = sync_channel::<Task>(TASKS_MAX);
        let this = Arc::downgrade(&subsystem);
        let name = format!("pf-{}", controller.name());
        let handle = std::thread::Builder::new().name(name).spawn(move || {
            for task in asked {
                // Whoever waits for what is dropped here is told so.
                let Some(subsystem) = this.upgrade() else { return };
                task(&subsystem);
            }
        })?;
        *lock(&subsystem.thread) = Some(Thread { tasks, handle });
        Ok(subsystem)
    }

    /// What its host knows: numbers, and what it has made of the functions.
    pub(super) fn known(&self) -> Known {
        let numbers = Some(lock(&self.table).known_numbers());
        let Some(controller) = self.controller.upgrade() else { return Known::default() };
        let standing = |disk: Arc<Disk>| {
            let is_its = disk.configured().kind.controller() == Some(controller.name());
            Some((disk.spec.name.clone(), disk.nvme().filter(|_| is_its)?.standing()?))
        };
        Known { numbers, standings: self.devices.all().into_iter().filter_map(standing).collect() }
    }

    fn end(&self) {
        let thread = lock(&self.thread).take();
        if let Some(Thread { tasks, handle }) = thread {
            drop(tasks);
            let _ = handle.join();
        }
    }

    /// Has the thread do something, and answer.
    fn ask(&self, reply: Reply, act: impl FnOnce(&Self) -> Result<u32, ManageError> + Send + 'static) {
        let task: Task = Box::new(move |subsystem| {
            let result = act(subsystem);
            subsystem.refresh();
            reply.answer(result);
        });
        // If it has ended, or has too much to do, the reply is dropped, which answers it as well.
        let _ = lock(&self.thread).as_ref().map(|thread| thread.tasks.try_send(task));
    }

    /// Makes the table anew. Waits for the controller.
    fn refresh(&self) {
        let _one = lock(&self.refreshing);
        let Some(controller) = self.controller.upgrade() else { return };
        let mut table = lock(&self.table).clone();
        match table.update(&controller, &self.devices.all()) {
            Ok(()) => *lock(&self.table) = table,
            Err(error) => tracing::warn!(controller = controller.name(), %error, "its volumes cannot be listed"),
        }
    }

    fn controller(&self) -> Result<Arc<ControllerHandle>, ManageError> {
        self.controller.upgrade().ok_or(ManageError::Denied)
    }

    fn create_volume(&self, capacity_bytes: u64) -> Result<u32, ManageError> {
        let name = lock(&self.table).free_name().ok_or(ManageError::NoIdLeft)?;
        let made = self.controller()?.create_volume(&name, capacity_bytes, None).map_err(|error| refusal(&error))?;
        lock(&self.table).number_of(made.id).ok_or(ManageError::NoIdLeft)
    }

    /// Deletes a volume that no function serves. The controller itself refuses if some other device does.
    fn delete_volume(&self, namespace: u32) -> Result<(), ManageError> {
        let (name, controllers) = lock(&self.table).volume(namespace)?;
        if !controllers.is_empty() {
            return Err(ManageError::Denied);
        }
        self.controller()?.delete_volume(&name).map_err(|error| refusal(&error))
    }

    /// All or none, as far as that can be known beforehand.
    fn delete_all(&self) -> Result<(), ManageError> {
        let controller = self.controller()?;
        let is_served = |disk: &Arc<Disk>| {
            let bottom = disk.bottom();
            let volume = bottom.as_ref().and_then(|bottom| bottom.kind.volume());
            volume.is_some_and(|volume| volume.controller == controller.name())
        };
        if self.devices.all().iter().any(is_served) {
            return Err(ManageError::Denied);
        }
        let all: Vec<u32> = lock(&self.table).allocated().iter().map(|namespace| namespace.id).collect();
        all.into_iter().try_for_each(|namespace| self.delete_volume(namespace))
    }

    fn attach_volume(&self, namespace: u32, controllers: &[u16]) -> Result<(), ManageError> {
        let (volume, attached) = lock(&self.table).volume(namespace)?;
        // A namespace is one function's alone: nothing else would keep two hosts from ruining each other's filesystem.
        let [controller] = controllers else { return Err(ManageError::Private) };
        if attached.contains(controller) {
            return Err(ManageError::AlreadyAttached);
        }
        if !attached.is_empty() {
            return Err(ManageError::Private);
        }
        let device = lock(&self.table).device(*controller)?;
        self.devices.attach(&device, &*self.controller()?, &volume)
    }

    fn detach_volume(&self, namespace: u32, controllers: &[u16]) -> Result<(), ManageError> {
        let (_, attached) = lock(&self.table).volume(namespace)?;
        if controllers.iter().any(|controller| !attached.contains(controller)) {
            return Err(ManageError::NotAttached);
        }
        controllers.iter().try_for_each(|controller| {
            let device = lock(&self.table).device(*controller)?;
            self.devices.detach(&device)
        })
    }
}

impl Manager for Subsystem {
    fn allocated(&self) -> Vec<AllocatedNamespace> {
        lock(&self.table).allocated()
    }

    fn max_namespaces(&self) -> u32 {
        table::NUMBER_MAX
    }

    fn capacity(&self) -> (u128, u128) {
        lock(&self.table).capacity()
    }

    fn secondary_controllers(&self) -> Vec<SecondaryController> {
        lock(&self.table).secondary_controllers()
    }

    /// A function has the queues and vectors that it was configured with.
    fn flexible(&self, _: Resource) -> Option<FlexibleResources> {
        None
    }

    fn create(&self, namespace: CreateNamespace, reply: Reply) {
        let CreateNamespace { capacity_bytes, block_bytes } = namespace;
        if block_bytes != lock(&self.table).block_bytes() {
            return reply.fail(ManageError::InvalidFormat);
        }
        if capacity_bytes > VOLUME_MAX_BYTES {
            return reply.fail(ManageError::NoSpace);
        }
        self.ask(reply, move |subsystem| subsystem.create_volume(capacity_bytes));
    }

    fn delete(&self, namespace: Option<u32>, reply: Reply) {
        self.ask(reply, move |subsystem| {
            match namespace {
                Some(namespace) => subsystem.delete_volume(namespace),
                None => subsystem.delete_all(),
            }
            .map(|()| 0)
        });
    }

    fn attach(&self, namespace: u32, controllers: Vec<u16>, reply: Reply) {
        self.ask(reply, move |subsystem| subsystem.attach_volume(namespace, &controllers).map(|()| 0));
    }

    fn detach(&self, namespace: u32, controllers: Vec<u16>, reply: Reply) {
        self.ask(reply, move |subsystem| subsystem.detach_volume(namespace, &controllers).map(|()| 0));
    }

    fn set_online(&self, controller: u16, online: bool, reply: Reply) {
        self.ask(reply, move |subsystem| {
            let device = lock(&subsystem.table).device(controller)?;
            subsystem.devices.set_online(&device, online).map(|()| 0)
        });
    }

    fn assign(&self, _: u16, _: Resource, _: u16, reply: Reply) {
        reply.fail(ManageError::InvalidResource);
    }

    fn allocate(&self, _: Resource, _: u16, reply: Reply) {
        reply.fail(ManageError::InvalidResource);
    }
}
