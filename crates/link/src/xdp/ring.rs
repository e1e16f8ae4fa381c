//! The four rings of an AF_XDP socket. The kernel is at their other end.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use sidecore_linux::{NEEDS_WAKE_UP, XdpRing};
use sidecore_memory::{UserAddress, Words};

use crate::LinkError;

/// More of the frame is in the next entry (`XDP_PKT_CONTD`).
pub(super) const CONTINUED: u32 = 1;

/// An entry of the receive and the transmit ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub address: u64,
    pub len_bytes: u32,
    pub flags: u32,
}

#[derive(Debug)]
pub(super) struct Ring {
    producer: Words<AtomicU32>,
    consumer: Words<AtomicU32>,
    flags: Words<AtomicU32>,
    entries: Words<AtomicU64>,
    mask: u32,
    /// Words of an entry.
    width: usize,
    /// This side's index, which the kernel may not see yet.
    own: u32,
}

impl Ring {
    /// A ring whose entries have `width` words of 8 bytes.
    pub fn new(ring: &XdpRing, width: usize) -> Result<Self, LinkError> {
        let wrong = |error| LinkError::Kernel {
            step: "map a ring of AF_XDP",
            error: std::io::Error::other(error),
        };
        let count = usize::try_from(ring.entries).unwrap_or(0).saturating_mul(width);
        let word =
            |at| Words::new(&ring.memory, UserAddress(at), 1, size_of::<u32>()).map_err(wrong);
        Ok(Self {
            producer: word(ring.producer_at)?,
            consumer: word(ring.consumer_at)?,
            flags: word(ring.flags_at)?,
            entries: Words::new(
                &ring.memory,
                UserAddress(ring.entries_at),
                count,
                size_of::<u64>(),
            )
            .map_err(wrong)?,
            mask: ring.entries.wrapping_sub(1),
            width,
            own: 0,
        })
    }

    /// The kernel's index. What it wrote before, or read, is done.
    fn load(words: &Words<AtomicU32>) -> u32 {
        words.get(0).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(words: &Words<AtomicU32>, value: u32) {
        if let Some(word) = words.get(0) {
            word.store(value, Ordering::Release);
        }
    }

    fn word(&self, index: u32, word: usize) -> Option<&AtomicU64> {
        let entry = usize::try_from(index & self.mask).ok()?;
        self.entries.get(entry.checked_mul(self.width)?.checked_add(word)?)
    }

    fn read(&self, word: usize) -> u64 {
        self.word(self.own, word).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn write(&self, word: usize, value: u64) {
        if let Some(word) = self.word(self.own, word) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Consumer: entries that the kernel has produced.
    pub fn available(&self) -> u32 {
        Self::load(&self.producer).wrapping_sub(self.own)
    }

    /// Consumer: takes the next of the entries that are available.
    pub fn take(&mut self) -> Descriptor {
        let address = self.read(0);
        let [a, b, c, d, e, f, g, h] = if self.width > 1 { self.read(1) } else { 0 }.to_ne_bytes();
        self.own = self.own.wrapping_add(1);
        Descriptor {
            address,
            len_bytes: u32::from_ne_bytes([a, b, c, d]),
            flags: u32::from_ne_bytes([e, f, g, h]),
        }
    }

    /// Consumer: gives the entries taken back to the kernel.
    pub fn release(&self) {
        Self::store(&self.consumer, self.own);
    }

    /// Producer: adds an entry, for which there is room: the ring has one for each chunk.
    pub fn push(&mut self, descriptor: Descriptor) {
        self.write(0, descriptor.address);
        if self.width > 1 {
            let [a, b, c, d] = descriptor.len_bytes.to_ne_bytes();
            let [e, f, g, h] = descriptor.flags.to_ne_bytes();
            self.write(1, u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
        }
        self.own = self.own.wrapping_add(1);
    }

    /// Producer: shows the kernel the entries added.
    pub fn publish(&self) {
        Self::store(&self.producer, self.own);
    }

    /// Producer: entries that the kernel has not taken yet.
    pub fn pending(&self) -> u32 {
        self.own.wrapping_sub(Self::load(&self.consumer))
    }

    /// Producer: whether the kernel looks at the ring only when it is asked to.
    pub fn needs_wake_up(&self) -> bool {
        Self::load(&self.flags) & NEEDS_WAKE_UP != 0
    }
}
