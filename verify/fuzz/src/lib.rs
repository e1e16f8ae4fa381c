//! Shared parts of the targets: a small guest whose memory is the input, and a reader of numbers.

#![forbid(unsafe_code)]

mod input;
pub mod vrio;

pub use input::Input;

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_ring::{RingFormat, RingLayout};

/// The entries of a ring: few, so that an input reaches all of them.
const RING_SIZE: u16 = 4;
const MEMORY_BYTES: u64 = 64 << 10;
/// The part of an input that is the memory's first content; the rest changes this content.
const IMAGE_BYTES: usize = 640;
/// The size of an offset and a word.
const POKE_BYTES: usize = 4;

/// A guest's memory, zeroed: guest and user addresses are the same.
///
/// The memory is made once: making one for each input would be most of the work.
#[must_use]
pub fn guest_memory() -> GuestMemory {
    thread_local! {
        static MEMORY: GuestMemory = {
            let flags = rustix::fs::MemfdFlags::CLOEXEC;
            let file = rustix::fs::memfd_create("guest", flags).expect("a memfd");
            rustix::fs::ftruncate(&file, MEMORY_BYTES).expect("64 KiB");
            GuestMemory::map(vec![RegionSpec {
                guest_address: GuestAddress(0),
                user_address: UserAddress(0),
                len_bytes: MEMORY_BYTES,
                file,
                file_offset_bytes: 0,
            }])
            .expect("a mapping")
        };
    }
    let memory = MEMORY.with(Clone::clone);
    let zeros = [0; MEMORY_BYTES as usize];
    memory.write_slice(GuestAddress(0), &zeros, &mut RegionHint::default()).expect("in range");
    memory
}

/// The ring for the low three bits of an input's first byte.
#[must_use]
pub fn ring_layout(setup: u8) -> RingLayout {
    let format = if setup & 1 == 0 { RingFormat::Split } else { RingFormat::Packed };
    RingLayout {
        event_idx: setup & 2 != 0,
        indirect: setup & 4 != 0,
        ..RingLayout::compact(UserAddress(0), format, RING_SIZE)
    }
}

/// The guest's writes: the memory's first content, then a word at a time.
#[derive(Debug)]
pub struct Poker<'a> {
    memory: GuestMemory,
    pokes: &'a [u8],
}

impl<'a> Poker<'a> {
    /// Writes the first part of `input` to the start of `memory`.
    #[must_use]
    pub fn new(memory: &GuestMemory, input: &'a [u8]) -> Self {
        let (image, pokes) = input.split_at_checked(IMAGE_BYTES).unwrap_or((input, &[]));
        memory.write_slice(GuestAddress(0), image, &mut RegionHint::default()).expect("in range");
        Self { memory: memory.clone(), pokes }
    }

    /// Writes the next word; false at the end of the input.
    pub fn poke(&mut self, hint: &mut RegionHint) -> bool {
        let Some((poke, rest)) = self.pokes.split_at_checked(POKE_BYTES) else { return false };
        self.pokes = rest;
        let offset = u64::from(u16::from_le_bytes([poke[0], poke[1]])) % (IMAGE_BYTES as u64);
        self.memory.write_slice(GuestAddress(offset), &poke[2..], hint).expect("in range");
        true
    }
}
