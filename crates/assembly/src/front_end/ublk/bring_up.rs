//! The daemon's side of a device that is brought up.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sidecore_block::{BlockDevice, Geometry, QueueStats};
use sidecore_linux::{UblkControl, UblkInfo, UblkParameters, UblkQueue};
use sidecore_linux::{open_ublk_device, ublk_numbers};
use sidecore_sidecore::NotStarted;
use sidecore_ublk::{Server, UblkUnit, UnitOptions, Up, remove_remnants};

use super::{Device, block_device, lock};

/// How long the kernel may take to close the files of the process that has served the device.
const PREDECESSOR: Duration = Duration::from_secs(30);

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Brings a device up: afterwards it can be used. Returns early, without an error, if it is to end.
///
/// # Errors
/// The reason, with the remedy.
pub(super) fn bring_up(device: &Arc<Device>, control: &UblkControl) -> Result<(), String> {
    let Some(store) = lock(&device.store).clone() else { return Ok(()) };
    match device.life.bring_up(control, &Serving { device, control, store })? {
        Up::Made => show(device, "made"),
        Up::Recovered => show(device, "recovered"),
        Up::Ends => return Ok(()),
    }
    device.grow();
    Ok(())
}

/// Records that the kernel shows the block device.
pub(super) fn show(device: &Device, how: &str) {
    device.is_live.store(true, Ordering::Relaxed);
    let path = block_device(device.own.number);
    let queues = device.running_count.load(Ordering::Relaxed);
    tracing::info!(device = &*device.name, queues, "{} is {how}", path.display());
}

/// Removes what daemons have left of devices in the kernel that they were making or removing when
/// they were killed, except for devices of these numbers, which are about to be brought up.
pub(crate) fn remove_ublk_remnants(configured: &[u32]) {
    let numbers = ublk_numbers(Path::new("/dev"));
    let others: Vec<_> =
        numbers.into_iter().filter(|number| !configured.contains(number)).collect();
    if others.is_empty() {
        return;
    }
    // Without privileges no daemon has left anything.
    let Ok(control) = UblkControl::open() else { return };
    remove_remnants(&control, others, |pid| Path::new(&format!("/proc/{pid}")).exists());
}

struct Serving<'a> {
    device: &'a Arc<Device>,
    control: &'a UblkControl,
    store: Arc<dyn BlockDevice>,
}

impl Server for Serving<'_> {
    fn ends(&self) -> bool {
        self.device.ends()
    }

    fn pause(&self) {
        std::thread::sleep(LOOK);
    }

    /// False until the operator has accepted the loss.
    fn may_recover(&self) -> bool {
        self.device.loss().is_none()
    }

    fn wanted(&self, word: u64) -> UblkInfo {
        let own = &self.device.own;
        let sizes = (self.device.wanted_queues.min(self.control.queues_max()), own.queue_depth);
        let io_bytes_max = u32::try_from(own.io_bytes_max).unwrap_or(u32::MAX);
        UblkInfo::new(own.number, sizes, io_bytes_max, word)
    }

    fn parameters(&self, made: &UblkInfo) -> UblkParameters {
        let geometry = self.store.geometry();
        UblkParameters {
            capacity_bytes: geometry.capacity_bytes,
            block_bytes: geometry.block_bytes,
            physical_block_bytes: geometry.physical_block_bytes,
            io_bytes_max: made.io_bytes_max,
            read_only: geometry.read_only || self.device.read_only,
            volatile_cache: geometry.volatile_cache,
            discard: geometry.discard,
            write_zeroes: geometry.write_zeroes,
        }
    }

    fn fits(&self, shown: &UblkParameters) -> Result<(), String> {
        let now = self.store.geometry();
        let path = block_device(self.device.own.number);
        if shown.block_bytes < now.block_bytes || shown.capacity_bytes > now.capacity_bytes {
            return Err(format!(
                "{} has {} bytes in blocks of {}, and its store has {} in blocks of {}; serve the \
                 store that it had before",
                path.display(),
                shown.capacity_bytes,
                shown.block_bytes,
                now.capacity_bytes,
                now.block_bytes
            ));
        }
        if !shown.read_only && (now.read_only || self.device.read_only) {
            return Err(format!(
                "{} is writable, and its device or store is read-only now; unmount it and remove \
                 the device before this change",
                path.display()
            ));
        }
        Ok(())
    }

    fn start_queues(&self, info: &UblkInfo, parameters: &UblkParameters) -> Result<(), String> {
        let geometry = Geometry {
            capacity_bytes: parameters.capacity_bytes,
            read_only: parameters.read_only,
            ..self.store.geometry()
        };
        start_queues(self, info, geometry)?;
        *lock(&self.device.geometry) = geometry;
        Ok(())
    }

    fn stop_queues(&self) {
        self.device.stop_queues();
    }
}

/// Opens the device, which one process can have open. An earlier one may be ending.
fn open(device: &Device) -> Result<std::os::fd::OwnedFd, String> {
    const BUSY: i32 = 16;
    let number = device.own.number;
    let begun = Instant::now();
    loop {
        let opened = open_ublk_device(number);
        let is_busy = opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(BUSY));
        if !is_busy || begun.elapsed() > PREDECESSOR || device.ends() {
            return opened.map_err(|error| format!("/dev/ublkc{number}: {error}"));
        }
        std::thread::sleep(LOOK);
    }
}

fn start_queues(serving: &Serving<'_>, info: &UblkInfo, geometry: Geometry) -> Result<(), String> {
    let Serving { device, control, store } = serving;
    let (depth, io_bytes_max) = (info.depth, info.io_bytes_max);
    let partitions = control.partitions();
    device.made_queues.store(info.queues, Ordering::Relaxed);
    let opened = open(device)?;
    let sidecores = device.sidecores.iter().cycle().take(usize::from(info.queues));
    for (sidecore, index) in sidecores.zip(0_u16..) {
        let stats = {
            let mut stats = lock(&device.stats);
            if stats.len() <= usize::from(index) {
                stats.push(Arc::<QueueStats>::default());
            }
            Arc::clone(&stats[usize::from(index)])
        };
        let weak = Arc::downgrade(device);
        let broken = move |reason| {
            if let Some(device) = weak.upgrade() {
                device.break_with(reason);
            }
        };
        let options = UnitOptions {
            device: Arc::clone(&device.name),
            index,
            geometry,
            mode: device.idle,
            stats,
            broken: Box::new(broken),
        };
        let store = Arc::clone(store);
        let file = opened.try_clone().map_err(|error| error.to_string())?;
        let started = sidecore.start(move |core| {
            let queue = UblkQueue::new(file.as_fd(), index, depth, io_bytes_max, partitions)?;
            let channel = store.open_channel(core, usize::from(depth))?;
            UblkUnit::new(queue, channel, options)
        });
        let handle = started.map_err(|error| match error {
            NotStarted::Unit(error) | NotStarted::Watch(error) => {
                format!("queue {index} cannot be opened: {error}")
            }
            NotStarted::Gone => format!("queue {index}: its sidecore is gone; restart the daemon"),
        })?;
        lock(&device.running).push(handle);
        device.running_count.fetch_add(1, Ordering::Release);
    }
    Ok(())
}
