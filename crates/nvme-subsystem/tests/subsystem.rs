//! A subsystem in front of a store in memory.

use std::collections::BTreeMap;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};

use sidecore_nvme::{CreateNamespace, ManageError, Manager, Reply};
use sidecore_nvme_subsystem::{
    Function, FunctionState, Store, Subsystem, Subsystems, Volume, VolumeService, restore,
};

/// A store with its volumes, and functions in front of them.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<(Store, Vec<Function>)>>);

impl Memory {
    /// Volumes by their numbers, and functions with the volumes that they were configured to serve.
    fn new(volumes: &[u64], functions: &[(&str, u64)]) -> Self {
        let function = |&(device, volume): &(&str, u64)| {
            let state = FunctionState { configured: volume, volume: Some(volume), is_online: true };
            Function { device: device.to_owned(), state }
        };
        let volumes = volumes.iter().map(|id| volume(*id, &format!("volume-{id}"))).collect();
        let store = Store { block_bytes: 4096, volumes, ..Store::default() };
        Self(Arc::new(Mutex::new((store, functions.iter().map(function).collect()))))
    }

    fn serves(&self, volume: u64) -> bool {
        self.functions().iter().any(|function| function.state.volume == Some(volume))
    }

    fn change<T>(
        &self,
        device: &str,
        change: impl FnOnce(&mut FunctionState) -> Result<T, ManageError>,
    ) -> Result<T, ManageError> {
        let functions = &mut self.0.lock().unwrap().1;
        let function = functions.iter_mut().find(|function| function.device == device);
        change(&mut function.ok_or(ManageError::NoSuchController)?.state)
    }
}

fn volume(id: u64, name: &str) -> Volume {
    let (name, nguid) = (name.to_owned(), [id as u8; 16]);
    Volume { id, name, capacity_bytes: 1 << 20, nguid, read_only: false, is_served: false }
}

impl VolumeService for Memory {
    fn store(&self) -> Option<Store> {
        let mut store = self.0.lock().unwrap().0.clone();
        store.volumes.iter_mut().for_each(|volume| volume.is_served = self.serves(volume.id));
        Some(store)
    }

    fn functions(&self) -> Vec<Function> {
        self.0.lock().unwrap().1.clone()
    }

    fn create(&self, name: &str, _: u64) -> Result<u64, ManageError> {
        let volumes = &mut self.0.lock().unwrap().0.volumes;
        let id = volumes.iter().map(|volume| volume.id).max().unwrap_or(0) + 1;
        volumes.push(volume(id, name));
        Ok(id)
    }

    fn delete(&self, id: u64) -> Result<(), ManageError> {
        self.0.lock().unwrap().0.volumes.retain(|volume| volume.id != id);
        Ok(())
    }

    fn attach(&self, device: &str, volume: u64) -> Result<(), ManageError> {
        if self.serves(volume) {
            return Err(ManageError::Private);
        }
        self.change(device, |state| match state.volume {
            None => {
                state.volume = Some(volume);
                Ok(())
            }
            Some(_) => Err(ManageError::AttachmentLimit),
        })
    }

    fn detach(&self, device: &str) -> Result<(), ManageError> {
        self.change(device, |state| state.volume.take().map(drop).ok_or(ManageError::NotAttached))
    }

    fn set_online(&self, device: &str, is_online: bool) -> Result<(), ManageError> {
        self.change(device, |state| {
            state.is_online = is_online;
            Ok(())
        })
    }
}

fn answer(request: impl FnOnce(Reply)) -> Result<u32, ManageError> {
    let (sender, receiver) = sync_channel(1);
    request(Reply::new(move |result| sender.send(result).unwrap()));
    receiver.recv().unwrap()
}

fn start(memory: &Memory) -> (Subsystems, Arc<Subsystem>) {
    let subsystems = Subsystems::default();
    let subsystem = subsystems.of("pool", memory.clone(), None).unwrap();
    (subsystems, subsystem)
}

fn attached(subsystem: &Subsystem) -> Vec<(u32, Vec<u16>)> {
    subsystem
        .allocated()
        .into_iter()
        .map(|namespace| (namespace.id, namespace.controllers))
        .collect()
}

#[test]
fn namespaces_are_made_attached_to_one_function_each_and_deleted() {
    let memory = Memory::new(&[7], &[("one", 7), ("two", 8)]);
    memory.detach("two").unwrap();
    let (subsystems, subsystem) = start(&memory);
    assert_eq!(attached(&subsystem), [(2, vec![1])]);
    let made = CreateNamespace { capacity_bytes: 1 << 20, block_bytes: 4096 };
    assert_eq!(answer(|reply| subsystem.create(made, reply)), Ok(3));
    let other_blocks = CreateNamespace { block_bytes: 512, ..made };
    assert_eq!(
        answer(|reply| subsystem.create(other_blocks, reply)),
        Err(ManageError::InvalidFormat)
    );
    let attach = |namespace, controllers: &[u16]| {
        let controllers = controllers.to_vec();
        answer(|reply| subsystem.attach(namespace, controllers, reply))
    };
    assert_eq!(attach(2, &[2]), Err(ManageError::Private));
    assert_eq!(attach(3, &[1, 2]), Err(ManageError::Private));
    assert_eq!(attach(3, &[1]), Err(ManageError::AttachmentLimit));
    assert_eq!(attach(3, &[2]), Ok(0));
    assert_eq!(attach(3, &[2]), Err(ManageError::AlreadyAttached));
    assert_eq!(attached(&subsystem), [(2, vec![1]), (3, vec![2])]);
    assert_eq!(answer(|reply| subsystem.delete(Some(3), reply)), Err(ManageError::Denied));
    assert_eq!(answer(|reply| subsystem.detach(2, vec![1], reply)), Ok(0));
    assert_eq!(answer(|reply| subsystem.delete(None, reply)), Err(ManageError::Denied));
    assert_eq!(attached(&subsystem), [(2, vec![]), (3, vec![2])], "all are deleted or none");
    assert_eq!(answer(|reply| subsystem.detach(3, vec![2], reply)), Ok(0));
    assert_eq!(answer(|reply| subsystem.delete(None, reply)), Ok(0));
    assert!(subsystem.allocated().is_empty());
    assert_eq!(subsystem.secondary_controllers().len(), 2);
    subsystems.end();
    assert_eq!(answer(|reply| subsystem.set_online(1, false, reply)), Err(ManageError::Internal));
}

#[test]
fn functions_get_back_the_volumes_that_they_had_exchanged() {
    let memory = Memory::new(&[1, 2, 3, 4], &[("one", 1), ("two", 2), ("three", 3)]);
    let state = |configured, volume, is_online| FunctionState { configured, volume, is_online };
    let states = BTreeMap::from([
        ("one".to_owned(), state(1, Some(2), true)),
        ("two".to_owned(), state(2, Some(1), false)),
        // Configured to serve another volume by now.
        ("three".to_owned(), state(4, None, false)),
        ("gone".to_owned(), state(4, Some(3), false)),
    ]);
    restore(&memory, &states);
    let restored: Vec<_> = memory.functions().into_iter().map(|function| function.state).collect();
    let restored: Vec<_> = restored.iter().map(|state| (state.volume, state.is_online)).collect();
    assert_eq!(restored, [(Some(2), true), (Some(1), false), (Some(3), false)]);
}

#[test]
fn numbers_pass_to_the_next_process() {
    let memory = Memory::new(&[1, 2], &[("one", 1), ("two", 2)]);
    let (before, subsystem) = start(&memory);
    assert_eq!(answer(|reply| subsystem.detach(2, vec![1], reply)), Ok(0));
    assert_eq!(answer(|reply| subsystem.delete(Some(2), reply)), Ok(0));
    let state = subsystem.state();
    assert_eq!(state.functions["one"].volume, None);
    before.end();
    let subsystem = Subsystems::default().of("pool", memory, state.numbers).unwrap();
    assert_eq!(attached(&subsystem), [(3, vec![2])]);
}
