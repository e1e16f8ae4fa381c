//! A block device of this host's kernel, `/dev/ublkbN`.

mod bring_up;
mod cache;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use sidecore_block::{BlockDevice, Geometry, QueueStats};
use sidecore_linux::{UblkControl, UblkQueue, ublk_memory_prepared};
use sidecore_peer::Disconnect;
use sidecore_reactor::IdleMode;
use sidecore_sidecore::{Handle, Sidecore, Stopped};
use sidecore_ublk::{Life, UblkUnit};

use super::{FrontEnd, Place};
use crate::AssemblyError;
use crate::left::LeftDevice;
use crate::report::QueueCounters;
use crate::spec::{DeviceSpec, UblkSpec};
use crate::swap::{Line, NotSwapped, Swapped, is_same, swap};
use bring_up::bring_up;
pub(crate) use bring_up::remove_ublk_remnants;
use cache::write_cached;

/// How long a start waits for the kernel to show the device. The rest goes on behind it.
const PATIENCE: Duration = Duration::from_secs(2);

/// A warning is logged each time that a stop has waited for so long.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// The path of the block device of this number.
pub(crate) fn block_device(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

/// A block device of the kernel, and the thread that brings it up.
pub(crate) struct Ublk {
    device: Arc<Device>,
    starting: Mutex<Option<JoinHandle<()>>>,
}

/// The parts of a device that its thread shares.
struct Device {
    name: Arc<str>,
    life: Life,
    own: UblkSpec,
    read_only: bool,
    wanted_queues: u16,
    idle: IdleMode,
    sidecores: Vec<Sidecore>,
    geometry: Mutex<Geometry>,
    /// `None` after the device was closed.
    store: Mutex<Option<Arc<dyn BlockDevice>>>,
    /// The counters of each queue that there was.
    stats: Mutex<Vec<Arc<QueueStats>>>,
    running: Mutex<Vec<Handle<UblkUnit<UblkQueue>>>>,
    running_count: AtomicU16,
    /// The kernel shows the block device.
    is_live: AtomicBool,
    /// The device was begun to be brought up.
    is_begun: AtomicBool,
    /// The device is to stop.
    ends: AtomicBool,
    broken: Mutex<Option<String>>,
    /// The number of queues that the kernel's device has; zero before there is one.
    made_queues: AtomicU16,
    loss_accepted: AtomicBool,
}

impl Ublk {
    /// A device that is not served yet. `outlives`: the contents of the store outlive this process.
    /// `sidecores` has one for each queue.
    pub(crate) fn new(
        spec: &DeviceSpec,
        own: &UblkSpec,
        (store, outlives): (Arc<dyn BlockDevice>, bool),
        sidecores: Vec<Sidecore>,
    ) -> Self {
        let geometry = store.geometry();
        let geometry = Geometry { read_only: geometry.read_only || spec.read_only, ..geometry };
        let device = Device {
            name: spec.name.as_str().into(),
            life: Life::new(own.number, &spec.name, outlives),
            own: own.clone(),
            read_only: spec.read_only,
            wanted_queues: spec.queues,
            idle: spec.idle,
            sidecores,
            geometry: Mutex::new(geometry),
            store: Mutex::new(Some(store)),
            stats: Mutex::default(),
            running: Mutex::default(),
            running_count: AtomicU16::new(0),
            is_live: AtomicBool::new(false),
            is_begun: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            broken: Mutex::default(),
            made_queues: AtomicU16::new(0),
            loss_accepted: AtomicBool::new(false),
        };
        Self { device: Arc::new(device), starting: Mutex::default() }
    }

    fn error(&self, error: impl std::fmt::Display) -> AssemblyError {
        AssemblyError::Kernel { name: self.device.name.to_string(), error: error.to_string() }
    }

    /// Brings the device up on a thread of its own, because the kernel reads partitions meanwhile,
    /// from a store that may take any time. Waits for a moment.
    fn start(&self) -> Result<(), AssemblyError> {
        let control = UblkControl::open().map_err(|error| self.error(error))?;
        self.device.is_begun.store(true, Ordering::Relaxed);
        let (sender, up) = mpsc::sync_channel(1);
        let device = Arc::clone(&self.device);
        let run = move || {
            let result = bring_up(&device, &control);
            if let Err(reason) = &result {
                device.break_with(reason.clone());
            }
            // The starting thread may have gone on.
            let _ = sender.send(result);
        };
        let thread = std::thread::Builder::new().name(format!("ublk-{}", self.device.name));
        *lock(&self.starting) = Some(thread.spawn(run).map_err(AssemblyError::Threads)?);
        match up.recv_timeout(PATIENCE) {
            Ok(Err(reason)) => {
                self.end();
                Err(self.error(reason))
            }
            Ok(Ok(())) | Err(_) => Ok(()),
        }
    }

    /// Has the bringing up end, and waits for that. False if the device was stopped before.
    fn give_up_start(&self) -> bool {
        let was_ended = self.device.ends.swap(true, Ordering::Relaxed);
        if let Some(starting) = lock(&self.starting).take() {
            let _ = starting.join();
        }
        !was_ended
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    fn ends(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }

    /// Whether the device is brought up and the kernel does not show it yet.
    fn is_starting(&self) -> bool {
        let is_begun = self.is_begun.load(Ordering::Relaxed) && !self.ends();
        is_begun && !self.is_live.load(Ordering::Relaxed)
    }

    /// Records the first reason why the device is not served as it should be.
    fn break_with(&self, reason: String) {
        let mut broken = lock(&self.broken);
        if broken.is_none() && !self.ends() {
            tracing::error!(device = &*self.name, "{reason}");
            *broken = Some(reason);
        }
    }

    fn loss(&self) -> Option<String> {
        if self.loss_accepted.load(Ordering::Relaxed) {
            return None;
        }
        lock(&self.store).as_ref()?.loss()
    }

    /// The differences between the kernel's device and the configuration or the store.
    fn warning(&self) -> Option<String> {
        let made = self.made_queues.load(Ordering::Relaxed);
        let store = lock(&self.store).as_ref()?.geometry();
        let shown = *lock(&self.geometry);
        let fewer = (1..self.wanted_queues).contains(&made).then(|| {
            format!(
                "it has {made} of {} queues: the kernel makes no more than it has CPUs, and \
                 cannot recover a device of several before Linux 6.16",
                self.wanted_queues
            )
        });
        let grown = (store.capacity_bytes > shown.capacity_bytes).then(|| {
            format!(
                "its store has grown to {} bytes, of which it shows {}; unmount it, remove the \
                 device and add it again",
                store.capacity_bytes, shown.capacity_bytes
            )
        });
        let found: Vec<_> = fewer.into_iter().chain(grown).collect();
        (!found.is_empty()).then(|| found.join("; "))
    }

    fn swap_store(
        &self,
        from: &Arc<dyn BlockDevice>,
        to: &Arc<dyn BlockDevice>,
    ) -> Result<Swapped, NotSwapped> {
        // Locked throughout: no queue stops meanwhile.
        let running = lock(&self.running);
        if !is_same(lock(&self.store).as_ref(), from) {
            return Err(NotSwapped::Changed);
        }
        if !self.is_live.load(Ordering::Relaxed) {
            return Err(NotSwapped::FrontEnd(
                "the kernel is still making its block device, or has given it up; try again",
            ));
        }
        let lines: Vec<&dyn Line> = running.iter().map(|handle| handle as &dyn Line).collect();
        swap(&lines, to, || {
            let mut store = lock(&self.store);
            // Closed meanwhile, if there is none.
            store.as_mut().map(|store| *store = Arc::clone(to)).is_some()
        })
    }

    /// Gives the kernel's device the size to which its store has grown, if the kernel can do that.
    fn grow(&self) {
        let Some(store) = lock(&self.store).clone() else { return };
        let mut geometry = lock(&self.geometry);
        let capacity_bytes = store.geometry().capacity_bytes;
        let is_live = self.is_live.load(Ordering::Relaxed) && !self.ends();
        if !is_live || capacity_bytes <= geometry.capacity_bytes {
            return;
        }
        // A queue that knows its new size too early refuses nothing that the kernel sends.
        for queue in &*lock(&self.running) {
            queue.tell(move |queue| queue.resize(capacity_bytes));
        }
        let resized = UblkControl::open().and_then(|control| {
            if control.can_resize() {
                control.resize(self.own.number, capacity_bytes).map(|()| true)
            } else {
                Ok(false)
            }
        });
        match resized {
            Ok(true) => geometry.capacity_bytes = capacity_bytes,
            // Reports have a warning.
            Ok(false) => {}
            Err(error) => tracing::error!(device = &*self.name, "{error}"),
        }
    }

    /// Stops the queues when their requests in flight are done. The kernel keeps all others.
    fn stop_queues(&self) {
        let running = std::mem::take(&mut *lock(&self.running));
        let stopping: Vec<_> = running.into_iter().map(Handle::stop).collect();
        for stopping in stopping {
            // The wait has no limit: only the store knows when it is done with the buffers.
            while stopping.wait(STOP_PATIENCE) == Stopped::StillInFlight {
                tracing::warn!(device = &*self.name, "stopping: requests are still in flight");
            }
        }
        self.running_count.store(0, Ordering::Relaxed);
        self.is_live.store(false, Ordering::Relaxed);
    }

    /// Removes the device from the kernel, after the pages that the kernel has cached were written.
    fn remove(&self) {
        let path = block_device(self.own.number);
        if self.is_live.load(Ordering::Relaxed)
            && let Err(error) = write_cached(&path)
        {
            tracing::error!(device = &*self.name, "{} lost writes: {error}", path.display());
        }
        match UblkControl::open() {
            Ok(control) => self.life.remove(&control, || self.stop_queues()),
            Err(error) => tracing::error!(device = &*self.name, "{error}"),
        }
    }
}

impl FrontEnd for Ublk {
    fn serve(&self, _: &Path, _: Place, left: Option<LeftDevice>) -> Result<(), AssemblyError> {
        if let Some(left) = left {
            left.disconnect();
        }
        if !ublk_memory_prepared() {
            return Err(self.error(
                "the daemon was started without such a device, so its threads may wait for the \
                 memory that this one is to free; put it into the configuration file and restart \
                 the daemon",
            ));
        }
        self.start()
    }

    fn stop(&self) -> bool {
        let is_first = self.give_up_start();
        if is_first && self.device.life.is_made() {
            self.device.remove();
        }
        self.device.stop_queues();
        is_first
    }

    fn end(&self) {
        self.give_up_start();
        self.device.stop_queues();
    }

    fn hand_over(&self) -> Option<LeftDevice> {
        self.end();
        None
    }

    fn close(&self) {
        *lock(&self.device.store) = None;
    }

    fn swap_store(
        &self,
        from: &Arc<dyn BlockDevice>,
        to: &Arc<dyn BlockDevice>,
    ) -> Result<Swapped, NotSwapped> {
        self.device.swap_store(from, to)
    }

    /// Grows the device with its store, on a thread of its own: the kernel may be reading the
    /// partitions of the device, from a store that takes any time.
    fn refresh(&self) {
        let device = Arc::clone(&self.device);
        let thread = std::thread::Builder::new().name(format!("ublk-{}", device.name));
        if let Err(error) = thread.spawn(move || device.grow()) {
            tracing::error!(device = &*self.device.name, "no thread to resize it: {error}");
        }
    }

    fn geometry(&self) -> Geometry {
        *lock(&self.device.geometry)
    }

    fn node(&self) -> Option<PathBuf> {
        Some(block_device(self.device.own.number))
    }

    fn queues_on(&self, sidecore: &str) -> usize {
        self.device.sidecores.iter().filter(|serving| serving.name() == sidecore).count()
    }

    fn running_count(&self) -> u16 {
        // Pairs with the start of a queue: the device was begun before.
        self.device.running_count.load(Ordering::Acquire)
    }

    fn is_connected(&self) -> bool {
        self.device.is_live.load(Ordering::Relaxed)
    }

    fn is_starting(&self) -> bool {
        self.device.is_starting()
    }

    fn disconnect(&self) -> Option<Disconnect> {
        None
    }

    fn broken(&self) -> Option<String> {
        lock(&self.device.broken).clone()
    }

    fn loss(&self) -> Option<String> {
        self.device.loss()
    }

    fn warning(&self) -> Option<String> {
        self.device.warning()
    }

    fn accept_loss(&self) -> bool {
        let is_missed = self.device.loss().is_some();
        self.device.loss_accepted.fetch_or(is_missed, Ordering::Relaxed);
        is_missed
    }

    fn lost_sidecore(&self) -> Option<String> {
        super::lost(self.device.sidecores.iter())
    }

    fn queues(&self) -> Vec<QueueCounters> {
        let stats = lock(&self.device.stats);
        let numbered = stats.iter().zip(0_u16..);
        numbered.map(|(stats, index)| QueueCounters::of(index, stats)).collect()
    }
}

#[cfg(test)]
mod tests {
    use sidecore_block::RamStore;

    use super::*;
    use crate::disk::state_of;
    use crate::report::DeviceState;

    fn ublk() -> Ublk {
        let store = RamStore::new(Geometry::new(1 << 20, 512)).unwrap();
        let own = UblkSpec { number: 7, queue_depth: 4, io_bytes_max: 1 << 16 };
        Ublk::new(&DeviceSpec::default(), &own, (Arc::new(store), true), Vec::new())
    }

    #[test]
    fn a_device_whose_queues_run_is_starting_until_the_kernel_shows_it() {
        let ublk = ublk();
        assert_eq!(state_of(&ublk, false), DeviceState::Opening);
        ublk.device.is_begun.store(true, Ordering::Relaxed);
        assert_eq!(state_of(&ublk, true), DeviceState::Starting, "it waits for its predecessor");
        ublk.device.running_count.store(1, Ordering::Release);
        assert_eq!(state_of(&ublk, true), DeviceState::Starting);
        bring_up::show(&ublk.device, "made");
        assert_eq!(state_of(&ublk, true), DeviceState::Running);
        ublk.end();
        assert_eq!(state_of(&ublk, true), DeviceState::Waiting);
    }
}
