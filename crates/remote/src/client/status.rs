//! The state of a remote device, for any thread.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sidecore_units::Nanos;
use sidecore_vrio::wire::DeviceEntry;

/// The condition that a device waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// The link carries no frames, for this reason.
    Link(&'static str),
    /// The IOhost answers a handshake, for the first time.
    Handshake,
    /// The IOhost admits this client: it refuses it for this reason, which nothing proves.
    Admission(&'static str),
    /// The IOhost answers again.
    Iohost,
    /// The IOhost has a device of this name for this client.
    Device,
    /// The IOhost has the device again as it was: it differs in this.
    SameDevice(&'static str),
    /// The IOhost has the answered writes again that it may have lost in a restart.
    Replay,
    /// The IOhost takes requests of this client again.
    Undrained,
    /// The IOhost is no longer drained here.
    OwnDrain,
    /// The session has ended, so the wait does not end.
    Session,
}

impl WaitsFor {
    /// The condition in a word, for metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Link(_) => "link",
            Self::Handshake => "handshake",
            Self::Admission(_) => "admission",
            Self::Iohost => "iohost",
            Self::Device => "device",
            Self::SameDevice(_) => "same_device",
            Self::Replay => "replay",
            Self::Undrained => "drained_there",
            Self::OwnDrain => "drained_here",
            Self::Session => "session",
        }
    }
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link(reason) => write!(f, "the link ({reason})"),
            Self::Handshake => f.write_str(
                "the IOhost, which has answered no handshake yet (is it up, and are its `address` \
                 and its `invitation` right?)",
            ),
            Self::Admission(reason) => {
                write!(f, "the IOhost, which admits no session: {reason}")
            }
            Self::Iohost => f.write_str("the IOhost, which does not answer"),
            Self::Device => f.write_str("the device, which the IOhost does not have"),
            Self::SameDevice(change) => {
                write!(f, "the device as it was: {change}, which cannot change while it is open")
            }
            Self::Replay => f.write_str("answered writes, which are sent again"),
            Self::Undrained => f.write_str(
                "the IOhost, which is drained of this client's requests (`sidecore remote drain`)",
            ),
            Self::OwnDrain => f.write_str(
                "the end of its IOhost's drain here (`sidecore remote drain --undo --iohost`)",
            ),
            Self::Session => f.write_str("its session, which has ended"),
        }
    }
}

/// A wait of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The condition that it waits for now.
    pub waits_for: WaitsFor,
    /// When it began to wait, by the clock of the sidecores.
    pub since: Nanos,
}

/// The state of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    /// The wait of its requests, if they wait. `None` in the entry's absence means that the
    /// session has not been polled yet.
    pub waiting: Option<Waiting>,
    /// How often its requests have begun to wait: also short waits, which no look at `waiting` may
    /// see.
    pub waits: u64,
    /// The IOhost's entry of the device, once it was attached: the newest one. Before that, the one
    /// that was promised, if one was.
    pub entry: Option<DeviceEntry>,
}

/// A device of a session, as other threads see it.
#[derive(Debug)]
pub(super) struct DeviceShared {
    pub(super) name: String,
    status: Mutex<DeviceStatus>,
    changed: Condvar,
    /// The size of the device in bytes, for each request; 0 before it is known.
    capacity_bytes: AtomicU64,
    /// No store uses it, and none will.
    is_unused: AtomicBool,
    /// Answered writes of a user that is gone which may be missing: see [`UNKNOWN`].
    left_writes: AtomicU64,
}

/// The user is gone, and the session has not said yet how many of its writes may be missing.
const UNKNOWN: u64 = u64::MAX;

impl DeviceShared {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            status: Mutex::default(),
            changed: Condvar::new(),
            capacity_bytes: AtomicU64::new(0),
            is_unused: AtomicBool::new(false),
            left_writes: AtomicU64::new(0),
        }
    }

    /// Its user is gone: the session has to say what may be missing.
    pub(super) fn user_is_gone(&self) {
        self.left_writes.store(UNKNOWN, Ordering::Release);
    }

    /// So many answered writes of a user that is gone may be missing.
    pub(super) fn set_left_writes(&self, count: u64) {
        self.left_writes.store(count, Ordering::Release);
    }

    /// The reason why answered writes of a user that is gone may be missing.
    pub(super) fn loss(&self) -> Option<String> {
        match self.left_writes.load(Ordering::Acquire) {
            0 => None,
            UNKNOWN => Some("its last user is gone, and its writes are not flushed yet".to_owned()),
            count => Some(format!(
                "{count} of its last user, which is gone, were not flushed: the IOhost may have \
                 lost them"
            )),
        }
    }

    pub(super) fn is_in_use(&self) -> bool {
        !self.is_unused.load(Ordering::Acquire)
    }

    pub(super) fn set_unused(&self) {
        self.is_unused.store(true, Ordering::Release);
    }

    pub(super) fn status(&self) -> DeviceStatus {
        *self.lock()
    }

    /// The size of the device in bytes.
    #[inline]
    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn set(&self, status: DeviceStatus) {
        if let Some(entry) = &status.entry {
            self.capacity_bytes.store(entry.capacity_bytes, Ordering::Relaxed);
        }
        *self.lock() = status;
        self.changed.notify_all();
    }

    /// Wakes all threads in [`wait`](Self::wait).
    pub(super) fn notify(&self) {
        // With the lock: a thread that is about to wait has it until it waits.
        let status = self.lock();
        self.changed.notify_all();
        drop(status);
    }

    /// Waits until `is_over`, or for so long. Returns the status and whether it is over.
    pub(super) fn wait(
        &self,
        patience: Option<Duration>,
        is_over: impl Fn(&DeviceStatus) -> bool,
    ) -> (DeviceStatus, bool) {
        let goes_on = |status: &mut DeviceStatus| !is_over(status);
        let (status, timed_out) = match patience {
            Some(patience) => {
                let waited = self.changed.wait_timeout_while(self.lock(), patience, goes_on);
                let (status, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                (*status, timeout.timed_out())
            }
            None => {
                let waited = self.changed.wait_while(self.lock(), goes_on);
                (*waited.unwrap_or_else(PoisonError::into_inner), false)
            }
        };
        (status, !timed_out)
    }

    fn lock(&self) -> MutexGuard<'_, DeviceStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
