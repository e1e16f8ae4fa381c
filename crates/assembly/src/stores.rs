//! Opens stores, those below first, and closes them, those above first, when nothing leads to them any more.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, NullStore, RamStore};
use sidecore_controller::HostFunction;
use sidecore_linux::{FileStore, HostFile};

use crate::AssemblyError;
use crate::controllers::Controllers;
use crate::flush::flush;
use crate::host::MappedFile;
use crate::machine;
use crate::spec::{FileOptions, HostFileOptions, StageSpec, StoreKind, StoreSpec};

/// The stores that are known by name, and those of them that are open. A store that nothing leads to is not opened: it
/// would only take memory.
#[derive(Default)]
pub(crate) struct Stores {
    known: HashMap<String, Known>,
    open: HashMap<String, Arc<dyn BlockDevice>>,
}

struct Known {
    spec: StoreSpec,
    /// It came with a device, and is forgotten with the last one that leads to it.
    passing: bool,
}

impl Stores {
    pub(crate) fn new(specs: &[StoreSpec]) -> Self {
        let known = specs.iter().map(|spec| (spec.name.clone(), Known { spec: spec.clone(), passing: false }));
        Self { known: known.collect(), open: HashMap::new() }
    }

    /// Gets to know a store that comes with a device.
    pub(crate) fn add(&mut self, spec: &StoreSpec) -> Result<(), AssemblyError> {
        if self.known.contains_key(&spec.name) {
            return Err(AssemblyError::Duplicate { kind: "store", name: spec.name.clone() });
        }
        self.known.insert(spec.name.clone(), Known { spec: spec.clone(), passing: true });
        Ok(())
    }

    /// The type of the store of this name.
    pub(crate) fn kind(&self, name: &str) -> Option<&'static str> {
        self.known.get(name).map(|known| known.spec.word())
    }

    /// The store at the bottom of those that the one of this name is put in front of.
    pub(crate) fn bottom(&self, name: &str) -> Option<&StoreSpec> {
        let last = self.chain(name).pop()?;
        self.known.get(&last).map(|known| &known.spec)
    }

    /// This store and those that it is put in front of, from the top down; ends where a cycle closes.
    fn chain(&self, name: &str) -> Vec<String> {
        let mut chain = Vec::new();
        let mut next = self.known.get(name);
        while let Some(known) = next
            && !chain.contains(&known.spec.name)
        {
            chain.push(known.spec.name.clone());
            next = known.spec.kind.inner().and_then(|inner| self.known.get(inner));
        }
        chain
    }

    /// Whether the store of this name is open.
    pub(crate) fn is_open(&self, name: &str) -> bool {
        self.open.contains_key(name)
    }

    /// Keeps a store of a known name whose bottom was opened elsewhere.
    pub(crate) fn put(&mut self, name: String, bottom: Arc<dyn BlockDevice>) {
        let Some(known) = self.known.get(&name) else { return };
        let store = behind(&known.spec.stages, bottom);
        self.open.insert(name, store);
    }

    /// The store that `user` asks for by its name, and all below it, opened once.
    pub(crate) fn open(
        &mut self,
        name: &str,
        user: &str,
        controllers: &Controllers,
    ) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        self.open_below(name, user, controllers, &mut Vec::new())
    }

    fn open_below(
        &mut self,
        name: &str,
        user: &str,
        controllers: &Controllers,
        above: &mut Vec<String>,
    ) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        if let Some(store) = self.open.get(name) {
            return Ok(Arc::clone(store));
        }
        let unknown = || AssemblyError::Unknown { user: user.to_owned(), kind: "store", name: name.to_owned() };
        let spec = self.known.get(name).ok_or_else(unknown)?.spec.clone();
        if above.iter().any(|above| above == name) {
            return Err(AssemblyError::Cycle { name: name.to_owned() });
        }
        above.push(name.to_owned());
        let user = format!("store \"{name}\"");
        let bottom: Arc<dyn BlockDevice> = match &spec.kind {
            StoreKind::Store { store } => self.open_below(store, &user, controllers, above)?,
            StoreKind::Volume(volume) => controllers.open_function(&user, volume)?,
            StoreKind::PhysicalFunction { controller } => controllers.physical_function(&user, controller)?,
            StoreKind::Ram { size_bytes, block_bytes } => ram(name, *size_bytes, *block_bytes)?,
            StoreKind::File(_) | StoreKind::HostFile(_) => file_or_host_file(&spec)?,
            StoreKind::Null { size_bytes, block_bytes } => {
                Arc::new(NullStore::new(Geometry::new(*size_bytes, *block_bytes)))
            }
        };
        above.pop();
        let store = behind(&spec.stages, bottom);
        self.open.insert(name.to_owned(), Arc::clone(&store));
        Ok(store)
    }

    /// Closes every open store that none of `used` leads to, and forgets those that came with a device.
    pub(crate) fn close_unused(&mut self, used: impl Iterator<Item = String>) {
        let used: HashSet<String> = used.flat_map(|name| self.chain(&name)).collect();
        let unused: Vec<String> = self.open.keys().filter(|name| !used.contains(*name)).cloned().collect();
        self.close(unused);
        self.known.retain(|name, known| !known.passing || used.contains(name));
    }

    /// Closes the functions of controllers, and whatever is in front of them.
    pub(crate) fn close_functions(&mut self) {
        let of_controller = |name: &&String| self.bottom(name).is_some_and(|bottom| bottom.kind.controller().is_some());
        let functions: Vec<String> = self.open.keys().filter(of_controller).cloned().collect();
        self.close(functions);
    }

    /// Closes what is still open; the names of those that may have lost writes.
    pub(crate) fn close_all(&mut self) -> Vec<String> {
        let all: Vec<String> = self.open.keys().cloned().collect();
        self.close(all)
    }

    /// Flushes, side by side, what may still be in a cache, and lets go of all; the names of those that may have lost writes.
    fn close(&mut self, names: Vec<String>) -> Vec<String> {
        let stores: Vec<_> = names.into_iter().filter_map(|name| self.open.remove_entry(&name)).collect();
        std::thread::scope(|scope| {
            let mut flushing = Vec::new();
            for (name, store) in &stores {
                let is_file = matches!(self.kind(name), Some("file" | "host-file"));
                if is_file && !store.geometry().read_only {
                    flushing.push((name, scope.spawn(move || flush(name, store.as_ref()))));
                }
            }
            let has_failed = |(name, flushed): (&String, std::thread::ScopedJoinHandle<'_, bool>)| {
                (!flushed.join().unwrap_or(false)).then(|| name.clone())
            };
            flushing.into_iter().filter_map(has_failed).collect()
        })
    }
}

/// A store with its stages in front of its bottom.
fn behind(stages: &[StageSpec], bottom: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    stages.iter().rev().fold(bottom, |below, stage| stage.open(below))
}

fn ram(name: &str, size_bytes: u64, block_bytes: u32) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    let refused = |error| AssemblyError::Memory { name: name.to_owned(), size_bytes, error };
    let store = RamStore::new(Geometry::new(size_bytes, block_bytes)).map_err(refused)?;
    tracing::info!(store = name, pages = ?store.pages(), "memory is ready");
    Ok(Arc::new(store))
}

/// A store in a file, without its stages. Blocks the calling thread: see [`FileStore::open`] and
/// [`HostFile::open`].
pub(crate) fn file_or_host_file(spec: &StoreSpec) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    match &spec.kind {
        StoreKind::HostFile(options) => {
            machine::until_looked_at(&options.path);
            host_file(&spec.name, options)
        }
        StoreKind::File(options) => {
            machine::until_looked_at(&options.path);
            file(&spec.name, options)
        }
        _ => Err(AssemblyError::Unknown { user: "this".to_owned(), kind: "file", name: spec.name.clone() }),
    }
}

fn file(name: &str, options: &FileOptions) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    let refused = |error| AssemblyError::File { name: name.to_owned(), error };
    Ok(Arc::new(FileStore::open(options).map_err(refused)?))
}

fn host_file(name: &str, options: &HostFileOptions) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    let refused = |error| AssemblyError::HostFile { name: name.to_owned(), error };
    let file = MappedFile::new(HostFile::open(options).map_err(refused)?);
    let function = HostFunction::open(name, Box::new(file), options.read_only);
    Ok(Arc::new(function.map_err(|error| AssemblyError::HostFunction { name: name.to_owned(), error })?))
}
