//! A device that a client has opened.

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use super::replay::ReplayLog;
use crate::wire::{DEVICE_NAME_BYTES, DeviceEntry, device_flag};

/// The executor of the writes of a replay log: an incarnation of an IOhost, in an epoch of the
/// device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Executor {
    pub(super) incarnation: u64,
    pub(super) epoch: u64,
}

/// A device that was opened.
#[derive(Debug)]
pub(super) struct Device {
    /// The place is in use.
    pub(super) is_open: bool,
    pub(super) name: [u8; DEVICE_NAME_BYTES],
    pub(super) entry: DeviceEntry,
    /// The IOhost has attached the device to this session.
    pub(super) is_attached: bool,
    /// When to ask for it again, unless it is attached and the entry is of the newest version.
    pub(super) ask_at: Nanos,
    pub(super) log: ReplayLog,
    /// The executor of the writes in the log.
    executor: Option<Executor>,
    /// The replay to a new executor.
    pub(super) replay: Option<Replay>,
    /// The engine's own flush is unanswered.
    pub(super) is_flushing: bool,
    /// Replayed writes failed: the next flush does, too.
    pub(super) lost: Option<BlockError>,
    /// The caller has not been told of the entry.
    pub(super) is_untold: bool,
}

/// A replay on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replay {
    to: Executor,
    /// The position of the next write to be sent.
    pub(super) next: u64,
    /// The position behind the last one.
    pub(super) end: u64,
    /// Writes that were sent and not answered.
    pub(super) unanswered: usize,
}

impl Device {
    pub(super) fn new(name: [u8; DEVICE_NAME_BYTES], replay_bytes: usize) -> Self {
        // A log must hold each single write.
        let replay_bytes = replay_bytes.max(crate::wire::MAX_REQUEST_BYTES as usize);
        Self { is_open: true, log: ReplayLog::new(replay_bytes), name, ..Self::closed() }
    }

    /// The place of a device that is not used.
    pub(super) fn closed() -> Self {
        Self {
            is_open: false,
            name: [0; DEVICE_NAME_BYTES],
            entry: DeviceEntry::default(),
            is_attached: false,
            ask_at: Nanos::ZERO,
            log: ReplayLog::new(0),
            executor: None,
            replay: None,
            is_flushing: false,
            lost: None,
            is_untold: false,
        }
    }

    /// Whether the IOhost has ever attached it.
    pub(super) const fn is_known(&self) -> bool {
        self.entry.has(device_flag::PRESENT)
    }

    /// Whether `entry` is of this device: an IOhost may have made another one with its name.
    pub(super) fn is_same(&self, entry: &DeviceEntry) -> bool {
        !self.is_known() || entry.serial == self.entry.serial
    }

    /// Whether the entry has to be asked for.
    pub(super) const fn is_stale(&self, devices_version: u32) -> bool {
        self.is_open && (!self.is_attached || self.entry.version != devices_version)
    }

    /// Whether requests of the caller may be sent.
    pub(super) const fn is_ready(&self) -> bool {
        self.is_attached && self.replay.is_none()
    }

    /// Whether writes are kept until a flush covers them.
    pub(super) const fn keeps_writes(&self) -> bool {
        self.entry.has(device_flag::VOLATILE_CACHE)
    }

    /// The session is over.
    pub(super) fn detach(&mut self) {
        self.is_attached = false;
        self.replay = None;
        self.is_flushing = false;
        self.ask_at = Nanos::ZERO;
    }

    /// The device was attached: by another incarnation, or in another epoch, the writes of the log
    /// may be lost, and are sent again.
    pub(super) fn attach(&mut self, executor: Executor, replays: bool) {
        self.is_attached = true;
        let (next, end) = (self.log.base(), self.log.end());
        if replays && next < end && self.executor != Some(executor) {
            self.replay = Some(Replay { to: executor, next, end, unanswered: 0 });
        } else {
            self.executor = Some(executor);
        }
    }

    /// Ends the replay, if all of it was answered.
    pub(super) fn end_replay(&mut self) {
        if let Some(replay) =
            self.replay.filter(|replay| replay.next >= replay.end && replay.unanswered == 0)
        {
            self.executor = Some(replay.to);
            self.replay = None;
        }
    }
}
