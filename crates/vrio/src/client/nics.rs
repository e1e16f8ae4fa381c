//! NICs among a client's devices.

use sidecore_units::Nanos;

use super::device::Device;
use super::{Client, Core};
use crate::Reason;
use crate::channel::Channel;
use crate::handshake::ClientHandshake;
use crate::nic::{Nic, Sent, packet_segment_bytes};
use crate::port::{Port, Seal};
use crate::wire::{DEVICE_NAME_BYTES, NicEntry, PacketBody};

impl<H: ClientHandshake> Client<H> {
    /// Begins to use the NIC with this name, padded with zeros, as [`open`](Self::open) does for
    /// disks. [`close`](Self::close) ends its use.
    pub fn open_nic(&mut self, name: &[u8; DEVICE_NAME_BYTES], nic: Nic) -> Option<u16> {
        self.core.open(Device::nic(*name, nic))
    }

    /// A NIC that was opened, by the number of its device. A caller that has it send
    /// [transmits](Self::transmit) afterwards.
    #[must_use]
    #[inline]
    pub fn nic_mut(&mut self, device: u16) -> Option<&mut Nic> {
        self.core.device_mut(device)?.nic.as_deref_mut()
    }

    /// The entry of a NIC that was opened, while it is attached.
    #[must_use]
    pub fn nic_entry(&self, device: u16) -> Option<NicEntry> {
        let device = self.core.devices.get(usize::from(device))?;
        device.entry.nic().filter(|_| device.is_attached)
    }
}

impl Core {
    /// Takes a frame of a packet.
    #[inline]
    pub(super) fn packet<P: Port>(
        &mut self,
        now: Nanos,
        (body, payload_bytes): (&PacketBody, usize),
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        let Self { devices, stats, frame_bytes, tag_bytes, .. } = self;
        let is_it = |device: &&mut Device| device.entry.device == body.device && device.is_attached;
        let mut its = devices.iter_mut().filter(is_it);
        let nic = its.find_map(|device| device.nic.as_deref_mut()).ok_or(Reason::Device)?;
        let segment_bytes = packet_segment_bytes(*frame_bytes, *tag_bytes);
        nic.receive(now, (body, payload_bytes, segment_bytes), (received, port), stats)?;
        self.nics_due = self.nics_due.min(nic.deadline().unwrap_or(Nanos::MAX));
        Ok(())
    }

    /// Sends packets, as far as the link has room.
    #[inline]
    pub(super) fn send_packets<S: Seal>(&mut self, channel: &mut Channel<S>, port: &mut impl Port) {
        let frame_bytes = self.frame_bytes;
        let has_room = self.nic_turns.send(&mut self.devices, |device| match &mut device.nic {
            Some(nic) if nic.has_queued() => nic.transmit(frame_bytes, channel, port),
            _ => Sent::All,
        });
        self.has_room = has_room && self.sending.is_empty();
    }

    /// Whether packets are to be sent.
    #[inline]
    pub(super) fn has_packets_queued(&self) -> bool {
        self.nics > 0
            && self
                .devices
                .iter()
                .any(|device| device.nic.as_ref().is_some_and(|nic| nic.has_queued()))
    }

    /// Gives up packets that are incomplete for too long.
    #[cold]
    pub(super) fn expire_packets(&mut self, now: Nanos) {
        self.nics_due = Nanos::MAX;
        for nic in self.devices.iter_mut().filter_map(|device| device.nic.as_deref_mut()) {
            nic.expire(now, &self.stats);
            self.nics_due = self.nics_due.min(nic.deadline().unwrap_or(Nanos::MAX));
        }
    }
}
