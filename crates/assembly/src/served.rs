//! A virtio disk as its transport sees it, with its queues on sidecores. Each call sends mail to a
//! sidecore and waits for the acknowledgement.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sidecore_block::BlockDevice;
use sidecore_linux::peer_event;
use sidecore_reactor::IdleMode;
use sidecore_ring::RingState;
use sidecore_sidecore::{Handle, NotStarted, Sidecore, Stopped};
use sidecore_virtio::blk::{BlkDevice, BlkQueue, Log};
use sidecore_virtio::{ConfigError, QueueLog, QueueResources, StartError, VirtioDevice};

use crate::flush::flush;
use crate::front_end::LastStart;
use crate::swap::{Line, NotSwapped, Swapped, is_same, swap};

/// The time between two warnings of a stop that waits for requests in flight.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// A virtio disk that is served.
pub(crate) struct ServedBlk {
    device: Arc<BlkDevice>,
    /// `None` after the disk was closed.
    store: Mutex<Option<Arc<dyn BlockDevice>>>,
    idle: IdleMode,
    queue_size_max: u16,
    queues: Vec<Queue>,
    /// The number of running queues, which is readable while a queue is locked by its stop.
    running_count: AtomicU16,
    pub(crate) last_start: LastStart,
    /// Whether the operator accepts the loss of answered writes.
    loss_accepted: AtomicBool,
    /// Whether a running queue logs its writes to guest memory: its guest is about to migrate.
    migrates: AtomicBool,
}

/// A request queue and its sidecore.
struct Queue {
    sidecore: Sidecore,
    /// The running queue; `None` while it is stopped.
    running: Mutex<Option<Handle<BlkQueue>>>,
}

impl Queue {
    fn running(&self) -> MutexGuard<'_, Option<Handle<BlkQueue>>> {
        // A handle stays valid if another thread has panicked.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServedBlk {
    /// Creates a disk without a running queue; `sidecores` has one for each queue.
    pub(crate) fn new(
        device: BlkDevice,
        store: Arc<dyn BlockDevice>,
        idle: IdleMode,
        queue_size_max: u16,
        sidecores: impl Iterator<Item = Sidecore>,
    ) -> Self {
        let queues =
            sidecores.map(|sidecore| Queue { sidecore, running: Mutex::new(None) }).collect();
        let store = Mutex::new(Some(store));
        Self {
            device: Arc::new(device),
            store,
            idle,
            queue_size_max,
            queues,
            running_count: AtomicU16::new(0),
            last_start: LastStart::default(),
            loss_accepted: AtomicBool::new(false),
            migrates: AtomicBool::new(false),
        }
    }

    /// Serves clients that an earlier process served, although answered writes may be missing.
    /// False if none are missing.
    pub(crate) fn accept_loss(&self) -> bool {
        let is_missed = self.store().as_ref().is_some_and(|store| store.loss().is_some());
        self.loss_accepted.fetch_or(is_missed, Ordering::Relaxed);
        is_missed
    }

    /// The VMM is gone, and with it the guest.
    pub(crate) fn user_gone(&self) {
        let store = self.store();
        let Some(store) = store.as_ref().filter(|_| !self.device.options().read_only) else {
            return;
        };
        let was_missed = store.loss().is_some();
        store.user_gone();
        // A loss that was accepted was another one, of an earlier guest.
        if !was_missed && store.loss().is_some() {
            self.loss_accepted.store(false, Ordering::Relaxed);
        }
    }

    /// Drops the store. No queue can be started afterwards.
    pub(crate) fn close(&self) {
        *self.store() = None;
    }

    /// See [`FrontEnd::swap_store`](crate::front_end::FrontEnd::swap_store).
    pub(crate) fn swap_store(
        &self,
        from: &Arc<dyn BlockDevice>,
        to: &Arc<dyn BlockDevice>,
    ) -> Result<Swapped, NotSwapped> {
        if !is_same(self.store().as_ref(), from) {
            return Err(NotSwapped::Changed);
        }
        // The queues are not locked while requests in flight end: a worker may want one.
        let handles: Vec<_> =
            self.queues.iter().filter_map(|queue| queue.running().clone()).collect();
        let lines: Vec<&dyn Line> = handles.iter().map(|handle| handle as &dyn Line).collect();
        swap(&lines, to, || {
            let running: Vec<_> = self.queues.iter().map(Queue::running).collect();
            let mut running = running.iter().filter_map(|running| running.as_ref());
            let are_known = running.all(|queue| handles.contains(queue));
            match &mut *self.store() {
                Some(store) if are_known => {
                    *store = Arc::clone(to);
                    true
                }
                _ => false,
            }
        })
    }

    fn store(&self) -> MutexGuard<'_, Option<Arc<dyn BlockDevice>>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the answered writes of a guest that migrates durable, when its last queue has stopped:
    /// another daemon serves the guest next, and the guest's flushes there have to cover them.
    fn flush_for_migration(&self) {
        if self.running_count() > 0 || !self.migrates.swap(false, Ordering::Relaxed) {
            return;
        }
        let Some(store) = self.store().clone() else { return };
        if store.geometry().volatile_cache {
            flush(self.name(), store.as_ref());
        }
    }

    /// Adopts the store's size. True if the driver must be notified.
    pub(crate) fn refresh(&self) -> bool {
        let capacity_bytes = self.store().as_ref().map(|store| store.geometry().capacity_bytes);
        capacity_bytes.is_some_and(|capacity_bytes| self.device.set_capacity_bytes(capacity_bytes))
    }

    /// The state that all queues share.
    pub(crate) fn device(&self) -> &BlkDevice {
        &self.device
    }

    /// The number of running queues.
    pub(crate) fn running_count(&self) -> u16 {
        self.running_count.load(Ordering::Relaxed)
    }

    /// The number of queues that the sidecore of this name serves.
    pub(crate) fn queues_on(&self, sidecore: &str) -> usize {
        self.queues.iter().filter(|queue| queue.sidecore.name() == sidecore).count()
    }

    /// The name of a sidecore of the disk's queues that has ended by itself.
    pub(crate) fn lost_sidecore(&self) -> Option<String> {
        crate::front_end::lost(self.queues.iter().map(|queue| &queue.sidecore))
    }

    fn queue(&self, index: u16) -> Result<&Queue, StartError> {
        let no_such_queue = || StartError::NoSuchQueue { index, queue_count: self.queue_count() };
        self.queues.get(usize::from(index)).ok_or_else(no_such_queue)
    }
}

impl VirtioDevice for ServedBlk {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn queue_count(&self) -> u16 {
        self.device.options().queues
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn read_config(&self, offset_bytes: u32, data: &mut [u8]) -> Result<(), ConfigError> {
        self.device.read_config(offset_bytes, data)
    }

    fn config_generation(&self) -> u32 {
        self.device.config_generation()
    }

    fn write_config(&self, offset_bytes: u32, data: &[u8]) -> Result<(), ConfigError> {
        self.device.write_config(offset_bytes, data)
    }

    fn start_queue(
        &self,
        index: u16,
        resources: QueueResources,
        state: RingState,
    ) -> Result<(), StartError> {
        let queue = self.queue(index)?;
        let refuse = |why: String| {
            Err(StartError::Io { index, error: io::Error::new(io::ErrorKind::InvalidInput, why) })
        };
        let size = resources.layout.size;
        if size > self.queue_size_max {
            return refuse(format!(
                "a ring of {size} entries; `queue_size_max` is {}",
                self.queue_size_max
            ));
        }
        let mut running = queue.running();
        if running.is_some() {
            return refuse("the queue is running already".to_owned());
        }
        let Some(store) = self.store().clone() else {
            return refuse("the device is closed".to_owned());
        };
        self.migrates.fetch_or(resources.log.is_some(), Ordering::Relaxed);
        let (device, idle) = (Arc::clone(&self.device), self.idle);
        let io_error = move |error| StartError::Io { index, error };
        let started = queue.sidecore.start(move |core| {
            let channel = store.open_channel(core, usize::from(size)).map_err(io_error)?;
            BlkQueue::new(&device, index, resources, state, channel, idle, peer_event)
        });
        *running = Some(started.map_err(|error| match error {
            NotStarted::Unit(error) => error,
            NotStarted::Watch(error) => io_error(error),
            NotStarted::Gone => StartError::SidecoreGone,
        })?);
        self.running_count.fetch_add(1, Ordering::Relaxed);
        self.last_start.set();
        tracing::info!(
            device = self.name(),
            queue = index,
            sidecore = queue.sidecore.name(),
            size,
            "queue started"
        );
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Option<RingState> {
        let queue = self.queue(index).ok()?;
        // Locked until the queue has stopped, so that a start that comes meanwhile waits.
        let mut running = queue.running();
        let stopping = running.take()?.stop();
        let state = loop {
            match stopping.wait(STOP_PATIENCE) {
                Stopped::Stopped(state) => break Some(state),
                Stopped::Gone => break None,
                // The wait has no limit: only the store knows when the guest's memory may be
                // unmapped.
                Stopped::StillInFlight => {
                    tracing::warn!(
                        device = self.name(),
                        queue = index,
                        "stopping: requests are still in flight"
                    );
                }
            }
        };
        self.running_count.fetch_sub(1, Ordering::Relaxed);
        match state {
            Some(_) => tracing::info!(device = self.name(), queue = index, "queue stopped"),
            None => tracing::error!(
                device = self.name(),
                queue = index,
                "queue lost: its sidecore is gone"
            ),
        }
        self.flush_for_migration();
        state
    }

    fn set_call(&self, index: u16, call: Option<OwnedFd>) {
        let Ok(queue) = self.queue(index) else { return };
        let running = queue.running();
        let Some(running) = &*running else { return };
        match call.map(|call| peer_event(call.as_fd())).transpose() {
            Ok(call) => {
                // The sidecore drops the previous descriptor.
                let _ = running.ask(move |queue| queue.set_call(call));
            }
            Err(error) => self
                .device
                .break_with(&format!("queue {index}: the call descriptor is unusable: {error}")),
        }
    }

    fn set_log(&self, index: u16, log: Option<QueueLog>) {
        let Ok(queue) = self.queue(index) else { return };
        let running = queue.running();
        let Some(running) = &*running else { return };
        self.migrates.store(log.is_some(), Ordering::Relaxed);
        match log.map(|log| Log::new(log, peer_event)).transpose() {
            // Waits for the sidecore: from its next write on the queue uses the new log.
            Ok(log) => {
                let _ = running.ask(move |queue| queue.set_log(log));
            }
            Err(error) => self
                .device
                .break_with(&format!("queue {index}: the log's descriptor is unusable: {error}")),
        }
    }

    fn reset(&self) {
        self.device.reset();
    }

    fn broken(&self) -> Option<String> {
        self.device.broken()
    }

    fn loss(&self) -> Option<String> {
        if self.loss_accepted.load(Ordering::Relaxed) {
            None
        } else {
            self.store().as_ref()?.loss()
        }
    }
}

#[cfg(test)]
mod tests {
    use sidecore_block::{BlockChannel, Geometry, NullStore};
    use sidecore_reactor::CoreContext;
    use sidecore_virtio::blk::BlkOptions;

    use super::*;

    /// A store that may have lost writes: of an earlier process, or of its last user.
    #[derive(Default)]
    struct Lossy {
        is_lost: AtomicBool,
        is_shared: bool,
    }

    impl BlockDevice for Lossy {
        fn geometry(&self) -> Geometry {
            Geometry::new(1 << 20, 512)
        }

        fn open_channel(
            &self,
            core: &CoreContext,
            depth: usize,
        ) -> io::Result<Box<dyn BlockChannel>> {
            NullStore::new(self.geometry()).open_channel(core, depth)
        }

        fn loss(&self) -> Option<String> {
            self.is_lost.load(Ordering::Relaxed).then(|| "lost".to_owned())
        }

        fn user_gone(&self) {
            self.is_lost.fetch_or(self.is_shared, Ordering::Relaxed);
        }
    }

    fn served(store: &Arc<Lossy>, read_only: bool) -> ServedBlk {
        let options = BlkOptions { read_only, ..BlkOptions::default() };
        let device = BlkDevice::new("disk", options, store.geometry());
        let store = Arc::clone(store) as Arc<dyn BlockDevice>;
        ServedBlk::new(device, store, IdleMode::Poll, 256, std::iter::empty())
    }

    #[test]
    fn a_loss_is_accepted_for_the_guest_that_it_concerns() {
        let store = Arc::new(Lossy { is_shared: true, ..Lossy::default() });
        let disk = served(&store, false);
        assert!(!disk.accept_loss());
        disk.user_gone();
        assert!(disk.loss().is_some());
        assert!(disk.accept_loss() && disk.loss().is_none());
        // The guest connects again, and the next loss is another one.
        store.is_lost.store(false, Ordering::Relaxed);
        disk.user_gone();
        assert!(disk.loss().is_some());
        // One of an earlier process lasts, and so does its acceptance.
        let store = Arc::new(Lossy { is_lost: AtomicBool::new(true), ..Lossy::default() });
        let disk = served(&store, false);
        assert!(disk.accept_loss());
        disk.user_gone();
        assert!(disk.loss().is_none());
    }

    #[test]
    fn a_guest_that_could_not_write_has_left_nothing() {
        let store = Arc::new(Lossy { is_shared: true, ..Lossy::default() });
        served(&store, true).user_gone();
        assert!(store.loss().is_none());
    }
}
