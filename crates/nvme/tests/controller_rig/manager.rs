//! A manager with two virtual functions, and namespaces of numbers only.

use std::sync::{Mutex, MutexGuard};

use sidecore_nvme::{
    AllocatedNamespace, CreateNamespace, FlexibleResources, ManageError, Manager, Reply, Resource,
    SecondaryController,
};

pub struct FakeManager(Mutex<Books>);

pub struct Books {
    pub namespaces: Vec<AllocatedNamespace>,
    pub controllers: Vec<SecondaryController>,
    /// Whether answers take until [`FakeManager::release`].
    pub holds: bool,
    held: Vec<(Reply, Result<u32, ManageError>)>,
}

impl FakeManager {
    pub fn new() -> Self {
        let controller = |id| SecondaryController {
            id,
            online: true,
            virtual_function: id - 1,
            queues: 8,
            interrupts: 8,
        };
        let controllers = vec![controller(2), controller(3)];
        Self(Mutex::new(Books {
            namespaces: Vec::new(),
            controllers,
            holds: false,
            held: Vec::new(),
        }))
    }

    pub fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap()
    }

    pub fn release(&self) {
        let held = std::mem::take(&mut self.books().held);
        held.into_iter().for_each(|(reply, result)| reply.answer(result));
    }

    fn answer(&self, reply: Reply, act: impl FnOnce(&mut Books) -> Result<u32, ManageError>) {
        let mut books = self.books();
        let result = act(&mut books);
        if books.holds {
            books.held.push((reply, result));
        } else {
            drop(books);
            reply.answer(result);
        }
    }
}

fn find(books: &mut Books, id: u32) -> Result<&mut AllocatedNamespace, ManageError> {
    books
        .namespaces
        .iter_mut()
        .find(|namespace| namespace.id == id)
        .ok_or(ManageError::NoSuchNamespace)
}

impl Manager for FakeManager {
    fn allocated(&self) -> Vec<AllocatedNamespace> {
        self.books().namespaces.clone()
    }

    fn max_namespaces(&self) -> u32 {
        16
    }

    fn capacity(&self) -> (u128, u128) {
        (1 << 30, 1 << 29)
    }

    fn secondary_controllers(&self) -> Vec<SecondaryController> {
        self.books().controllers.clone()
    }

    fn flexible(&self, resource: Resource) -> Option<FlexibleResources> {
        (resource == Resource::Queue).then_some(FlexibleResources {
            total: 128,
            assigned: 16,
            primary_allocated: 0,
            primary_private: 64,
            secondary_max: 64,
            granularity: 1,
        })
    }

    fn create(&self, namespace: CreateNamespace, reply: Reply) {
        self.answer(reply, |books| {
            let id = books.namespaces.last().map_or(2, |last| last.id + 1);
            books.namespaces.push(AllocatedNamespace {
                id,
                capacity_bytes: namespace.capacity_bytes,
                block_bytes: namespace.block_bytes,
                nguid: [id as u8; 16],
                read_only: false,
                controllers: Vec::new(),
            });
            Ok(id)
        });
    }

    fn delete(&self, namespace: Option<u32>, reply: Reply) {
        self.answer(reply, |books| {
            books.namespaces.retain(|candidate| namespace.is_some_and(|id| candidate.id != id));
            Ok(0)
        });
    }

    fn attach(&self, namespace: u32, controllers: Vec<u16>, reply: Reply) {
        self.answer(reply, |books| {
            let namespace = find(books, namespace)?;
            if controllers.iter().any(|id| namespace.controllers.contains(id)) {
                return Err(ManageError::AlreadyAttached);
            }
            namespace.controllers.extend(controllers);
            Ok(0)
        });
    }

    fn detach(&self, namespace: u32, controllers: Vec<u16>, reply: Reply) {
        self.answer(reply, |books| {
            let namespace = find(books, namespace)?;
            if !controllers.iter().all(|id| namespace.controllers.contains(id)) {
                return Err(ManageError::NotAttached);
            }
            namespace.controllers.retain(|id| !controllers.contains(id));
            Ok(0)
        });
    }

    fn set_online(&self, controller: u16, online: bool, reply: Reply) {
        self.answer(reply, |books| {
            let controllers = &mut books.controllers;
            controllers
                .iter_mut()
                .filter(|entry| entry.id == controller)
                .for_each(|entry| entry.online = online);
            Ok(0)
        });
    }

    fn assign(&self, controller: u16, _resource: Resource, count: u16, reply: Reply) {
        self.answer(reply, |books| {
            let controllers = &mut books.controllers;
            controllers
                .iter_mut()
                .filter(|entry| entry.id == controller)
                .for_each(|entry| entry.queues = count);
            Ok(count.into())
        });
    }

    fn allocate(&self, _resource: Resource, _count: u16, reply: Reply) {
        self.answer(reply, |_| Err(ManageError::InvalidCount));
    }
}
