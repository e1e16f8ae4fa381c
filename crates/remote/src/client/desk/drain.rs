//! Requests wait, and answered writes are flushed, before the IOhost is taken away.

use sidecore_block::BlockError;
use sidecore_units::Nanos;
use sidecore_vrio::handshake::ClientHandshake;

use super::SessionDesk;

/// The error of a held request whose IOhost has been away for too long (Linux' ETIMEDOUT).
const TIMED_OUT: BlockError = BlockError::Io { errno: 110 };

impl<H: ClientHandshake> SessionDesk<H> {
    /// Has new requests wait, or go on.
    pub(super) fn set_drain(&mut self, drains: bool) {
        (self.drains, self.drain_error) = (drains, None);
        self.port.data.hold(drains);
        let iohost = &self.shared.name;
        match drains {
            true => tracing::info!(iohost, "draining: new requests to the IOhost wait"),
            false => tracing::info!(iohost, "no longer drained: requests to the IOhost go on"),
        }
    }

    /// A step of a drain: flushes devices once no request is unanswered, and fails held requests
    /// whose IOhost has been away for too long.
    #[cold]
    pub(super) fn drain(&mut self, now: Nanos) {
        if self.failure_deadline().is_some_and(|at| at <= now) {
            let mut over = std::mem::take(&mut self.over);
            self.port.data.fail_held(None, TIMED_OUT, &mut over);
            self.hand_back_all(over);
        }
        if self.port.data.unanswered() > 0 || !self.client.is_connected() {
            return;
        }
        for device in &self.devices {
            let flushed = self.client.flush_kept(device.number);
            self.drain_error = self.drain_error.or(flushed.err());
        }
    }

    /// When held requests fail. The engine fails those that it has.
    pub(super) fn failure_deadline(&self) -> Option<Nanos> {
        let after = self.fail_after.filter(|_| self.port.data.held() > 0)?;
        Some(self.client.heard_at()?.after(after))
    }
}
