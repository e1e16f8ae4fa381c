//! Whether a ring was in use before.

use std::sync::atomic::{AtomicU32, Ordering};

use sidecore_memory::{GuestMemory, MemoryError};
use sidecore_spec_virtio::packed::{AVAIL, Tail, USED};
use sidecore_spec_virtio::split;

use crate::cell::{Words, descriptor_words, event_words};
use crate::{RingFormat, RingLayout};

/// Whether a device has given back descriptors of the ring at `layout`, by what lies there.
///
/// The position alone does not tell: a split ring's index is 0 again after 65,536 requests, a
/// packed ring's position is the first again after two laps. A driver allocates a ring and zeroes
/// it before it says where it is (virtio 1.2, 4.1.5.1.3); a block device writes at least the status
/// of each request, so that no used length is zero.
///
/// # Errors
/// The ring is not in `memory`.
pub fn was_used(memory: &GuestMemory, layout: &RingLayout) -> Result<bool, MemoryError> {
    match layout.format {
        RingFormat::Split => was_split_used(memory, layout),
        RingFormat::Packed => was_packed_used(memory, layout),
    }
}

fn was_split_used(memory: &GuestMemory, layout: &RingLayout) -> Result<bool, MemoryError> {
    let len_bytes = split::used_entry_offset(layout.size);
    let used = Words::<AtomicU32>::in_bytes(
        memory,
        layout.device_area,
        len_bytes,
        split::USED_ALIGN_BYTES,
    )?;
    let mut words = used.words().iter().map(|word| u32::from_le(word.load(Ordering::Relaxed)));
    // The first word has the flags, which a device sets that has taken nothing yet, and the index.
    let index = words.next().map_or(0, |word| word >> 16);
    let mut lengths = words.skip(1).step_by(2);
    Ok(index != 0 || lengths.any(|len_bytes| len_bytes != 0))
}

fn was_packed_used(memory: &GuestMemory, layout: &RingLayout) -> Result<bool, MemoryError> {
    let descriptors = descriptor_words(memory, layout)?;
    let device_event = event_words(memory, layout.device_area)?;
    let tails = descriptors
        .words()
        .iter()
        .skip(1)
        .step_by(2)
        .map(|tail| u64::from_le(tail.load(Ordering::Relaxed)));
    let is_past = |tail: Tail| match (tail.flags & AVAIL != 0, tail.flags & USED != 0) {
        // Made available on the first lap, or on a later one as well.
        (true, false) => false,
        // Untouched, or used on a later lap.
        (false, false) => tail.len_bytes != 0,
        (true, true) | (false, true) => true,
    };
    // If the driver has made the whole ring available again, only what the device asks for is left
    // of earlier laps.
    let has_asked = device_event.words().iter().any(|word| word.load(Ordering::Relaxed) != 0);
    Ok(has_asked || tails.map(Tail::from_word).any(is_past))
}
