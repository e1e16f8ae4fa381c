//! A device that a client has opened.

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use super::Client;
use super::replay::ReplayLog;
use crate::VrioStats;
use crate::handshake::ClientHandshake;
use crate::nic::Nic;
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
    /// The first entry, with the newest size: the device's user relies on it.
    pub(super) promised: DeviceEntry,
    /// A larger size that an entry has claimed.
    claimed_bytes: u64,
    /// The IOhost has attached the device to this session.
    pub(super) is_attached: bool,
    /// Since when the IOhost does not serve it, as far as that is known.
    pub(super) away_since: Option<Nanos>,
    /// Requests of the caller that have not ended.
    pub(super) guest_requests: u16,
    /// It is attached once more, and requests wait for that: see [`Client::claim`].
    pub(super) claims: bool,
    /// Its user is gone: see [`Client::leave`].
    pub(super) is_left: bool,
    /// The position behind the last kept write of users that were gone when the present one began.
    gone: u64,
    /// Answered writes of its last user that were abandoned.
    pub(super) abandoned: u64,
    /// Those that the caller has not been told of.
    pub(super) untold_abandoned: u64,
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
    /// The difference for which the IOhost's newest entry was refused.
    pub(super) refused: Option<&'static str>,
    /// The caller has not been told of the entry.
    pub(super) is_untold: bool,
    /// The device is a NIC, not a disk.
    pub(super) nic: Option<Box<Nic>>,
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

impl<H: ClientHandshake> Client<H> {
    /// Promises the user of an opened device that it is as in this entry, before the IOhost has
    /// attached it: another one is then [refused](Self::change). Without an effect if the IOhost
    /// has attached the device before, or if the entry is of no device.
    pub fn promise(&mut self, device: u16, entry: &DeviceEntry) {
        if let Some(device) = self.core.device_mut(device) {
            device.promise(entry);
        }
    }
}

impl Device {
    pub(super) fn new(name: [u8; DEVICE_NAME_BYTES], replay_bytes: usize) -> Self {
        // A log must hold each single write.
        let replay_bytes = replay_bytes.max(crate::wire::MAX_REQUEST_BYTES as usize);
        Self { is_open: true, log: ReplayLog::new(replay_bytes), name, ..Self::closed() }
    }

    pub(super) fn nic(name: [u8; DEVICE_NAME_BYTES], nic: Nic) -> Self {
        Self { is_open: true, name, nic: Some(Box::new(nic)), ..Self::closed() }
    }

    /// Whether the entry is of a device of this kind that can be used.
    pub(super) fn takes(&self, entry: &DeviceEntry, has_packets: bool) -> bool {
        match self.nic {
            Some(_) => has_packets && entry.nic().is_some(),
            None => entry.is_sound(),
        }
    }

    /// The place of a device that is not used.
    pub(super) fn closed() -> Self {
        Self {
            is_open: false,
            name: [0; DEVICE_NAME_BYTES],
            entry: DeviceEntry::default(),
            promised: DeviceEntry::default(),
            claimed_bytes: 0,
            is_attached: false,
            away_since: None,
            guest_requests: 0,
            claims: false,
            is_left: false,
            gone: 0,
            abandoned: 0,
            untold_abandoned: 0,
            ask_at: Nanos::ZERO,
            log: ReplayLog::new(0),
            executor: None,
            replay: None,
            is_flushing: false,
            lost: None,
            refused: None,
            is_untold: false,
            nic: None,
        }
    }

    /// Takes an entry of an earlier client for the IOhost's, unless the IOhost has attached it.
    pub(super) fn promise(&mut self, entry: &DeviceEntry) {
        if !self.is_known() && entry.is_sound() {
            self.entry = DeviceEntry { name: self.name, ..*entry };
            self.promised = self.entry;
        }
    }

    /// Whether the IOhost has ever attached it, or it was promised.
    pub(super) const fn is_known(&self) -> bool {
        self.entry.has(device_flag::PRESENT)
    }

    /// The difference for which `entry` is not this device as its user knows it: an IOhost may have
    /// made another one with its name. Users take growth alone.
    pub(super) fn change(&self, entry: &DeviceEntry) -> Option<&'static str> {
        // The user of a NIC has a port for it, which takes another address or MTU over.
        if !self.is_known() || self.nic.is_some() {
            return None;
        }
        let (was, is) = (|flag| self.promised.has(flag), |flag| entry.has(flag));
        let lost = |flag| was(flag) && !is(flag);
        let changes = [
            (entry.serial != self.promised.serial, "it has another serial number"),
            (entry.block_bytes != self.promised.block_bytes, "it has another block size"),
            (entry.capacity_bytes < self.promised.capacity_bytes, "it has shrunk"),
            (is(device_flag::READ_ONLY) && !was(device_flag::READ_ONLY), "it has become read-only"),
            (
                is(device_flag::VOLATILE_CACHE) && !was(device_flag::VOLATILE_CACHE),
                "it has got a volatile cache",
            ),
            (lost(device_flag::DISCARD), "it no longer discards"),
            (lost(device_flag::DISCARD_ZEROES), "its discarded blocks no longer read as zeros"),
            (lost(device_flag::WRITE_ZEROES), "it no longer writes zeros"),
        ];
        changes.into_iter().find_map(|(has_changed, what)| has_changed.then_some(what))
    }

    /// Whether this is a larger size that is claimed for the first time: the entry is asked for
    /// once more. A size cannot be taken back, and frames that are not sealed may be damaged.
    pub(super) const fn is_new_size(&mut self, capacity_bytes: u64) -> bool {
        let is_disk = self.nic.is_none();
        let has_grown = self.is_known() && is_disk && capacity_bytes > self.promised.capacity_bytes;
        let is_new = has_grown && capacity_bytes != self.claimed_bytes;
        self.claimed_bytes = capacity_bytes;
        is_new
    }

    /// Whether the entry has to be asked for.
    pub(super) fn is_stale(&self, devices_version: u32) -> bool {
        let is_old = self.entry.version != devices_version;
        self.is_open && (!self.is_attached || self.is_claimed() || is_old)
    }

    /// Whether it is to be attached once more: what was kept before is replayed and flushed.
    pub(super) fn is_claimed(&self) -> bool {
        self.claims && self.is_ready() && !self.owes_flush()
    }

    /// Whether requests of the caller may be sent.
    pub(super) const fn is_ready(&self) -> bool {
        self.is_attached && self.replay.is_none()
    }

    /// Whether kept writes are to be flushed: for a user that begins, or for one that is gone.
    pub(super) fn owes_flush(&self) -> bool {
        let keeps_some = self.log.base() < self.log.end();
        let may_flush = self.is_left || (self.claims && self.lost.is_none());
        may_flush && keeps_some && self.is_ready()
    }

    /// Its user is gone.
    pub(super) const fn leave(&mut self) {
        self.is_left = true;
    }

    /// Another user begins. Returns the number of kept writes that were abandoned.
    pub(super) fn begin(&mut self) -> u64 {
        let mut abandoned = 0;
        if std::mem::take(&mut self.is_left) {
            self.gone = self.log.end();
            // Writes of a replay that is not over are still read.
            if self.lost.take().is_some() && self.replay.is_none() {
                abandoned = self.abandon();
            }
        }
        // The new user relies on none of them.
        self.abandoned = 0;
        abandoned
    }

    /// A flush of the engine's own has failed that covers the writes before `covers`. If all of
    /// them are of users that are gone, they are abandoned; returns their number. Otherwise the
    /// user's next flush fails.
    pub(super) fn flush_failed(&mut self, covers: u64, error: BlockError) -> u64 {
        // A flush that has not begun covers nothing.
        if self.is_attached && covers > 0 && covers <= self.gone() {
            return self.abandon();
        }
        self.lost = self.lost.or(Some(error));
        0
    }

    /// The position behind the last kept write of users that are gone.
    fn gone(&self) -> u64 {
        if self.is_left { self.log.end() } else { self.gone }
    }

    /// Answered writes of a user that is gone which are kept, or were abandoned.
    pub(super) fn left_writes(&self) -> u64 {
        self.gone().saturating_sub(self.log.base()).saturating_add(self.abandoned)
    }

    /// Another executor is about to attach the device, or has failed to flush it: forgets the kept
    /// writes of users that are gone. Returns their number.
    pub(super) fn abandon(&mut self) -> u64 {
        let count = self.gone().saturating_sub(self.log.base());
        self.log.covered(self.gone());
        self.note_abandoned(count)
    }

    /// Forgets the kept writes that a replay has not sent yet, for a user that is gone. Returns
    /// their number.
    pub(super) fn end_replay_early(&mut self) -> u64 {
        let Some(replay) = &mut self.replay else { return 0 };
        replay.end = replay.next;
        let count = self.log.forget(replay.next);
        self.end_replay();
        self.note_abandoned(count)
    }

    const fn note_abandoned(&mut self, count: u64) -> u64 {
        self.abandoned = self.abandoned.saturating_add(count);
        self.untold_abandoned = self.untold_abandoned.saturating_add(count);
        self.is_untold |= count > 0;
        count
    }

    /// Whether writes are kept until a flush covers them.
    pub(super) const fn keeps_writes(&self) -> bool {
        self.entry.has(device_flag::VOLATILE_CACHE)
    }

    /// The session is over, or the IOhost has it no longer: it was served at `now` last.
    pub(super) fn detach(&mut self, now: Nanos, stats: &VrioStats) {
        self.away_since.get_or_insert(now);
        if let Some(nic) = &mut self.nic {
            nic.detach(stats);
        }
        self.is_attached = false;
        self.claims = false;
        self.replay = None;
        self.is_flushing = false;
        self.ask_at = Nanos::ZERO;
    }

    /// The device was attached: by another incarnation, or in another epoch, the writes of the log
    /// may be lost, and are sent again. Those of users that are gone are abandoned; returns their
    /// number.
    pub(super) fn attach(&mut self, executor: Executor, replays: bool) -> u64 {
        (self.is_attached, self.away_since) = (true, None);
        let abandoned = if self.executor == Some(executor) { 0 } else { self.abandon() };
        let (next, end) = (self.log.base(), self.log.end());
        if replays && next < end && self.executor != Some(executor) {
            self.replay = Some(Replay { to: executor, next, end, unanswered: 0 });
        } else {
            self.executor = Some(executor);
        }
        abandoned
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promised_device_is_refused_if_it_is_another_one() {
        let entry = DeviceEntry {
            flags: device_flag::PRESENT,
            capacity_bytes: 1 << 20,
            block_bytes: 512,
            physical_block_bytes: 512,
            ..DeviceEntry::default()
        };
        let mut device = Device::new([b'a'; DEVICE_NAME_BYTES], 0);
        for unsound in [DeviceEntry::default(), DeviceEntry { block_bytes: 7, ..entry }] {
            device.promise(&unsound);
            assert!(!device.is_known(), "{unsound:?}");
        }
        device.promise(&entry);
        assert!(device.is_known() && !device.is_attached && device.entry.name == device.name);
        let smaller = DeviceEntry { capacity_bytes: 1 << 19, ..entry };
        assert_eq!(device.change(&smaller), Some("it has shrunk"));
        let same = DeviceEntry { capacity_bytes: 2 << 20, epoch: 4, version: 9, ..entry };
        assert_eq!(device.change(&same), None);
    }

    #[test]
    fn a_device_may_grow_and_change_in_nothing_that_its_user_relies_on() {
        let all = device_flag::PRESENT
            | device_flag::DISCARD
            | device_flag::DISCARD_ZEROES
            | device_flag::WRITE_ZEROES;
        fn with_flags(mut entry: DeviceEntry, flags: u32) -> DeviceEntry {
            entry.flags = flags;
            entry
        }
        let entry = DeviceEntry {
            flags: all,
            capacity_bytes: 1 << 20,
            block_bytes: 512,
            physical_block_bytes: 512,
            ..DeviceEntry::default()
        };
        let mut device = Device::new([b'a'; DEVICE_NAME_BYTES], 0);
        assert_eq!(device.change(&entry), None, "it was not known before");
        (device.entry, device.promised) = (entry, entry);
        for same in [
            entry,
            DeviceEntry { capacity_bytes: 2 << 20, version: 9, epoch: 4, device: 7, ..entry },
        ] {
            assert_eq!(device.change(&same), None);
        }
        let mut changes: Vec<_> = [
            DeviceEntry { serial: [1; 20], ..entry },
            DeviceEntry { block_bytes: 4096, ..entry },
            DeviceEntry { capacity_bytes: 1 << 19, ..entry },
            with_flags(entry, all | device_flag::READ_ONLY),
            with_flags(entry, all | device_flag::VOLATILE_CACHE),
            with_flags(entry, all & !device_flag::DISCARD),
            with_flags(entry, all & !device_flag::DISCARD_ZEROES),
            with_flags(entry, all & !device_flag::WRITE_ZEROES),
        ]
        .map(|changed| device.change(&changed).expect("refused"))
        .into();
        changes.sort_unstable();
        changes.dedup();
        assert_eq!(changes.len(), 8, "each has its own reason: {changes:?}");
        // A promise does not replace what the IOhost has said.
        device.promise(&DeviceEntry { block_bytes: 4096, physical_block_bytes: 4096, ..entry });
        assert_eq!(device.promised, entry);
        device.promised.flags |= device_flag::READ_ONLY | device_flag::VOLATILE_CACHE;
        assert_eq!(device.change(&entry), None, "more than the user relies on");
    }
}
