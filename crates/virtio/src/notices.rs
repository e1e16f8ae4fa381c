//! The events between one queue and its driver: kicks, interrupts, and the error event.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use sidecore_reactor::{EventFd, MakeSignal, Signal};
use sidecore_ring::DeviceRing;

use crate::StartError;

/// The descriptors of a queue, as the front end sent them.
pub(crate) struct Notices {
    kick: Option<EventFd>,
    call: Option<Box<dyn Signal>>,
    /// Signalled once, when the queue breaks.
    err: Option<EventFd>,
    signal: MakeSignal,
}

impl fmt::Debug for Notices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notices").field("kick", &self.kick).field("call", &self.call).finish()
    }
}

impl Notices {
    /// The events of queue `index`. `signal` makes interrupts.
    ///
    /// # Errors
    /// A descriptor is no eventfd.
    pub(crate) fn new(
        index: u16,
        kick: Option<OwnedFd>,
        call: Option<OwnedFd>,
        err: Option<OwnedFd>,
        signal: MakeSignal,
    ) -> Result<Self, StartError> {
        let io = |error| StartError::Io { index, error };
        let event = |fd: Option<OwnedFd>| fd.map(EventFd::from_peer).transpose().map_err(io);
        Ok(Self {
            kick: event(kick)?,
            call: call.map(|call| signal(call.as_fd())).transpose().map_err(io)?,
            err: event(err)?,
            signal,
        })
    }

    /// Replaces the interrupt, and interrupts the guest there. Returns the old one: to drop it
    /// takes a while.
    pub(crate) fn set_call(&mut self, call: Option<Box<dyn Signal>>) -> Option<Box<dyn Signal>> {
        let old = std::mem::replace(&mut self.call, call);
        if let Some(call) = &mut self.call {
            // Whether the old one was signalled in vain cannot be known.
            call.signal();
        }
        old
    }

    /// Interrupts the guest if it asked for that. True if it was.
    #[inline]
    pub(crate) fn call(&mut self, ring: &mut DeviceRing) -> bool {
        match &mut self.call {
            Some(call) if ring.take_call() => {
                call.signal();
                true
            }
            _ => false,
        }
    }

    /// Signals that queue `index` of the device of this name is broken.
    pub(crate) fn broke(&mut self, device: &str, index: u16) {
        if let Some(err) = self.err.take() {
            match (self.signal)(err.as_fd()) {
                Ok(mut err) => err.signal(),
                Err(error) => tracing::warn!(device, index, "cannot tell the VMM: {error}"),
            }
        }
    }

    /// The descriptor that the guest signals; without one the queue can only be polled.
    pub(crate) fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(AsFd::as_fd)
    }

    /// Clears the guest's kicks, and returns their number.
    pub(crate) fn drain_kicks(&self) -> u64 {
        self.kick.as_ref().map_or(0, EventFd::drain)
    }
}
