//! The namespaces and secondary controllers of a subsystem, and their numbers.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

use sidecore_nvme::{AllocatedNamespace, ManageError, SecondaryController};

use crate::{Function, Numbers, Store};

/// The first number of a volume: 1 is the whole store.
const NUMBER_MIN: u32 = 2;
/// The highest: one for each volume that there can be.
pub(crate) const NUMBER_MAX: u32 = 65_537;
/// CNTLID: those from FFF0h on are reserved (NVMe base 2.0, figure 275).
const CONTROLLER_MAX: u16 = 0xFFEF;
/// Most entries of a secondary controller list (figure 282).
const SECONDARY_MAX: usize = 127;

/// The name of a new volume that is to be namespace `number`.
fn name_of(number: u32) -> String {
    format!("ns-{number}")
}

#[derive(Clone, Default)]
pub(crate) struct Table {
    volumes: Vec<Volume>,
    /// The numbers of volumes, by the store's.
    numbers: HashMap<u64, u32>,
    secondary: Vec<Secondary>,
    /// The numbers of devices, by their names.
    controllers: HashMap<String, u16>,
    block_bytes: u32,
    total_bytes: u64,
    free_bytes: u64,
}

#[derive(Clone)]
struct Volume {
    id: u64,
    name: String,
    namespace: AllocatedNamespace,
}

#[derive(Clone)]
struct Secondary {
    device: String,
    controller: SecondaryController,
}

impl Table {
    /// Replaces the contents; numbers stay.
    pub(crate) fn update(&mut self, store: Store, functions: Vec<Function>) {
        self.block_bytes = store.block_bytes;
        (self.total_bytes, self.free_bytes) = (store.total_bytes, store.free_bytes);
        self.number(store.volumes.iter().map(|volume| (volume.id, volume.name.as_str())));
        let attached = self.list_controllers(functions);
        let volume = |volume: crate::Volume| {
            let namespace = AllocatedNamespace {
                id: *self.numbers.get(&volume.id)?,
                capacity_bytes: volume.capacity_bytes,
                block_bytes: store.block_bytes,
                nguid: volume.nguid,
                read_only: volume.read_only,
                controllers: attached.get(&volume.id).cloned().unwrap_or_default(),
            };
            Some(Volume { id: volume.id, name: volume.name, namespace })
        };
        self.volumes = store.volumes.into_iter().filter_map(volume).collect();
        self.volumes.sort_by_key(|volume| volume.namespace.id);
    }

    /// The numbers that the host knows.
    pub(crate) fn numbers(&self) -> Numbers {
        Numbers { namespaces: self.numbers.clone(), controllers: self.controllers.clone() }
    }

    /// Takes the numbers that a host knows already, as far as they are valid.
    pub(crate) fn resume(&mut self, numbers: Numbers) {
        let Numbers { namespaces, controllers } = numbers;
        // Invalid ones are replaced as soon as volumes are numbered.
        self.numbers = namespaces;
        // These are 1, 2, 3 and so on, in some order.
        let known: BTreeSet<u16> = controllers.values().copied().collect();
        if known.into_iter().map(usize::from).eq(1..=controllers.len()) {
            self.controllers = controllers;
        }
    }

    /// Numbers the volumes that have no number, and frees the numbers of those that are gone.
    fn number<'a>(&mut self, volumes: impl Iterator<Item = (u64, &'a str)> + Clone) {
        let before = std::mem::take(&mut self.numbers);
        let mut taken = BTreeSet::new();
        let mut take =
            |number: u32| (NUMBER_MIN..=NUMBER_MAX).contains(&number) && taken.insert(number);
        for (id, _) in volumes.clone() {
            if let Some(number) = before.get(&id).filter(|number| take(**number)) {
                self.numbers.insert(id, *number);
            }
        }
        for (id, name) in volumes.clone().filter(|(id, _)| !before.contains_key(id)) {
            let number = name.strip_prefix("ns-").and_then(|number| number.parse().ok());
            if let Some(number) = number.filter(|number| name_of(*number) == name && take(*number))
            {
                self.numbers.insert(id, number);
            }
        }
        let mut free = NUMBER_MIN..=NUMBER_MAX;
        for (id, _) in volumes {
            if let Entry::Vacant(unnumbered) = self.numbers.entry(id)
                && let Some(number) = free.find(|number| take(*number))
            {
                unnumbered.insert(number);
            }
        }
    }

    /// Lists the functions; returns the controllers that each volume is attached to.
    fn list_controllers(&mut self, functions: Vec<Function>) -> HashMap<u64, Vec<u16>> {
        let mut attached: HashMap<u64, Vec<u16>> = HashMap::new();
        self.secondary.clear();
        for Function { device, state } in functions {
            let next = self.controllers.len().saturating_add(1);
            let next = u16::try_from(next).ok().filter(|next| *next <= CONTROLLER_MAX);
            let id = match (self.controllers.get(&device), next) {
                (Some(id), _) => *id,
                (None, Some(next)) => *self.controllers.entry(device.clone()).or_insert(next),
                (None, None) => continue,
            };
            if let Some(volume) = state.volume {
                attached.entry(volume).or_default().push(id);
            }
            let controller = SecondaryController {
                id,
                online: state.is_online,
                virtual_function: id,
                queues: 0,
                interrupts: 0,
            };
            self.secondary.push(Secondary { device, controller });
        }
        self.secondary.sort_by_key(|secondary| secondary.controller.id);
        self.secondary.truncate(SECONDARY_MAX);
        attached.values_mut().for_each(|controllers| controllers.sort_unstable());
        attached
    }

    pub(crate) fn allocated(&self) -> Vec<AllocatedNamespace> {
        self.volumes.iter().map(|volume| volume.namespace.clone()).collect()
    }

    pub(crate) fn secondary_controllers(&self) -> Vec<SecondaryController> {
        self.secondary.iter().map(|secondary| secondary.controller).collect()
    }

    /// The sizes of the store and of its free part.
    pub(crate) fn capacity(&self) -> (u128, u128) {
        (self.total_bytes.into(), self.free_bytes.into())
    }

    pub(crate) fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// A name for a new volume, whose number is free.
    pub(crate) fn free_name(&self) -> Option<String> {
        let taken: BTreeSet<u32> = self.numbers.values().copied().collect();
        let is_free = |name: &String| self.volumes.iter().all(|volume| volume.name != *name);
        (NUMBER_MIN..=NUMBER_MAX)
            .filter(|number| !taken.contains(number))
            .map(name_of)
            .find(is_free)
    }

    /// The number of a volume, by the store's.
    pub(crate) fn number_of(&self, id: u64) -> Option<u32> {
        self.volumes.iter().find(|volume| volume.id == id).map(|volume| volume.namespace.id)
    }

    /// The store's number of a volume, and the controllers that it is attached to.
    pub(crate) fn volume(&self, namespace: u32) -> Result<(u64, Vec<u16>), ManageError> {
        let volume = self.volumes.iter().find(|volume| volume.namespace.id == namespace);
        let volume = volume.ok_or(ManageError::NoSuchNamespace)?;
        Ok((volume.id, volume.namespace.controllers.clone()))
    }

    /// The device of a secondary controller.
    pub(crate) fn device(&self, controller: u16) -> Result<String, ManageError> {
        let secondary =
            self.secondary.iter().find(|secondary| secondary.controller.id == controller);
        secondary.map(|secondary| secondary.device.clone()).ok_or(ManageError::NoSuchController)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(table: &mut Table, volumes: &[(u64, &str)]) -> Vec<u32> {
        table.number(volumes.iter().copied());
        volumes.iter().map(|(id, _)| table.numbers[id]).collect()
    }

    #[test]
    fn volumes_keep_their_numbers_and_free_ones_are_used_again() {
        let mut table = Table::default();
        assert_eq!(
            numbers(&mut table, &[(10, "a"), (11, "ns-2"), (12, "b"), (13, "ns-02")]),
            [3, 2, 4, 5]
        );
        assert_eq!(
            numbers(&mut table, &[(11, "ns-2"), (13, "c"), (14, "ns-7"), (15, "d")]),
            [2, 5, 7, 3]
        );
        // A name does not matter once its volume has a number, or another volume has that number.
        assert_eq!(
            numbers(&mut table, &[(11, "x"), (13, "ns-9"), (16, "ns-2"), (17, "ns-1")]),
            [2, 5, 3, 4]
        );
        assert_eq!(numbers(&mut table, &[(18, "ns-65538"), (19, "ns-65537")]), [2, 65_537]);
    }

    #[test]
    fn valid_numbers_of_another_process_are_resumed() {
        let mut before = Table::default();
        before.number([(10, "a"), (11, "b"), (12, "c")].into_iter());
        before.number([(10, "a"), (12, "c")].into_iter());
        before.controllers = HashMap::from([("x".to_owned(), 2), ("y".to_owned(), 1)]);
        let mut table = Table::default();
        table.resume(before.numbers());
        assert_eq!(numbers(&mut table, &[(12, "c"), (10, "a"), (13, "d")]), [4, 2, 3]);
        assert_eq!(table.controllers["x"], 2);
        for wrong in [[0, 1], [1, 1], [1, 3]] {
            let controllers = ["x", "y"].map(str::to_owned).into_iter().zip(wrong).collect();
            let mut table = Table::default();
            table.resume(Numbers {
                namespaces: HashMap::from([(10, 7), (11, 7), (12, 0)]),
                controllers,
            });
            assert!(table.controllers.is_empty());
            let given = numbers(&mut table, &[(10, "a"), (11, "b"), (12, "c")]);
            assert_eq!(given.iter().copied().collect::<BTreeSet<_>>().len(), 3, "{given:?}");
        }
    }

    #[test]
    fn a_new_volume_gets_a_name_that_is_as_free_as_its_number() {
        let mut table = Table::default();
        table.number([(1, "a"), (2, "b")].into_iter());
        assert_eq!(table.free_name().as_deref(), Some("ns-4"));
        table.number([(2, "b")].into_iter());
        assert_eq!(table.free_name().as_deref(), Some("ns-2"));
    }
}
