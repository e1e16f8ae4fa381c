//! The stores of an assembly: opened by their specifications, flushed and closed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, NullStore, RamStore};
use sidecore_controller::HostFunction;
use sidecore_linux::{FileStore, HostFile};

use crate::AssemblyError;
use crate::controllers::Controllers;
use crate::host::MappedFile;
use crate::machine;
use crate::plan::{Part, Phase, has_far_bottom};
use crate::spec::{FileOptions, HostFileOptions, StoreKind, StoreSpec};

/// A part that is being opened, or the result.
pub(crate) enum Progress<T> {
    Opening,
    /// With the reason.
    Refused(String),
    Open(T),
}

impl<T> Progress<T> {
    pub(crate) fn phase(&self) -> Phase {
        match self {
            Self::Opening => Phase::Opening,
            Self::Refused(_) => Phase::Refused,
            Self::Open(_) => Phase::Open,
        }
    }
}

/// The stores that were opened or are to be.
#[derive(Default)]
pub(crate) struct Stores(HashMap<String, (StoreSpec, Progress<Arc<dyn BlockDevice>>)>);

impl Stores {
    /// The specification and phase of each.
    pub(crate) fn parts(&self) -> BTreeMap<String, Part<StoreSpec>> {
        let part =
            |spec: &StoreSpec, phase| (spec.name.clone(), Part { spec: spec.clone(), phase });
        self.0.values().map(|(spec, progress)| part(spec, progress.phase())).collect()
    }

    /// The store of this name, if it is open.
    pub(crate) fn get(&self, name: &str) -> Option<&Arc<dyn BlockDevice>> {
        match self.0.get(name) {
            Some((_, Progress::Open(store))) => Some(store),
            _ => None,
        }
    }

    /// The open stores that are devices of IOhosts, by their names.
    pub(crate) fn remote(&self) -> impl Iterator<Item = (String, Arc<dyn BlockDevice>)> {
        self.0.values().filter_map(|(spec, progress)| match progress {
            Progress::Open(store) if spec.kind.remote().is_some() => {
                Some((spec.name.clone(), Arc::clone(store)))
            }
            _ => None,
        })
    }

    /// The reason for which a store was refused.
    pub(crate) fn refusal(&self, name: &str) -> Option<&str> {
        match self.0.get(name) {
            Some((_, Progress::Refused(reason))) => Some(reason),
            _ => None,
        }
    }

    pub(crate) fn set(&mut self, spec: &StoreSpec, progress: Progress<Arc<dyn BlockDevice>>) {
        if let Progress::Refused(reason) = &progress {
            tracing::error!(store = spec.name, "not opened: {reason}");
        }
        self.0.insert(spec.name.clone(), (spec.clone(), progress));
    }

    /// Whether an attempt to open this store has not ended.
    pub(crate) fn is_opening(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some((_, Progress::Opening)))
    }

    /// Ends an attempt to open a store. An attempt that is out of date, because the store was
    /// closed or replaced meanwhile, changes nothing.
    pub(crate) fn answered(
        &mut self,
        spec: &StoreSpec,
        opened: Result<Arc<dyn BlockDevice>, String>,
    ) {
        if self
            .0
            .get(&spec.name)
            .is_some_and(|(of, progress)| of == spec && progress.phase() == Phase::Opening)
        {
            self.set(spec, opened.map_or_else(Progress::Refused, Progress::Open));
        }
    }

    /// Lets go of stores. Returns those that may still have writes in a cache, for their last
    /// flush.
    pub(crate) fn close(&mut self, names: &[&str]) -> Vec<Unflushed> {
        let closed = names.iter().filter_map(|name| self.0.remove(*name));
        closed.filter_map(|(spec, progress)| unflushed(&spec, &progress)).collect()
    }

    /// The stores of these names that may have writes in a cache.
    pub(crate) fn unflushed(&self, names: &[&str]) -> Vec<Unflushed> {
        let stores = names.iter().filter_map(|name| self.0.get(*name));
        stores.filter_map(|(spec, progress)| unflushed(spec, progress)).collect()
    }

    /// Opens a store whose parts below are open.
    pub(crate) fn open(
        &self,
        spec: &StoreSpec,
        controllers: &Controllers,
    ) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        behind(spec, self.bottom(spec, controllers)?)
    }

    /// The bottom of a store whose parts below are open, without the store's stages.
    pub(crate) fn bottom(
        &self,
        spec: &StoreSpec,
        controllers: &Controllers,
    ) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        let StoreSpec { name, kind, .. } = spec;
        let user = format!("store \"{name}\"");
        let inner = |inner: &String| {
            let unknown = || AssemblyError::Unknown {
                user: user.clone(),
                kind: "store",
                name: inner.clone(),
            };
            self.get(inner).cloned().ok_or_else(unknown)
        };
        Ok(match kind {
            StoreKind::Store { store } => inner(store)?,
            StoreKind::Volume(volume) => controllers.open_function(&user, volume)?,
            StoreKind::PhysicalFunction { controller } => {
                controllers.physical_function(&user, controller)?
            }
            StoreKind::Ram { size_bytes, block_bytes } => ram(name, *size_bytes, *block_bytes)?,
            StoreKind::Null { size_bytes, block_bytes } => {
                Arc::new(NullStore::new(Geometry::new(*size_bytes, *block_bytes)))
            }
            StoreKind::File(_)
            | StoreKind::HostFile(_)
            | StoreKind::Remote(_)
            | StoreKind::Mirror(_) => {
                return open_bottom_file(spec);
            }
        })
    }
}

/// A store with its name.
pub(crate) type Unflushed = (String, Arc<dyn BlockDevice>);

fn unflushed(spec: &StoreSpec, progress: &Progress<Arc<dyn BlockDevice>>) -> Option<Unflushed> {
    let Progress::Open(store) = progress else { return None };
    let is_far = has_far_bottom(spec) || spec.kind.mirror().is_some();
    let has_cache = is_far && !store.geometry().read_only;
    has_cache.then(|| (spec.name.clone(), Arc::clone(store)))
}

/// Opens a store whose bottom is a file. Blocks the calling thread: see [`FileStore::open`] and
/// [`HostFile::open`].
pub(crate) fn open_file(spec: &StoreSpec) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    behind(spec, open_bottom_file(spec)?)
}

fn open_bottom_file(spec: &StoreSpec) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    match &spec.kind {
        StoreKind::HostFile(options) => host_file(&spec.name, options),
        StoreKind::File(options) => file(&spec.name, options),
        _ => Err(AssemblyError::Unknown {
            user: "this".to_owned(),
            kind: "file",
            name: spec.name.clone(),
        }),
    }
}

/// A store with its stages in front of its bottom.
pub(crate) fn behind(
    spec: &StoreSpec,
    bottom: Arc<dyn BlockDevice>,
) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    let mut stages = spec.stages.iter().rev();
    let opened = stages.try_fold(bottom, |below, stage| stage.open(&spec.name, below));
    opened.map_err(|error| AssemblyError::Stage { name: spec.name.clone(), error })
}

fn ram(
    name: &str,
    size_bytes: u64,
    block_bytes: u32,
) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    let refused = |error| AssemblyError::Memory { name: name.to_owned(), size_bytes, error };
    let store = RamStore::new(Geometry::new(size_bytes, block_bytes)).map_err(refused)?;
    tracing::info!(store = name, pages = ?store.pages(), "memory is ready");
    Ok(Arc::new(store))
}

fn file(name: &str, options: &FileOptions) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    machine::until_looked_at(&options.path);
    let refused = |error| AssemblyError::File { name: name.to_owned(), error };
    Ok(Arc::new(FileStore::open(options).map_err(refused)?))
}

fn host_file(name: &str, options: &HostFileOptions) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    machine::until_looked_at(&options.path);
    let refused = |error| AssemblyError::HostFile { name: name.to_owned(), error };
    let file = MappedFile::new(HostFile::open(options).map_err(refused)?);
    let function = HostFunction::open(name, Box::new(file), options.read_only);
    Ok(Arc::new(
        function.map_err(|error| AssemblyError::HostFunction { name: name.to_owned(), error })?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn null() -> Arc<dyn BlockDevice> {
        Arc::new(NullStore::new(Geometry::new(1 << 20, 512)))
    }

    #[test]
    fn an_attempt_that_is_out_of_date_changes_nothing() {
        let spec =
            StoreSpec::new("disk", StoreKind::Null { size_bytes: 1 << 20, block_bytes: 512 });
        let other =
            StoreSpec::new("disk", StoreKind::Null { size_bytes: 1 << 20, block_bytes: 4096 });
        let mut stores = Stores::default();
        stores.set(&spec, Progress::Open(null()));
        stores.answered(&spec, Err("in use".to_owned()));
        assert!(stores.get("disk").is_some() && stores.refusal("disk").is_none());
        stores.set(&other, Progress::Opening);
        stores.answered(&spec, Ok(null()));
        assert!(stores.is_opening("disk"));
        stores.answered(&other, Err("in use".to_owned()));
        assert_eq!(stores.refusal("disk"), Some("in use"));
    }
}
