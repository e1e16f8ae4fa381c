//! Requests that are given up: their device is gone or was closed, or its IOhost was away for too
//! long.

use sidecore_block::BlockError;

use super::Core;
use super::entry::{Entry, Origin};

impl Core {
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
