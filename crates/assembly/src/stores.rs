//! Opens stores, those below first, and flushes them in the end.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sidecore_block::{
    Batch, BlockDevice, BlockRequest, DelayStore, FaultStore, Geometry, NullStore, Operation, RamStore, Tag,
};
use sidecore_linux::{Clock, FileStore};

use crate::AssemblyError;
use crate::spec::{StoreKind, StoreSpec};

/// Longer than any disk takes for a flush that it will ever finish.
const FLUSH_PATIENCE: Duration = Duration::from_secs(60);

/// The open stores by their names. A store that no device leads to is not opened: it would only take memory.
pub(crate) struct Stores<'a> {
    specs: HashMap<&'a str, &'a StoreSpec>,
    open: HashMap<&'a str, Arc<dyn BlockDevice>>,
    /// The stores that something has to be written back to.
    cached: Vec<CachedStore>,
}

/// A store whose completed writes may still be in a cache.
pub(crate) struct CachedStore {
    name: String,
    device: Arc<dyn BlockDevice>,
}

impl<'a> Stores<'a> {
    pub(crate) fn new(specs: &'a [StoreSpec]) -> Self {
        let specs = specs.iter().map(|spec| (spec.name.as_str(), spec)).collect();
        Self { specs, open: HashMap::new(), cached: Vec::new() }
    }

    /// The type of the store of this name.
    pub(crate) fn kind(&self, name: &str) -> Option<&'static str> {
        self.specs.get(name).map(|spec| spec.kind.word())
    }

    /// The store that `user` asks for by its name, and all below it, opened once.
    pub(crate) fn open(&mut self, name: &str, user: &str) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        self.open_below(name, user, &mut Vec::new())
    }

    fn open_below(
        &mut self,
        name: &str,
        user: &str,
        above: &mut Vec<&'a str>,
    ) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        if let Some(store) = self.open.get(name) {
            return Ok(Arc::clone(store));
        }
        let unknown = || AssemblyError::Unknown { user: user.to_owned(), kind: "store", name: name.to_owned() };
        let spec = *self.specs.get(name).ok_or_else(unknown)?;
        if above.contains(&name) {
            return Err(AssemblyError::Cycle { name: name.to_owned() });
        }
        above.push(&spec.name);
        let user = format!("store \"{name}\"");
        let store: Arc<dyn BlockDevice> = match &spec.kind {
            StoreKind::Null { size_bytes, block_bytes } => {
                Arc::new(NullStore::new(Geometry::new(*size_bytes, *block_bytes)))
            }
            StoreKind::Ram { size_bytes, block_bytes } => {
                let store = RamStore::new(Geometry::new(*size_bytes, *block_bytes));
                let store = store.map_err(|error| AssemblyError::Memory {
                    name: name.to_owned(),
                    size_bytes: *size_bytes,
                    error,
                })?;
                tracing::info!(store = name, pages = ?store.pages(), "memory is ready");
                Arc::new(store)
            }
            StoreKind::File(options) => {
                let store =
                    FileStore::open(options).map_err(|error| AssemblyError::File { name: name.to_owned(), error })?;
                Arc::new(store)
            }
            StoreKind::Delay { store, delay } => {
                Arc::new(DelayStore::new(self.open_below(store, &user, above)?, *delay))
            }
            StoreKind::Fault { store, plan } => {
                Arc::new(FaultStore::new(self.open_below(store, &user, above)?, plan.clone()))
            }
        };
        above.pop();
        if matches!(spec.kind, StoreKind::File(_)) && !store.geometry().read_only {
            self.cached.push(CachedStore { name: name.to_owned(), device: Arc::clone(&store) });
        }
        self.open.insert(&spec.name, Arc::clone(&store));
        Ok(store)
    }

    /// The stores to flush in the end.
    pub(crate) fn into_cached(self) -> Vec<CachedStore> {
        self.cached
    }
}

impl CachedStore {
    /// Makes everything that was written survive a power cut.
    pub(crate) fn flush(&self) {
        match flush(self.device.as_ref()) {
            Ok(()) => tracing::info!(store = self.name, "flushed"),
            Err(error) => tracing::error!(store = self.name, "the last flush failed, writes may be lost: {error}"),
        }
    }
}

fn flush(device: &dyn BlockDevice) -> io::Result<()> {
    let mut channel = device.open_channel(None, 1)?;
    let mut request = BlockRequest::blank(0);
    request.operation = Operation::Flush;
    request.tag = Some(Tag::from_bits(0));
    let (mut batch, mut completed) = (vec![request], Batch::new());
    let (clock, started) = (Clock::new(), Instant::now());
    let mut result = Ok(());
    loop {
        channel.submit(&mut batch);
        channel.poll(clock.now(), &mut completed);
        if let Some(mut request) = completed.pop() {
            request.tag.take().map(Tag::into_bits);
            return result.and(request.result.map_err(io::Error::other));
        }
        // The disk owns the request until it hands it back: there is nothing to do but to say so and go on waiting.
        if started.elapsed() > FLUSH_PATIENCE && result.is_ok() {
            tracing::warn!("the last flush takes long");
            result = Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}
