//! The transmit ring: a frame is filled in where it is sent from, and all are sent in their order.

use std::io;

use sidecore_linux::{PacketRing, PacketSlots, VIRTIO_HEADER_BYTES, packet_slot};
use sidecore_memory::GuestMemory;

/// From the start of a slot to a frame's virtio header: behind the slot's own header, and so that
/// the frame begins a cache line.
const DATA_AT: u16 = 54;

#[derive(Debug)]
pub(super) struct Sending {
    slots: PacketSlots,
    slot_bytes: u32,
    /// The slot of the next loan.
    next: usize,
    /// The oldest slot that the kernel has not taken.
    oldest: usize,
    /// The size of the frame in each slot.
    sizes: Box<[u32]>,
    /// Slots that the kernel has not taken.
    unsent: usize,
    /// A loan found no slot.
    is_starved: bool,
}

/// The outcome of a call to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    pub frames: u64,
    /// Size of these frames.
    pub bytes: u64,
}

impl Sending {
    /// The ring behind the receive ring, at this place of the socket's memory.
    pub fn new(
        memory: &GuestMemory,
        at: u64,
        shape: &PacketRing,
        slot_bytes: u32,
    ) -> io::Result<Self> {
        let slots = PacketSlots::new(memory, at, shape)?;
        let sizes = vec![0; slots.slots()].into();
        Ok(Self { slots, slot_bytes, next: 0, oldest: 0, sizes, unsent: 0, is_starved: false })
    }

    /// Whether a frame of this size with its virtio header is too large for any slot.
    #[inline]
    pub fn is_too_large(&self, len_bytes: u32) -> bool {
        u32::from(DATA_AT).saturating_add(len_bytes) > self.slot_bytes
    }

    /// Where the next frame is to be put; `None` while the kernel has all slots.
    #[inline]
    pub fn place(&mut self) -> Option<u64> {
        self.is_starved = !self.has_slot();
        let start = u64::from(self.slots.start(self.next));
        (!self.is_starved).then(|| start.saturating_add(DATA_AT.into()))
    }

    fn has_slot(&self) -> bool {
        self.unsent < self.slots.slots() && self.slots.is_available(self.next)
    }

    /// Whether the last loan found no slot, as the next one would not.
    pub fn wants_slot(&mut self) -> bool {
        self.is_starved = self.is_starved && !self.has_slot();
        self.is_starved
    }

    /// Has the next call send the frame that was filled in, of this size with its virtio header.
    #[inline]
    pub fn commit(&mut self, len_bytes: u32) {
        self.slots.request(self.next, DATA_AT, len_bytes);
        if let Some(size) = self.sizes.get_mut(self.next) {
            *size = len_bytes.saturating_sub(VIRTIO_HEADER_BYTES as u32);
        }
        self.next = self.behind(self.next);
        self.unsent = self.unsent.wrapping_add(1);
    }

    /// Frames that the kernel has not taken.
    #[inline]
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Counts the frames that the kernel has taken since the last call.
    pub fn reap(&mut self) -> Taken {
        let mut taken = Taken::default();
        while self.unsent > 0 && self.slots.status(self.oldest) != packet_slot::SEND_REQUEST {
            taken.frames = taken.frames.saturating_add(1);
            taken.bytes = taken.bytes.saturating_add(self.size(self.oldest));
            self.oldest = self.behind(self.oldest);
            self.unsent = self.unsent.wrapping_sub(1);
        }
        taken
    }

    /// Takes the frames back that the kernel has not taken, and so goes on in the slot where it
    /// does. Returns their number.
    pub fn abandon(&mut self) -> u64 {
        let abandoned = self.unsent as u64;
        self.next = self.oldest;
        while self.unsent > 0 {
            self.slots.set_status(self.oldest, 0);
            self.oldest = self.behind(self.oldest);
            self.unsent = self.unsent.wrapping_sub(1);
        }
        self.oldest = self.next;
        abandoned
    }

    fn size(&self, slot: usize) -> u64 {
        self.sizes.get(slot).copied().unwrap_or(0).into()
    }

    fn behind(&self, slot: usize) -> usize {
        let next = slot.wrapping_add(1);
        if next < self.slots.slots() { next } else { 0 }
    }
}
