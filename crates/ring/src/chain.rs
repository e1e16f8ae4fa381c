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

/// A descriptor chain, checked for its shape: all readable buffers come before all writable ones,
/// none is empty, and there are no more than the limit. It is reused from request to request.
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

    /// The descriptors that the device reads, in order.
    #[must_use]
    #[inline]
    pub fn readable(&self) -> &[Descriptor] {
        self.descriptors.get(..self.readable).unwrap_or(&[])
    }

    /// The descriptors that the device writes, in order.
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

/// A request taken from a ring and owed to it: its name there, and how many descriptors it holds.
/// Give it back to [`DeviceRing::complete`](crate::DeviceRing::complete) or, unanswered, to
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
