//! Writes: their parts, intents and tags.

use sidecore_block::{BlockError, BlockRequest, Operation, PartNumber as Number, Place};

use super::{IntegrityChannel, Progress, hash_of};
use crate::intents::{Intent, PER_SECTOR, encode};
use crate::journal::Parity;
use crate::layout::Layout;
use crate::parts::{Label, PART_BLOCKS, Work};
use crate::rules::Rule;
use crate::tag::{SECTOR_BYTES, Tag};

/// Blocks of a failed write that cannot be read are read so many times again: their slot is used
/// again at some time, and only it knows what they may have.
const LOOKS_AGAIN: u8 = 2;
/// The budget for a block that is zero already.
const SKIP_BYTES: u64 = 64;

/// A slot that intents are collected for.
pub(super) struct OpenSlot {
    /// The era and the number of the slot; `None` if no slot is open.
    slot: Option<(Parity, u64)>,
    intents: Vec<Intent>,
    /// The first and the last part.
    ends: Option<(Number, Number)>,
    most: usize,
}

impl OpenSlot {
    pub(super) fn new(layout: &Layout) -> Self {
        let sectors = usize::try_from(layout.sectors_per_unit()).unwrap_or(1);
        let most = sectors.saturating_mul(PER_SECTOR);
        Self { slot: None, intents: Vec::with_capacity(most), ends: None, most }
    }

    fn has_room(&self, count: u64) -> bool {
        (self.intents.len() as u64).saturating_add(count) <= self.most as u64
    }
}

impl IntegrityChannel {
    /// Holds blocks, all or none. `tags` gets their tags.
    pub(super) fn hold(&mut self, first: u64, count: u64, tags: &mut [Tag; PART_BLOCKS]) -> bool {
        let end = first.saturating_add(count);
        for (block, tag) in (first..end).zip(tags) {
            if let Some(held) = self.shared.tags.hold(block) {
                *tag = held;
            } else if !self.shared.neglected.keeps(Rule::Exclusion) {
                *tag = self.shared.tags.get(block).unwrap_or_default();
            } else {
                (first..block).for_each(|block| self.shared.tags.release(block));
                self.is_blocked = true;
                return false;
            }
        }
        true
    }

    /// Skips the next blocks of a discard that are zero already by their tags. What the store holds
    /// may differ: a write of zeros mends that, and is not skipped.
    fn skip_zeros(&mut self, place: Place) {
        let size = u64::from(self.shared.layout.block_bytes);
        let Some(split) = self.table.get_mut(place) else { return };
        let Some(request) = split.request() else { return };
        let (offset_bytes, len_bytes) = (request.offset_bytes, request.len_bytes);
        while split.next_bytes < len_bytes && self.budget > 0 {
            let at = offset_bytes.saturating_add(split.next_bytes);
            let block = at.checked_div(size).unwrap_or(0);
            if self.shared.tags.sum(block) != Some(self.shared.sums.zeros_at(block)) {
                break;
            }
            split.next_bytes = split.next_bytes.saturating_add(size);
            self.budget = self.budget.saturating_sub(SKIP_BYTES);
        }
    }

    /// Begins the next part of a write.
    pub(super) fn start_write(&mut self, place: Place) -> Progress {
        let operation = self.table.request(place).map(|request| request.operation);
        let is_write = operation == Some(Operation::Write);
        if operation == Some(Operation::Discard) {
            self.skip_zeros(place);
        }
        let Some(entry) = self.table.get(place) else { return Progress::Blocked };
        let Some(request) = entry.request() else { return Progress::Blocked };
        let (skip_bytes, len_bytes) = (entry.next_bytes, request.len_bytes);
        let start = request.offset_bytes.saturating_add(skip_bytes);
        if skip_bytes >= len_bytes || self.shared.journal.has_failed() {
            let is_done = skip_bytes >= len_bytes;
            let result = if is_done { Ok(()) } else { Err(BlockError::EIO) };
            self.table.part_began(place, skip_bytes);
            self.ended.extend(self.table.part_ended(place, result));
            return Progress::Begun;
        }
        if self.budget == 0 || !self.parts.has_free() {
            self.is_blocked |= self.budget == 0;
            return Progress::Blocked;
        }
        let size = u64::from(self.shared.layout.block_bytes);
        let left = len_bytes.saturating_sub(skip_bytes).checked_div(size).unwrap_or(0);
        let count = left.min(PART_BLOCKS as u64);
        let first = start.checked_div(size).unwrap_or(0);
        let mut old = [Tag::default(); PART_BLOCKS];
        if !self.hold(first, count, &mut old) {
            return Progress::Blocked;
        }
        let place_of_intents = self.slot_for(count).and_then(|era| Some((era, self.parts.take()?)));
        let Some((parity, number)) = place_of_intents else {
            (first..first.saturating_add(count)).for_each(|block| self.shared.tags.release(block));
            return Progress::Blocked;
        };
        if let Some(part) = self.parts.get_mut(number) {
            (part.of, part.skip_bytes) = (place, skip_bytes);
            part.work = if is_write { Work::Write } else { Work::Zero };
            (part.first, part.count) = (first, usize::try_from(count).unwrap_or(0));
            (part.old, part.parity, part.next) = (old, parity, None);
        }
        let part_bytes = count.saturating_mul(size);
        self.budget = self.budget.saturating_sub(part_bytes);
        self.table.part_began(place, skip_bytes.saturating_add(part_bytes));
        self.fill(number);
        Progress::Begun
    }

    /// Counts a part into the open slot, or opens another one.
    fn slot_for(&mut self, count: u64) -> Option<Parity> {
        if !self.slot.has_room(count) {
            self.send_slot();
        }
        if let Some((parity, _)) = self.slot.slot {
            // The first part of the slot has not ended.
            self.shared.journal.join(parity);
            return Some(parity);
        }
        self.slot.slot = self.shared.journal.enter();
        if self.slot.slot.is_none() {
            self.wants_checkpoint = true;
        }
        self.slot.slot.map(|(parity, _)| parity)
    }

    /// Copies the data of a part, and adds its intents to the open slot.
    fn fill(&mut self, number: Number) {
        let size = self.shared.layout.block_bytes as usize;
        let Some(part) = self.parts.get_mut(number) else { return };
        let (of, work, skip_bytes, count) = (part.of, part.work, part.skip_bytes, part.count);
        let (mut new, old, first) = (part.old, part.old, part.first);
        let len_bytes = (count as u64).saturating_mul(size as u64);
        let Some(data) = self.parts.data(number, len_bytes) else { return };
        let request = self.table.request(of);
        for (index, (tag, old)) in new.iter_mut().zip(&old).take(count).enumerate() {
            let block = first.saturating_add(index as u64);
            let at = (index as u64).saturating_mul(size as u64);
            let step = self.step.get_mut(..size).unwrap_or_default();
            let hash = match (work, request) {
                (Work::Write, Some(request)) => {
                    // The request was checked: its memory is as long as its range.
                    let hash = hash_of(&request.segments, skip_bytes.saturating_add(at), step);
                    data.segments.copy_from_slice(at, step);
                    hash.map(|hash| self.shared.sums.at(block, hash))
                }
                _ => Some(self.shared.sums.zeros_at(block)),
            };
            *tag = old.next(hash.unwrap_or(0));
            self.slot.intents.push(Intent { block, tag: *tag });
        }
        self.parts.put_data(number, data);
        if let Some(part) = self.parts.get_mut(number) {
            part.new = new;
        }
        let last = self.slot.ends.map(|(_, last)| last);
        if let Some(part) = last.and_then(|last| self.parts.get_mut(last)) {
            part.next = Some(number);
        }
        let head = self.slot.ends.map_or(number, |(head, _)| head);
        self.slot.ends = Some((head, number));
    }

    /// Writes the intents of the open slot.
    pub(super) fn send_slot(&mut self) {
        let Some((_, slot)) = self.slot.slot.take() else { return };
        let Some((head, _)) = self.slot.ends.take() else { return };
        if !self.shared.neglected.keeps(Rule::IntentFirst) {
            self.slot.intents.clear();
            return self.send_data_of(head);
        }
        let unit_bytes = u64::from(self.shared.layout.unit_bytes);
        let at_bytes = Layout::journal_at().saturating_add(slot.saturating_mul(unit_bytes));
        self.unit.fill(0);
        let sectors = self.unit.chunks_exact_mut(SECTOR_BYTES);
        for ((index, sector), intents) in
            sectors.enumerate().zip(self.slot.intents.chunks(PER_SECTOR))
        {
            let at_bytes = at_bytes.saturating_add((index as u64).saturating_mul(512));
            encode(&self.shared.sums, at_bytes, intents, sector);
        }
        self.slot.intents.clear();
        let Some(mut request) = self.parts.intents(head, unit_bytes) else { return };
        request.segments.copy_from_slice(0, &self.unit);
        request.offset_bytes = at_bytes;
        request.write_through = self.writes_through;
        self.outbound.push(request);
    }

    /// Goes on with the parts of a slot whose intents are written.
    pub(super) fn intents_came_back(&mut self, head: Number, mut request: Box<BlockRequest>) {
        let result = request.result;
        let is_durable = !self.shared.is_volatile
            || self.writes_through
            || !self.shared.neglected.keeps(Rule::IntentDurable);
        if result.is_err() || is_durable {
            self.parts.put_intents(head, request);
            return match result {
                Ok(()) => self.send_data_of(head),
                Err(error) => self.fail_parts_of(head, error),
            };
        }
        request.operation = Operation::Flush;
        (request.offset_bytes, request.len_bytes) = (0, 0);
        request.segments.clear();
        request.tag.replace(Label::IntentsFlush(head).tag()).map(sidecore_block::Tag::into_bits);
        self.outbound.push(request);
    }

    /// Goes on with the parts of a slot whose intents are durable.
    pub(super) fn intents_flushed(&mut self, head: Number, request: Box<BlockRequest>) {
        let result = request.result;
        self.parts.put_intents(head, request);
        match result {
            Ok(()) => self.send_data_of(head),
            Err(error) => {
                // The kernel may have dropped other writes that it had answered.
                self.fail_store("a flush of the store has failed");
                self.fail_parts_of(head, error);
            }
        }
    }

    fn fail_parts_of(&mut self, head: Number, error: BlockError) {
        let mut next = Some(head);
        while let Some(number) = next {
            next = self.parts.get_mut(number).and_then(|part| part.next.take());
            self.end_part(number, Err(error));
        }
    }

    fn send_data_of(&mut self, head: Number) {
        let mut next = Some(head);
        while let Some(number) = next {
            next = self.parts.get_mut(number).and_then(|part| part.next.take());
            self.send_data(number);
        }
    }

    /// Writes the data of a part.
    fn send_data(&mut self, number: Number) {
        let Some(part) = self.parts.get_mut(number) else { return };
        let (of, work, skip_bytes) = (part.of, part.work, part.skip_bytes);
        let (first, count) = (part.first, part.count as u64);
        let len_bytes = count.saturating_mul(self.shared.layout.block_bytes.into());
        let is_write = work == Work::Write;
        let copied_bytes = if is_write { len_bytes } else { 0 };
        let Some(mut request) = self.parts.data(number, copied_bytes) else { return };
        request.len_bytes = len_bytes;
        request.offset_bytes = self.shared.layout.at(first);
        request.operation = Operation::Write;
        if let Some(guest) = self.table.request(of) {
            request.taken_at = guest.taken_at;
            if !is_write {
                let may_unmap = guest.operation != Operation::WriteZeroes { may_unmap: false };
                request.operation = Operation::WriteZeroes { may_unmap };
            } else if !self.shared.neglected.keeps(Rule::PrivateCopy) {
                request.segments.bind_part(&guest.segments, skip_bytes, len_bytes);
            }
        }
        self.outbound.push(request);
    }

    /// Ends a part, or looks at the effect of a write that has failed.
    pub(super) fn data_came_back(&mut self, number: Number, request: Box<BlockRequest>) {
        let Some(part) = self.parts.get_mut(number) else { return };
        let work = part.work;
        let result = match (work, request.result) {
            (Work::Read, _) => self.check_part(number, &request),
            (Work::Look(error, left), Err(_)) if left > 0 => {
                return self.look(number, request, Work::Look(error, left.saturating_sub(1)));
            }
            (Work::Look(error, _), _) => {
                self.settle(number, Some(&request));
                Err(error)
            }
            (_, Ok(())) => {
                self.settle(number, None);
                Ok(())
            }
            (_, Err(error)) => {
                return self.look(number, request, Work::Look(error, LOOKS_AGAIN));
            }
        };
        self.parts.put_data(number, request);
        self.end_part(number, result);
    }

    /// Reads the blocks of a write that has failed.
    fn look(&mut self, number: Number, request: Box<BlockRequest>, work: Work) {
        if let Some(part) = self.parts.get_mut(number) {
            part.work = work;
        }
        self.parts.put_data(number, request);
        self.read_part(number);
    }

    /// Sets the tags of a write that has ended. If it has failed, `looked` has the blocks. If they
    /// cannot be read either, the tags stay: the blocks are good if the write was not done, and
    /// their intents decide if the store is opened again.
    fn settle(&mut self, number: Number, looked: Option<&BlockRequest>) {
        if looked.is_some_and(|read| read.result.is_err()) {
            return self.shared.journal.leave_unsettled();
        }
        let Some(part) = self.parts.get_mut(number) else { return };
        let size = self.shared.layout.block_bytes as usize;
        for (index, (block, old, new)) in part.blocks().enumerate() {
            let step = self.step.get_mut(..size).unwrap_or_default();
            let at = (index as u64).saturating_mul(size as u64);
            let hash = looked.and_then(|read| hash_of(&read.segments, at, step));
            let is_old = hash.is_some_and(|hash| self.shared.sums.at(block, hash) == old.sum);
            let tag = if is_old { old.confirmed_at(new) } else { new };
            self.shared.tags.set(block, tag);
            self.shared.tags.mark(block);
        }
        // If it has failed, the tags may be those of torn blocks.
        if looked.is_none() {
            self.shared.mend(part.first..part.first.saturating_add(part.count as u64));
        }
    }

    /// Ends a part that the store does not have.
    fn end_part(&mut self, number: Number, result: Result<(), BlockError>) {
        let Some(part) = self.parts.get_mut(number) else { return };
        let (of, work, parity) = (part.of, part.work, part.parity);
        for (block, _, _) in part.blocks() {
            self.shared.tags.release(block);
        }
        self.parts.give_back(number);
        if work != Work::Read {
            self.shared.journal.leave(parity);
        }
        self.ended.extend(self.table.part_ended(of, result));
    }
}
