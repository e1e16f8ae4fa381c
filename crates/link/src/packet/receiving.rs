//! The receive ring: filled by the kernel in order, given back in any.

use sidecore_linux::{PacketSlots, packet_slot};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};

use super::ETHERNET_BYTES;
use crate::EthernetAddress;
use crate::frame::Piece;

#[derive(Debug)]
pub(super) struct Receiving {
    ring: PacketSlots,
    next: usize,
    /// Whether the slot of this number is lent.
    lent: Box<[bool]>,
    slot_bytes: u32,
    frame_bytes: u32,
}

/// The contents of a slot that the kernel has filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    Frame {
        slot: u32,
        piece: Piece,
        from: EthernetAddress,
    },
    Truncated,
    Foreign,
    Malformed,
    /// Not for the link's user: a question or an answer of the other link.
    Message,
}

impl Receiving {
    pub fn new(ring: PacketSlots, slot_bytes: u32, frame_bytes: u32) -> Self {
        let lent = vec![false; ring.slots()].into();
        Self { ring, next: 0, lent, slot_bytes, frame_bytes }
    }

    pub fn slots(&self) -> usize {
        self.ring.slots()
    }

    /// Whether [`Receiving::take`] has something.
    pub fn has_next(&self) -> bool {
        // A slot that is still lent since the last round looks as if it were full again.
        self.lent.get(self.next).is_some_and(|lent| !lent)
            && self.ring.status(self.next) & packet_slot::USER != 0
    }

    /// When the next arrival came, by the kernel's clock.
    pub fn arrived_at(&self) -> Option<(u32, u32)> {
        self.has_next().then(|| self.ring.arrived_at(self.next))
    }

    /// The next arrival; a slot without a frame for us goes back to the kernel.
    pub fn take(&mut self, memory: &GuestMemory) -> Option<Arrival> {
        if !self.has_next() {
            return None;
        }
        let slot = self.next;
        self.next = slot.wrapping_add(1);
        if self.next >= self.ring.slots() {
            self.next = 0;
        }
        let arrival = self.look(memory, slot);
        match arrival {
            Arrival::Frame { .. } => self.set_lent(slot, true),
            _ => self.ring.set_status(slot, 0),
        }
        Some(arrival)
    }

    pub fn give_back(&mut self, slot: u32) {
        let slot = usize::try_from(slot).unwrap_or(usize::MAX);
        self.set_lent(slot, false);
        self.ring.set_status(slot, 0);
    }

    fn set_lent(&mut self, slot: usize, is: bool) {
        if let Some(lent) = self.lent.get_mut(slot) {
            *lent = is;
        }
    }

    fn look(&self, memory: &GuestMemory, slot: usize) -> Arrival {
        let header = self.ring.header(slot);
        if header.snap_bytes < header.len_bytes {
            return Arrival::Truncated;
        }
        let end = u32::from(header.mac_at).checked_add(header.snap_bytes);
        let len_bytes = header.snap_bytes.saturating_sub(ETHERNET_BYTES);
        if len_bytes == 0 || end.is_none_or(|end| end > self.slot_bytes) {
            return Arrival::Malformed;
        }
        if len_bytes > self.frame_bytes {
            return Arrival::Truncated;
        }
        if self.ring.status(slot) & packet_slot::VLAN_VALID != 0
            && header.vlan_tag & packet_slot::VLAN_NUMBER != 0
        {
            return Arrival::Foreign;
        }
        let start = self.ring.start(slot).saturating_add(u32::from(header.mac_at));
        let source = GuestAddress(u64::from(start).saturating_add(6));
        let Ok(from) = memory.read_array(source, &mut RegionHint::default()) else {
            return Arrival::Malformed;
        };
        let piece = Piece::new(start.saturating_add(ETHERNET_BYTES), len_bytes);
        Arrival::Frame {
            slot: u32::try_from(slot).unwrap_or(u32::MAX),
            piece,
            from: EthernetAddress(from),
        }
    }
}
