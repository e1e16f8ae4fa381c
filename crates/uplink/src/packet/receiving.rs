//! The receive ring, filled by the kernel in its order and given back in that order.

use std::io;

use sidecore_linux::{PacketHeader, PacketRing, PacketSlots, VIRTIO_HEADER_BYTES, packet_slot};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_net::DropReason;
use sidecore_spec_virtio::net::{PacketHeader as VirtioHeader, flag, gso};

use super::VLAN_TAG_BYTES;

/// A frame with its virtio header, in the socket's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub start: u64,
    pub len_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Receiving {
    slots: PacketSlots,
    slot_bytes: u32,
    /// The slot that the kernel fills next, as far as is known here.
    next: usize,
    /// The oldest slot that is not given back.
    oldest: usize,
    /// Slots that are lent.
    lent: usize,
    hint: RegionHint,
}

impl Receiving {
    /// The ring at the start of the socket's memory.
    pub fn new(memory: &GuestMemory, shape: &PacketRing, slot_bytes: u32) -> io::Result<Self> {
        let slots = PacketSlots::new(memory, 0, shape)?;
        Ok(Self { slots, slot_bytes, next: 0, oldest: 0, lent: 0, hint: RegionHint::default() })
    }

    /// Whether [`Receiving::take`] has something.
    #[inline]
    pub fn has_next(&self) -> bool {
        // A slot that is lent since the last round looks as if it were full again.
        self.lent < self.slots.slots() && self.slots.status(self.next) & packet_slot::USER != 0
    }

    /// Takes the next frame, or the reason why it is none.
    #[inline]
    pub fn take(&mut self, memory: &GuestMemory) -> Option<Result<Frame, DropReason>> {
        if !self.has_next() {
            return None;
        }
        let slot = self.next;
        self.next = self.behind(slot);
        self.lent = self.lent.wrapping_add(1);
        let header = self.slots.header(slot);
        if header.snap_bytes < header.len_bytes {
            return Some(Err(DropReason::TooLong));
        }
        let Some(frame) = self.frame(slot, &header) else {
            return Some(Err(DropReason::Fragmented));
        };
        let status = self.slots.status(slot);
        if status & packet_slot::VLAN_VALID == 0 {
            return Some(Ok(frame));
        }
        Some(self.tag(memory, frame, tag_of(&header, status)).ok_or(DropReason::Fragmented))
    }

    /// Gives the oldest `count` slots back to the kernel.
    #[inline]
    pub fn give_back(&mut self, count: usize) {
        for _ in 0..count.min(self.lent) {
            self.slots.set_status(self.oldest, 0);
            self.oldest = self.behind(self.oldest);
            self.lent = self.lent.wrapping_sub(1);
        }
    }

    fn behind(&self, slot: usize) -> usize {
        let next = slot.wrapping_add(1);
        if next < self.slots.slots() { next } else { 0 }
    }

    /// Where a frame lies with its virtio header; `None` outside of its slot.
    fn frame(&self, slot: usize, header: &PacketHeader) -> Option<Frame> {
        let end = u32::from(header.mac_at).checked_add(header.snap_bytes)?;
        let at = u64::from(header.mac_at).checked_sub(VIRTIO_HEADER_BYTES as u64)?;
        (end <= self.slot_bytes).then_some(())?;
        Some(Frame {
            start: u64::from(self.slots.start(slot)).checked_add(at)?,
            len_bytes: u64::from(header.snap_bytes).checked_add(VIRTIO_HEADER_BYTES as u64)?,
        })
    }

    /// Puts the tag back that the kernel has taken out of a frame: everything in front of its place
    /// moves forward, into space that the ring reserves.
    fn tag(&mut self, memory: &GuestMemory, frame: Frame, tag: [u8; 4]) -> Option<Frame> {
        const ADDRESSES_BYTES: usize = 12;
        const FRONT_BYTES: usize = VIRTIO_HEADER_BYTES + ADDRESSES_BYTES;
        let read = memory.read_array::<FRONT_BYTES>(GuestAddress(frame.start), &mut self.hint);
        let mut front = read.ok()?;
        shift(&mut front);
        let start = frame.start.checked_sub(VLAN_TAG_BYTES as u64)?;
        memory.write_slice(GuestAddress(start), &front, &mut self.hint).ok()?;
        let behind = GuestAddress(start.checked_add(FRONT_BYTES as u64)?);
        memory.write_slice(behind, &tag, &mut self.hint).ok()?;
        Some(Frame { start, len_bytes: frame.len_bytes.checked_add(VLAN_TAG_BYTES as u64)? })
    }
}

/// The tag that the kernel has taken out of a frame: protocol and number.
fn tag_of(header: &PacketHeader, status: u32) -> [u8; 4] {
    /// Of a customer's VLAN (IEEE 802.1Q, 9.5).
    const CUSTOMER: u16 = 0x8100;
    let is_known = status & packet_slot::VLAN_PROTOCOL_VALID != 0;
    let protocol = if is_known { header.vlan_protocol } else { CUSTOMER };
    let ([a, b], [c, d]) = (protocol.to_be_bytes(), header.vlan_tag.to_be_bytes());
    [a, b, c, d]
}

/// Moves the offsets of a virtio header behind a tag.
fn shift(front: &mut [u8]) {
    let Some(bytes) = front.first_chunk_mut::<VIRTIO_HEADER_BYTES>() else { return };
    let mut whole = [0; VirtioHeader::BYTES];
    if let Some(first) = whole.first_chunk_mut() {
        *first = *bytes;
    }
    let mut header = VirtioHeader::decode(&whole);
    if header.flags & flag::NEEDS_CSUM != 0 {
        header.csum_start = header.csum_start.wrapping_add(VLAN_TAG_BYTES as u16);
    }
    if header.gso_type != gso::NONE {
        header.hdr_len = header.hdr_len.wrapping_add(VLAN_TAG_BYTES as u16);
    }
    if let Some(first) = header.encode().first_chunk() {
        *bytes = *first;
    }
}
