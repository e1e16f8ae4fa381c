//! The slots of a packet socket's ring, whose headers the kernel and this process share
//! (`struct tpacket2_hdr`).

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use sidecore_memory::{GuestMemory, UserAddress, Words};

use crate::PacketRing;

const STATUS: usize = 0;
const LEN: usize = 4;
const SNAP_LEN: usize = 8;
/// Where the frame and its payload begin, 16 bits each.
const OFFSETS: usize = 12;
/// When the frame arrived, in seconds and nanoseconds.
const SECONDS: usize = 16;
const NANOSECONDS: usize = 20;
/// VLAN tag and its protocol, 16 bits each.
const VLAN: usize = 24;

/// States of a slot of a packet socket's ring.
pub mod packet_slot {
    /// Receive: the frame is ours.
    pub const USER: u32 = 1;
    /// Receive: the VLAN tag is valid.
    pub const VLAN_VALID: u32 = 1 << 4;
    /// Receive: the protocol of the VLAN tag is valid.
    pub const VLAN_PROTOCOL_VALID: u32 = 1 << 6;
    /// Transmit: the kernel is to send the frame.
    pub const SEND_REQUEST: u32 = 1;
    /// Transmit: the kernel sends the frame.
    pub const SENDING: u32 = 1 << 1;
    /// The part of a VLAN tag that is the VLAN; 0 marks a priority, and no VLAN.
    pub const VLAN_NUMBER: u16 = 0xfff;
}

/// The header of a slot, as the kernel has filled it in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketHeader {
    /// Bytes of the frame.
    pub len_bytes: u32,
    /// Bytes of it that are in the slot.
    pub snap_bytes: u32,
    /// From the start of the slot to the frame.
    pub mac_at: u16,
    /// The tag that the kernel has taken out of the frame, if the slot's state says so.
    pub vlan_tag: u16,
    /// Its protocol, if the slot's state says so.
    pub vlan_protocol: u16,
}

/// The slots of one ring, receive or transmit. A slot that does not exist reads as zeros.
#[derive(Debug)]
pub struct PacketSlots {
    words: Words<AtomicU32>,
    /// Where each slot begins, in the memory of both rings.
    starts: Box<[u32]>,
}

impl PacketSlots {
    /// The ring that begins at this place of the socket's memory.
    ///
    /// # Errors
    /// The memory is not the socket's, or too large.
    pub fn new(memory: &GuestMemory, at: u64, shape: &PacketRing) -> io::Result<Self> {
        let bytes = usize::try_from(memory.len_bytes()).unwrap_or(usize::MAX);
        let words = Words::in_bytes(memory, UserAddress(0), bytes, size_of::<u32>())
            .map_err(io::Error::other)?;
        let start = |slot| u32::try_from(at.saturating_add(shape.slot_at(slot))).ok();
        let starts: Option<_> = (0..shape.slots()).map(start).collect();
        Ok(Self { words, starts: starts.ok_or(io::ErrorKind::OutOfMemory)? })
    }

    /// The number of slots.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.starts.len()
    }

    /// Where a slot begins; the end of memory if there is no such slot.
    #[must_use]
    pub fn start(&self, slot: usize) -> u32 {
        self.starts.get(slot).copied().unwrap_or(u32::MAX)
    }

    fn word(&self, slot: usize, offset: usize) -> Option<&AtomicU32> {
        let start = usize::try_from(self.start(slot)).ok()?;
        self.words.at(start.checked_add(offset)?)
    }

    fn load(&self, slot: usize, offset: usize) -> u32 {
        self.word(slot, offset).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn store(&self, slot: usize, offset: usize, value: u32) {
        if let Some(word) = self.word(slot, offset) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// The slot's state. What the kernel wrote before is read after it.
    #[must_use]
    #[inline]
    pub fn status(&self, slot: usize) -> u32 {
        self.word(slot, STATUS).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Hands the slot to the kernel, with all that was written before.
    #[inline]
    pub fn set_status(&self, slot: usize, status: u32) {
        if let Some(word) = self.word(slot, STATUS) {
            word.store(status, Ordering::Release);
        }
    }

    /// The header of a slot that the kernel has filled.
    #[must_use]
    pub fn header(&self, slot: usize) -> PacketHeader {
        let [mac_low, mac_high, _, _] = self.load(slot, OFFSETS).to_ne_bytes();
        let [tag_low, tag_high, protocol_low, protocol_high] = self.load(slot, VLAN).to_ne_bytes();
        PacketHeader {
            len_bytes: self.load(slot, LEN),
            snap_bytes: self.load(slot, SNAP_LEN),
            mac_at: u16::from_ne_bytes([mac_low, mac_high]),
            vlan_tag: u16::from_ne_bytes([tag_low, tag_high]),
            vlan_protocol: u16::from_ne_bytes([protocol_low, protocol_high]),
        }
    }

    /// When a frame arrived, by the kernel's clock: seconds and nanoseconds.
    #[must_use]
    pub fn arrived_at(&self, slot: usize) -> (u32, u32) {
        (self.load(slot, SECONDS), self.load(slot, NANOSECONDS))
    }

    /// Has the kernel send `len_bytes` from `mac_at` on.
    pub fn request(&self, slot: usize, mac_at: u16, len_bytes: u32) {
        let [low, high] = mac_at.to_ne_bytes();
        self.store(slot, LEN, len_bytes);
        self.store(slot, OFFSETS, u32::from_ne_bytes([low, high, 0, 0]));
        self.set_status(slot, packet_slot::SEND_REQUEST);
    }

    /// Has the kernel pass over a slot, whose bytes it leaves alone: no frame begins inside of the
    /// header (`PACKET_TX_HAS_OFF`, `PACKET_LOSS`).
    pub fn pass_over(&self, slot: usize) {
        self.request(slot, 0, 0);
    }

    /// Whether the kernel has no use for a transmit slot.
    #[must_use]
    pub fn is_available(&self, slot: usize) -> bool {
        self.status(slot) & (packet_slot::SEND_REQUEST | packet_slot::SENDING) == 0
    }
}
