//! The store of a remote device.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use sidecore_block::{BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Operation};
use sidecore_reactor::CoreContext;
use sidecore_vrio::wire::{DEVICE_NAME_BYTES, DeviceEntry, device_flag};

use super::handover::line;
use super::iohost::{Command, Iohost, Shared};
use super::local::{Desks, LocalChannel};
use super::status::{DeviceShared, DeviceStatus};

/// A device as a store has opened it.
#[derive(Clone)]
pub(super) struct Opened {
    pub(super) device: Arc<DeviceShared>,
    /// As of the opening.
    geometry: Geometry,
}

impl Opened {
    /// The geometry, with the newest size.
    fn geometry(&self) -> Geometry {
        Geometry { capacity_bytes: self.device.capacity_bytes(), ..self.geometry }
    }

    /// Whether the device can carry a request out. A long request is checked as a whole, before a
    /// part of it is sent.
    pub(super) fn check(&self, request: &BlockRequest) -> Result<(), BlockError> {
        let geometry = self.geometry();
        let is_supported = match request.operation {
            Operation::Flush => return Ok(()),
            Operation::Read | Operation::Write => true,
            Operation::Discard => geometry.discard,
            Operation::WriteZeroes { .. } => geometry.write_zeroes,
        };
        if geometry.read_only && request.operation.is_write() {
            return Err(BlockError::ReadOnly);
        }
        if !is_supported {
            return Err(BlockError::Unsupported);
        }
        let checked = geometry.check(request.offset_bytes, request.len_bytes);
        checked.map_err(|_| BlockError::OutOfBounds)
    }
}

/// Why a remote device was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The name is no name of a device.
    #[error("a device's name has 1 to {DEVICE_NAME_BYTES} bytes and no zeros in it")]
    Name,
    /// Another store has it.
    #[error("the device is in use by another store: use that one for both")]
    InUse,
    /// The opening was cancelled.
    #[error("the opening was cancelled")]
    Cancelled,
    /// The session with the IOhost has ended.
    #[error("the session with the IOhost has ended")]
    Ended,
}

/// An opening of a remote device, which takes until the IOhost has attached it.
pub struct Opening(Arc<OpeningShared>);

/// Closes the device when the store and all of its queues are gone.
pub(super) struct OpeningShared {
    session: Arc<Shared>,
    device: Arc<DeviceShared>,
    is_cancelled: AtomicBool,
}

/// Cancels an [`Opening`] that another thread waits for.
#[derive(Clone)]
pub struct Canceller(Arc<OpeningShared>);

impl Opening {
    /// Begins to open the device `name` of an IOhost, which may be away, or have no such device
    /// yet, and whose session may be started later.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn new(iohost: &Iohost, name: &str) -> Result<Self, OpenError> {
        padded_name(name).ok_or(OpenError::Name)?;
        let session = &iohost.0;
        if session.has_ended() {
            return Err(OpenError::Ended);
        }
        let device = Arc::new(DeviceShared::new(name));
        {
            let mut devices = session.devices.lock().unwrap_or_else(PoisonError::into_inner);
            devices.retain(|device| device.strong_count() > 0);
            let is_it = |device: &Arc<DeviceShared>| device.name == name && device.is_in_use();
            if devices.iter().filter_map(std::sync::Weak::upgrade).any(|device| is_it(&device)) {
                return Err(OpenError::InUse);
            }
            devices.push(Arc::downgrade(&device));
        }
        session.tell(Command::OpenDevice(Arc::clone(&device)));
        let session = Arc::clone(session);
        Ok(Self(Arc::new(OpeningShared { session, device, is_cancelled: AtomicBool::new(false) })))
    }

    /// The condition that the device waits for, and since when.
    #[must_use]
    pub fn status(&self) -> DeviceStatus {
        self.0.device.status()
    }

    /// Cancels the opening while another thread waits for it.
    #[must_use]
    pub fn canceller(&self) -> Canceller {
        Canceller(Arc::clone(&self.0))
    }

    /// Waits until the device is attached, for at most `patience`. Returns the opening itself if
    /// that was not enough.
    ///
    /// # Errors
    /// It was cancelled, or the session has ended.
    pub fn wait(self, patience: Option<Duration>) -> Result<Result<RemoteStore, Self>, OpenError> {
        self.wait_until(patience, |status| status.waiting.is_none() && status.entry.is_some())
    }

    /// Opens the device as in `entry`, as an earlier process has known it: its requests wait until
    /// the IOhost has attached it, and it is refused there if it has changed in a way that its user
    /// cannot follow. If the IOhost has attached it meanwhile, it is opened as it is.
    ///
    /// Without a sound entry this waits until the device is attached.
    ///
    /// # Errors
    /// It was cancelled, or the session has ended.
    pub fn promised(self, entry: &DeviceEntry) -> Result<Result<RemoteStore, Self>, OpenError> {
        self.0.session.tell(Command::Promise(Arc::clone(&self.0.device), *entry));
        self.wait_until(None, |status| status.entry.is_some())
    }

    fn wait_until(
        self,
        patience: Option<Duration>,
        is_known: impl Fn(&DeviceStatus) -> bool,
    ) -> Result<Result<RemoteStore, Self>, OpenError> {
        let OpeningShared { session, device, is_cancelled } = &*self.0;
        let gives_up = || is_cancelled.load(Ordering::Acquire) || session.has_ended();
        let (status, _) = device.wait(patience, |status| is_known(status) || gives_up());
        if is_cancelled.load(Ordering::Acquire) {
            return Err(OpenError::Cancelled);
        }
        if session.has_ended() {
            return Err(OpenError::Ended);
        }
        match status.entry {
            Some(entry) if is_known(&status) => {
                let opened = Opened { device: Arc::clone(device), geometry: geometry_of(&entry) };
                Ok(Ok(RemoteStore { opening: self.0, opened }))
            }
            _ => Ok(Err(self)),
        }
    }
}

impl Canceller {
    /// Cancels the opening. A device that has been opened meanwhile stays open.
    pub fn cancel(&self) {
        self.0.is_cancelled.store(true, Ordering::Release);
        self.0.device.notify();
    }

    /// Closes the device, though queues of its store are open: their requests fail, and answered
    /// writes are no longer kept.
    pub fn abandon(&self) {
        self.0.session.tell(Command::CloseDevice(Arc::clone(&self.0.device)));
    }

    /// Waits until the device's requests are carried out, for at most `patience`. Returns whether
    /// they are.
    #[must_use]
    pub fn wait_until_ready(&self, patience: Duration) -> bool {
        self.0.device.wait(Some(patience), |status| status.waiting.is_none()).1
    }

    /// The condition that the device waits for, and since when, also after it was opened.
    #[must_use]
    pub fn status(&self) -> DeviceStatus {
        self.0.device.status()
    }
}

impl Drop for OpeningShared {
    fn drop(&mut self) {
        // Until the session is told: a new opening may not be told of before.
        let _devices = self.session.devices.lock().unwrap_or_else(PoisonError::into_inner);
        self.device.set_unused();
        self.session.tell(Command::CloseDevice(Arc::clone(&self.device)));
    }
}

/// A block device of an IOhost.
///
/// A queue on the session's own sidecore gives its requests to the session directly, any other one
/// hands them over. The geometry is that of the opening, except that a device may grow; any other
/// change, which a guest could not survive, is refused.
pub struct RemoteStore {
    opening: Arc<OpeningShared>,
    opened: Opened,
}

impl RemoteStore {
    /// The condition that requests wait for, if they do, and the newest entry of the device.
    #[must_use]
    pub fn status(&self) -> DeviceStatus {
        self.opened.device.status()
    }

    fn hold(&self) -> (&Opened, Arc<OpeningShared>) {
        (&self.opened, Arc::clone(&self.opening))
    }

    /// The name of the IOhost.
    #[must_use]
    pub fn iohost(&self) -> &str {
        &self.opening.session.name
    }

    /// The device's name at the IOhost.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.opened.device.name
    }

    /// The device's serial number, as far as it is text.
    #[must_use]
    pub fn serial(&self) -> String {
        let serial = self.status().entry.map(|entry| entry.serial).unwrap_or_default();
        let len = serial.iter().position(|byte| *byte == 0).unwrap_or(serial.len());
        String::from_utf8_lossy(serial.get(..len).unwrap_or_default()).into_owned()
    }
}

impl BlockDevice for RemoteStore {
    fn geometry(&self) -> Geometry {
        self.opened.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let session = &self.opening.session;
        if session.has_ended() {
            return Err(io::Error::new(io::ErrorKind::NotConnected, OpenError::Ended));
        }
        if let Some(desk) = core.shared::<Desks>().find(session.number)
            && let Some(channel) = LocalChannel::new(core, desk, self.hold(), depth)
        {
            return Ok(Box::new(channel));
        }
        Ok(Box::new(line(session, self.hold(), depth)?))
    }

    fn user_gone(&self) {
        let device = &self.opened.device;
        device.user_is_gone();
        self.opening.session.tell(Command::LeaveDevice(Arc::clone(device)));
    }

    fn loss(&self) -> Option<String> {
        self.opened.device.loss()
    }
}

/// The geometry of a device with this entry.
fn geometry_of(entry: &DeviceEntry) -> Geometry {
    Geometry {
        capacity_bytes: entry.capacity_bytes,
        block_bytes: entry.block_bytes,
        physical_block_bytes: entry.physical_block_bytes,
        read_only: entry.has(device_flag::READ_ONLY),
        volatile_cache: entry.has(device_flag::VOLATILE_CACHE),
        discard: entry.has(device_flag::DISCARD),
        discard_zeroes: entry.has(device_flag::DISCARD_ZEROES),
        write_zeroes: entry.has(device_flag::WRITE_ZEROES),
    }
}

/// A device's name as the wire has it; `None` if it is none.
pub(super) fn padded_name(name: &str) -> Option<[u8; DEVICE_NAME_BYTES]> {
    let mut padded = [0; DEVICE_NAME_BYTES];
    padded.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
    (!name.is_empty() && !name.contains('\0')).then_some(padded)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The session must close a device before it opens it again, or it refuses the new opening as
    /// a second one: no opening may see the device unused before the session is told.
    #[test]
    fn a_device_is_opened_again_only_behind_the_close_of_its_former_opening() {
        let iohost = Iohost::new("io1").unwrap();
        let former = Opening::new(&iohost, "disk1").unwrap();
        let (device, session) = (Arc::clone(&former.0.device), Arc::clone(&iohost.0));
        std::thread::scope(|scope| {
            // The close waits for this lock.
            let commands = session.commands();
            scope.spawn(|| drop(former));
            while device.is_in_use() {
                std::thread::yield_now();
            }
            assert!(session.devices.try_lock().is_err(), "an opening could come in between");
            drop(commands);
        });
        let again = Opening::new(&iohost, "disk1").unwrap();
        let name = |command| match command {
            Command::OpenDevice(_) => "open",
            Command::CloseDevice(_) => "close",
            Command::OpenLine(_) | Command::CloseLine(_) | Command::OpenNic(..) => "other",
            Command::Promise(..) | Command::Drain(_) | Command::LeaveDevice(_) => "other",
            Command::Move { .. } => "other",
        };
        let told: Vec<_> = session.take_commands().into_iter().map(name).collect();
        assert_eq!(told, ["open", "close", "open"]);
        drop(again);
    }
}
