//! The requests in flight, each in one or several portions.
//!
//! A portion is as much as one submission takes without the kernel having to split it: a block
//! device's queue has limits, and io_uring passes a request above the limits to a worker thread,
//! because it cannot wait for the pieces in place (`bio_split_rw` in the kernel's block/blk-merge.c
//! fails a `REQ_NOWAIT` bio that needs splitting). The portions of a request are in flight at the
//! same time, each in a [`Slot`](super::slot::Slot) of its own.

use std::ops::Range;

use sidecore_block::{BlockError, BlockRequest};
use sidecore_units::Nanos;

use super::slot::Way;

/// A place for a request.
#[derive(Debug)]
struct Ongoing {
    request: Option<Box<BlockRequest>>,
    way: Way,
    /// The end of the portions that were given to slots.
    given_bytes: u64,
    /// The number of portions in slots.
    portions: u32,
    result: Result<(), BlockError>,
}

/// All requests in flight of a channel.
#[derive(Debug)]
pub(super) struct Requests {
    places: Box<[Ongoing]>,
    free: Vec<u32>,
}

impl Requests {
    /// Makes `depth` free places.
    pub fn new(depth: usize) -> Self {
        let place = || Ongoing {
            request: None,
            way: Way::Sync,
            given_bytes: 0,
            portions: 0,
            result: Ok(()),
        };
        Self {
            places: (0..depth).map(|_| place()).collect(),
            free: (0..depth as u32).rev().collect(),
        }
    }

    /// The number of places.
    #[inline]
    pub fn depth(&self) -> usize {
        self.places.len()
    }

    /// The number of requests in flight.
    #[inline]
    pub fn count(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// The time when the oldest request was accepted.
    pub fn oldest(&self) -> Option<Nanos> {
        if self.count() == 0 {
            return None;
        }
        self.places
            .iter()
            .filter_map(|place| place.request.as_ref())
            .map(|request| request.taken_at)
            .min()
    }

    /// Accepts a request. Returns its place, or the request if all places are taken.
    #[inline]
    pub fn begin(
        &mut self,
        request: Box<BlockRequest>,
        way: Way,
    ) -> Result<u32, Box<BlockRequest>> {
        let Some(index) = self.free.pop() else { return Err(request) };
        let request = Some(request);
        self.places[index as usize] =
            Ongoing { request, way, given_bytes: 0, portions: 0, result: Ok(()) };
        Ok(index)
    }

    /// The request in this place.
    #[inline]
    pub fn get(&self, index: u32) -> Option<&BlockRequest> {
        self.places.get(index as usize)?.request.as_deref()
    }

    /// Returns the next portion, of at most `most_bytes`, and its operation; `None` if no portion
    /// is left, or one has failed, so that the rest is useless.
    #[inline]
    pub fn next_portion(&mut self, index: u32, most_bytes: u64) -> Option<(Way, Range<u64>)> {
        let place = self.places.get_mut(index as usize)?;
        let len_bytes = place.request.as_ref()?.len_bytes;
        let start = place.given_bytes;
        let is_first = start == 0 && place.portions == 0 && place.result.is_ok();
        // A flush has one portion without bytes.
        if !is_first && (start >= len_bytes || place.result.is_err()) {
            return None;
        }
        let end = if place.way.is_transfer() {
            len_bytes.min(start.saturating_add(most_bytes))
        } else {
            len_bytes
        };
        place.given_bytes = end;
        place.portions += 1;
        Some((place.way, start..end))
    }

    /// Whether the request has another portion.
    #[inline]
    pub fn has_more(&self, index: u32) -> bool {
        self.places.get(index as usize).is_some_and(|place| {
            place.request.as_ref().is_some_and(|request| place.given_bytes < request.len_bytes)
                && place.result.is_ok()
        })
    }

    /// Ends a portion. Returns the request, with its result, after its last portion.
    #[inline]
    pub fn finish_portion(
        &mut self,
        index: u32,
        result: Result<(), BlockError>,
    ) -> Option<Box<BlockRequest>> {
        let is_last = {
            let place = self.places.get_mut(index as usize)?;
            place.portions -= 1;
            // The first error is the request's result.
            place.result = place.result.and(result);
            place.portions == 0
        };
        if !is_last || self.has_more(index) {
            return None;
        }
        let place = &mut self.places[index as usize];
        let mut request = place.request.take()?;
        request.result = place.result;
        self.free.push(index);
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use sidecore_block::Operation;

    use super::*;

    fn request(operation: Operation, len_bytes: u64) -> Box<BlockRequest> {
        let mut request = BlockRequest::blank(0);
        request.operation = operation;
        request.len_bytes = len_bytes;
        request
    }

    #[test]
    fn a_large_transfer_comes_in_portions_and_ends_with_the_last() {
        let mut requests = Requests::new(1);
        let index = requests.begin(request(Operation::Read, 2500), Way::Transfer).unwrap();
        assert!(
            requests.begin(request(Operation::Read, 1), Way::Transfer).is_err(),
            "there is room for one"
        );
        assert_eq!(requests.next_portion(index, 1000), Some((Way::Transfer, 0..1000)));
        assert_eq!(requests.next_portion(index, 1000), Some((Way::Transfer, 1000..2000)));
        assert!(requests.finish_portion(index, Ok(())).is_none());
        assert!(
            requests.finish_portion(index, Ok(())).is_none(),
            "500 bytes were not given out yet"
        );
        assert_eq!(requests.next_portion(index, 1000), Some((Way::Transfer, 2000..2500)));
        assert_eq!(requests.next_portion(index, 1000), None);
        let done = requests.finish_portion(index, Ok(())).unwrap();
        assert_eq!((done.result, requests.count()), (Ok(()), 0));
    }

    #[test]
    fn after_an_error_no_portion_is_started_and_the_first_error_is_returned() {
        let mut requests = Requests::new(1);
        let index = requests.begin(request(Operation::Write, 3000), Way::Transfer).unwrap();
        requests.next_portion(index, 1000).unwrap();
        requests.next_portion(index, 1000).unwrap();
        assert!(requests.finish_portion(index, Err(BlockError::NoSpace)).is_none());
        assert_eq!(requests.next_portion(index, 1000), None);
        let done = requests.finish_portion(index, Err(BlockError::EIO)).unwrap();
        assert_eq!(done.result, Err(BlockError::NoSpace));
    }

    #[test]
    fn an_operation_without_data_is_one_portion() {
        let mut requests = Requests::new(1);
        for (operation, way, len_bytes) in
            [(Operation::Flush, Way::Sync, 0), (Operation::Discard, Way::Punch, 1 << 40)]
        {
            let index = requests.begin(request(operation, len_bytes), way).unwrap();
            assert_eq!(requests.next_portion(index, 1000), Some((way, 0..len_bytes)));
            assert_eq!(requests.next_portion(index, 1000), None);
            assert!(requests.finish_portion(index, Ok(())).is_some());
        }
    }
}
