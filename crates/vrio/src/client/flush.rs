//! Flushes of the engine's own.

use sidecore_block::BlockError;

use super::Core;
use super::entry::Origin;
use crate::Request;

impl Core {
    /// Begins a flush of the engine's own. Without an entry for it, another one of the engine's own
    /// requests has to end first.
    pub(super) fn flush(&mut self, number: usize) {
        if let Some(flush) = self.accept(Origin::OwnFlush, number, Request::FLUSH) {
            self.stats.own_flushes.add(1);
            self.waiting.push_back(flush);
            self.looks_again = true;
            if let Some(device) = self.devices.get_mut(number) {
                device.is_flushing = true;
            }
        }
    }

    /// Flushes the answered writes of a device that are kept, unless such a flush is unanswered.
    pub(super) fn flush_kept(&mut self, number: usize) -> Result<(), BlockError> {
        let Some(device) = self.devices.get(number) else { return Ok(()) };
        if let Some(error) = device.lost {
            return Err(error);
        }
        if !device.is_flushing && device.log.base() < device.log.end() {
            self.flush(number);
        }
        Ok(())
    }
}
