//! The requests of a channel.

use std::collections::VecDeque;

use sidecore_block::{BlockError, BlockRequest, Tag};

/// The place of a request in the table.
pub(crate) type Place = usize;

/// A request.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// `None` if the entry is free, or the store has the request itself.
    pub(crate) request: Option<Box<BlockRequest>>,
    /// The bits of its tag and its offset, while the store has it.
    tag: Option<u64>,
    offset_bytes: u64,
    /// The bytes of a read that have been checked, or the start of the next part.
    pub(crate) next_bytes: u64,
    /// Parts that have not ended.
    pub(crate) in_flight: u32,
    /// Whether it has parts that have not begun.
    pub(crate) is_queued: bool,
    error: Option<BlockError>,
}

/// See the module.
pub(crate) struct Table {
    entries: Vec<Entry>,
    free: Vec<Place>,
    /// Requests with parts to begin, in turn.
    pub(crate) queued: VecDeque<Place>,
}

impl Table {
    pub(crate) fn new(depth: usize) -> Self {
        Self {
            entries: std::iter::repeat_with(Entry::default).take(depth).collect(),
            free: (0..depth).rev().collect(),
            queued: VecDeque::with_capacity(depth),
        }
    }

    /// Requests that are here.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.entries.len().saturating_sub(self.free.len())
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, place: Place) -> Option<&mut Entry> {
        self.entries.get_mut(place)
    }

    #[inline]
    pub(crate) fn get(&self, place: Place) -> Option<&Entry> {
        self.entries.get(place)
    }

    /// A free place, for [`send`](Self::send), [`keep`](Self::keep) or [`queue`](Self::queue).
    #[inline]
    pub(crate) fn place(&mut self) -> Option<Place> {
        let place = self.free.pop()?;
        *self.entries.get_mut(place)? = Entry::default();
        Some(place)
    }

    /// Notes a request that the store is to have itself, at this offset.
    #[inline]
    pub(crate) fn send(
        &mut self,
        place: Place,
        request: &mut BlockRequest,
        (offset_bytes, tag): (u64, Tag),
    ) {
        if let Some(entry) = self.entries.get_mut(place) {
            entry.offset_bytes = std::mem::replace(&mut request.offset_bytes, offset_bytes);
            entry.tag = request.tag.replace(tag).map(Tag::into_bits);
        }
    }

    /// Restores a request that the store had itself.
    #[inline]
    pub(crate) fn came_back(&self, place: Place, request: &mut BlockRequest) {
        if let Some(entry) = self.entries.get(place) {
            request.offset_bytes = entry.offset_bytes;
            request.tag.take().map(Tag::into_bits);
            request.tag = entry.tag.map(Tag::from_bits);
        }
    }

    /// Keeps a request that has no parts.
    pub(crate) fn keep(&mut self, place: Place, request: Box<BlockRequest>) {
        if let Some(entry) = self.entries.get_mut(place) {
            entry.request = Some(request);
        }
    }

    /// Keeps a request whose parts are to begin.
    #[inline]
    pub(crate) fn queue(&mut self, place: Place, request: Box<BlockRequest>) {
        if let Some(entry) = self.entries.get_mut(place) {
            entry.request = Some(request);
            entry.is_queued = true;
            self.queued.push_back(place);
        }
    }

    /// Frees a place without a request.
    #[inline]
    pub(crate) fn free(&mut self, place: Place) {
        self.free.push(place);
    }

    /// Notes that the next part has begun, which ends there. Returns whether it was the last one.
    #[inline]
    pub(crate) fn part_began(&mut self, place: Place, next_bytes: u64) -> bool {
        let Some(entry) = self.entries.get_mut(place) else { return true };
        entry.next_bytes = next_bytes;
        entry.in_flight = entry.in_flight.saturating_add(1);
        let len_bytes = entry.request.as_deref().map_or(0, |request| request.len_bytes);
        entry.is_queued = next_bytes < len_bytes;
        !entry.is_queued
    }

    /// Ends a part. Returns the request with its result when that was the last one. After an error
    /// no further part of it begins.
    #[inline]
    pub(crate) fn part_ended(
        &mut self,
        place: Place,
        outcome: Result<(), BlockError>,
    ) -> Option<Box<BlockRequest>> {
        let entry = self.entries.get_mut(place)?;
        entry.in_flight = entry.in_flight.saturating_sub(1);
        if let Err(error) = outcome {
            entry.error = entry.error.or(Some(error));
            if entry.is_queued {
                entry.is_queued = false;
                self.queued.retain(|other| *other != place);
            }
        }
        if entry.in_flight > 0 || entry.is_queued {
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

    #[test]
    fn the_first_error_of_a_part_is_that_of_the_request_and_ends_it() {
        let mut table = Table::new(1);
        let place = table.place().unwrap();
        assert_eq!(table.place(), None);
        let mut request = BlockRequest::blank(0);
        request.len_bytes = 4096;
        table.queue(place, request);
        assert!(!table.part_began(place, 1024) && !table.part_began(place, 2048));
        assert!(table.part_ended(place, Err(BlockError::NoSpace)).is_none());
        assert!(table.queued.is_empty());
        let ended = table.part_ended(place, Err(BlockError::EIO)).unwrap();
        assert_eq!((ended.result, table.len()), (Err(BlockError::NoSpace), 0));
    }

    #[test]
    fn a_request_that_the_store_had_comes_back_as_it_was() {
        let mut table = Table::new(2);
        let place = table.place().unwrap();
        let mut request = BlockRequest::blank(0);
        (request.offset_bytes, request.tag) = (512, Some(Tag::from_bits(7)));
        table.send(place, &mut request, (9000, Tag::from_bits(1)));
        assert_eq!((request.offset_bytes, request.tag.as_ref().unwrap().bits()), (9000, 1));
        table.came_back(place, &mut request);
        assert_eq!((request.offset_bytes, request.tag.take().unwrap().into_bits()), (512, 7));
    }
}
