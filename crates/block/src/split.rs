//! The requests of a stage that splits them: each has parts, which end in any order.

use std::collections::VecDeque;

use crate::{BlockError, BlockRequest, Operation, Tag};

/// The place of a request in a [`SplitTable`].
pub type Place = usize;

/// A request of a [`SplitTable`].
#[derive(Debug, Default)]
pub struct Split {
    /// `None` if the place is free, or if the store has the request itself.
    request: Option<Box<BlockRequest>>,
    /// The start of the next part; of a request that the store had itself, the bytes that are done
    /// with.
    pub next_bytes: u64,
    is_queued: bool,
    /// Parts that have begun and not ended.
    in_flight: u32,
    /// The first one of a part.
    error: Option<BlockError>,
    /// The bits of its tag and its offset, while the store has the request itself.
    tag: Option<u64>,
    offset_bytes: u64,
}

impl Split {
    /// The request, unless the store has it itself.
    #[must_use]
    #[inline]
    pub fn request(&self) -> Option<&BlockRequest> {
        self.request.as_deref()
    }

    /// Whether it has parts that have not begun.
    #[must_use]
    #[inline]
    pub fn is_queued(&self) -> bool {
        self.is_queued
    }
}

/// The requests of a channel, in places that are allocated once.
#[derive(Debug)]
pub struct SplitTable {
    splits: Vec<Split>,
    /// The place that was used last is used next.
    free: Vec<Place>,
    /// Requests that have parts to begin: one part of each in turn.
    queued: VecDeque<Place>,
}

impl SplitTable {
    /// A table with room for `depth` requests.
    #[must_use]
    pub fn new(depth: usize) -> Self {
        Self {
            splits: (0..depth).map(|_| Split::default()).collect(),
            free: (0..depth).rev().collect(),
            queued: VecDeque::with_capacity(depth),
        }
    }

    /// Requests that are here.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.splits.len().saturating_sub(self.free.len())
    }

    /// Whether no request is here.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests that fit.
    #[must_use]
    #[inline]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Requests with parts to begin.
    #[must_use]
    #[inline]
    pub fn queued(&self) -> usize {
        self.queued.len()
    }

    /// The request at this place.
    #[must_use]
    #[inline]
    pub fn get(&self, place: Place) -> Option<&Split> {
        self.splits.get(place)
    }

    /// The request at this place.
    #[must_use]
    #[inline]
    pub fn get_mut(&mut self, place: Place) -> Option<&mut Split> {
        self.splits.get_mut(place)
    }

    /// The request at this place, unless the store has it itself.
    #[must_use]
    #[inline]
    pub fn request(&self, place: Place) -> Option<&BlockRequest> {
        self.splits.get(place)?.request()
    }

    #[inline]
    fn take_place(&mut self) -> Option<(Place, &mut Split)> {
        let place = self.free.pop()?;
        let split = self.splits.get_mut(place)?;
        (split.next_bytes, split.is_queued, split.in_flight) = (0, false, 0);
        split.error = None;
        Some((place, split))
    }

    /// Keeps a request without parts to begin, or returns it if there is no room.
    ///
    /// # Errors
    /// The request.
    #[inline]
    pub fn keep(&mut self, request: Box<BlockRequest>) -> Result<Place, Box<BlockRequest>> {
        let Some((place, split)) = self.take_place() else { return Err(request) };
        split.request = Some(request);
        Ok(place)
    }

    /// Keeps a request whose parts are to begin, or returns it if there is no room.
    ///
    /// # Errors
    /// The request.
    #[inline]
    pub fn queue(&mut self, request: Box<BlockRequest>) -> Result<Place, Box<BlockRequest>> {
        let place = self.keep(request)?;
        self.queue_again(place);
        Ok(place)
    }

    /// Queues a request for its parts.
    #[inline]
    fn queue_again(&mut self, place: Place) {
        if let Some(split) = self.splits.get_mut(place) {
            split.is_queued = true;
            self.queued.push_back(place);
        }
    }

    /// Takes the next request with parts to begin. The caller [returns](Self::put_back) it if parts
    /// are left.
    #[inline]
    pub fn take_queued(&mut self) -> Option<Place> {
        self.queued.pop_front()
    }

    /// Returns a request from [`take_queued`](Self::take_queued), if it is still here and has parts
    /// to begin.
    #[inline]
    pub fn put_back(&mut self, place: Place) {
        if self.get(place).is_some_and(Split::is_queued) {
            self.queued.push_back(place);
        }
    }

    /// Begins the next part of the next request: its place, and the part's start and size in it. A
    /// request without data is one part.
    #[inline]
    pub fn next_part(&mut self, most_bytes: u64) -> Option<(Place, u64, u64)> {
        let place = self.take_queued()?;
        let split = self.splits.get(place)?;
        let request = split.request()?;
        let has_data = matches!(request.operation, Operation::Read | Operation::Write);
        let skip_bytes = split.next_bytes;
        let rest_bytes = request.len_bytes.saturating_sub(skip_bytes);
        let len_bytes = if has_data { rest_bytes.min(most_bytes) } else { rest_bytes };
        self.part_began(place, skip_bytes.saturating_add(len_bytes));
        self.put_back(place);
        Some((place, skip_bytes, len_bytes))
    }

    /// Notes that the next part of a request has begun, which ends there.
    #[inline]
    pub fn part_began(&mut self, place: Place, next_bytes: u64) {
        let Some(split) = self.splits.get_mut(place) else { return };
        let len_bytes = split.request().map_or(0, |request| request.len_bytes);
        split.next_bytes = next_bytes;
        split.in_flight = split.in_flight.saturating_add(1);
        // One that is only kept has no part but this.
        split.is_queued &= next_bytes < len_bytes;
    }

    /// Ends a part. Returns the request with its result when that was the last one. After an error
    /// no further part of it begins.
    #[inline]
    pub fn part_ended(
        &mut self,
        place: Place,
        result: Result<(), BlockError>,
    ) -> Option<Box<BlockRequest>> {
        let split = self.splits.get_mut(place)?;
        split.in_flight = split.in_flight.saturating_sub(1);
        split.error = split.error.or(result.err());
        if split.is_queued && split.error.is_some() {
            split.is_queued = false;
            self.queued.retain(|queued| *queued != place);
        }
        if split.is_queued || split.in_flight > 0 {
            return None;
        }
        let mut request = split.request.take()?;
        request.result = split.error.map_or(Ok(()), Err);
        self.free.push(place);
        Some(request)
    }

    /// Takes a place for a request that the store is to have itself: at this offset, and under the
    /// tag that `tag` makes of the place. False if there is no room.
    #[inline]
    pub fn lend(
        &mut self,
        request: &mut BlockRequest,
        offset_bytes: u64,
        tag: impl FnOnce(Place) -> Tag,
    ) -> bool {
        let Some((place, split)) = self.take_place() else { return false };
        split.offset_bytes = std::mem::replace(&mut request.offset_bytes, offset_bytes);
        split.tag = request.tag.replace(tag(place)).map(Tag::into_bits);
        true
    }

    /// Restores a request that the store had itself. Its place stays taken.
    #[inline]
    pub fn restore(&self, place: Place, request: &mut BlockRequest) {
        if let Some(split) = self.splits.get(place) {
            request.offset_bytes = split.offset_bytes;
            request.tag.take().map(Tag::into_bits);
            request.tag = split.tag.map(Tag::from_bits);
        }
    }

    /// Frees the place of a request that the store had itself.
    #[inline]
    pub fn free(&mut self, place: Place) {
        self.free.push(place);
    }

    /// Queues a request that the store had itself, for parts from `next_bytes` on.
    pub fn split(&mut self, place: Place, request: Box<BlockRequest>, next_bytes: u64) {
        if let Some(split) = self.splits.get_mut(place) {
            (split.request, split.next_bytes) = (Some(request), next_bytes);
            self.queue_again(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART_BYTES: u64 = 64 << 10;

    fn request(operation: Operation, len_bytes: u64) -> Box<BlockRequest> {
        let mut request = BlockRequest::blank(0);
        (request.operation, request.len_bytes) = (operation, len_bytes);
        request
    }

    #[test]
    fn parts_of_requests_take_turns() {
        let mut table = SplitTable::new(3);
        for (operation, len) in [
            (Operation::Write, 2 * PART_BYTES + 512),
            (Operation::Read, 512),
            (Operation::Flush, 0),
        ] {
            table.queue(request(operation, len)).unwrap();
        }
        assert_eq!((table.len(), table.room(), table.queued()), (3, 0, 3));
        assert!(table.queue(request(Operation::Flush, 0)).is_err());
        let mut next = || table.next_part(PART_BYTES);
        assert_eq!(next(), Some((0, 0, PART_BYTES)));
        assert_eq!(next(), Some((1, 0, 512)));
        assert_eq!(next(), Some((2, 0, 0)));
        assert_eq!(next(), Some((0, PART_BYTES, PART_BYTES)));
        assert_eq!(next(), Some((0, 2 * PART_BYTES, 512)));
        assert_eq!(next(), None);
        assert!(table.part_ended(0, Ok(())).is_none());
        assert!(table.part_ended(1, Ok(())).is_some());
        assert!(table.part_ended(0, Ok(())).is_none());
        assert_eq!(table.part_ended(0, Ok(())).unwrap().result, Ok(()));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn the_first_error_of_a_part_is_that_of_the_request_and_ends_it() {
        let mut table = SplitTable::new(1);
        table.queue(request(Operation::Write, 9 * PART_BYTES)).unwrap();
        assert!(table.next_part(PART_BYTES).is_some() && table.next_part(PART_BYTES).is_some());
        assert!(table.part_ended(0, Err(BlockError::NoSpace)).is_none());
        assert_eq!(table.queued(), 0);
        let ended = table.part_ended(0, Err(BlockError::EIO)).unwrap();
        assert_eq!(ended.result, Err(BlockError::NoSpace));
        assert_eq!((table.is_empty(), table.room()), (true, 1));
    }

    #[test]
    fn a_request_that_was_kept_is_one_part_whatever_its_size() {
        let mut table = SplitTable::new(1);
        let place = table.keep(request(Operation::Flush, PART_BYTES)).unwrap();
        assert_eq!(table.next_part(PART_BYTES), None);
        table.part_began(place, 0);
        assert!(table.part_ended(place, Ok(())).is_some());
    }

    #[test]
    fn a_request_that_the_store_had_comes_back_as_it_was() {
        let mut table = SplitTable::new(1);
        let mut sent = request(Operation::Read, 4096);
        (sent.offset_bytes, sent.tag) = (512, Some(Tag::from_bits(7)));
        assert!(table.lend(&mut sent, 9000, |place| Tag::from_bits(place as u64 + 1)));
        assert_eq!((sent.offset_bytes, sent.tag.as_ref().unwrap().bits()), (9000, 1));
        let full = table.lend(&mut request(Operation::Read, 512), 0, |_| unreachable!());
        assert!(!full);
        table.restore(0, &mut sent);
        assert_eq!((sent.offset_bytes, sent.tag.as_ref().unwrap().bits()), (512, 7));
        table.split(0, sent, 1024);
        assert_eq!(table.next_part(PART_BYTES), Some((0, 1024, 3072)));
        let ended = table.part_ended(0, Ok(()));
        assert_eq!(ended.unwrap().tag.take().unwrap().into_bits(), 7);
    }
}
