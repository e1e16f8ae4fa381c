//! Requests that are given up: their device is gone or was closed, or was not served for too long.

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use super::entry::{Entry, Origin};
use super::{Core, OnDisconnect};

/// The error of a request that has waited for an IOhost for too long (Linux' ETIMEDOUT).
const TIMED_OUT: BlockError = BlockError::Io { errno: 110 };

impl Core {
    /// Whether all devices are attached, as far as that is known without a look at each: the client
    /// asks for those that are not.
    #[inline]
    pub(super) const fn has_all_devices(&self) -> bool {
        self.phase.is_connected() && !self.is_asking
    }

    /// When requests fail because their device is not served.
    pub(super) fn failure_deadline(&self) -> Nanos {
        let OnDisconnect::Fail(after) = self.options.on_disconnect else { return Nanos::MAX };
        if self.guest_requests == 0 {
            return Nanos::MAX;
        }
        let waiting =
            self.devices.iter().filter(|device| !device.is_attached && device.guest_requests > 0);
        let since = waiting.filter_map(|device| device.away_since).min();
        since.map_or(Nanos::MAX, |since| since.after(after))
    }

    /// Fails the requests of devices that were not served for too long: there is no session, or it
    /// has no such device. They may have been executed in an earlier session, and none of them is
    /// executed after the next one has begun.
    pub(super) fn fail_late(&mut self, now: Nanos) {
        let OnDisconnect::Fail(after) = self.options.on_disconnect else { return };
        for number in 0..self.devices.len() {
            let device = self.devices.get_mut(number);
            let Some(device) = device.filter(|it| it.is_open && !it.is_attached) else { continue };
            let since = *device.away_since.get_or_insert(now);
            if device.guest_requests > 0 && since.after(after) <= now {
                self.stats.timed_out.add(device.guest_requests.into());
                let is_its = |entry: &Entry| {
                    entry.device == number && matches!(entry.origin, Origin::Guest { .. })
                };
                self.fail(is_its, TIMED_OUT);
            }
        }
    }

    /// Fails requests of the caller, and gives up the engine's own, that `concerns` finds.
    pub(super) fn fail(&mut self, concerns: impl Fn(&Entry) -> bool, error: BlockError) {
        let entries = &self.entries;
        let is_failed = |index: u16| entries.get(usize::from(index)).is_none_or(&concerns);
        self.waiting.retain(|index| !is_failed(*index));
        for index in 0..u16::try_from(self.entries.len()).unwrap_or(u16::MAX) {
            let entry = self.entries.get(usize::from(index));
            let failed = entry.filter(|entry| entry.origin != Origin::None && concerns(entry));
            let Some((slot, device)) = failed.map(|entry| (entry.slot, entry.device)) else {
                continue;
            };
            if slot.is_some() {
                self.note_given_up(device);
            }
            self.end(index, Err(error));
        }
    }

    /// A request of a device was given up that has a slot.
    fn note_given_up(&mut self, device: usize) {
        let Some(name) = self.devices.get(device).map(|device| device.name) else { return };
        if !self.given_up.contains(&name) {
            self.given_up.push(name);
        }
    }
}
