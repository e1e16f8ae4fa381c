//! The packed virtqueue (2.8): one ring of descriptors and two event suppression structures.

use crate::descriptor::shift;

/// Offset of a descriptor's buffer id (2.8.13).
pub const DESCRIPTOR_ID_OFFSET: usize = 12;
/// Offset of a descriptor's flags (2.8.13).
pub const DESCRIPTOR_FLAGS_OFFSET: usize = 14;

/// Descriptor flag VIRTQ_DESC_F_AVAIL: the driver's wrap counter (2.8.1).
pub const AVAIL: u16 = 1 << 7;
/// Descriptor flag VIRTQ_DESC_F_USED: the device's wrap counter (2.8.1).
pub const USED: u16 = 1 << 15;

/// Size of an event suppression structure (2.8.14).
pub const EVENT_BYTES: usize = 4;
/// Alignment of an event suppression structure (2.8.10.1).
pub const EVENT_ALIGN_BYTES: usize = 4;
/// Offset of the position in the ring at which a notification is wanted (2.8.14).
pub const EVENT_POSITION_OFFSET: usize = 0;
/// Offset of the flags of an event suppression structure (2.8.14).
pub const EVENT_FLAGS_OFFSET: usize = 2;
/// The bits of the flags that have a meaning (2.8.14).
pub const EVENT_FLAGS_MASK: u16 = 3;

/// RING_EVENT_FLAGS_ENABLE: notifications are wanted (2.8.10).
pub const EVENT_ENABLE: u16 = 0;
/// RING_EVENT_FLAGS_DISABLE: no notifications are wanted (2.8.10).
pub const EVENT_DISABLE: u16 = 1;
/// RING_EVENT_FLAGS_DESC: a notification is wanted at one position (2.8.10).
pub const EVENT_DESCRIPTOR: u16 = 2;

/// The wrap counter, above the index in a 16-bit position (2.8.14).
pub const WRAP: u16 = 1 << 15;

/// A descriptor's second word (2.8.13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Size of the buffer, or in a used descriptor how much the device wrote.
    pub len_bytes: u32,
    /// The driver's name for the chain.
    pub id: u16,
    /// Flags, see [`descriptor`](crate::descriptor), [`AVAIL`] and [`USED`].
    pub flags: u16,
}

impl Tail {
    /// Takes the word apart, which is in the machine's byte order.
    #[must_use]
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, clippy::arithmetic_side_effects)] // shifts below 64
    pub const fn from_word(word: u64) -> Self {
        Self {
            len_bytes: word as u32,
            id: (word >> shift(DESCRIPTOR_ID_OFFSET)) as u16,
            flags: (word >> shift(DESCRIPTOR_FLAGS_OFFSET)) as u16,
        }
    }

    /// Puts the word together, in the machine's byte order.
    #[must_use]
    #[inline(always)]
    #[allow(clippy::arithmetic_side_effects)] // shifts below 64
    pub const fn to_word(self) -> u64 {
        self.len_bytes as u64
            | (self.id as u64) << shift(DESCRIPTOR_ID_OFFSET)
            | (self.flags as u64) << shift(DESCRIPTOR_FLAGS_OFFSET)
    }
}
