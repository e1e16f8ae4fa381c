//! The front end's settings of one ring, and the ring's state at the device.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sidecore_memory::{GuestMemory, UserAddress};
use sidecore_peer::{ExportFds, FdPlace, ResumeError, ResumeFds};
use sidecore_ring::{RingFormat, RingLayout, RingState, was_used};
use sidecore_spec_virtio::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED};
use sidecore_spec_virtio::vhost_user::{LOG_ALL, PROTOCOL_FEATURES};
use sidecore_virtio::{QueueResources, StartError, VirtioDevice};

use crate::message::VringAddress;
use crate::write_log::WriteLog;

/// The addresses of a ring's areas, in the front end's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Areas {
    descriptor: UserAddress,
    driver: UserAddress,
    device: UserAddress,
}

impl From<VringAddress> for Areas {
    fn from(address: VringAddress) -> Self {
        Self {
            descriptor: UserAddress(address.descriptor),
            driver: UserAddress(address.available),
            device: UserAddress(address.used),
        }
    }
}

/// A ring in a snapshot. None of its requests is in flight.
#[derive(Serialize, Deserialize)]
pub(crate) struct RingSnapshot {
    size: Option<u16>,
    /// The addresses of the descriptor, driver and device areas.
    areas: Option<[u64; 3]>,
    /// The position in the form of SET_VRING_BASE; `None` for the first position.
    base: Option<u32>,
    /// The ring starts at its first position, and `base` is only the reply to GET_VRING_BASE.
    is_reset: bool,
    kick: KickSnapshot,
    call: Option<FdPlace>,
    err: Option<FdPlace>,
    enabled: Option<bool>,
    was_served: bool,
}

#[derive(Serialize, Deserialize)]
enum KickSnapshot {
    Absent,
    Polled,
    Eventfd(FdPlace),
}

/// The device's position when the ring is started.
#[derive(Clone, Copy, Debug)]
enum Position {
    /// The ring's first position.
    Fresh,
    /// The position of SET_VRING_BASE.
    Base(u32),
    /// The position at which the device stopped.
    Stopped(RingState, RingFormat),
    /// The ring's first position, after a reset at this base. VHOST_USER_GET_VRING_BASE still
    /// returns this base: QEMU 7.2 and its contemporaries first set the status to 0 and then ask
    /// for the base, even to pause a guest.
    Reset(u32),
}

impl Position {
    fn state(self, format: RingFormat) -> RingState {
        match self {
            Self::Base(base) => RingState::from_vring_base(base, format),
            Self::Stopped(state, stopped) if stopped == format => state,
            Self::Fresh | Self::Stopped(..) | Self::Reset(..) => RingState::fresh(format),
        }
    }
}

/// The guest's way to announce buffers. SET_VRING_KICK starts a ring with either way
/// (specification, "Ring states").
#[derive(Debug)]
enum Kick {
    /// SET_VRING_KICK has not come yet: the ring is stopped.
    Absent,
    /// The guest sends no notifications: the device polls.
    Polled,
    /// The guest signals an eventfd.
    Eventfd(OwnedFd),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The device does not have the queue.
    Stopped,
    /// The device serves the queue.
    Running(RingFormat),
    /// The ring has all its settings, but the device refused it. Each change by the front end
    /// starts another attempt.
    Refused,
}

/// One ring of a session.
pub(crate) struct Ring {
    device: Arc<dyn VirtioDevice>,
    index: u16,
    size: Option<u16>,
    areas: Option<Areas>,
    position: Position,
    kick: Kick,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    enabled: Option<bool>,
    phase: Phase,
    /// Whether the device has served the ring on this connection.
    was_served: bool,
}

impl Ring {
    pub(crate) fn new(device: Arc<dyn VirtioDevice>, index: u16) -> Self {
        Self {
            device,
            index,
            size: None,
            areas: None,
            position: Position::Fresh,
            kick: Kick::Absent,
            call: None,
            err: None,
            enabled: None,
            phase: Phase::Stopped,
            was_served: false,
        }
    }

    /// Exports a stopped ring to another process.
    pub(crate) fn export(&mut self, fds: &mut ExportFds) -> RingSnapshot {
        let (base, is_reset) = match self.position {
            Position::Fresh => (None, false),
            Position::Base(base) => (Some(base), false),
            Position::Stopped(state, format) => (Some(state.to_vring_base(format)), false),
            Position::Reset(base) => (Some(base), true),
        };
        let kick = match std::mem::replace(&mut self.kick, Kick::Absent) {
            Kick::Absent => KickSnapshot::Absent,
            Kick::Polled => KickSnapshot::Polled,
            Kick::Eventfd(kick) => KickSnapshot::Eventfd(fds.put(kick)),
        };
        RingSnapshot {
            size: self.size,
            areas: self.areas.map(|areas| [areas.descriptor.0, areas.driver.0, areas.device.0]),
            base,
            is_reset,
            kick,
            call: self.call.take().map(|call| fds.put(call)),
            err: self.err.take().map(|err| fds.put(err)),
            enabled: self.enabled,
            was_served: self.was_served,
        }
    }

    /// Takes over the ring of another process, and does not start it yet.
    pub(crate) fn resume(
        &mut self,
        state: RingSnapshot,
        fds: &mut ResumeFds,
    ) -> Result<(), ResumeError> {
        self.size = state.size;
        self.areas = state.areas.map(|[descriptor, driver, device]| Areas {
            descriptor: UserAddress(descriptor),
            driver: UserAddress(driver),
            device: UserAddress(device),
        });
        self.position = match (state.base, state.is_reset) {
            (None, _) => Position::Fresh,
            (Some(base), false) => Position::Base(base),
            (Some(base), true) => Position::Reset(base),
        };
        self.kick = match state.kick {
            KickSnapshot::Absent => Kick::Absent,
            KickSnapshot::Polled => Kick::Polled,
            KickSnapshot::Eventfd(kick) => Kick::Eventfd(fds.take(kick)?),
        };
        self.call = state.call.map(|call| fds.take(call)).transpose()?;
        self.err = state.err.map(|err| fds.take(err)).transpose()?;
        self.enabled = state.enabled;
        self.was_served = state.was_served;
        Ok(())
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running(_))
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.phase == Phase::Refused
    }

    /// Sets the size. False if the ring runs with another size.
    pub(crate) fn set_size(&mut self, size: u16) -> bool {
        let allowed = !self.is_running() || self.size == Some(size);
        if allowed {
            self.size = Some(size);
        }
        allowed
    }

    /// Sets the areas. False if the ring runs with other areas. A front end repeats the addresses
    /// of a running ring to switch logging.
    pub(crate) fn set_areas(&mut self, areas: Areas) -> bool {
        let allowed = !self.is_running() || self.areas == Some(areas);
        if allowed {
            self.areas = Some(areas);
        }
        allowed
    }

    /// Sets the ring's first position.
    pub(crate) fn forget_position(&mut self) {
        self.position = Position::Fresh;
    }

    /// Sets the position of the next start. False if the ring runs.
    pub(crate) fn set_base(&mut self, base: u32) -> bool {
        let allowed = !self.is_running();
        if allowed {
            self.position = Position::Base(base);
        }
        allowed
    }

    /// Returns the base of SET_VRING_BASE if a ring of this format cannot have it: the upper half
    /// of a split ring's base is reserved (specification, "A vring state description"). A packed
    /// ring's base is checked against its size, at the start.
    pub(crate) fn bad_base(&self, features: u64) -> Option<u32> {
        match self.position {
            Position::Base(base) if format(features) == RingFormat::Split && base >> 16 != 0 => {
                Some(base)
            }
            _ => None,
        }
    }

    /// Returns the ring's position, in the form of VHOST_USER_GET_VRING_BASE.
    pub(crate) fn base(&self, features: u64) -> u32 {
        match self.position {
            Position::Fresh => RingState::fresh(format(features)).to_vring_base(format(features)),
            Position::Base(base) | Position::Reset(base) => base,
            Position::Stopped(state, format) => state.to_vring_base(format),
        }
    }

    /// Sets the guest's way to announce buffers. The caller stops the ring before, and tries to
    /// start it afterwards.
    pub(crate) fn set_kick(&mut self, kick: Option<OwnedFd>) {
        self.kick = kick.map_or(Kick::Polled, Kick::Eventfd);
    }

    /// Sets the error eventfd. The caller stops the ring before, and tries to start it afterwards.
    pub(crate) fn set_err(&mut self, err: Option<OwnedFd>) {
        self.err = err;
    }

    /// Sets the call eventfd, without a stop if the ring runs: front ends mask and unmask an
    /// interrupt in this way.
    pub(crate) fn set_call(&mut self, call: Option<OwnedFd>) -> io::Result<()> {
        if self.is_running() {
            self.device.set_call(self.index, duplicate(call.as_ref())?);
        }
        self.call = call;
        Ok(())
    }

    /// Has a running ring log its writes as `log` says under these features. On return the device
    /// uses this log, and no other.
    pub(crate) fn set_log(&self, features: u64, log: &WriteLog) -> io::Result<()> {
        if self.is_running() {
            self.device.set_log(self.index, log.for_queue(features)?);
        }
        Ok(())
    }

    /// Enables or disables the ring. A disabled ring stops, unless it is a network device's.
    pub(crate) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = Some(enabled);
        if self.device.is_network() {
            if self.is_running() {
                self.device.set_enabled(self.index, enabled);
            }
        } else if !enabled {
            self.stop();
        }
    }

    /// Starts the ring if it is enabled, has all its settings, and does not run. A ring whose
    /// writes are to be logged waits for the log. The ring of a network device starts while it is
    /// disabled, too.
    pub(crate) fn start(
        &mut self,
        memory: &GuestMemory,
        features: u64,
        log: &WriteLog,
    ) -> Result<(), StartError> {
        if features & LOG_ALL != 0 && !log.is_set() {
            return Ok(());
        }
        let is_enabled = self.enabled.unwrap_or(features & PROTOCOL_FEATURES == 0);
        if self.is_running() || !(is_enabled || self.device.is_network()) {
            return Ok(());
        }
        let kick = match &self.kick {
            Kick::Absent => return Ok(()),
            Kick::Polled => None,
            Kick::Eventfd(kick) => Some(kick),
        };
        let (Some(size), Some(areas)) = (self.size, self.areas) else {
            return Ok(());
        };
        let format = format(features);
        let state = self.position.state(format);
        let layout = RingLayout {
            format,
            size,
            descriptor_area: areas.descriptor,
            driver_area: areas.driver,
            device_area: areas.device,
            event_idx: features & EVENT_IDX != 0,
            indirect: features & INDIRECT_DESC != 0,
        };
        if !self.was_served
            && let Some(why) = self.device.loss()
            // The start below reports an area outside of the guest's memory.
            && (state != RingState::fresh(format) || was_used(memory, &layout).unwrap_or(false))
        {
            return Err(StartError::Loss { index: self.index, why });
        }
        let eventfds = duplicate(kick)
            .and_then(|kick| {
                let (call, err) = (duplicate(self.call.as_ref())?, duplicate(self.err.as_ref())?);
                Ok((kick, call, err, log.for_queue(features)?))
            })
            .map_err(|error| StartError::Io { index: self.index, error });
        let started = eventfds.and_then(|(kick, call, err, log)| {
            let resources = QueueResources {
                memory: memory.clone(),
                layout,
                features: features & !(PROTOCOL_FEATURES | LOG_ALL),
                kick,
                call,
                err,
                log,
                is_enabled,
            };
            self.device.start_queue(self.index, resources, state)
        });
        self.was_served |= started.is_ok();
        self.phase = if started.is_ok() { Phase::Running(format) } else { Phase::Refused };
        started
    }

    /// Stops the ring and keeps its position. Afterwards the device does not touch the ring's
    /// memory. False if the ring did not run.
    pub(crate) fn stop(&mut self) -> bool {
        let Phase::Running(format) = self.phase else {
            self.phase = Phase::Stopped;
            return false;
        };
        match self.device.stop_queue(self.index) {
            Some(state) => self.position = Position::Stopped(state, format),
            None => tracing::error!(
                ring = self.index,
                "the device does not have a queue that it started"
            ),
        }
        self.phase = Phase::Stopped;
        true
    }

    /// Stops the ring until the next SET_VRING_KICK.
    pub(crate) fn disarm(&mut self) {
        self.stop();
        self.kick = Kick::Absent;
    }

    /// Stops the ring and resets its settings, except for its call and error eventfds: QEMU sends
    /// those once for a connection, and not again after a reset.
    pub(crate) fn reset(&mut self) {
        self.stop();
        let fresh = Self::new(Arc::clone(&self.device), self.index);
        let old = std::mem::replace(self, fresh);
        self.call = old.call;
        self.err = old.err;
        self.was_served = old.was_served;
        self.position = match old.position {
            Position::Fresh => Position::Fresh,
            Position::Base(base) | Position::Reset(base) => Position::Reset(base),
            Position::Stopped(state, format) => Position::Reset(state.to_vring_base(format)),
        };
    }
}

fn format(features: u64) -> RingFormat {
    if features & RING_PACKED != 0 { RingFormat::Packed } else { RingFormat::Split }
}

/// The device owns its duplicates; the originals stay for the next start.
fn duplicate(fd: Option<&OwnedFd>) -> io::Result<Option<OwnedFd>> {
    fd.map(OwnedFd::try_clone).transpose()
}
