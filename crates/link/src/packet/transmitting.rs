//! The transmit ring: buffers lent and sent in any order, taken by the kernel in the ring's.
//!
//! Each slot has a turn in every round. A buffer that is sent in its turn is sent where it lies.
//! One that its user still has when the turn comes is passed over; when it is sent later, its frame
//! is copied to the slot whose turn it is then.

use std::collections::VecDeque;

use sidecore_linux::{PacketSlots, packet_slot};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};

use super::ETHERNET_BYTES;
use crate::frame::{Piece, Pieces};
use crate::{Buffer, EthernetAddress};

#[derive(Debug)]
pub(super) struct Transmitting {
    ring: PacketSlots,
    /// From the start of a slot to the frame, behind the Ethernet header.
    frame_at: u32,
    frame_bytes: u32,
    own: EthernetAddress,
    ethertype: u16,
    /// Whether a user has the slot of this number.
    held: Box<[bool]>,
    /// Size of the frame, with its Ethernet header, that was last submitted in the slot of this
    /// number; zero if it was passed over.
    sizes: Box<[u32]>,
    /// Turns, which count on from round to round: those before `taken` were taken by the kernel,
    taken: u64,
    /// those before `submitted` are for it to take,
    submitted: u64,
    /// and those before `lent` are lent, up to a round ahead,
    lent: u64,
    /// but for so many, which were lent and came back unsent.
    holes: usize,
    /// Sent, but not submitted: the ring is full.
    queue: VecDeque<(Buffer, EthernetAddress, u32)>,
    starved: bool,
    /// A frame on its way from one slot to another.
    scratch: Vec<u8>,
    late_copies: u64,
}

impl Transmitting {
    pub fn new(
        ring: PacketSlots,
        frame_at: u32,
        frame_bytes: u32,
        own: EthernetAddress,
        ethertype: u16,
    ) -> Self {
        let slots = ring.slots();
        Self {
            ring,
            frame_at,
            frame_bytes,
            own,
            ethertype,
            held: vec![false; slots].into(),
            sizes: vec![0; slots].into(),
            taken: 0,
            submitted: 0,
            lent: 0,
            holes: 0,
            queue: VecDeque::with_capacity(slots),
            starved: false,
            scratch: vec![0; usize::try_from(frame_bytes).unwrap_or(0)],
            late_copies: 0,
        }
    }

    pub fn slots(&self) -> usize {
        self.ring.slots()
    }

    fn slot_of(&self, turn: u64) -> usize {
        let slots = self.ring.slots() as u64;
        usize::try_from(turn.checked_rem(slots).unwrap_or(0)).unwrap_or(0)
    }

    fn is_held(&self, slot: usize) -> bool {
        self.held.get(slot).copied().unwrap_or(true)
    }

    fn set_held(&mut self, slot: usize, is: bool) {
        if let Some(held) = self.held.get_mut(slot) {
            *held = is;
        }
    }

    /// Turns from the next one to be submitted to the next one to be lent.
    fn window(&self) -> u64 {
        self.lent.wrapping_sub(self.submitted)
    }

    /// Turns until that of a slot.
    fn ahead(&self, slot: usize) -> u64 {
        let slots = self.ring.slots();
        let distance = slot.wrapping_add(slots).wrapping_sub(self.slot_of(self.submitted));
        distance.checked_rem(slots).unwrap_or(0) as u64
    }

    /// The slot of the next turn to be lent, if the kernel has no use for it.
    fn next_slot(&self) -> Option<usize> {
        let slot = self.slot_of(self.lent);
        (self.window() < self.ring.slots() as u64 && self.ring.is_available(slot)).then_some(slot)
    }

    /// A slot that came back unsent and whose turn is to come.
    fn hole(&self) -> Option<usize> {
        if self.holes == 0 {
            return None;
        }
        let turns =
            (0..self.window()).map(|ahead| self.slot_of(self.submitted.wrapping_add(ahead)));
        turns.into_iter().find(|slot| !self.is_held(*slot))
    }

    /// A slot to lend.
    fn free_slot(&mut self) -> Option<usize> {
        if let Some(slot) = self.hole() {
            self.holes = self.holes.saturating_sub(1);
            return Some(slot);
        }
        while let Some(slot) = self.next_slot() {
            self.lent = self.lent.wrapping_add(1);
            // A slot that is held since an earlier round is passed over once more.
            if !self.is_held(slot) {
                return Some(slot);
            }
        }
        None
    }

    pub fn lend(&mut self, count: usize, buffers: &mut Vec<Buffer>) {
        let mut missing = count;
        while missing > 0
            && let Some(slot) = self.free_slot()
        {
            self.set_held(slot, true);
            let piece =
                Piece::new(self.ring.start(slot).saturating_add(self.frame_at), self.frame_bytes);
            buffers.push(Buffer::new(Pieces::one(piece), u32::try_from(slot).unwrap_or(u32::MAX)));
            missing = missing.saturating_sub(1);
        }
        self.starved = missing > 0;
    }

    /// Takes a buffer back unsent.
    pub fn cancel(&mut self, buffer: Buffer) {
        let slot = usize::try_from(buffer.into_slot()).unwrap_or(usize::MAX);
        self.set_held(slot, false);
        if self.ahead(slot) < self.window() {
            self.holes = self.holes.saturating_add(1);
        }
        // Turns at the end of the window are simply lent again.
        while self.holes > 0 && !self.is_held(self.slot_of(self.lent.wrapping_sub(1))) {
            self.lent = self.lent.wrapping_sub(1);
            self.holes = self.holes.saturating_sub(1);
        }
    }

    /// The frame of a buffer is on its way.
    fn release(&mut self, buffer: Buffer) {
        self.set_held(usize::try_from(buffer.into_slot()).unwrap_or(usize::MAX), false);
    }

    /// Whether a user waits for a buffer, or a sent frame for a slot, that there is now.
    pub fn has_wanted_room(&self) -> bool {
        self.wants_room() && (self.holes > 0 || self.next_slot().is_some())
    }

    /// Whether a user waits for a buffer, or a sent frame for a slot.
    pub fn wants_room(&self) -> bool {
        self.starved || !self.queue.is_empty()
    }

    /// Whether frames wait for the kernel to take them.
    pub fn has_unsent(&self) -> bool {
        self.taken != self.submitted || !self.queue.is_empty()
    }

    /// Sends a frame of `len_bytes`, once its turn has come.
    pub fn send(
        &mut self,
        memory: &GuestMemory,
        buffer: Buffer,
        to: EthernetAddress,
        len_bytes: usize,
    ) {
        self.queue.push_back((buffer, to, u32::try_from(len_bytes).unwrap_or(u32::MAX)));
        self.submit_queue(memory);
    }

    /// Submits what waits for a slot. Returns whether anything still does.
    pub fn submit_queue(&mut self, memory: &GuestMemory) -> bool {
        while let Some((buffer, to, len_bytes)) = self.queue.pop_front() {
            if let Err(buffer) = self.submit(memory, buffer, to, len_bytes) {
                self.queue.push_front((buffer, to, len_bytes));
                return true;
            }
        }
        false
    }

    fn submit(
        &mut self,
        memory: &GuestMemory,
        buffer: Buffer,
        to: EthernetAddress,
        len_bytes: u32,
    ) -> Result<(), Buffer> {
        let own = usize::try_from(buffer.slot()).unwrap_or(usize::MAX);
        loop {
            let ahead = self.ahead(own);
            if ahead < self.window() {
                // Its turn is to come in this round: those before it are passed over.
                (0..ahead).for_each(|_| self.pass_over());
                self.request(memory, own, to, len_bytes);
                self.release(buffer);
                return Ok(());
            }
            if self.window() == 0 {
                let Some(slot) = self.next_slot() else {
                    return Err(buffer);
                };
                self.lent = self.lent.wrapping_add(1);
                self.holes = usize::from(!self.is_held(slot));
                continue;
            }
            let turn = self.slot_of(self.submitted);
            if self.is_held(turn) {
                self.pass_over();
                continue;
            }
            // Its turn was before it was sent: the frame moves to a free slot.
            self.move_frame(memory, &buffer, turn, len_bytes);
            self.request(memory, turn, to, len_bytes);
            self.holes = self.holes.saturating_sub(1);
            self.release(buffer);
            return Ok(());
        }
    }

    fn move_frame(&mut self, memory: &GuestMemory, buffer: &Buffer, slot: usize, len_bytes: u32) {
        let len = usize::try_from(len_bytes).unwrap_or(usize::MAX).min(self.scratch.len());
        let Some(scratch) = self.scratch.get_mut(..len) else {
            return;
        };
        buffer.pieces().read(memory, 0, scratch);
        let to = Piece::new(self.ring.start(slot).saturating_add(self.frame_at), self.frame_bytes);
        Pieces::one(to).write(memory, 0, scratch);
        self.late_copies = self.late_copies.saturating_add(1);
    }

    /// Copies made so far because frames were sent after their turn.
    pub fn take_late_copies(&mut self) -> u64 {
        std::mem::take(&mut self.late_copies)
    }

    fn pass_over(&mut self) {
        let slot = self.slot_of(self.submitted);
        if !self.is_held(slot) {
            self.holes = self.holes.saturating_sub(1);
        }
        self.ring.pass_over(slot);
        self.set_size(slot, 0);
        self.submitted = self.submitted.wrapping_add(1);
    }

    /// Submits the frame in the slot whose turn it is.
    fn request(&mut self, memory: &GuestMemory, slot: usize, to: EthernetAddress, len_bytes: u32) {
        let mac_at = self.frame_at.saturating_sub(ETHERNET_BYTES);
        let at = GuestAddress(u64::from(self.ring.start(slot).saturating_add(mac_at)));
        let mut header = [0; ETHERNET_BYTES as usize];
        let bytes = to.0.into_iter().chain(self.own.0).chain(self.ethertype.to_be_bytes());
        header.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        // In range, as the slot is.
        let _ = memory.write_slice(at, &header, &mut RegionHint::default());
        let size = len_bytes.saturating_add(ETHERNET_BYTES);
        self.ring.request(slot, u16::try_from(mac_at).unwrap_or(0), size);
        self.set_size(slot, size);
        self.submitted = self.submitted.wrapping_add(1);
    }

    fn set_size(&mut self, slot: usize, size: u32) {
        if let Some(place) = self.sizes.get_mut(slot) {
            *place = size;
        }
    }

    /// Takes note of what the kernel has taken, and calls `visit` with the size of each frame.
    pub fn reap(&mut self, mut visit: impl FnMut(u32)) {
        while self.taken != self.submitted {
            let slot = self.slot_of(self.taken);
            if self.ring.status(slot) & packet_slot::SEND_REQUEST != 0 {
                break;
            }
            self.taken = self.taken.wrapping_add(1);
            match self.sizes.get(slot) {
                Some(0) | None => {}
                Some(size) => visit(*size),
            }
        }
    }

    /// Ends the life of the frames that were not sent.
    pub fn clear(&mut self) {
        while let Some((buffer, ..)) = self.queue.pop_front() {
            self.release(buffer);
        }
    }
}
