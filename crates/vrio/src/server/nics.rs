//! The NICs of an IOhost, each of which one session has.

use sidecore_units::Nanos;

use super::{Host, Server};
use crate::handshake::HostHandshake;
use crate::nic::{Nic, Sent, Turns, packet_segment_bytes};
use crate::port::{Peer, Port, Seal};
use crate::wire::{NicEntry, PacketBody};
use crate::{Reason, VrioStats};

/// A NIC of one of the clients.
struct HostNic {
    device: u16,
    nic: Nic,
    /// The place of the session that has attached it last.
    place: Option<u16>,
}

/// The NICs of all clients.
#[derive(Default)]
pub(crate) struct Nics {
    all: Vec<HostNic>,
    /// No incomplete packet is given up before.
    next_due: Option<Nanos>,
    turns: Turns,
    /// In the next poll, packets are sent before answers.
    pub(super) goes_first: bool,
}

impl Nics {
    fn find(&mut self, device: u16) -> Option<&mut HostNic> {
        self.all.iter_mut().find(|found| found.device == device)
    }

    /// The session at a place has attached a NIC.
    pub(super) fn attach(&mut self, place: u16, entry: &NicEntry, stats: &VrioStats) {
        let Some(found) = self.find(entry.device) else { return };
        if found.place.replace(place) != Some(place) {
            found.nic.detach(stats);
        }
        found.nic.attach(entry.device, entry.epoch, stats);
    }

    /// The session at a place has the NICs that `has` finds, and no others any more.
    pub(super) fn retain(&mut self, place: u16, stats: &VrioStats, has: impl Fn(u16) -> bool) {
        let of_place = |found: &&mut HostNic| found.place == Some(place) && !has(found.device);
        for found in self.all.iter_mut().filter(of_place) {
            found.place = None;
            found.nic.detach(stats);
        }
    }

    /// The session at a place is over.
    pub(super) fn leave(&mut self, place: u16, stats: &VrioStats) {
        self.retain(place, stats, |_| false);
    }

    /// Whether nothing is to be sent or given up at `now`.
    #[inline]
    pub(super) fn is_idle(&self, now: Nanos) -> bool {
        self.next_due.is_none_or(|due| now < due) && !self.has_queued()
    }

    /// Whether packets are to be sent.
    #[inline]
    pub(super) fn has_queued(&self) -> bool {
        self.all.iter().any(|found| found.nic.has_queued())
    }

    /// When the next incomplete packet is given up.
    pub(super) const fn deadline(&self) -> Option<Nanos> {
        self.next_due
    }

    /// Gives up packets that are incomplete for too long.
    #[cold]
    fn expire(&mut self, now: Nanos, stats: &VrioStats) {
        for found in &mut self.all {
            found.nic.expire(now, stats);
        }
        self.next_due = self.all.iter().filter_map(|found| found.nic.deadline()).min();
    }
}

impl<S: Seal> Server<S> {
    /// Takes a frame of a packet.
    #[inline]
    pub(super) fn packet<P: Port>(
        &mut self,
        (now, from): (Nanos, Peer),
        (body, payload_bytes): (&PacketBody, usize),
        (received, port): (&mut P::Received, &mut P),
        nics: &mut Nics,
    ) -> Result<(), Reason> {
        let place = Some(self.place);
        let found = nics.find(body.device).filter(|found| found.place == place);
        let nic = &mut found.ok_or(Reason::Device)?.nic;
        let segment_bytes = packet_segment_bytes(self.terms.frame_bytes, self.terms.tag_bytes);
        let packet = (body, payload_bytes, segment_bytes);
        nic.receive(now, packet, (received, port), &self.stats)?;
        let due = nic.deadline();
        nics.next_due = nics.next_due.map_or(due, |next| Some(next.min(due.unwrap_or(next))));
        self.heard(now, from);
        Ok(())
    }
}

impl<H: HostHandshake> Host<H> {
    /// Adds a NIC, whose entry [`set_devices`](Self::set_devices) gives to its client.
    pub fn add_nic(&mut self, device: u16, nic: Nic) {
        self.nics.all.push(HostNic { device, nic, place: None });
    }

    /// Removes a NIC. Its packets are lost with it.
    pub fn remove_nic(&mut self, device: u16) {
        self.nics.all.retain(|found| found.device != device);
    }

    /// A NIC, for its packets. A caller that has it send [polls](Self::poll) afterwards.
    /// Returns the counters of the client that has it, too, or of frames that are of none.
    #[must_use]
    #[inline]
    pub fn nic_mut(&mut self, device: u16) -> Option<(&mut Nic, &VrioStats)> {
        let HostNic { nic, place, .. } = self.nics.find(device)?;
        let place = place.and_then(|place| self.places.get(usize::from(place)));
        Some((nic, place.map_or(&self.stats, |place| &place.server.stats)))
    }

    /// Sends packets, as far as the link has room, and gives up incomplete ones. Returns whether
    /// the link had room.
    pub(super) fn send_packets(&mut self, now: Nanos, port: &mut impl Port) -> bool {
        let Self { nics, places, stats, .. } = self;
        if nics.next_due.is_some_and(|due| due <= now) {
            nics.expire(now, stats);
        }
        let Nics { all, turns, .. } = nics;
        let has_room = turns.send(all, |found| {
            let server = found.place.and_then(|place| places.get_mut(usize::from(place)));
            let Some(server) = server.map(|place| &mut place.server) else { return Sent::All };
            if server.session() == 0 {
                found.place = None;
                found.nic.detach(stats);
            } else if found.nic.has_queued() {
                port.next_session();
                let frame_bytes = server.frame_bytes();
                return found.nic.transmit(frame_bytes, &mut server.channel, port);
            }
            Sent::All
        });
        // A link that is short of room is the packets' and the answers' in turn.
        nics.goes_first = !has_room && !nics.goes_first;
        has_room
    }
}
