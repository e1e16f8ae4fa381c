//! Requests that go to the store in parts, or wait for blocks.

use std::ops::ControlFlow;

use sidecore_block::{BlockError, BlockRequest, Operation};
use sidecore_extent::{BlockRange, Extent, Mapping, Piece};
use sidecore_units::{Plba, Vlba};

use super::slot::{Grant, Label, Parts, Stage};
use super::stores::Outgoing;
use super::{FunctionChannel, Multiplexer};
use crate::mail::{GrantId, Question, Slot};

/// What stopped a walk before the request's end.
enum Stop {
    /// The first piece is all of it: it can go as it is, to this byte, and perhaps
    /// through the filesystem.
    Whole(u64, bool),
    /// No boxes for parts.
    Starved,
    /// A pruned part of the tree.
    Pruned(BlockRange),
    /// Blocks have to be allocated.
    Missing(BlockRange),
}

impl FunctionChannel {
    /// Carries the request in `slot` on from where it stopped.
    pub(super) fn go_on(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        let Some(parts) = self.slots.parts(slot) else { return };
        if parts.result.is_err() || parts.next_bytes >= parts.request.len_bytes {
            parts.stage = Stage::Finishing;
            return self.finish_if_done(slot);
        }
        let unmaps = match parts.request.operation {
            Operation::Discard => true,
            Operation::WriteZeroes { may_unmap } => may_unmap && !std::mem::replace(&mut parts.unmapped, true),
            _ => false,
        };
        if !unmaps {
            return self.walk(multiplexer, slot);
        }
        let (offset_bytes, len_bytes) = (parts.request.offset_bytes, parts.request.len_bytes);
        match self.whole_blocks(offset_bytes, len_bytes) {
            Some(range) => self.ask(slot, Question::Unmap { range }),
            None => self.unmapped(multiplexer, slot),
        }
    }

    /// The blocks that lie inside of a range of bytes with all their bytes.
    fn whole_blocks(&self, offset_bytes: u64, len_bytes: u64) -> Option<BlockRange> {
        let shift = self.function.block_shift;
        let mask = 1_u64.checked_shl(shift)?.wrapping_sub(1);
        let first = offset_bytes.checked_add(mask)?.checked_shr(shift)?;
        let end = offset_bytes.checked_add(len_bytes)?.checked_shr(shift)?;
        let count = end.checked_sub(first).filter(|count| *count > 0)?;
        Some(BlockRange { first: Vlba(first), count })
    }

    /// What was to be unmapped is. Zeros still have to be written where blocks were
    /// not covered whole; a discard owes nothing there.
    fn unmapped(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        let Some(parts) = self.slots.parts(slot) else { return };
        if parts.request.operation == Operation::Discard {
            parts.next_bytes = parts.request.len_bytes;
        }
        parts.stage = Stage::Ready;
        self.go_on(multiplexer, slot);
    }

    /// The hypervisor side has done what it was asked.
    pub(super) fn hear_done(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        let Some(parts) = self.slots.parts(slot) else { return };
        match (parts.stage, parts.request.operation) {
            (Stage::Linking, _) => {
                self.stats.rewalks.add(1);
                parts.stage = Stage::Ready;
                self.go_on(multiplexer, slot);
            }
            (_, Operation::Discard | Operation::WriteZeroes { .. }) => self.unmapped(multiplexer, slot),
            (_, _) => {
                parts.stage = Stage::Finishing;
                self.finish_if_done(slot);
            }
        }
    }

    /// Translates the rest of the request in one walk and sends off what can go.
    fn walk(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        self.stats.translations.add(1);
        let Some(parts) = self.slots.parts(slot) else { return };
        let request = &parts.request;
        let range = {
            let offset_bytes = request.offset_bytes.saturating_add(parts.next_bytes);
            let len_bytes = request.len_bytes.saturating_sub(parts.next_bytes);
            self.blocks(offset_bytes, len_bytes)
        };
        let shift = self.function.block_shift;
        let Some(parts) = self.slots.parts(slot) else { return };
        let untouched = parts.next_bytes == 0 && parts.under_way == 0;
        let mut sender = Sender {
            boxes: &mut multiplexer.parts,
            outgoing: &mut self.outgoing,
            through: self.function.goes_through(),
            quiescence: &mut self.quiescence,
            block_bytes: u64::from(self.function.geometry.block_bytes),
            slot,
            sent: 0,
        };
        let sender_through = sender.through;
        let mut stop = None;
        let visit = &mut |piece: Piece| {
            let flow = sender.take_piece(parts, piece, shift, &mut stop);
            if untouched && piece.range == range && sender.sent == 1 && stop.is_none() {
                // It would be its only part: better it goes itself.
                if let Some(offset_bytes) = sender.take_back_last(parts) {
                    stop = Some(Stop::Whole(offset_bytes, sender.through));
                    return ControlFlow::Break(());
                }
            }
            flow
        };
        if sender_through {
            // The file is one extent, and the filesystem translates.
            let mapping = Mapping::Mapped { physical: Plba(range.first.0), shared: false };
            let _ = visit(Piece { range, mapping });
        } else {
            let (function, last) = (&self.function, &mut self.last);
            multiplexer.unit.translate(function.id, &function.root, last, range, visit);
        }
        let sent = sender.sent;
        self.tagged = self.tagged.saturating_add(sent);
        if sent > 0 {
            self.stats.splits.add(1);
        }
        self.after_walk(slot, stop);
    }

    fn after_walk(&mut self, slot: Slot, stop: Option<Stop>) {
        match stop {
            Some(Stop::Whole(offset_bytes, through)) => {
                if let Some(parts) = self.slots.take_parts(slot) {
                    self.send_whole(parts.request, offset_bytes, through);
                }
            }
            Some(Stop::Starved) => self.starved.push_back(slot),
            Some(Stop::Pruned(range)) => {
                self.stats.prune_misses.add(1);
                self.ask(slot, Question::Regenerate { range });
            }
            Some(Stop::Missing(range)) => self.ask_for_blocks(slot, range),
            None => {
                let Some(parts) = self.slots.parts(slot) else { return };
                if parts.next_bytes < parts.request.len_bytes && parts.result.is_ok() {
                    // The walk came to the end of the function: it has shrunk.
                    return self.fail(slot, BlockError::OutOfBounds);
                }
                parts.stage = Stage::Finishing;
                self.finish_if_done(slot);
            }
        }
    }

    /// A write misses `range` (thesis 5.3).
    fn ask_for_blocks(&mut self, slot: Slot, range: BlockRange) {
        self.stats.misses.add(1);
        let shift = self.function.block_shift;
        let Some(parts) = self.slots.parts(slot) else { return };
        let start = parts.request.offset_bytes.saturating_add(parts.next_bytes);
        let end = parts.request.offset_bytes.saturating_add(parts.request.len_bytes);
        let first_byte = range.first.0.checked_shl(shift).unwrap_or(u64::MAX);
        let end_byte = range.first.0.saturating_add(range.count).checked_shl(shift).unwrap_or(u64::MAX);
        let question = Question::Allocate { range, partial_head: first_byte < start, partial_tail: end < end_byte };
        self.ask(slot, question);
    }

    /// Writes the data of a miss to the blocks that were allocated for it.
    pub(super) fn use_grant(
        &mut self,
        multiplexer: &mut Multiplexer,
        slot: Slot,
        grant: GrantId,
        range: BlockRange,
        extents: Vec<Extent>,
    ) {
        let shift = self.function.block_shift;
        let Some(parts) = self.slots.parts(slot) else { return };
        let end = range.first.0.saturating_add(range.count).checked_shl(shift).unwrap_or(u64::MAX);
        let end_bytes = end.saturating_sub(parts.request.offset_bytes).min(parts.request.len_bytes);
        parts.grant = Some(Grant { id: grant, extents, end_bytes });
        parts.grant_start_bytes = parts.next_bytes;
        parts.stage = Stage::Granted;
        self.stats.splits.add(1);
        self.write_grant(multiplexer, slot);
    }

    fn write_grant(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        let shift = self.function.block_shift;
        let Some(parts) = self.slots.parts(slot) else { return };
        let Some(grant) = parts.grant.take() else { return };
        let mut sender = Sender {
            boxes: &mut multiplexer.parts,
            outgoing: &mut self.outgoing,
            through: false,
            quiescence: &mut self.quiescence,
            block_bytes: u64::from(self.function.geometry.block_bytes),
            slot,
            sent: 0,
        };
        let mut starved = false;
        for extent in &grant.extents {
            let start = extent.first.0.checked_shl(shift).unwrap_or(u64::MAX);
            let end = extent.first.0.saturating_add(extent.count).checked_shl(shift).unwrap_or(u64::MAX);
            let at = parts.request.offset_bytes.saturating_add(parts.next_bytes);
            let end = end.saturating_sub(parts.request.offset_bytes).min(grant.end_bytes);
            if at < start || parts.next_bytes >= end || parts.result.is_err() {
                continue;
            }
            if !sender.send(parts, end, extent.physical, start, shift) {
                starved = true;
                break;
            }
        }
        let sent = sender.sent;
        parts.grant = Some(grant);
        self.tagged = self.tagged.saturating_add(sent);
        if starved {
            self.starved.push_back(slot);
        } else {
            self.report_grant(slot);
        }
    }

    /// Once all of a grant's data is written, says so.
    fn report_grant(&mut self, slot: Slot) {
        let Some(parts) = self.slots.parts(slot) else { return };
        if parts.stage != Stage::Granted || parts.under_way > 0 {
            return;
        }
        let Some(Grant { id, end_bytes, .. }) = parts.grant else { return };
        if parts.next_bytes < end_bytes && parts.result.is_ok() {
            return;
        }
        parts.grant = None;
        parts.stage = Stage::Linking;
        let all = parts.result.is_ok();
        if !all {
            // The rest of it is in vain, and wants no boxes any more.
            self.starved.retain(|starved| *starved != slot);
        }
        self.ask(slot, Question::Written { grant: id, all });
    }

    /// A part is back from the store.
    pub(super) fn take_back_part(&mut self, multiplexer: &mut Multiplexer, slot: Slot, part: Box<BlockRequest>) {
        let result = part.result;
        multiplexer.recycle(part);
        let Some(parts) = self.slots.parts(slot) else { return };
        parts.under_way = parts.under_way.saturating_sub(1);
        parts.result = parts.result.and(result);
        match parts.stage {
            Stage::Granted => self.report_grant(slot),
            Stage::Finishing => self.finish_if_done(slot),
            Stage::Ready | Stage::Asked | Stage::Linking => {}
        }
    }

    /// Gives boxes to those that wait for them.
    pub(super) fn feed_starved(&mut self, multiplexer: &mut Multiplexer) {
        for _ in 0..self.starved.len() {
            if multiplexer.parts.is_empty() {
                return;
            }
            let Some(slot) = self.starved.pop_front() else { return };
            match self.slots.parts(slot).map(|parts| parts.stage) {
                Some(Stage::Granted) => self.write_grant(multiplexer, slot),
                Some(Stage::Ready) => self.go_on(multiplexer, slot),
                // A slot that waits for an answer is not to be freed before that comes.
                Some(Stage::Asked | Stage::Linking | Stage::Finishing) | None => {}
            }
        }
    }
}

/// Cuts parts off a request and sends them.
struct Sender<'a> {
    boxes: &'a mut sidecore_block::Batch,
    outgoing: &'a mut Outgoing,
    /// Whether they go through the filesystem.
    through: bool,
    quiescence: &'a mut crate::grace::Quiescence,
    /// The store's unit of reads and writes.
    block_bytes: u64,
    slot: Slot,
    sent: usize,
}

impl Sender<'_> {
    /// Deals with the next piece of the request's translation.
    fn take_piece(&mut self, parts: &mut Parts, piece: Piece, shift: u32, stop: &mut Option<Stop>) -> ControlFlow<()> {
        let operation = parts.request.operation;
        let start = piece.range.first.0.checked_shl(shift).unwrap_or(u64::MAX);
        let end = piece.range.first.0.saturating_add(piece.range.count).checked_shl(shift).unwrap_or(u64::MAX);
        let end = end.saturating_sub(parts.request.offset_bytes).min(parts.request.len_bytes);
        let reads = operation == Operation::Read;
        match (piece.mapping, &mut *stop) {
            // Behind missing blocks only more of them are of interest: they can be
            // allocated together.
            (Mapping::Mapped { shared: true, .. }, Some(Stop::Missing(range))) => {
                range.count = range.count.saturating_add(piece.range.count);
                ControlFlow::Continue(())
            }
            (Mapping::Hole, Some(Stop::Missing(range))) if operation == Operation::Write => {
                range.count = range.count.saturating_add(piece.range.count);
                ControlFlow::Continue(())
            }
            (_, Some(_)) => ControlFlow::Break(()),
            (Mapping::Mapped { physical, shared }, None) if reads || !shared => {
                if self.send(parts, end, physical, start, shift) {
                    return ControlFlow::Continue(());
                }
                if parts.result.is_ok() {
                    *stop = Some(Stop::Starved);
                }
                ControlFlow::Break(())
            }
            (Mapping::Hole, None) if operation != Operation::Write => {
                if reads {
                    // POSIX: what was never written reads as zeros (thesis 5.3).
                    let len_bytes = end.saturating_sub(parts.next_bytes);
                    parts.request.segments.zero(parts.next_bytes, len_bytes);
                }
                parts.next_bytes = end;
                ControlFlow::Continue(())
            }
            (Mapping::Pruned, None) => {
                *stop = Some(Stop::Pruned(piece.range));
                ControlFlow::Break(())
            }
            (_, None) => {
                *stop = Some(Stop::Missing(piece.range));
                ControlFlow::Continue(())
            }
        }
    }

    /// Sends the request's bytes up to `end_bytes`, which lie in an extent whose
    /// first byte is `start` and lies at block `physical`. False if the boxes do not
    /// suffice.
    fn send(&mut self, parts: &mut Parts, end_bytes: u64, physical: Plba, start: u64, shift: u32) -> bool {
        let request = &parts.request;
        let physical_bytes = physical.0.checked_shl(shift).unwrap_or(u64::MAX);
        while parts.next_bytes < end_bytes {
            let Some(mut part) = self.boxes.pop() else { return false };
            let wanted = end_bytes.saturating_sub(parts.next_bytes);
            let mut bound = wanted;
            if matches!(request.operation, Operation::Read | Operation::Write) {
                bound = part.segments.bind_part(&request.segments, parts.next_bytes, wanted);
                let whole = bound & !self.block_bytes.wrapping_sub(1);
                if bound < wanted && whole < bound {
                    // Cut between two pieces of memory in the middle of a block.
                    bound = part.segments.bind_part(&request.segments, parts.next_bytes, whole);
                }
                if bound == 0 {
                    // A guest that cuts a block into more pieces than a box holds.
                    *part = *BlockRequest::blank(request.segments.pieces().len());
                    bound = part.segments.bind_part(&request.segments, parts.next_bytes, wanted);
                }
                if bound == 0 {
                    self.boxes.push(part);
                    parts.result = parts.result.and(Err(BlockError::EIO));
                    return false;
                }
            }
            let at = request.offset_bytes.saturating_add(parts.next_bytes);
            part.operation = request.operation;
            part.offset_bytes = physical_bytes.saturating_add(at.saturating_sub(start));
            part.len_bytes = bound;
            part.taken_at = request.taken_at;
            part.result = Ok(());
            let parity = self.quiescence.began(1);
            part.tag = Some(Label { slot: self.slot, part: true, parity }.into_tag());
            self.outgoing.push(part, self.through);
            self.sent = self.sent.saturating_add(1);
            parts.under_way = parts.under_way.saturating_add(1);
            parts.next_bytes = parts.next_bytes.saturating_add(bound);
        }
        true
    }

    /// Undoes the sending of the last part; returns where it would have gone.
    fn take_back_last(&mut self, parts: &mut Parts) -> Option<u64> {
        let mut part = self.outgoing.pop(self.through)?;
        let label = Label::from_bits(part.tag.take().map(sidecore_block::Tag::into_bits)?);
        self.quiescence.ended(label.parity, 1);
        self.sent = self.sent.saturating_sub(1);
        parts.under_way = parts.under_way.saturating_sub(1);
        let offset_bytes = part.offset_bytes;
        part.segments.release();
        self.boxes.push(part);
        Some(offset_bytes)
    }
}
