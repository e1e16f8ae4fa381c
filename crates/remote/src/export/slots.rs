//! The memory of requests at an IOhost: a buffer for each slot of each session.

use std::io;

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, Segments, SharedPages};
use sidecore_vrio::wire::MAX_REQUEST_BYTES;

use crate::RequestData;

/// From a slot's buffer to the next one's. A page more than the largest request: buffers at
/// multiples of a power of two would share a few sets of the caches.
const STRIDE_BYTES: usize = MAX_REQUEST_BYTES as usize + 4096;

/// The buffers of one session's slots. The kernel gives them pages when they are first used.
struct Buffers {
    memory: GuestMemory,
    lists: Box<[Segments]>,
}

/// The buffers of all sessions, by the places that an engine names:
/// [`Execute::place`](sidecore_vrio::Execute::place).
#[derive(Default)]
pub(crate) struct SlotBuffers {
    places: Vec<Option<Buffers>>,
}

impl SlotBuffers {
    /// Makes the buffers of a place for this many slots.
    ///
    /// # Errors
    /// The kernel has no memory or no descriptor left.
    pub fn add(&mut self, place: u16, slots: u16) -> io::Result<()> {
        let slots = usize::from(slots.max(1));
        let pages = SharedPages::new("slots", slots.saturating_mul(STRIDE_BYTES))?;
        let list = |slot: usize| {
            let mut list = Segments::with_capacity(1);
            list.bind(pages.memory());
            let start = GuestAddress(slot.saturating_mul(STRIDE_BYTES) as u64);
            list.push(start, MAX_REQUEST_BYTES.into(), &mut RegionHint::default())
                .map_err(io::Error::other)?;
            Ok(list)
        };
        let lists = (0..slots).map(list).collect::<io::Result<_>>()?;
        let place = usize::from(place);
        if place >= self.places.len() {
            self.places.resize_with(place.saturating_add(1), || None);
        }
        if let Some(buffers) = self.places.get_mut(place) {
            *buffers = Some(Buffers { memory: pages.memory().clone(), lists });
        }
        Ok(())
    }

    /// Gives the memory of a place back. The store has no request of it.
    pub fn remove(&mut self, place: u16) {
        if let Some(buffers) = self.places.get_mut(usize::from(place)) {
            *buffers = None;
        }
    }

    fn buffers(&self, place: u64) -> Option<&Buffers> {
        self.places.get(usize::try_from(place >> 16).ok()?)?.as_ref()
    }

    /// Where the buffer of a place lies.
    #[inline]
    pub fn at(&self, place: u64) -> Option<(&GuestMemory, GuestAddress)> {
        let start = (place & 0xffff).saturating_mul(STRIDE_BYTES as u64);
        self.buffers(place).map(|buffers| (&buffers.memory, GuestAddress(start)))
    }
}

impl RequestData for SlotBuffers {
    #[inline]
    fn segments(&self, request: u64) -> Option<&Segments> {
        self.buffers(request)?.lists.get(usize::try_from(request & 0xffff).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_has_a_buffer_of_its_own_that_is_aligned() {
        let mut slots = SlotBuffers::default();
        slots.add(2, 3).unwrap();
        slots.add(0, 1).unwrap();
        for slot in 0..3_u8 {
            let place = 2 << 16 | u64::from(slot);
            let list = slots.segments(place).unwrap();
            assert_eq!(list.len_bytes(), u64::from(MAX_REQUEST_BYTES));
            assert!(list.pieces()[0].as_ptr().addr().is_multiple_of(4096));
            let filled = vec![slot + 1; MAX_REQUEST_BYTES as usize];
            assert_eq!(list.copy_from_slice(0, &filled), filled.len());
        }
        for slot in 0..3_u8 {
            let place = 2 << 16 | u64::from(slot);
            let (memory, start) = slots.at(place).unwrap();
            let end = GuestAddress(start.0 + u64::from(MAX_REQUEST_BYTES) - 1);
            for address in [start, end] {
                let [byte] = memory.read_array(address, &mut RegionHint::default()).unwrap();
                assert_eq!(byte, slot + 1);
            }
        }
        for nowhere in [2 << 16 | 3, 1 << 16, 1, 3 << 16, u64::MAX] {
            assert!(slots.segments(nowhere).is_none(), "{nowhere:#x}");
        }
        slots.remove(2);
        slots.remove(9);
        assert!(slots.segments(2 << 16).is_none() && slots.at(2 << 16).is_none());
        assert!(slots.segments(0).is_some());
    }
}
