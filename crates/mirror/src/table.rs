//! The requests of a channel.

use std::collections::VecDeque;

use sidecore_block::{BlockError, BlockRequest, Tag};

use crate::legs::LegSet;

/// The place of a request in the table.
pub(crate) type Place = usize;

/// A request.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// `None` if the entry is free, or its request is at a leg.
    pub(crate) request: Option<Box<BlockRequest>>,
    /// The start of the next part in the request.
    pub(crate) next_bytes: u64,
    /// Parts that have not ended.
    pub(crate) in_flight: u32,
    /// Whether it has parts that have not begun.
    pub(crate) is_queued: bool,
    pub(crate) error: Option<BlockError>,
    /// The state of the openings when the keeper was last asked to open its regions.
    pub(crate) asked: Option<u32>,
    /// Of a read: the bits of its tag, its offset, and the legs that have failed it.
    pub(crate) tag: Option<u64>,
    pub(crate) offset_bytes: u64,
    pub(crate) tried: LegSet,
}

impl Entry {
    fn queued() -> Self {
        Self { is_queued: true, ..Self::default() }
    }
}

/// See the module.
pub(crate) struct Table {
    /// Requests with something to start, in order.
    pub(crate) queued: VecDeque<Place>,
    entries: Vec<Entry>,
    /// Places of free entries.
    free: Vec<Place>,
}

impl Table {
    /// A table with room for `depth` requests.
    pub(crate) fn new(depth: usize) -> Self {
        let entries: Vec<Entry> = (0..depth).map(|_| Entry::default()).collect();
        let free = (0..entries.len()).rev().collect();
        Self { queued: VecDeque::with_capacity(depth), entries, free }
    }

    #[inline]
    pub(crate) fn get(&self, place: Place) -> Option<&Entry> {
        self.entries.get(place)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, place: Place) -> Option<&mut Entry> {
        self.entries.get_mut(place)
    }

    /// Requests that are here.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.entries.len().saturating_sub(self.room())
    }

    /// Requests that fit.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// Queues a request, or returns it if there is no room.
    #[inline]
    pub(crate) fn insert(&mut self, request: Box<BlockRequest>) -> Result<(), Box<BlockRequest>> {
        let place = self.free.pop().unwrap_or(usize::MAX);
        match self.entries.get_mut(place) {
            None => return Err(request),
            Some(entry) => *entry = Entry { request: Some(request), ..Entry::queued() },
        }
        self.queued.push_back(place);
        Ok(())
    }

    /// Ends a part. Returns the request with its result when that was the last one. After an error
    /// no further part of it starts.
    #[inline]
    pub(crate) fn part_ended(
        &mut self,
        place: Place,
        result: Result<(), BlockError>,
    ) -> Option<Box<BlockRequest>> {
        let ended = result.err();
        let entry = self.entries.get_mut(place)?;
        entry.in_flight = entry.in_flight.saturating_sub(1);
        if let Some(error) = ended {
            entry.error.get_or_insert(error);
            if std::mem::take(&mut entry.is_queued) {
                self.queued.retain(|queued| *queued != place);
            }
        }
        if entry.in_flight > 0 || entry.is_queued {
            return None;
        }
        let request = entry.request.take().map(|mut request| {
            request.result = entry.error.map_or(Ok(()), Err);
            request
        })?;
        self.free.push(place);
        Some(request)
    }

    /// Queues the read of an entry for another leg.
    pub(crate) fn again(&mut self, place: Place, request: Box<BlockRequest>) {
        if let Some(entry) = self.entries.get_mut(place) {
            entry.request = Some(request);
            entry.is_queued = true;
            self.queued.push_back(place);
        }
    }

    /// Ends a read, as its user knows it.
    #[inline]
    pub(crate) fn read_ended(
        &mut self,
        place: Place,
        mut request: Box<BlockRequest>,
    ) -> Box<BlockRequest> {
        if let Some(entry) = self.entries.get_mut(place) {
            request.offset_bytes = entry.offset_bytes;
            request.tag = entry.tag.map(Tag::from_bits);
            self.free.push(place);
        }
        request
    }

    /// The requests that have something to start.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &BlockRequest> {
        self.queued.iter().filter_map(|place| self.entries.get(*place)?.request.as_deref())
    }
}
