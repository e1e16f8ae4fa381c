//! The words of virtqueues.

use std::sync::atomic::{AtomicU16, AtomicU64};

use sidecore_memory::{GuestMemory, MemoryError, UserAddress};
use sidecore_spec_virtio::{descriptor, packed};

pub(crate) use sidecore_memory::Words;

use crate::RingLayout;

/// The descriptor area of a virtqueue: two words a descriptor.
pub(crate) fn descriptor_words(
    memory: &GuestMemory,
    layout: &RingLayout,
) -> Result<Words<AtomicU64>, MemoryError> {
    let len_bytes = usize::from(layout.size).saturating_mul(descriptor::BYTES);
    Words::in_bytes(memory, layout.descriptor_area, len_bytes, descriptor::ALIGN_BYTES)
}

/// An event suppression structure of a packed virtqueue: position and flags.
pub(crate) fn event_words(
    memory: &GuestMemory,
    at: UserAddress,
) -> Result<Words<AtomicU16>, MemoryError> {
    Words::in_bytes(memory, at, packed::EVENT_BYTES, packed::EVENT_ALIGN_BYTES)
}
