//! The NICs of clients: ports of switches at this IOhost.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_reactor::Arm;
use sidecore_spec_virtio::net::{MAC_BYTES, MTU_MIN};
use sidecore_vrio::handshake::HostHandshake;
use sidecore_vrio::wire::{DEVICE_NAME_BYTES, DeviceEntry, NicEntry, device_flag};

use super::{ClientId, Export, ExportError};
use crate::nic::{NicEnd, NicState, arm_all};

/// A NIC for a client.
#[derive(Clone, Debug)]
pub struct ExportedNic {
    /// The name by which the client asks for it.
    pub name: Arc<str>,
    /// Its hardware address.
    pub mac: [u8; MAC_BYTES],
    /// The largest packet without Ethernet header.
    pub mtu: u16,
    /// Whether its link is up.
    pub is_up: bool,
    /// The owner's epoch.
    pub epoch: u64,
}

/// A NIC of a client at this unit.
pub(super) struct ClientNic {
    client: ClientId,
    name: Arc<str>,
    number: u16,
    entry: NicEntry,
    end: NicEnd,
    /// The name of its first buffer.
    buffers: u64,
}

/// The entry of a NIC in its client's list.
fn entry(number: u16, nic: &ExportedNic) -> Result<NicEntry, ExportError> {
    let mut name = [0; DEVICE_NAME_BYTES];
    let text = nic.name.as_bytes();
    let place = name.get_mut(..text.len()).filter(|place| !place.is_empty());
    place.ok_or_else(|| ExportError::Name { name: Arc::clone(&nic.name) })?.copy_from_slice(text);
    Ok(NicEntry {
        device: number,
        flags: if nic.is_up { device_flag::LINK_UP } else { 0 },
        epoch: nic.epoch,
        mac: nic.mac,
        mtu: nic.mtu.max(MTU_MIN),
        name,
        ..NicEntry::default()
    })
}

impl<H: HostHandshake> Export<H> {
    /// Gives a client a NIC, whose port of a switch has the other end. Returns its number, which is
    /// that of no device.
    ///
    /// # Errors
    /// The client does not exist, or has a device or a NIC of this name; the name is too long; the
    /// kernel has no memory left.
    pub fn add_nic(
        &mut self,
        client: ClientId,
        nic: &ExportedNic,
        end: NicEnd,
    ) -> Result<u16, ExportError> {
        if !self.clients.get(client.0).is_some_and(Option::is_some) {
            return Err(ExportError::NoClient);
        }
        if self.has_name(client, &nic.name) {
            return Err(ExportError::Device { name: Arc::clone(&nic.name) });
        }
        let number = u16::try_from(self.devices.len()).map_err(|_| ExportError::Full)?;
        let entry = entry(number, nic)?;
        let engine = end.nic(&mut self.port.data.nics)?;
        let buffers = engine.name();
        if let Err(error) = self.nic_wakes.add(end.wake_fd()) {
            self.port.data.nics.remove(buffers);
            return Err(error.into());
        }
        // The number is taken.
        self.devices.push(None);
        self.host.add_nic(number, engine);
        let name = Arc::clone(&nic.name);
        self.nics.push(ClientNic { client, name, number, entry, end, buffers });
        self.announce(client);
        Ok(number)
    }

    /// Changes the address, the MTU, the link or the epoch of a NIC.
    ///
    /// # Errors
    /// There is no such NIC.
    pub fn change_nic(&mut self, number: u16, nic: &ExportedNic) -> Result<(), ExportError> {
        let found = self.nics.iter_mut().find(|found| found.number == number);
        let found = found.ok_or(ExportError::NoDevice)?;
        found.entry = entry(number, &ExportedNic { name: Arc::clone(&found.name), ..nic.clone() })?;
        let client = found.client;
        self.announce(client);
        Ok(())
    }

    /// Gives a NIC to another client: the same one after it was removed and added again.
    ///
    /// # Errors
    /// There is no such NIC, or no such client.
    pub fn assign_nic(&mut self, number: u16, client: ClientId) -> Result<(), ExportError> {
        if !self.clients.get(client.0).is_some_and(Option::is_some) {
            return Err(ExportError::NoClient);
        }
        let found = self.nics.iter_mut().find(|found| found.number == number);
        let found = found.ok_or(ExportError::NoDevice)?;
        let before = std::mem::replace(&mut found.client, client);
        self.announce(before);
        self.announce(client);
        Ok(())
    }

    /// Takes a NIC from its client at once.
    ///
    /// # Errors
    /// There is no such NIC.
    pub fn remove_nic(&mut self, number: u16) -> Result<(), ExportError> {
        let at = self.nics.iter().position(|found| found.number == number);
        let found = self.nics.swap_remove(at.ok_or(ExportError::NoDevice)?);
        self.nic_wakes.remove(found.end.wake_fd());
        self.host.remove_nic(number);
        self.port.data.nics.remove(found.buffers);
        self.announce(found.client);
        Ok(())
    }

    /// Whether a client has a device or a NIC of this name.
    pub(super) fn has_name(&self, client: ClientId, name: &str) -> bool {
        let mut nics = self.nics.iter().filter(|nic| nic.client == client);
        self.devices_of(client).any(|device| &*device.name == name)
            || nics.any(|nic| &*nic.name == name)
    }

    /// The entries of a client's NICs.
    pub(super) fn nic_entries(&self, client: ClientId) -> impl Iterator<Item = DeviceEntry> {
        let its = self.nics.iter().filter(move |nic| nic.client == client);
        its.map(|nic| nic.entry.to_device())
    }

    /// Takes packets of switches. Returns the number of packets and buffers.
    #[inline]
    pub(super) fn take_packets(&mut self) -> usize {
        let mut count = 0_usize;
        for found in &mut self.nics {
            if let Some((nic, stats)) = self.host.nic_mut(found.number) {
                count = count.saturating_add(found.end.take(nic, stats));
            }
        }
        count
    }

    /// Gives switches the packets of clients, and their buffers back. Returns their number.
    #[inline]
    pub(super) fn give_packets(&mut self) -> usize {
        let mut count = 0_usize;
        for found in &mut self.nics {
            let Some((nic, _)) = self.host.nic_mut(found.number) else { continue };
            let state = match (nic.is_attached(), found.entry.is_up()) {
                (false, _) => NicState::Away,
                (true, false) => NicState::Down,
                (true, true) => NicState::Up,
            };
            if nic.has_events() {
                count = count.saturating_add(found.end.give(nic));
            }
            found.end.set_state(state, Some(&found.entry));
        }
        count
    }

    /// Has switches wake the unit, unless they have sent something.
    pub(super) fn arm_nics(&mut self) -> Arm {
        arm_all(&mut self.nics, |nic| &mut nic.end)
    }

    pub(super) fn disarm_nics(&mut self) {
        self.nics.iter_mut().for_each(|found| found.end.disarm());
    }

    pub(super) fn wake_nics(&self) {
        self.nics.iter().for_each(|found| found.end.on_wake());
    }

    /// The descriptor that wakes the unit for packets.
    pub(super) fn nic_wake_fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.nic_wakes)
    }
}
