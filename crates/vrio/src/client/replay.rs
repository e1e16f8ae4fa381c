//! The replay log: private copies of writes that were answered and are not covered by a flush.

use std::collections::VecDeque;

use crate::Request;
use crate::port::{CHUNK_BYTES, Kept};

/// The end of a chain of chunks.
const NONE: u32 = u32::MAX;

/// A write that has a place in the log.
#[derive(Clone, Copy, Debug)]
struct Record {
    request: Request,
    /// Its data, as a chain.
    first: u32,
}

/// The log of one device. All memory is allocated at the start.
///
/// A write gets a [record](Self::reserve) before it is sent, so that its answer finds room. Records
/// whose write was [answered](Self::answered) have positions, in the order of the answers, from 0
/// on.
#[derive(Debug)]
pub(crate) struct ReplayLog {
    bytes: Vec<u8>,
    /// For each chunk the next one of its chain.
    next: Vec<u32>,
    /// A chain of the chunks that are free.
    free: u32,
    free_count: usize,
    records: Vec<Option<Record>>,
    /// Records that are free.
    blank: Vec<u16>,
    /// Answered records.
    order: VecDeque<u16>,
    /// The position of the first of them.
    base: u64,
}

impl ReplayLog {
    /// A log with room for `bytes` of data.
    pub(crate) fn new(bytes: usize) -> Self {
        // The numbers of records are 16 bits wide.
        let chunks = bytes.div_ceil(CHUNK_BYTES).clamp(1, usize::from(u16::MAX));
        let numbers = 1..u32::try_from(chunks).unwrap_or(NONE);
        Self {
            bytes: vec![0; chunks.saturating_mul(CHUNK_BYTES)],
            next: numbers.chain([NONE]).collect(),
            free: 0,
            free_count: chunks,
            records: vec![None; chunks],
            blank: (0..u16::try_from(chunks).unwrap_or(u16::MAX)).rev().collect(),
            order: VecDeque::with_capacity(chunks),
            base: 0,
        }
    }

    /// A record for a write with `data_bytes` of data; `None` if there is no room.
    pub(crate) fn reserve(&mut self, request: &Request, data_bytes: u32) -> Option<u16> {
        let chunks = usize::try_from(data_bytes).ok()?.div_ceil(CHUNK_BYTES);
        if self.free_count < chunks {
            return None;
        }
        let record = self.blank.pop()?;
        let mut first = NONE;
        for _ in 0..chunks {
            let chunk = self.free;
            let Some(next) = self.next.get_mut(chunk as usize) else { break };
            self.free = std::mem::replace(next, first);
            first = chunk;
        }
        self.free_count = self.free_count.saturating_sub(chunks);
        if let Some(place) = self.records.get_mut(usize::from(record)) {
            *place = Some(Record { request: *request, first });
        }
        Some(record)
    }

    /// Hands out the memory of a record, piece by piece, with each piece's offset in the data.
    pub(crate) fn write(
        &mut self,
        record: u16,
        data_bytes: u32,
        mut fill: impl FnMut(u32, &mut [u8]),
    ) {
        let mut chunk = self.first(record);
        let mut offset_bytes = 0_u32;
        while offset_bytes < data_bytes {
            let left = usize::try_from(data_bytes.saturating_sub(offset_bytes))
                .unwrap_or(0)
                .min(CHUNK_BYTES);
            let start = (chunk as usize).saturating_mul(CHUNK_BYTES);
            let Some(piece) = self.bytes.get_mut(start..).and_then(|rest| rest.get_mut(..left))
            else {
                return;
            };
            fill(offset_bytes, piece);
            offset_bytes = offset_bytes.saturating_add(CHUNK_BYTES as u32);
            chunk = self.next.get(chunk as usize).copied().unwrap_or(NONE);
        }
    }

    /// A part of the data of a record.
    pub(crate) fn read(&self, record: u16, offset_bytes: u32, len_bytes: u32) -> Kept<'_> {
        let memory = (self.bytes.as_slice(), self.next.as_slice());
        Kept::chained(memory, self.first(record), offset_bytes as usize, len_bytes as usize)
    }

    fn first(&self, record: u16) -> u32 {
        self.records.get(usize::from(record)).copied().flatten().map_or(NONE, |record| record.first)
    }

    /// The write of a record was answered: it is kept until a flush covers it.
    pub(crate) fn answered(&mut self, record: u16) {
        self.order.push_back(record);
    }

    /// Gives a record back whose write was not answered, or failed.
    pub(crate) fn cancel(&mut self, record: u16) {
        let Some(Record { first, .. }) =
            self.records.get_mut(usize::from(record)).and_then(Option::take)
        else {
            return;
        };
        let mut chunk = first;
        while let Some(next) = self.next.get_mut(chunk as usize) {
            let following = std::mem::replace(next, self.free);
            self.free = chunk;
            self.free_count = self.free_count.saturating_add(1);
            chunk = following;
        }
        self.blank.push(record);
    }

    /// The position of the next answer: a flush that begins now covers all positions before it.
    pub(crate) fn end(&self) -> u64 {
        self.base.saturating_add(self.order.len() as u64)
    }

    /// The first position that is kept.
    pub(crate) const fn base(&self) -> u64 {
        self.base
    }

    /// A flush has covered the positions before `end`.
    pub(crate) fn covered(&mut self, end: u64) {
        while self.base < end
            && let Some(record) = self.order.pop_front()
        {
            self.base = self.base.saturating_add(1);
            self.cancel(record);
        }
    }

    /// Forgets the answered writes from a position on, which the next answers get again: no flush
    /// may have begun. Returns their number.
    pub(crate) fn forget(&mut self, from: u64) -> u64 {
        let before = self.order.len();
        while self.end() > from
            && let Some(record) = self.order.pop_back()
        {
            self.cancel(record);
        }
        before.saturating_sub(self.order.len()) as u64
    }

    /// The record and the write at a position.
    pub(crate) fn at(&self, position: u64) -> Option<(u16, Request)> {
        let index = usize::try_from(position.checked_sub(self.base)?).ok()?;
        let record = *self.order.get(index)?;
        let Record { request, .. } = self.records.get(usize::from(record)).copied().flatten()?;
        Some((record, request))
    }

    /// Whether an answered write overlaps `request`.
    pub(crate) fn overlaps(&self, request: &Request) -> bool {
        let writes = self
            .order
            .iter()
            .filter_map(|record| self.records.get(usize::from(*record)).copied().flatten());
        writes.into_iter().any(|record| record.request.overlaps(request))
    }

    /// Whether nothing is kept and nothing reserved.
    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.free_count == self.next.len()
            && self.blank.len() == self.records.len()
            && self.order.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use sidecore_block::Operation;

    use super::*;

    fn write(len_bytes: u64) -> Request {
        Request { operation: Operation::Write, offset_bytes: 0, len_bytes, fua: false }
    }

    fn pattern(seed: u8, len: usize) -> Vec<u8> {
        (0..len).map(|index| (index / 7) as u8 ^ seed).collect()
    }

    fn keep(log: &mut ReplayLog, seed: u8, len: u32) -> Option<u16> {
        let record = log.reserve(&write(len.into()), len)?;
        let data = pattern(seed, len as usize);
        log.write(record, len, |offset, piece| {
            piece.copy_from_slice(&data[offset as usize..][..piece.len()])
        });
        Some(record)
    }

    #[test]
    fn data_comes_back_from_any_offset() {
        let mut log = ReplayLog::new(64 << 10);
        // A chain that is not in order.
        let (first, second) = (keep(&mut log, 1, 8192).unwrap(), keep(&mut log, 2, 4096).unwrap());
        log.cancel(first);
        log.cancel(second);
        let record = keep(&mut log, 3, 20_480).unwrap();
        for (offset, len) in
            [(0, 20_480), (0, 512), (4095, 2), (4096, 4096), (7680, 7680), (20_479, 1)]
        {
            let data = log.read(record, offset as u32, len as u32).collect::<Vec<_>>().concat();
            assert_eq!(data, pattern(3, 20_480)[offset..][..len], "{len} at {offset}");
        }
    }

    #[test]
    fn a_flush_frees_what_was_answered_before_it() {
        let mut log = ReplayLog::new(4 * CHUNK_BYTES);
        let records: Vec<u16> = (0..3).map(|seed| keep(&mut log, seed, 512).unwrap()).collect();
        log.answered(records[2]);
        log.answered(records[0]);
        let mark = log.end();
        log.answered(records[1]);
        assert_eq!(
            (0..3).map(|at| log.at(at).unwrap().0).collect::<Vec<_>>(),
            [records[2], records[0], records[1]]
        );
        log.covered(mark);
        assert_eq!((log.base(), log.end()), (2, 3));
        assert!(log.at(1).is_none() && log.at(3).is_none());
        assert_eq!(log.at(2).unwrap().0, records[1]);
        // Covered again, by a flush that was sent before.
        log.covered(1);
        assert_eq!(log.base(), 2);
        log.covered(u64::MAX);
        assert!(log.is_empty());
        assert_eq!(log.end(), 3, "positions are never used twice");
    }

    #[test]
    fn a_log_forgets_the_newest_writes() {
        let mut log = ReplayLog::new(4 * CHUNK_BYTES);
        let records: Vec<u16> = (0..3).map(|seed| keep(&mut log, seed, 512).unwrap()).collect();
        records.iter().for_each(|record| log.answered(*record));
        log.covered(1);
        assert_eq!(log.forget(2), 1);
        assert_eq!((log.base(), log.end(), log.at(1).unwrap().0), (1, 2, records[1]));
        assert_eq!(log.forget(0), 1);
        assert_eq!((log.base(), log.end()), (1, 1));
        assert!(log.is_empty());
    }

    #[test]
    fn a_full_log_says_so_and_loses_nothing() {
        let mut log = ReplayLog::new(4 * CHUNK_BYTES);
        let large = keep(&mut log, 9, 4 * CHUNK_BYTES as u32).unwrap();
        assert_eq!(keep(&mut log, 1, 512), None);
        log.cancel(large);
        let small: Vec<_> = (0..4).map(|seed| keep(&mut log, seed, 512).unwrap()).collect();
        assert_eq!(keep(&mut log, 5, 512), None);
        let discard = Request { operation: Operation::Discard, ..write(1 << 30) };
        assert_eq!(log.reserve(&discard, 0), None, "as many records as chunks");
        small.into_iter().for_each(|record| log.cancel(record));
        assert!(log.is_empty());
    }
}
