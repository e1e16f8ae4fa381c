//! Indirect descriptors: one table for each slot.

use sidecore_spec_virtio::descriptor::{self, LEN_OFFSET};
use sidecore_spec_virtio::{packed, split};

use super::{Buffer, IndirectTables, SharedMemory};
use crate::layout::RingFormat;

/// The tables of all slots, side by side.
#[derive(Debug)]
pub(crate) struct Tables {
    memory: SharedMemory,
    guest_base: u64,
    stride_bytes: usize,
}

impl Tables {
    pub(crate) fn new(tables: IndirectTables, buffers_per_slot: u16) -> Self {
        Self {
            memory: SharedMemory::new(tables.window),
            guest_base: tables.guest_address.0,
            stride_bytes: usize::from(buffers_per_slot).wrapping_mul(descriptor::BYTES),
        }
    }

    /// Writes `chain` as the table of `slot` and returns the one buffer that stands for it. In
    /// split rings the entries are linked (2.7.5.3); in packed ones they follow each other and the
    /// link means nothing (2.8.7).
    pub(crate) fn write(&self, slot: u16, chain: &[Buffer], format: RingFormat) -> Buffer {
        let start = usize::from(slot).wrapping_mul(self.stride_bytes);
        for (index, buffer) in chain.iter().enumerate() {
            let at = start.wrapping_add(index.wrapping_mul(descriptor::BYTES));
            let next = index.wrapping_add(1);
            match format {
                RingFormat::Split if next < chain.len() => {
                    write_split(
                        &self.memory,
                        at,
                        *buffer,
                        descriptor::NEXT,
                        u16::try_from(next).unwrap_or(0),
                    );
                }
                RingFormat::Split => write_split(&self.memory, at, *buffer, 0, 0),
                RingFormat::Packed => {
                    let tail = packed::Tail {
                        len_bytes: buffer.len_bytes,
                        id: 0,
                        flags: direction(*buffer),
                    };
                    self.memory.store_u64(at, buffer.address);
                    self.memory.store_u64(at.wrapping_add(LEN_OFFSET), tail.to_word());
                }
            }
        }
        let len_bytes = u32::try_from(chain.len().wrapping_mul(descriptor::BYTES)).unwrap_or(0);
        Buffer {
            address: self.guest_base.wrapping_add(start as u64),
            len_bytes,
            device_writes: false,
        }
    }
}

/// Writes a split ring's descriptor (2.7.5): address, length, flags, next.
#[inline]
pub(crate) fn write_split(
    memory: &SharedMemory,
    at: usize,
    buffer: Buffer,
    more_flags: u16,
    next: u16,
) {
    let tail =
        split::Tail { len_bytes: buffer.len_bytes, flags: direction(buffer) | more_flags, next };
    memory.store_u64(at, buffer.address);
    memory.store_u64(at.wrapping_add(LEN_OFFSET), tail.to_word());
}

/// The flag that says who writes the buffer.
#[inline(always)]
pub(crate) fn direction(buffer: Buffer) -> u16 {
    if buffer.device_writes { descriptor::WRITE } else { 0 }
}
