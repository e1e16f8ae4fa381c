//! Makes a device, or recovers the one that an earlier daemon has served.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sidecore_block::{BlockDevice, Geometry, QueueStats};
use sidecore_linux::{
    UblkControl, UblkError, UblkInfo, UblkParameters, UblkQueue, UblkState, open_ublk_device,
};
use sidecore_sidecore::NotStarted;
use sidecore_ublk::{UblkUnit, UnitOptions};

use super::{Device, block_device, lock};

/// How long the kernel may take to notice the end of the process that has served the device.
const PREDECESSOR: Duration = Duration::from_secs(30);

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Brings a device up: afterwards it can be used. Returns early, without an error, if it is to end.
///
/// # Errors
/// The reason, with the remedy.
pub(super) fn bring_up(device: &Arc<Device>, control: &UblkControl) -> Result<(), String> {
    let Some(store) = lock(&device.store).clone() else { return Ok(()) };
    let number = device.own.number;
    let result = match waits_for_predecessor(device, control)? {
        Some(info) if info.state() == UblkState::Quiesced => {
            recover(device, control, &info, &store)
        }
        // A daemon was killed between making it and starting it.
        Some(_) => control
            .delete(number, &|| device.ends())
            .map_err(|error| error.to_string())
            .and_then(|()| make(device, control, &store)),
        None => make(device, control, &store),
    };
    if device.ends() {
        return Ok(());
    }
    result?;
    device.grow();
    Ok(())
}

/// A word in the kernel's device by which a later daemon recognizes it.
fn server_word(name: &str) -> u64 {
    twox_hash::XxHash3_64::oneshot(format!("sidecore {name}").as_bytes())
}

/// The device of an earlier daemon once nothing serves it any longer; `None` if there is none.
fn waits_for_predecessor(
    device: &Device,
    control: &UblkControl,
) -> Result<Option<UblkInfo>, String> {
    let number = device.own.number;
    let begun = Instant::now();
    loop {
        let Some(info) = control.info(number).map_err(|error| error.to_string())? else {
            return Ok(None);
        };
        if info.server_word != server_word(&device.name) {
            return Err(format!(
                "ublk device {number} belongs to another program or to a device of another name; \
                 give this one another `number`"
            ));
        }
        device.is_made.store(true, Ordering::Relaxed);
        match info.state() {
            UblkState::Dead | UblkState::Quiesced => return Ok(Some(info)),
            _ if device.ends() => return Ok(Some(info)),
            _ if begun.elapsed() > PREDECESSOR => {
                return Err(format!(
                    "{} is served by process {}; end that process",
                    block_device(number).display(),
                    info.server
                ));
            }
            _ => std::thread::sleep(LOOK),
        }
    }
}

fn parameters(device: &Device, geometry: &Geometry, io_bytes_max: u32) -> UblkParameters {
    UblkParameters {
        capacity_bytes: geometry.capacity_bytes,
        block_bytes: geometry.block_bytes,
        physical_block_bytes: geometry.physical_block_bytes,
        io_bytes_max,
        read_only: geometry.read_only || device.read_only,
        volatile_cache: geometry.volatile_cache,
        discard: geometry.discard,
        write_zeroes: geometry.write_zeroes,
    }
}

fn make(
    device: &Arc<Device>,
    control: &UblkControl,
    store: &Arc<dyn BlockDevice>,
) -> Result<(), String> {
    let own = &device.own;
    let sizes = (device.wanted_queues.min(control.queues_max()), own.queue_depth);
    let io_bytes_max = u32::try_from(own.io_bytes_max).unwrap_or(u32::MAX);
    let wanted = UblkInfo::new(own.number, sizes, io_bytes_max, server_word(&device.name));
    let info = control.add(wanted).map_err(|error| error.to_string())?;
    device.is_made.store(true, Ordering::Relaxed);
    let geometry =
        Geometry { read_only: store.geometry().read_only || device.read_only, ..store.geometry() };
    let result = control
        .set_parameters(own.number, parameters(device, &geometry, info.io_bytes_max))
        .map_err(|error| error.to_string())
        .and_then(|()| start_queues(device, control, &info, geometry, store))
        .and_then(|()| {
            control.start(own.number, &|| device.ends()).map_err(|error| error.to_string())
        });
    match result {
        Ok(()) => show(device, "made"),
        Err(_) if device.ends() => {}
        Err(reason) => {
            device.remove();
            return Err(reason);
        }
    }
    Ok(())
}

/// Records that the kernel shows the block device.
pub(super) fn show(device: &Device, how: &str) {
    device.is_live.store(true, Ordering::Relaxed);
    let path = block_device(device.own.number);
    let queues = device.running_count.load(Ordering::Relaxed);
    tracing::info!(device = &*device.name, queues, "{} is {how}", path.display());
}

/// Takes over a device with the requests that it has: the kernel sends those again that an earlier
/// daemon had taken and not completed. The store has been opened by now, which waits until nothing
/// of that daemon is in flight to it, so that no old write can land behind a repeated one.
fn recover(
    device: &Arc<Device>,
    control: &UblkControl,
    info: &UblkInfo,
    store: &Arc<dyn BlockDevice>,
) -> Result<(), String> {
    let number = device.own.number;
    // Requests wait in the kernel until the operator has accepted the loss.
    while device.loss().is_some() {
        if device.ends() {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
    let shown = control.parameters(number).map_err(|error| error.to_string())?;
    let geometry = Geometry {
        capacity_bytes: shown.capacity_bytes,
        read_only: shown.read_only,
        ..store.geometry()
    };
    fits(&shown, store, device)?;
    begin_recovery(device, control)?;
    start_queues(device, control, info, geometry, store)?;
    control.end_recovery(number, &|| device.ends()).map_err(|error| error.to_string())?;
    *lock(&device.geometry) = geometry;
    show(device, "recovered");
    Ok(())
}

/// Checks that the store is still the one that the kernel was told of.
fn fits(
    shown: &UblkParameters,
    store: &Arc<dyn BlockDevice>,
    device: &Device,
) -> Result<(), String> {
    let now = store.geometry();
    let path = block_device(device.own.number);
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
    if !shown.read_only && (now.read_only || device.read_only) {
        return Err(format!(
            "{} is writable, and its device or store is read-only now; unmount it and remove the \
             device before this change",
            path.display()
        ));
    }
    Ok(())
}

/// Waits until the kernel has cleaned up after the process that has served the device.
fn begin_recovery(device: &Device, control: &UblkControl) -> Result<(), String> {
    /// `EINVAL` of the kernel: a recovery was begun by a daemon that was killed, and no queue has
    /// fetched since. The device is as another begin would make it.
    const BEGUN: i32 = 22;
    let begin = || match control.begin_recovery(device.own.number) {
        Err(error) if error.errno() == Some(BEGUN) => Ok(()),
        begun => begun,
    };
    while_busy(device, begin, UblkError::errno).map_err(|error| error.to_string())
}

/// Repeats a call that fails with EBUSY while the process that has served the device is ending.
fn while_busy<T, E>(
    device: &Device,
    call: impl Fn() -> Result<T, E>,
    errno: impl Fn(&E) -> Option<i32>,
) -> Result<T, E> {
    const BUSY: i32 = 16;
    let begun = Instant::now();
    loop {
        let result = call();
        let is_busy = result.as_ref().is_err_and(|error| errno(error) == Some(BUSY));
        if !is_busy || begun.elapsed() > PREDECESSOR || device.ends() {
            return result;
        }
        std::thread::sleep(LOOK);
    }
}

fn start_queues(
    device: &Arc<Device>,
    control: &UblkControl,
    info: &UblkInfo,
    geometry: Geometry,
    store: &Arc<dyn BlockDevice>,
) -> Result<(), String> {
    let (depth, io_bytes_max) = (info.depth, info.io_bytes_max);
    let partitions = control.partitions();
    device.made_queues.store(info.queues, Ordering::Relaxed);
    let number = device.own.number;
    let open = || open_ublk_device(number);
    let opened = while_busy(device, open, std::io::Error::raw_os_error)
        .map_err(|error| format!("/dev/ublkc{number}: {error}"))?;
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
