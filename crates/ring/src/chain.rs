//! One request's buffers, as the driver described them.

use sidecore_memory::GuestAddress;

use crate::RingError;

/// A buffer in guest memory; not yet translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Its guest physical address.
    pub address: GuestAddress,
    /// Its size in bytes; never zero in a [`Chain`].
    pub len_bytes: u32,
}

/// A descriptor chain, checked for its shape: all readable buffers come before
/// all writable ones, none is empty, and there are no more than the limit.
/// It is reused from request to request.
#[derive(Debug)]
pub struct Chain {
    descriptors: Vec<Descriptor>,
    readable: usize,
    limit: usize,
}

impl Chain {
    /// An empty chain that takes up to `limit` descriptors.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self { descriptors: Vec::with_capacity(limit), readable: 0, limit }
    }

    /// What the device reads, in order.
    #[must_use]
    #[inline]
    pub fn readable(&self) -> &[Descriptor] {
        self.descriptors.get(..self.readable).unwrap_or(&[])
    }

    /// What the device writes, in order.
    #[must_use]
    #[inline]
    pub fn writable(&self) -> &[Descriptor] {
        self.descriptors.get(self.readable..).unwrap_or(&[])
    }

    #[inline]
    pub(crate) fn clear(&mut self) {
        self.descriptors.clear();
        self.readable = 0;
    }

    #[inline]
    pub(crate) fn push(&mut self, descriptor: Descriptor, writable: bool) -> Result<(), RingError> {
        if descriptor.len_bytes == 0 {
            return Err(RingError::ZeroLength);
        }
        if self.descriptors.len() >= self.limit {
            return Err(RingError::ChainTooLong { limit: self.limit });
        }
        if !writable {
            if self.readable != self.descriptors.len() {
                return Err(RingError::ReadableAfterWritable);
            }
            self.readable = self.readable.wrapping_add(1);
        }
        self.descriptors.push(descriptor);
        Ok(())
    }
}

/// A request taken from a ring and owed to it: its name there, and how many
/// descriptors it holds. Give it back to
/// [`DeviceRing::complete`](crate::DeviceRing::complete) or, unanswered, to
/// [`DeviceRing::abandon`](crate::DeviceRing::abandon).
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Token {
    /// Head descriptor (split) or buffer id (packed).
    pub(crate) id: u16,
    /// Ring entries that it occupies; 1 in a split ring.
    pub(crate) entries: u16,
}

impl Token {
    /// The token as an integer, to travel with a request.
    #[must_use]
    #[inline]
    pub fn into_bits(self) -> u64 {
        u64::from(self.id) | (u64::from(self.entries) << 16)
    }

    /// The token that [`into_bits`](Self::into_bits) made.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // taking the two halves apart
    pub fn from_bits(bits: u64) -> Self {
        Self { id: (bits & 0xffff) as u16, entries: ((bits >> 16) & 0xffff) as u16 }
    }
}

/// Descriptor flags (virtio 1.2, 2.7.5 and 2.8.6: the same bits).
pub(crate) mod flags {
    pub(crate) const NEXT: u16 = 1;
    pub(crate) const WRITE: u16 = 2;
    pub(crate) const INDIRECT: u16 = 4;
    /// Packed rings only (2.8.1).
    pub(crate) const AVAIL: u16 = 1 << 7;
    /// Packed rings only (2.8.1).
    pub(crate) const USED: u16 = 1 << 15;
}

/// Bytes in a descriptor of either format.
pub(crate) const DESCRIPTOR_BYTES: u32 = 16;

/// The second half of a split descriptor, in one word: length, flags, next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitTail {
    pub(crate) len_bytes: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl SplitTail {
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // taking the word apart
    pub(crate) const fn from_word(word: u64) -> Self {
        let word = u64::from_le(word);
        Self { len_bytes: word as u32, flags: (word >> 32) as u16, next: (word >> 48) as u16 }
    }
}

/// The second half of a packed descriptor, in one word: length, id, flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedTail {
    pub(crate) len_bytes: u32,
    pub(crate) id: u16,
    pub(crate) flags: u16,
}

impl PackedTail {
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // taking the word apart
    pub(crate) const fn from_word(word: u64) -> Self {
        let word = u64::from_le(word);
        Self { len_bytes: word as u32, id: (word >> 32) as u16, flags: (word >> 48) as u16 }
    }

    #[inline(always)]
    pub(crate) const fn to_word(self) -> u64 {
        ((self.len_bytes as u64) | ((self.id as u64) << 32) | ((self.flags as u64) << 48)).to_le()
    }
}
