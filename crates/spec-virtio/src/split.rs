//! The split virtqueue (2.7): a descriptor table, the available ring and the used ring.

use crate::descriptor::shift;

/// Offset of a descriptor's flags (2.7.5).
pub const DESCRIPTOR_FLAGS_OFFSET: usize = 12;
/// Offset of the number of a chain's next descriptor (2.7.5).
pub const DESCRIPTOR_NEXT_OFFSET: usize = 14;

/// Alignment of the available ring (2.7).
pub const AVAIL_ALIGN_BYTES: usize = 2;
/// Alignment of the used ring (2.7).
pub const USED_ALIGN_BYTES: usize = 4;

/// Offset of the 16-bit flags of the available ring and of the used ring (2.7.6 and 2.7.8).
pub const FLAGS_OFFSET: usize = 0;
/// Offset of the 16-bit index of the available ring and of the used ring.
pub const INDEX_OFFSET: usize = 2;
/// Offset of the entries of the available ring and of the used ring.
pub const ENTRIES_OFFSET: usize = 4;

/// Size of an entry of the available ring: the number of a head descriptor (2.7.6).
pub const AVAIL_ENTRY_BYTES: usize = 2;
/// Size of an entry of the used ring: a 32-bit head and 32 bits of length written (2.7.8).
pub const USED_ENTRY_BYTES: usize = 8;
/// Offset of the written length in an entry of the used ring.
pub const USED_LEN_OFFSET: usize = 4;

/// Flag of the available ring: VIRTQ_AVAIL_F_NO_INTERRUPT (2.7.7).
pub const NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: VIRTQ_USED_F_NO_NOTIFY (2.7.10).
pub const NO_NOTIFY: u16 = 1;

/// Size of the event index behind the entries of each ring.
const EVENT_BYTES: usize = 2;

/// Offset of entry `position` of the available ring, which is below the queue's size. At the size
/// itself is `used_event` (2.7.6).
#[must_use]
#[inline(always)]
pub const fn avail_entry_offset(position: u16) -> usize {
    (position as usize).wrapping_mul(AVAIL_ENTRY_BYTES).wrapping_add(ENTRIES_OFFSET)
}

/// Offset of entry `position` of the used ring, which is below the queue's size. At the size itself
/// is `avail_event` (2.7.8).
#[must_use]
#[inline(always)]
pub const fn used_entry_offset(position: u16) -> usize {
    (position as usize).wrapping_mul(USED_ENTRY_BYTES).wrapping_add(ENTRIES_OFFSET)
}

/// Size of the available ring of a queue of `size` entries, with the event index (2.7).
#[must_use]
pub const fn avail_bytes(size: u16) -> usize {
    avail_entry_offset(size).wrapping_add(EVENT_BYTES)
}

/// Size of the used ring of a queue of `size` entries, with the event index (2.7).
#[must_use]
pub const fn used_bytes(size: u16) -> usize {
    used_entry_offset(size).wrapping_add(EVENT_BYTES)
}

/// A descriptor's second word (2.7.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Size of the buffer.
    pub len_bytes: u32,
    /// Flags, see [`descriptor`](crate::descriptor).
    pub flags: u16,
    /// The next descriptor of the chain, if the flags say that there is one.
    pub next: u16,
}

impl Tail {
    /// Takes the word apart, which is in the machine's byte order.
    #[must_use]
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, clippy::arithmetic_side_effects)] // shifts below 64
    pub const fn from_word(word: u64) -> Self {
        Self {
            len_bytes: word as u32,
            flags: (word >> shift(DESCRIPTOR_FLAGS_OFFSET)) as u16,
            next: (word >> shift(DESCRIPTOR_NEXT_OFFSET)) as u16,
        }
    }

    /// Puts the word together, in the machine's byte order.
    #[must_use]
    #[inline(always)]
    #[allow(clippy::arithmetic_side_effects)] // shifts below 64
    pub const fn to_word(self) -> u64 {
        self.len_bytes as u64
            | (self.flags as u64) << shift(DESCRIPTOR_FLAGS_OFFSET)
            | (self.next as u64) << shift(DESCRIPTOR_NEXT_OFFSET)
    }
}
