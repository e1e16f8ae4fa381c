//! The requests of a channel, and the parts that each has left.

use std::collections::VecDeque;

use sidecore_block::{BlockError, BlockRequest, Operation};

/// The most bytes of a part with data.
pub(crate) const PART_BYTES: u64 = 64 << 10;

/// The place of a request in the table.
pub(crate) type Place = usize;

#[derive(Debug, Default)]
struct Entry {
    /// `None` if the entry is free.
    request: Option<Box<BlockRequest>>,
    /// The start of the next part in the request.
    next_bytes: u64,
    is_queued: bool,
    /// Parts at the store.
    in_flight: u32,
    error: Option<BlockError>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Table {
    entries: Vec<Entry>,
    /// Places of free entries; the one used last is used next.
    free: Vec<Place>,
    /// Requests that have parts left: one part of each in turn.
    queued: VecDeque<Place>,
}

impl Table {
    pub(crate) fn new(depth: usize) -> Self {
        Self {
            entries: (0..depth).map(|_| Entry::default()).collect(),
            free: (0..depth).rev().collect(),
            queued: VecDeque::with_capacity(depth),
        }
    }

    /// Requests that are here.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.entries.len().saturating_sub(self.free.len())
    }

    /// Requests that fit.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Takes a request, which [`room`](Self::room) is for.
    #[inline]
    pub(crate) fn insert(&mut self, request: Box<BlockRequest>) -> Result<(), Box<BlockRequest>> {
        let Some(place) = self.free.pop() else { return Err(request) };
        let Some(entry) = self.entries.get_mut(place) else { return Err(request) };
        *entry = Entry { request: Some(request), is_queued: true, ..Entry::default() };
        self.queued.push_back(place);
        Ok(())
    }

    /// The request with the next part, and the part's start and size in it.
    #[inline]
    pub(crate) fn next_part(&mut self) -> Option<(Place, &BlockRequest, u64, u64)> {
        let place = self.queued.pop_front()?;
        let entry = self.entries.get_mut(place)?;
        let request = entry.request.as_deref()?;
        let has_data = matches!(request.operation, Operation::Read | Operation::Write);
        let skip_bytes = entry.next_bytes;
        let rest_bytes = request.len_bytes.saturating_sub(skip_bytes);
        let len_bytes = if has_data { rest_bytes.min(PART_BYTES) } else { rest_bytes };
        entry.next_bytes = skip_bytes.saturating_add(len_bytes);
        entry.in_flight = entry.in_flight.saturating_add(1);
        entry.is_queued = len_bytes < rest_bytes;
        if entry.is_queued {
            self.queued.push_back(place);
        }
        Some((place, request, skip_bytes, len_bytes))
    }

    /// The request at this place.
    #[inline]
    pub(crate) fn request(&self, place: Place) -> Option<&BlockRequest> {
        self.entries.get(place)?.request.as_deref()
    }

    /// Ends a part. Returns the request with its result when it was the last part. After an error
    /// no further part of the request starts.
    #[inline]
    pub(crate) fn part_ended(
        &mut self,
        place: Place,
        result: Result<(), BlockError>,
    ) -> Option<Box<BlockRequest>> {
        let entry = self.entries.get_mut(place)?;
        entry.in_flight = entry.in_flight.saturating_sub(1);
        entry.error = entry.error.or(result.err());
        if entry.is_queued && entry.error.is_some() {
            entry.is_queued = false;
            self.queued.retain(|queued| *queued != place);
        }
        if entry.is_queued || entry.in_flight > 0 {
            return None;
        }
        let mut request = entry.request.take()?;
        request.result = entry.error.map_or(Ok(()), Err);
        self.free.push(place);
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(operation: Operation, len_bytes: u64) -> Box<BlockRequest> {
        let mut request = BlockRequest::blank(0);
        (request.operation, request.len_bytes) = (operation, len_bytes);
        request
    }

    fn next(table: &mut Table) -> Option<(Place, u64, u64)> {
        table.next_part().map(|(place, _, skip_bytes, len_bytes)| (place, skip_bytes, len_bytes))
    }

    #[test]
    fn parts_of_requests_take_turns() {
        let mut table = Table::new(3);
        for (operation, len) in [
            (Operation::Write, 2 * PART_BYTES + 512),
            (Operation::Read, 512),
            (Operation::Flush, 0),
        ] {
            table.insert(request(operation, len)).unwrap();
        }
        assert_eq!((table.len(), table.room()), (3, 0));
        assert!(table.insert(request(Operation::Flush, 0)).is_err());
        assert_eq!(next(&mut table), Some((0, 0, PART_BYTES)));
        assert_eq!(next(&mut table), Some((1, 0, 512)));
        assert_eq!(next(&mut table), Some((2, 0, 0)));
        assert_eq!(next(&mut table), Some((0, PART_BYTES, PART_BYTES)));
        assert_eq!(next(&mut table), Some((0, 2 * PART_BYTES, 512)));
        assert_eq!(next(&mut table), None);
        assert!(table.part_ended(0, Ok(())).is_none());
        assert!(table.part_ended(1, Ok(())).is_some());
        assert!(table.part_ended(0, Ok(())).is_none());
        assert_eq!(table.part_ended(0, Ok(())).unwrap().result, Ok(()));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn the_first_error_of_a_part_is_that_of_the_request_and_ends_it() {
        let mut table = Table::new(1);
        table.insert(request(Operation::Write, 9 * PART_BYTES)).unwrap();
        assert!(next(&mut table).is_some() && next(&mut table).is_some());
        assert!(table.part_ended(0, Err(BlockError::NoSpace)).is_none());
        assert!(!table.has_queued());
        let ended = table.part_ended(0, Err(BlockError::EIO)).unwrap();
        assert_eq!(ended.result, Err(BlockError::NoSpace));
        assert_eq!((table.len(), table.room()), (0, 1));
    }
}
