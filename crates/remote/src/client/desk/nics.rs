//! The remote NICs of a session.

use sidecore_reactor::Arm;
use sidecore_vrio::handshake::ClientHandshake;

use super::super::store::padded_name;
use super::SessionDesk;
use crate::nic::{NicEnd, NicState, arm_all};

/// A NIC whose port is at the IOhost.
pub(super) struct DeskNic {
    name: String,
    /// Its number in the engine.
    number: u16,
    end: NicEnd,
    /// The name of its first buffer.
    buffers: u64,
}

impl<H: ClientHandshake> SessionDesk<H> {
    /// Begins to use a NIC. One that cannot be used has no session for ever: its end is dropped.
    pub(super) fn open_nic(&mut self, name: String, end: NicEnd) {
        let iohost = &self.shared.name;
        let Some(padded) = padded_name(&name) else { return };
        let nic = end.nic(&mut self.port.data.nics);
        let nic = nic.and_then(|nic| self.nic_wakes.add(end.wake_fd()).map(|()| nic));
        let nic = match nic {
            Ok(nic) => nic,
            Err(error) => {
                tracing::error!(iohost, nic = name, "cannot use the NIC: {error}");
                return;
            }
        };
        let buffers = nic.name();
        let Some(number) = self.client.open_nic(&padded, nic) else {
            tracing::error!(iohost, nic = name, "cannot use the NIC: a device has its name");
            self.nic_wakes.remove(end.wake_fd());
            self.port.data.nics.remove(buffers);
            return;
        };
        self.nics.push(DeskNic { name, number, end, buffers });
    }

    /// Takes packets of switches. Returns the number of packets and buffers.
    #[inline]
    pub(super) fn take_packets(&mut self) -> usize {
        let mut count = 0_usize;
        let mut is_over = false;
        for found in &mut self.nics {
            if let Some(nic) = self.client.nic_mut(found.number) {
                count = count.saturating_add(found.end.take(nic, &self.shared.vrio_stats));
                is_over |= found.end.is_over();
            }
        }
        if is_over {
            self.close_nics();
        }
        count
    }

    /// Gives switches the packets of the IOhost, and their buffers back. Returns their number.
    #[inline]
    pub(super) fn give_packets(&mut self) -> usize {
        let mut count = 0_usize;
        for found in &mut self.nics {
            let entry = self.client.nic_entry(found.number);
            let state = match &entry {
                None => NicState::Away,
                Some(entry) if entry.is_up() => NicState::Up,
                Some(_) => NicState::Down,
            };
            let Some(nic) = self.client.nic_mut(found.number) else { continue };
            if nic.has_events() {
                count = count.saturating_add(found.end.give(nic));
            }
            found.end.set_state(state, entry.as_ref());
        }
        count
    }

    /// Ends the use of NICs whose ports are gone.
    #[cold]
    fn close_nics(&mut self) {
        let Self { nics, client, port, nic_wakes, shared, .. } = self;
        nics.retain(|nic| {
            if nic.end.is_over() {
                nic_wakes.remove(nic.end.wake_fd());
                client.close(nic.number);
                port.data.nics.remove(nic.buffers);
                tracing::info!(iohost = shared.name, nic = nic.name, "the NIC is closed");
            }
            !nic.end.is_over()
        });
    }

    /// Has switches wake the session, unless they have sent something.
    pub(in crate::client) fn arm_nics(&mut self) -> Arm {
        arm_all(&mut self.nics, |nic| &mut nic.end)
    }

    pub(in crate::client) fn disarm_nics(&mut self) {
        self.nics.iter_mut().for_each(|found| found.end.disarm());
    }

    pub(in crate::client) fn wake_nics(&self) {
        self.nics.iter().for_each(|found| found.end.on_wake());
    }
}
