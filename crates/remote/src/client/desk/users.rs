//! Users of devices: guests that begin, and guests that are gone.

use std::sync::Arc;

use sidecore_vrio::handshake::ClientHandshake;

use super::{DeviceShared, SessionDesk};

impl<H: ClientHandshake> SessionDesk<H> {
    /// A queue of a device opens. It is a new user's if it is the device's first one, or if the
    /// last user is gone.
    pub(super) fn begin_use(&mut self, number: u16) {
        let is_it = |device: &&mut super::Device| device.number == number;
        let Some(device) = self.devices.iter_mut().find(is_it) else { return };
        let is_left = device.left_writes.take().is_some();
        if is_left {
            device.shared.set_left_writes(0);
        }
        if is_left || !self.lines.iter().flatten().any(|line| line.device == Some(number)) {
            self.client.claim(number);
        }
    }

    /// The user of a device is gone.
    pub(super) fn leave_device(&mut self, shared: &Arc<DeviceShared>) {
        let is_it = |device: &&mut super::Device| Arc::ptr_eq(&device.shared, shared);
        let Some(device) = self.devices.iter_mut().find(is_it) else {
            shared.set_left_writes(0);
            return;
        };
        self.client.leave(device.number);
        let count = self.client.left_writes(device.number);
        device.left_writes = Some(count);
        device.shared.set_left_writes(count);
        self.has_left = true;
    }

    /// Answered writes of a user that is gone may have been abandoned.
    pub(super) fn note_abandoned(&mut self, number: u16) {
        let writes = self.client.take_abandoned(number);
        let device = self.devices.iter().find(|device| device.number == number);
        if let Some(device) = device.filter(|_| writes > 0) {
            let (iohost, name) = (&self.shared.name, &device.shared.name);
            tracing::warn!(
                iohost,
                device = name,
                writes,
                "answered writes of a user that is gone are not sent again to an IOhost that may \
                 have lost them: the guest may run elsewhere by now"
            );
        }
    }

    /// Says what may be missing of users that are gone.
    #[inline]
    pub(super) fn look_at_left(&mut self) {
        if self.has_left {
            self.count_left();
        }
    }

    #[cold]
    fn count_left(&mut self) {
        self.has_left = false;
        for device in &mut self.devices {
            let Some(before) = device.left_writes else { continue };
            let count = self.client.left_writes(device.number);
            let has_queues =
                self.lines.iter().flatten().any(|line| line.device == Some(device.number));
            self.has_left |= has_queues || self.client.kept_writes(device.number) > 0;
            if count != before {
                device.left_writes = Some(count);
                device.shared.set_left_writes(count);
            }
        }
    }
}
