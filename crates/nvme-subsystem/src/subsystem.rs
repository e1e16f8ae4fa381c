//! The manager of one store's subsystem, and the managers of all.

use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use sidecore_nvme::{
    AllocatedNamespace, CreateNamespace, FlexibleResources, ManageError, Manager, Reply, Resource,
    SecondaryController,
};

use crate::table::{self, Table};
use crate::{Numbers, SubsystemState, VolumeService};

/// The subsystems that have, or had, a physical function, by the names of their controllers.
#[derive(Default)]
pub struct Subsystems(Mutex<HashMap<String, Arc<Subsystem>>>);

impl Subsystems {
    /// The subsystem of a controller; it is started, on `service`, if there is none yet. `numbers`
    /// are those that a host knows from another process.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn of(
        &self,
        controller: &str,
        service: impl VolumeService + 'static,
        numbers: Option<Numbers>,
    ) -> io::Result<Arc<Subsystem>> {
        let mut managed = lock(&self.0);
        let known = managed.get(controller).cloned();
        let is_new = known.is_none();
        let subsystem =
            known.map_or_else(|| Subsystem::start(controller, Box::new(service)), Ok)?;
        // The hosts of two physical functions know the same numbers. If the first of the two was
        // started without any, no host was connected to it, and its new numbers are unknown.
        let is_resumed = numbers.is_some();
        if let Some(numbers) = numbers {
            lock(&subsystem.table).resume(numbers);
        }
        if is_new || is_resumed {
            subsystem.refresh();
        }
        managed.insert(controller.to_owned(), Arc::clone(&subsystem));
        Ok(subsystem)
    }

    /// Makes all tables anew: volumes or functions have changed.
    pub fn refresh(&self) {
        self.all().iter().for_each(|subsystem| subsystem.refresh());
    }

    /// Ends the threads when the changes that were requested are done.
    pub fn end(&self) {
        self.all().iter().for_each(|subsystem| subsystem.end());
    }

    fn all(&self) -> Vec<Arc<Subsystem>> {
        lock(&self.0).values().cloned().collect()
    }
}

/// The limit of changes that wait for the thread. A host that resets its controller forgets those
/// that it has requested, and could request more and more.
const TASKS_MAX: usize = 256;

type Task = Box<dyn FnOnce(&Subsystem) + Send>;

/// The manager of the subsystem of one store.
pub struct Subsystem {
    service: Box<dyn VolumeService>,
    /// Locked to read it, or to replace it.
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
    fn start(controller: &str, service: Box<dyn VolumeService>) -> io::Result<Arc<Self>> {
        let subsystem = Arc::new(Self {
            service,
            table: Mutex::default(),
            refreshing: Mutex::default(),
            thread: Mutex::default(),
        });
        let (tasks, requested) = sync_channel::<Task>(TASKS_MAX);
        let this = Arc::downgrade(&subsystem);
        let handle =
            std::thread::Builder::new().name(format!("pf-{controller}")).spawn(move || {
                for task in requested {
                    // A task that is dropped answers its reply.
                    let Some(subsystem) = this.upgrade() else { return };
                    task(&subsystem);
                }
            })?;
        *lock(&subsystem.thread) = Some(Thread { tasks, handle });
        Ok(subsystem)
    }

    /// The state that the host of the physical function relies on.
    #[must_use]
    pub fn state(&self) -> SubsystemState {
        let functions =
            self.service.functions().into_iter().map(|function| (function.device, function.state));
        SubsystemState {
            numbers: Some(lock(&self.table).numbers()),
            functions: functions.collect(),
        }
    }

    fn end(&self) {
        let thread = lock(&self.thread).take();
        if let Some(Thread { tasks, handle }) = thread {
            drop(tasks);
            let _ = handle.join();
        }
    }

    /// Has the thread carry out a change and answer.
    fn request(
        &self,
        reply: Reply,
        change: impl FnOnce(&Self) -> Result<u32, ManageError> + Send + 'static,
    ) {
        let task: Task = Box::new(move |subsystem| {
            let result = change(subsystem);
            subsystem.refresh();
            reply.answer(result);
        });
        // If the thread has ended, or has too many tasks, the reply is dropped, which answers it.
        let _ = lock(&self.thread).as_ref().map(|thread| thread.tasks.try_send(task));
    }

    /// Makes the table anew. Waits for the service.
    fn refresh(&self) {
        let _one = lock(&self.refreshing);
        let Some(store) = self.service.store() else { return };
        let mut table = lock(&self.table).clone();
        table.update(store, self.service.functions());
        *lock(&self.table) = table;
    }

    fn create_volume(&self, capacity_bytes: u64) -> Result<u32, ManageError> {
        let name = lock(&self.table).free_name().ok_or(ManageError::NoIdLeft)?;
        let volume = self.service.create(&name, capacity_bytes)?;
        self.refresh();
        lock(&self.table).number_of(volume).ok_or(ManageError::NoIdLeft)
    }

    /// Deletes a volume that no function serves. The service refuses if another device does.
    fn delete_volume(&self, namespace: u32) -> Result<(), ManageError> {
        let (volume, controllers) = lock(&self.table).volume(namespace)?;
        if !controllers.is_empty() {
            return Err(ManageError::Denied);
        }
        self.service.delete(volume)
    }

    /// Deletes all volumes, or none if any of them is served.
    fn delete_all(&self) -> Result<(), ManageError> {
        let store = self.service.store().ok_or(ManageError::Denied)?;
        if store.volumes.iter().any(|volume| volume.is_served) {
            return Err(ManageError::Denied);
        }
        store.volumes.iter().try_for_each(|volume| self.service.delete(volume.id))
    }

    fn attach_volume(&self, namespace: u32, controllers: &[u16]) -> Result<(), ManageError> {
        let (volume, attached) = lock(&self.table).volume(namespace)?;
        // A namespace belongs to one function: else two hosts could ruin each other's filesystem.
        let [controller] = controllers else { return Err(ManageError::Private) };
        if attached.contains(controller) {
            return Err(ManageError::AlreadyAttached);
        }
        if !attached.is_empty() {
            return Err(ManageError::Private);
        }
        let device = lock(&self.table).device(*controller)?;
        self.service.attach(&device, volume)
    }

    fn detach_volume(&self, namespace: u32, controllers: &[u16]) -> Result<(), ManageError> {
        let (_, attached) = lock(&self.table).volume(namespace)?;
        if controllers.iter().any(|controller| !attached.contains(controller)) {
            return Err(ManageError::NotAttached);
        }
        controllers.iter().try_for_each(|controller| {
            let device = lock(&self.table).device(*controller)?;
            self.service.detach(&device)
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

    /// None: a function has the queues and vectors that it was configured with.
    fn flexible(&self, _: Resource) -> Option<FlexibleResources> {
        None
    }

    fn create(&self, namespace: CreateNamespace, reply: Reply) {
        let CreateNamespace { capacity_bytes, block_bytes } = namespace;
        if block_bytes != lock(&self.table).block_bytes() {
            return reply.fail(ManageError::InvalidFormat);
        }
        self.request(reply, move |subsystem| subsystem.create_volume(capacity_bytes));
    }

    fn delete(&self, namespace: Option<u32>, reply: Reply) {
        self.request(reply, move |subsystem| {
            match namespace {
                Some(namespace) => subsystem.delete_volume(namespace),
                None => subsystem.delete_all(),
            }
            .map(|()| 0)
        });
    }

    fn attach(&self, namespace: u32, controllers: Vec<u16>, reply: Reply) {
        self.request(reply, move |subsystem| {
            subsystem.attach_volume(namespace, &controllers).map(|()| 0)
        });
    }

    fn detach(&self, namespace: u32, controllers: Vec<u16>, reply: Reply) {
        self.request(reply, move |subsystem| {
            subsystem.detach_volume(namespace, &controllers).map(|()| 0)
        });
    }

    fn set_online(&self, controller: u16, online: bool, reply: Reply) {
        self.request(reply, move |subsystem| {
            let device = lock(&subsystem.table).device(controller)?;
            subsystem.service.set_online(&device, online).map(|()| 0)
        });
    }

    fn assign(&self, _: u16, _: Resource, _: u16, reply: Reply) {
        reply.fail(ManageError::InvalidResource);
    }

    fn allocate(&self, _: Resource, _: u16, reply: Reply) {
        reply.fail(ManageError::InvalidResource);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
