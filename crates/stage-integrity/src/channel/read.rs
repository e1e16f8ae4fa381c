//! Reads, and the check of what they have read.

use sidecore_block::{BadBlock, BlockError, BlockRequest, Operation, PartNumber as Number, Place};
use sidecore_units::Nanos;

use super::{IntegrityChannel, Progress, hash_of};
use crate::parts::{Label, PART_BLOCKS, Work};
use crate::rules::Rule;
use crate::shared::BAD;
use crate::tag::Tag;

/// The time between two searches of a channel for the right place of a block's bytes: a guest may
/// read bad blocks as often as it likes, and its neighbours wait for a search.
const SEARCH_PAUSE: Nanos = Nanos::from_millis(10);

/// A search for the right place of a block's bytes, and its result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search {
    at: Nanos,
    block: u64,
    hash: u64,
    kind: BadBlock,
}

impl IntegrityChannel {
    /// Sends a read to the store.
    #[inline]
    pub(super) fn accept_read(&mut self, mut request: Box<BlockRequest>) {
        let at_bytes = self.shared.layout.data_at().saturating_add(request.offset_bytes);
        if !self.table.lend(&mut request, at_bytes, |place| Label::Read(place).tag()) {
            return self.end(request, Err(BlockError::EIO));
        }
        self.outbound.push(request);
    }

    /// Checks a read that has come back. Returns it if the budget does not suffice for all of it.
    #[inline]
    pub(super) fn read_came_back(
        &mut self,
        place: Place,
        mut request: Box<BlockRequest>,
    ) -> Option<Box<BlockRequest>> {
        let size = self.shared.layout.block_bytes as usize;
        let len_bytes = if request.result.is_ok() { request.len_bytes } else { 0 };
        let first = request.offset_bytes.saturating_sub(self.shared.layout.data_at());
        let mut at = self.table.get(place).map_or(len_bytes, |entry| entry.next_bytes);
        while at < len_bytes {
            if self.budget == 0 {
                if let Some(entry) = self.table.get_mut(place) {
                    entry.next_bytes = at;
                }
                return Some(request);
            }
            self.budget = self.budget.saturating_sub(size as u64);
            let block = first.saturating_add(at).checked_div(size as u64).unwrap_or(0);
            let step = self.step.get_mut(..size).unwrap_or_default();
            let hash = hash_of(&request.segments, at, step);
            let sum = hash.map(|hash| self.shared.sums.at(block, hash));
            if sum.is_none() || sum != self.shared.tags.sum(block) {
                return self.read_differs(place, request, (at, block, hash));
            }
            at = at.saturating_add(size as u64);
        }
        self.table.restore(place, &mut request);
        self.table.free(place);
        if request.result.is_ok() {
            self.mend(&request);
        }
        self.ended.push(request);
        None
    }

    /// Notes that the blocks of a read are good.
    #[inline]
    fn mend(&self, request: &BlockRequest) {
        if self.shared.findings.has_bad() {
            let size = u64::from(self.shared.layout.block_bytes);
            let first = request.offset_bytes.checked_div(size).unwrap_or(0);
            let count = request.len_bytes.checked_div(size).unwrap_or(0);
            self.shared.mend(first..first.saturating_add(count));
        }
    }

    /// A block of a read does not match. A write may have changed it meanwhile, or the guest its
    /// memory. So it is read again, to private memory and while no write is in flight.
    #[cold]
    fn read_differs(
        &mut self,
        place: Place,
        mut request: Box<BlockRequest>,
        (at, block, hash): (u64, u64, Option<u64>),
    ) -> Option<Box<BlockRequest>> {
        self.table.restore(place, &mut request);
        if !self.shared.neglected.keeps(Rule::ReadAgain) {
            self.found(block, hash.unwrap_or(0));
            self.table.free(place);
            self.end(request, Err(BAD));
            return None;
        }
        self.table.split(place, request, at);
        None
    }

    /// Notes a bad block.
    #[cold]
    fn found(&mut self, block: u64, hash: u64) {
        let kind = self.kind(block, hash);
        self.stats.count(kind);
        let offset_bytes = block.saturating_mul(self.shared.layout.block_bytes.into());
        let is_new = self.shared.bad.note(block);
        self.shared.findings.note(kind, (block, offset_bytes), is_new);
    }

    /// Why a block is bad. One that is read again is of the same kind without a search.
    fn kind(&mut self, block: u64, hash: u64) -> BadBlock {
        if let Some(kind) = self.shared.kind(block, hash) {
            return kind;
        }
        let last = self.last_search;
        if let Some(last) = last.filter(|last| (last.block, last.hash) == (block, hash)) {
            return last.kind;
        }
        if last.is_some_and(|last| self.now.since(last.at) < SEARCH_PAUSE) {
            return BadBlock::Checksum;
        }
        let kind = self.shared.searched(block, hash);
        self.last_search = Some(Search { at: self.now, block, hash, kind });
        kind
    }

    /// Begins a part of a read that is repeated.
    pub(super) fn start_read(&mut self, place: Place) -> Progress {
        let Some(entry) = self.table.get(place) else { return Progress::Blocked };
        let Some(request) = entry.request() else { return Progress::Blocked };
        let (size, skip_bytes) = (u64::from(self.shared.layout.block_bytes), entry.next_bytes);
        let left = request.len_bytes.saturating_sub(skip_bytes).checked_div(size).unwrap_or(0);
        let count = left.min(PART_BLOCKS as u64);
        let start = request.offset_bytes.saturating_add(skip_bytes);
        let first = start.checked_div(size).unwrap_or(0);
        if !self.parts.has_free() {
            return Progress::Blocked;
        }
        let mut old = [Tag::default(); PART_BLOCKS];
        if !self.hold(first, count, &mut old) {
            if self.shared.journal.has_failed() {
                // The block may be held by a channel that is gone.
                self.zero_guest(place);
                self.table.part_began(place, skip_bytes.saturating_add(left.saturating_mul(size)));
                self.ended.extend(self.table.part_ended(place, Err(BlockError::EIO)));
                return Progress::Begun;
            }
            return Progress::Blocked;
        }
        let Some(number) = self.parts.take() else { return Progress::Blocked };
        if let Some(part) = self.parts.get_mut(number) {
            (part.of, part.skip_bytes, part.work) = (place, skip_bytes, Work::Read);
            (part.first, part.count) = (first, usize::try_from(count).unwrap_or(0));
            part.old = old;
        }
        let len_bytes = count.saturating_mul(size);
        self.budget = self.budget.saturating_sub(len_bytes);
        self.table.part_began(place, skip_bytes.saturating_add(len_bytes));
        self.read_part(number);
        Progress::Begun
    }

    /// Reads the blocks of a part into its pages.
    pub(super) fn read_part(&mut self, number: Number) {
        let Some(part) = self.parts.get_mut(number) else { return };
        let (first, count) = (part.first, part.count as u64);
        let len_bytes = count.saturating_mul(self.shared.layout.block_bytes.into());
        let Some(mut request) = self.parts.data(number, len_bytes) else { return };
        request.operation = Operation::Read;
        request.offset_bytes = self.shared.layout.at(first);
        self.outbound.push(request);
    }

    /// Checks the blocks of a read that was repeated, and copies them to the guest.
    pub(super) fn check_part(
        &mut self,
        number: Number,
        read: &BlockRequest,
    ) -> Result<(), BlockError> {
        let Some(part) = self.parts.get_mut(number) else { return Err(BlockError::EIO) };
        let (of, skip_bytes, first, count) = (part.of, part.skip_bytes, part.first, part.count);
        if let Err(error) = read.result {
            self.zero_guest(of);
            return Err(error);
        }
        let size = self.shared.layout.block_bytes as usize;
        for (index, block) in (first..).take(count).enumerate() {
            let at = (index as u64).saturating_mul(size as u64);
            let step = self.step.get_mut(..size).unwrap_or_default();
            let hash = hash_of(&read.segments, at, step).ok_or(BlockError::EIO)?;
            let is_good = Some(self.shared.sums.at(block, hash)) == self.shared.tags.sum(block);
            if !is_good {
                self.zero_guest(of);
                self.found(block, hash);
                return Err(BAD);
            }
            let guest = self.table.request(of);
            let guest = guest.ok_or(BlockError::EIO)?;
            guest.segments.copy_from_slice(skip_bytes.saturating_add(at), step);
        }
        self.shared.mend(first..first.saturating_add(count as u64));
        Ok(())
    }

    /// No bad byte stays with the guest, which may have some of the first read.
    #[cold]
    fn zero_guest(&self, place: Place) {
        if let Some(guest) = self.table.request(place) {
            guest.segments.zero(0, guest.len_bytes);
        }
    }
}
