//! The data buffers of a queue's slots.

use sidecore_ring::driver::SharedMemory;

use crate::arena::Part;
use crate::error::ClientError;
use crate::request::{Piece, Slot};

/// One for each slot, all of one size.
#[derive(Debug)]
pub(crate) struct Buffers {
    memory: SharedMemory,
    /// Where the device finds the first of them.
    at: u64,
    slots: u16,
    slot_bytes: u32,
    /// From one to the next.
    stride: usize,
}

impl Buffers {
    pub(crate) fn new(part: Part, slots: u16, slot_bytes: u32, stride: usize) -> Self {
        Self {
            memory: SharedMemory::new(part.window),
            at: part.guest_address,
            slots,
            slot_bytes,
            stride,
        }
    }

    /// Size of each in bytes.
    #[inline]
    pub(crate) fn slot_bytes(&self) -> u32 {
        self.slot_bytes
    }

    /// Where the device finds the slot's.
    #[inline]
    pub(crate) fn address(&self, slot: Slot) -> u64 {
        self.at + self.offset(slot) as u64
    }

    /// The memory of all slots, and where the slot's begins in it.
    #[inline]
    pub(crate) fn place(&self, slot: Slot) -> (&SharedMemory, usize) {
        (&self.memory, self.offset(slot))
    }

    /// Where the device finds a piece of the slot's.
    pub(crate) fn piece_address(&self, slot: Slot, piece: &Piece) -> Result<u64, ClientError> {
        match piece.offset_bytes.checked_add(piece.len_bytes) {
            Some(end) if end <= self.slot_bytes => {
                Ok(self.address(slot) + u64::from(piece.offset_bytes))
            }
            _ => Err(ClientError::Request(format!("{piece:?} is outside of the slot's buffer"))),
        }
    }

    /// Fails if the slot's has not that many bytes.
    #[inline]
    pub(crate) fn check_len(&self, len_bytes: u32) -> Result<(), ClientError> {
        if len_bytes <= self.slot_bytes {
            Ok(())
        } else {
            Err(too_long(len_bytes, self.slot_bytes))
        }
    }

    pub(crate) fn read(&self, slot: Slot, offset_bytes: u32, to: &mut [u8]) -> usize {
        let room = self.room(slot, offset_bytes).min(to.len());
        self.memory.read_bytes(self.offset(slot) + offset_bytes as usize, &mut to[..room])
    }

    pub(crate) fn write(&mut self, slot: Slot, offset_bytes: u32, from: &[u8]) -> usize {
        let room = self.room(slot, offset_bytes).min(from.len());
        self.memory.write_bytes(self.offset(slot) + offset_bytes as usize, &from[..room])
    }

    /// The sum of the 64-bit words.
    pub(crate) fn sum(&self, slot: Slot) -> u64 {
        let start = self.offset(slot);
        let words = (start..start + self.slot_bytes as usize).step_by(8);
        words.fold(0, |sum, at| sum.wrapping_add(self.memory.load_u64(at)))
    }

    #[inline]
    fn offset(&self, slot: Slot) -> usize {
        slot.index() * self.stride
    }

    /// Bytes of the slot's buffer from `offset_bytes` on.
    fn room(&self, slot: Slot, offset_bytes: u32) -> usize {
        if slot.0 < self.slots { self.slot_bytes.saturating_sub(offset_bytes) as usize } else { 0 }
    }
}

#[cold]
fn too_long(len_bytes: u32, slot_bytes: u32) -> ClientError {
    ClientError::Request(format!("{len_bytes} bytes, a slot has {slot_bytes}"))
}

/// The methods of a queue that concern its buffers alone, and its notification.
macro_rules! buffer_methods {
    ($Queue:ident) => {
        impl $Queue {
            /// Size of a slot's data buffer in bytes.
            #[must_use]
            pub fn slot_bytes(&self) -> u32 {
                self.data.slot_bytes()
            }

            /// How it learns of completions.
            #[must_use]
            #[inline]
            pub fn notify(&self) -> Notify {
                self.notify
            }

            /// Copies out of the slot's buffer; returns how many bytes there were.
            pub fn read_data(&self, slot: Slot, offset_bytes: u32, to: &mut [u8]) -> usize {
                self.data.read(slot, offset_bytes, to)
            }

            /// Copies into the slot's buffer; returns how many bytes fitted.
            pub fn write_data(&mut self, slot: Slot, offset_bytes: u32, from: &[u8]) -> usize {
                self.data.write(slot, offset_bytes, from)
            }

            /// The sum of the 64-bit words of the slot's buffer: what a client costs that looks at
            /// its data.
            #[must_use]
            pub fn sum_data(&self, slot: Slot) -> u64 {
                self.data.sum(slot)
            }
        }
    };
}
pub(crate) use buffer_methods;
