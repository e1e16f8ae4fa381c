//! Users of devices, which are guests: those that begin, and those that are gone.

use sidecore_block::{BlockError, Operation};
use sidecore_units::Nanos;

use super::entry::{Entry, Origin};
use super::{Client, Core, SubmitError};
use crate::handshake::ClientHandshake;
use crate::{Request, Rule};

/// The error of writes of a user that is gone. Nothing reads it.
const GONE: BlockError = BlockError::EIO;

impl<H: ClientHandshake> Client<H> {
    /// Attaches an opened device again, for a user that begins: a guest may have used it through
    /// another client meanwhile, and the IOhost serves the client that has attached it last. Before
    /// that, a replay ends and kept writes are flushed. Requests wait until the IOhost has
    /// answered. The device is not attached again while requests are unanswered: then it is in use,
    /// unless its last user is [gone](Self::leave), whose requests have to end before.
    pub fn claim(&mut self, device: u16) {
        let index = usize::from(device);
        let core = &mut self.core;
        let is_its = |entry: &Entry| entry.origin != Origin::None && entry.device == index;
        let is_in_use = core.entries.iter().any(|entry| {
            is_its(entry) && !matches!(entry.origin, Origin::OwnFlush | Origin::Replay)
        });
        let Some(device) = core.device_mut(device) else { return };
        let abandoned = device.begin();
        // A device that is not attached will be.
        if device.is_attached && !is_in_use {
            device.claims = true;
            device.ask_at = Nanos::ZERO;
        }
        let is_claimed = device.is_claimed();
        core.is_asking |= is_claimed;
        core.stats.abandoned.add(abandoned);
        core.untold.devices |= abandoned > 0;
        core.looks_again = true;
    }

    /// The user of an opened device is gone for good and reads no answer: its VMM was killed. It
    /// may be started elsewhere, by another client of the device, so nothing of it may come late.
    /// Until the next user [begins](Self::claim),
    ///
    /// - requests that change the device fail, unless the IOhost may have them already; those fail
    ///   when the session is over;
    /// - kept writes are flushed;
    /// - another incarnation or epoch does not get them again, also if the next user has begun
    ///   meanwhile: they are abandoned.
    pub fn leave(&mut self, device: u16) {
        let core = &mut self.core;
        if !core.options.neglected.keeps(Rule::GoneUsers) {
            return;
        }
        let Some(found) = core.device_mut(device) else { return };
        found.leave();
        let abandoned = found.end_replay_early();
        core.stats.abandoned.add(abandoned);
        core.untold.devices |= abandoned > 0;
        core.looks_again = true;
        core.fail_left();
    }

    /// Answered writes of users of an opened device that are [gone](Self::leave) which no flush
    /// covers yet, or which were abandoned since the last user began: they may be missing.
    #[must_use]
    pub fn left_writes(&self, device: u16) -> u64 {
        self.core.devices.get(usize::from(device)).map_or(0, super::Device::left_writes)
    }

    /// Answered writes of users of an opened device that were abandoned since the last call, after
    /// an [`Event::Device`](super::Event::Device).
    pub fn take_abandoned(&mut self, device: u16) -> u64 {
        let found = self.core.device_mut(device);
        found.map_or(0, |device| std::mem::take(&mut device.untold_abandoned))
    }
}

impl Core {
    /// Makes an entry of a request of the caller; `None` if the request has ended at once.
    #[inline]
    pub(super) fn take_over(
        &mut self,
        tag: u64,
        device: u16,
        request: Request,
    ) -> Result<Option<u16>, SubmitError> {
        let found = self.device_mut(device).filter(|found| found.nic.is_none());
        let is_left = found.ok_or(SubmitError::UnknownDevice { device })?.is_left;
        if self.guest_requests >= self.options.depth {
            return Err(SubmitError::Full);
        }
        let entry = self.accept(Origin::Guest { tag }, usize::from(device), request);
        let entry = entry.ok_or(SubmitError::Full)?;
        self.guest_requests = self.guest_requests.saturating_add(1);
        if let Some(device) = self.device_mut(device) {
            device.guest_requests = device.guest_requests.saturating_add(1);
        }
        if is_left && request.operation != Operation::Read {
            self.end(entry, Err(GONE));
            return Ok(None);
        }
        Ok(Some(entry))
    }

    /// Fails the requests of users that are gone, but for reads and for those that the IOhost may
    /// have.
    pub(super) fn fail_left(&mut self) {
        for number in 0..self.devices.len() {
            if self.devices.get(number).is_some_and(|device| device.is_left) {
                let is_late = |entry: &Entry| {
                    entry.device == number
                        && entry.slot.is_none()
                        && matches!(entry.origin, Origin::Guest { .. })
                        && entry.request.operation != Operation::Read
                };
                self.fail(is_late, GONE);
            }
        }
    }

    /// Flushes kept writes for users that begin and for those that are gone, and has devices
    /// attached for users that begin once nothing is kept. If a replay of writes of a gone user has
    /// failed, the next one is not told.
    pub(super) fn flush_for_users(&mut self) {
        for number in 0..self.devices.len() {
            let Some(device) = self.devices.get_mut(number) else { return };
            if device.owes_flush() {
                if device.is_left && device.lost.take().is_some() {
                    self.stats.abandoned.add(device.abandon());
                    self.untold.devices |= device.is_untold;
                } else if !device.is_flushing {
                    self.flush(number);
                    continue;
                }
            }
            self.is_asking |= device.is_claimed();
        }
    }
}
