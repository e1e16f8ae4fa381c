//! The memory of requests at an IOhost: a buffer for each slot of each session.
//!
//! The data of a write may stay in the frame in which they came instead: the store then reads what
//! the client could still change, as a store of a local disk does with a guest's data.

use std::io;

use sidecore_link::Frame;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, Segments, SharedPages};
use sidecore_vrio::wire::MAX_REQUEST_BYTES;

use crate::RequestData;
use crate::nic::NicBuffers;

/// From a slot's buffer to the next one's. A page more than the largest request: buffers at
/// multiples of a power of two would share a few sets of the caches.
const STRIDE_BYTES: usize = MAX_REQUEST_BYTES as usize + 4096;

/// Frames that stores may use at a time: the others are left to the link, however slow a store is.
const LOANS_MAX: usize = 32;

/// The buffers of one session's slots. The kernel gives them pages when they are first used.
struct Buffers {
    memory: GuestMemory,
    lists: Box<[Segments]>,
    loans: Box<[Loan]>,
}

/// A frame that has the data of a slot's request.
#[derive(Default)]
struct Loan {
    /// Where the data are in the link's memory; `None` if they are in the slot's buffer.
    payload: Option<GuestAddress>,
    /// The request is to be executed, and so it will end.
    is_claimed: bool,
    /// The frame, once the rest of its batch has gone back.
    frame: Option<Frame>,
}

/// Where the data of a request are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataAt {
    /// In the slot's buffer.
    Buffer(GuestAddress),
    /// In a frame, in the link's memory.
    Frame(GuestAddress),
}

/// The buffers of all sessions, by the places that an engine names:
/// [`Execute::place`](sidecore_vrio::Execute::place).
#[derive(Default)]
pub(crate) struct SlotBuffers {
    places: Vec<Option<Buffers>>,
    /// Loans that have not ended.
    lent: usize,
    /// Frames of loans that have ended.
    ended: Vec<Frame>,
    pub(super) nics: NicBuffers,
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
        let loans = (0..slots).map(|_| Loan::default()).collect();
        self.ended.reserve(LOANS_MAX);
        // The frames of a former session go back to the link.
        self.remove(place);
        let place = usize::from(place);
        if place >= self.places.len() {
            self.places.resize_with(place.saturating_add(1), || None);
        }
        if let Some(buffers) = self.places.get_mut(place) {
            *buffers = Some(Buffers { memory: pages.memory().clone(), lists, loans });
        }
        Ok(())
    }

    /// Gives the memory of a place back. The store has no request of it.
    pub fn remove(&mut self, place: u16) {
        let buffers = self.places.get_mut(usize::from(place)).and_then(Option::take);
        let loans = buffers.map(|buffers| buffers.loans).unwrap_or_default();
        for mut loan in loans {
            self.lent = self.lent.saturating_sub(loan.payload.iter().count());
            self.ended.extend(loan.frame.take());
        }
    }

    fn buffers(&self, place: u64) -> Option<&Buffers> {
        self.places.get(usize::try_from(place >> 16).ok()?)?.as_ref()
    }

    /// The memory of a place's session, and where the data of the place are.
    #[inline]
    pub fn at(&self, place: u64) -> Option<(&GuestMemory, DataAt)> {
        let buffers = self.buffers(place)?;
        if self.lent > 0
            && let Some(loan) = buffers.loans.get(usize::try_from(place & 0xffff).ok()?)
            && let Some(payload) = loan.payload
        {
            return Some((&buffers.memory, DataAt::Frame(payload)));
        }
        let start = (place & 0xffff).saturating_mul(STRIDE_BYTES as u64);
        Some((&buffers.memory, DataAt::Buffer(GuestAddress(start))))
    }

    #[inline]
    fn loan(&mut self, place: u64) -> Option<&mut Loan> {
        let buffers = self.places.get_mut(usize::try_from(place >> 16).ok()?)?.as_mut()?;
        buffers.loans.get_mut(usize::try_from(place & 0xffff).ok()?)
    }

    /// The request at a place is to be executed: its data are needed until it has
    /// [ended](Self::end).
    #[inline]
    pub fn claim(&mut self, place: u64) {
        if self.lent > 0
            && let Some(loan) = self.loan(place)
        {
            loan.is_claimed = true;
        }
    }

    /// The request at a place has ended.
    #[inline]
    pub fn end(&mut self, place: u64) {
        if self.lent > 0
            && let Some(loan) = self.loan(place)
            && loan.payload.take().is_some()
        {
            let frame = loan.frame.take();
            self.lent = self.lent.saturating_sub(1);
            self.ended.extend(frame);
        }
    }
}

impl RequestData for SlotBuffers {
    #[inline]
    fn segments(&self, request: u64) -> Option<&Segments> {
        if NicBuffers::is_name(request) {
            return self.nics.segments(request);
        }
        self.buffers(request)?.lists.get(usize::try_from(request & 0xffff).ok()?)
    }

    #[inline]
    fn lend(&mut self, request: u64, payload: GuestAddress) -> bool {
        if self.lent >= LOANS_MAX {
            return false;
        }
        match self.loan(request) {
            Some(loan) if loan.payload.is_none() => {
                *loan = Loan { payload: Some(payload), ..Loan::default() };
                self.lent = self.lent.saturating_add(1);
                true
            }
            _ => false,
        }
    }

    fn keep(&mut self, request: u64, frame: Frame) -> Option<Frame> {
        let Some(loan) = self.loan(request).filter(|loan| loan.payload.is_some()) else {
            return Some(frame);
        };
        if loan.is_claimed {
            loan.frame = Some(frame);
            return None;
        }
        // Its session has ended before.
        self.end(request);
        Some(frame)
    }

    #[inline]
    fn take_ended(&mut self, frames: &mut Vec<Frame>) {
        frames.append(&mut self.ended);
    }

    fn take_kept(&mut self, frames: &mut Vec<Frame>) {
        for place in 0..u16::try_from(self.places.len()).unwrap_or(u16::MAX) {
            self.remove(place);
        }
        self.take_ended(frames);
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
            let (memory, DataAt::Buffer(start)) = slots.at(place).unwrap() else { panic!() };
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

    #[test]
    fn a_payload_is_lent_until_its_request_has_ended() {
        let mut slots = SlotBuffers::default();
        slots.add(0, 64).unwrap();
        let payload = GuestAddress(8192);
        for place in 0..LOANS_MAX as u64 {
            assert!(slots.lend(place, payload), "{place}");
        }
        assert!(!slots.lend(40, payload), "the others are left to the link");
        assert!(!slots.lend(0, payload), "it has one");
        assert_eq!(slots.at(3).unwrap().1, DataAt::Frame(payload));
        assert!(matches!(slots.at(40).unwrap().1, DataAt::Buffer(_)));
        slots.claim(3);
        slots.end(3);
        slots.end(3);
        assert!(matches!(slots.at(3).unwrap().1, DataAt::Buffer(_)));
        assert!(slots.lend(40, payload) && !slots.lend(41, payload));
        slots.remove(0);
        assert_eq!(slots.lent, 0);
        assert!(!slots.lend(1, payload), "there is no such place");
    }
}
