//! The files and volumes that devices write to.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::AssemblyError;
use crate::disk::Disk;
use crate::spec::{StoreKind, StoreSpec};

/// The name of contents that a second writer would destroy. Stores in memory have none, because
/// their contents end with the daemon anyway.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Contents {
    /// A file, a remote device or a mirror, by its store.
    Store(String),
    Volume {
        controller: String,
        volume: String,
    },
}

impl Contents {
    fn of(bottom: &StoreSpec) -> Option<Self> {
        match &bottom.kind {
            StoreKind::File(_)
            | StoreKind::HostFile(_)
            | StoreKind::Remote(_)
            | StoreKind::Mirror(_) => Some(Self::Store(bottom.name.clone())),
            StoreKind::Volume(of) => {
                let (controller, volume) = (of.controller.clone(), of.volume.clone());
                Some(Self::Volume { controller, volume })
            }
            _ => None,
        }
    }
}

/// The devices that write, by the files and volumes that they write to. Valid while the graph is
/// locked.
pub(crate) struct Writers(BTreeMap<Contents, String>);

impl Writers {
    pub(crate) fn of(disks: &[Arc<Disk>]) -> Self {
        let writer =
            |disk: &Arc<Disk>| Some((Contents::of(&disk.writes_to()?)?, disk.spec.name.clone()));
        Self(disks.iter().filter_map(writer).collect())
    }

    /// The device that writes to this store, the bottom of another device's.
    pub(crate) fn to(&self, bottom: &StoreSpec) -> Option<&str> {
        self.0.get(&Contents::of(bottom)?).map(String::as_str)
    }

    /// Adds a device.
    ///
    /// # Errors
    /// Another one writes to its file or volume.
    pub(super) fn add(&mut self, disk: &Disk) -> Result<(), AssemblyError> {
        let Some(bottom) = disk.writes_to() else { return Ok(()) };
        if let Some(other) = self.to(&bottom) {
            let (name, store) = (disk.spec.name.clone(), disk.spec.store.clone());
            return Err(AssemblyError::SecondWriter { name, store, other: other.to_owned() });
        }
        self.0.extend(Contents::of(&bottom).map(|contents| (contents, disk.spec.name.clone())));
        Ok(())
    }
}
