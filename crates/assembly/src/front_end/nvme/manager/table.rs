//! What a subsystem has, and the numbers that it has it under.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sidecore_nvme::{AllocatedNamespace, ManageError, SecondaryController};

use super::super::names;
use crate::controllers::ControllerHandle;
use crate::disk::Disk;
use crate::operation::OperationError;
use crate::report::VolumeReport;

/// The first number of a volume: 1 is the whole store.
const NUMBER_MIN: u32 = 2;
/// The highest: one for each volume that there can be.
pub(super) const NUMBER_MAX: u32 = 65_537;
/// CNTLID: those from FFF0h on are reserved (NVMe base 2.0, figure 275).
const CONTROLLER_MAX: u16 = 0xFFEF;
/// Most entries of a secondary controller list (figure 282).
const SECONDARY_MAX: usize = 127;

/// The name that a volume is made with which comes to be namespace `number`.
fn name_of(number: u32) -> String {
    format!("ns-{number}")
}

/// The numbers that a physical function's host knows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Numbers {
    /// Of volumes, by the controller's own.
    namespaces: HashMap<u64, u32>,
    /// Of devices, by their names.
    controllers: HashMap<String, u16>,
}

#[derive(Clone, Default)]
pub(super) struct Table {
    volumes: Vec<Volume>,
    /// The numbers of volumes, by the controller's own.
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
    /// Looks at everything again.
    pub(super) fn update(&mut self, controller: &ControllerHandle, disks: &[Arc<Disk>]) -> Result<(), OperationError> {
        let volumes = controller.volumes()?;
        let report = controller.report();
        self.block_bytes = controller.logical_block_bytes();
        (self.total_bytes, self.free_bytes) = (report.space.total_bytes, report.space.free_bytes);
        self.number(volumes.iter().map(|volume| (volume.id, volume.name.as_str())));
        let attached = self.list_controllers(controller.name(), disks);
        let volume = |report: VolumeReport| {
            let namespace = AllocatedNamespace {
                id: *self.numbers.get(&report.id)?,
                capacity_bytes: report.size_bytes,
                block_bytes: self.block_bytes,
                nguid: names::volume_nguid(&report),
                read_only: report.read_only,
                controllers: attached.get(&report.name).cloned().unwrap_or_default(),
            };
            Some(Volume { id: report.id, name: report.name, namespace })
        };
        self.volumes = volumes.into_iter().filter_map(volume).collect();
        self.volumes.sort_by_key(|volume| volume.namespace.id);
        Ok(())
    }

    /// The numbers that are known.
    pub(super) fn known_numbers(&self) -> Numbers {
        Numbers { namespaces: self.numbers.clone(), controllers: self.controllers.clone() }
    }

    /// Goes on with numbers that are known already; nothing has a number yet.
    pub(super) fn take_over(&mut self, numbers: Numbers) {
        let Numbers { namespaces, controllers } = numbers;
        // What is wrong with these is put right as soon as volumes are numbered.
        self.numbers = namespaces;
        // These are 1, 2, 3 and so on, in some order.
        let known: BTreeSet<u16> = controllers.values().copied().collect();
        if known.into_iter().map(usize::from).eq(1..=controllers.len()) {
            self.controllers = controllers;
        }
    }

    /// Numbers volumes that have none, and frees the numbers of those that are gone.
    fn number<'a>(&mut self, volumes: impl Iterator<Item = (u64, &'a str)> + Clone) {
        let before = std::mem::take(&mut self.numbers);
        let mut taken = BTreeSet::new();
        let mut take = |number: u32| (NUMBER_MIN..=NUMBER_MAX).contains(&number) && taken.insert(number);
        for (id, _) in volumes.clone() {
            if let Some(number) = before.get(&id).filter(|number| take(**number)) {
                self.numbers.insert(id, *number);
            }
        }
        for (id, name) in volumes.clone().filter(|(id, _)| !before.contains_key(id)) {
            let number = name.strip_prefix("ns-").and_then(|number| number.parse().ok());
            if let Some(number) = number.filter(|number| name_of(*number) == name && take(*number)) {
                self.numbers.insert(id, number);
            }
        }
        let mut next = NUMBER_MIN;
        for (id, _) in volumes {
            let Entry::Vacant(unnumbered) = self.numbers.entry(id) else { continue };
            while next <= NUMBER_MAX && !take(next) {
                next += 1;
            }
            if next <= NUMBER_MAX {
                unnumbered.insert(next);
            }
        }
    }

    /// Lists the functions of a controller's volumes; returns the controllers that each volume is attached to.
    fn list_controllers(&mut self, controller: &str, disks: &[Arc<Disk>]) -> HashMap<String, Vec<u16>> {
        let mut attached: HashMap<String, Vec<u16>> = HashMap::new();
        self.secondary.clear();
        for disk in disks {
            let is_its = disk.configured().kind.volume().is_some_and(|volume| volume.controller == controller);
            let Some(function) = disk.nvme().filter(|_| is_its) else { continue };
            let next = self.controllers.len().saturating_add(1);
            let next = u16::try_from(next).ok().filter(|next| *next <= CONTROLLER_MAX);
            let id = match (self.controllers.get(&disk.spec.name), next) {
                (Some(id), _) => *id,
                (None, Some(next)) => *self.controllers.entry(disk.spec.name.clone()).or_insert(next),
                (None, None) => continue,
            };
            let controller = SecondaryController {
                id,
                online: function.is_online(),
                virtual_function: id,
                queues: 0,
                interrupts: 0,
            };
            self.secondary.push(Secondary { device: disk.spec.name.clone(), controller });
            if let Some(bottom) = disk.bottom()
                && let Some(volume) = bottom.kind.volume()
            {
                attached.entry(volume.volume.clone()).or_default().push(id);
            }
        }
        self.secondary.sort_by_key(|secondary| secondary.controller.id);
        self.secondary.truncate(SECONDARY_MAX);
        attached.values_mut().for_each(|controllers| controllers.sort_unstable());
        attached
    }

    pub(super) fn allocated(&self) -> Vec<AllocatedNamespace> {
        self.volumes.iter().map(|volume| volume.namespace.clone()).collect()
    }

    pub(super) fn secondary_controllers(&self) -> Vec<SecondaryController> {
        self.secondary.iter().map(|secondary| secondary.controller).collect()
    }

    /// All of the store, and what of it volumes can still be given.
    pub(super) fn capacity(&self) -> (u128, u128) {
        (self.total_bytes.into(), self.free_bytes.into())
    }

    pub(super) fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// A name for a new volume, whose number is free.
    pub(super) fn free_name(&self) -> Option<String> {
        let taken: BTreeSet<u32> = self.numbers.values().copied().collect();
        let is_free = |name: &String| self.volumes.iter().all(|volume| volume.name != *name);
        (NUMBER_MIN..=NUMBER_MAX).filter(|number| !taken.contains(number)).map(name_of).find(is_free)
    }

    /// The number of a volume, by the controller's.
    pub(super) fn number_of(&self, id: u64) -> Option<u32> {
        self.volumes.iter().find(|volume| volume.id == id).map(|volume| volume.namespace.id)
    }

    /// A volume's name, and what it is attached to.
    pub(super) fn volume(&self, namespace: u32) -> Result<(String, Vec<u16>), ManageError> {
        let volume = self.volumes.iter().find(|volume| volume.namespace.id == namespace);
        let volume = volume.ok_or(ManageError::NoSuchNamespace)?;
        Ok((volume.name.clone(), volume.namespace.controllers.clone()))
    }

    /// The device that a secondary controller is.
    pub(super) fn device(&self, controller: u16) -> Result<String, ManageError> {
        let secondary = self.secondary.iter().find(|secondary| secondary.controller.id == controller);
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
        assert_eq!(numbers(&mut table, &[(10, "a"), (11, "ns-2"), (12, "b"), (13, "ns-02")]), [3, 2, 4, 5]);
        assert_eq!(numbers(&mut table, &[(11, "ns-2"), (13, "c"), (14, "ns-7"), (15, "d")]), [2, 5, 7, 3]);
        // A name says nothing once a volume has a number, or somebody else has that one.
        assert_eq!(numbers(&mut table, &[(11, "x"), (13, "ns-9"), (16, "ns-2"), (17, "ns-1")]), [2, 5, 3, 4]);
        assert_eq!(numbers(&mut table, &[(18, "ns-65538"), (19, "ns-65537")]), [2, 65_537]);
    }

    #[test]
    fn numbers_of_another_process_are_gone_on_with_as_far_as_they_make_sense() {
        let mut before = Table::default();
        before.number([(10, "a"), (11, "b"), (12, "c")].into_iter());
        before.number([(10, "a"), (12, "c")].into_iter());
        before.controllers = HashMap::from([("x".to_owned(), 2), ("y".to_owned(), 1)]);
        let mut table = Table::default();
        table.take_over(before.known_numbers());
        assert_eq!(numbers(&mut table, &[(12, "c"), (10, "a"), (13, "d")]), [4, 2, 3]);
        assert_eq!(table.controllers["x"], 2);
        for wrong in [[0, 1], [1, 1], [1, 3]] {
            let controllers = ["x", "y"].map(str::to_owned).into_iter().zip(wrong).collect();
            let mut table = Table::default();
            table.take_over(Numbers { namespaces: HashMap::from([(10, 7), (11, 7), (12, 0)]), controllers });
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
