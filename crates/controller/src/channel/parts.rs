//! Requests that are submitted in parts, or wait for blocks.

use std::ops::ControlFlow;

use sidecore_block::{BlockError, BlockRequest, Operation};
use sidecore_extent::{BlockRange, Extent, Mapping, Piece};
use sidecore_units::{Plba, Vlba};

use super::slot::{Grant, Label, Parts, Phase};
use super::stores::StoreQueues;
use super::{FunctionChannel, Multiplexer};
use crate::mail::{GrantId, Question, Slot};

/// The reason that a walk ended before the request's end.
enum Stop {
    /// The first piece is the whole request: it can be submitted as it is, to this byte, and
    /// through the filesystem if the flag is set.
    Whole(u64, bool),
    /// No free box for a part.
    NoBoxes,
    /// A pruned part of the tree.
    Pruned(BlockRange),
    /// Blocks have to be allocated.
    Missing(BlockRange),
}

impl FunctionChannel {
    /// Resumes the request in `slot` where it stopped.
    pub(super) fn resume(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        let Some(parts) = self.slots.parts(slot) else { return };
        if parts.result.is_err() || parts.next_bytes >= parts.request.len_bytes {
            parts.phase = Phase::Finishing;
            return self.finish_if_done(slot);
        }
        let unmaps = match parts.request.operation {
            Operation::Discard => true,
            Operation::WriteZeroes { may_unmap } => {
                may_unmap && !std::mem::replace(&mut parts.unmapped, true)
            }
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

    /// The blocks of which a range of bytes covers every byte.
    fn whole_blocks(&self, offset_bytes: u64, len_bytes: u64) -> Option<BlockRange> {
        let shift = self.function.block_shift;
        let mask = 1_u64.checked_shl(shift)?.wrapping_sub(1);
        let first = offset_bytes.checked_add(mask)?.checked_shr(shift)?;
        let end = offset_bytes.checked_add(len_bytes)?.checked_shr(shift)?;
        let count = end.checked_sub(first).filter(|count| *count > 0)?;
        Some(BlockRange { first: Vlba(first), count })
    }

    /// Continues after an unmap. Zeros still have to be written to the partly covered blocks; a
    /// discard is complete.
    fn unmapped(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        let Some(parts) = self.slots.parts(slot) else { return };
        if parts.request.operation == Operation::Discard {
            parts.next_bytes = parts.request.len_bytes;
        }
        parts.phase = Phase::Ready;
        self.resume(multiplexer, slot);
    }

    /// Handles an answer that the operation is done.
    pub(super) fn handle_done(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        let Some(parts) = self.slots.parts(slot) else { return };
        match (parts.phase, parts.request.operation) {
            (Phase::Linking, _) => {
                self.stats.rewalks.add(1);
                parts.phase = Phase::Ready;
                self.resume(multiplexer, slot);
            }
            (_, Operation::Discard | Operation::WriteZeroes { .. }) => {
                self.unmapped(multiplexer, slot)
            }
            (_, _) => {
                parts.phase = Phase::Finishing;
                self.finish_if_done(slot);
            }
        }
    }

    /// Translates the rest of the request in one walk and submits the parts that it can.
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
        let untouched = parts.next_bytes == 0 && parts.in_flight == 0;
        let mut sender = Sender {
            boxes: &mut multiplexer.parts,
            for_store: &mut self.for_store,
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
                // A single part would be the whole request: submit the request itself.
                if let Some(offset_bytes) = sender.take_back_last(parts) {
                    stop = Some(Stop::Whole(offset_bytes, sender.through));
                    return ControlFlow::Break(());
                }
            }
            flow
        };
        if sender_through {
            // The file is one extent, because the filesystem translates.
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
            Some(Stop::NoBoxes) => self.for_parts.push_back(slot),
            Some(Stop::Pruned(range)) => {
                self.stats.prune_misses.add(1);
                self.ask(slot, Question::Regenerate { range });
            }
            Some(Stop::Missing(range)) => self.ask_for_blocks(slot, range),
            None => {
                let Some(parts) = self.slots.parts(slot) else { return };
                if parts.next_bytes < parts.request.len_bytes && parts.result.is_ok() {
                    // The walk reached the end of the function, which has shrunk.
                    return self.fail(slot, BlockError::OutOfBounds);
                }
                parts.phase = Phase::Finishing;
                self.finish_if_done(slot);
            }
        }
    }

    /// Asks for blocks for a write that misses in `range` (thesis 5.3).
    fn ask_for_blocks(&mut self, slot: Slot, range: BlockRange) {
        self.stats.misses.add(1);
        let shift = self.function.block_shift;
        let Some(parts) = self.slots.parts(slot) else { return };
        let start = parts.request.offset_bytes.saturating_add(parts.next_bytes);
        let end = parts.request.offset_bytes.saturating_add(parts.request.len_bytes);
        let first_byte = range.first.0.checked_shl(shift).unwrap_or(u64::MAX);
        let end_byte =
            range.first.0.saturating_add(range.count).checked_shl(shift).unwrap_or(u64::MAX);
        let question = Question::Allocate {
            range,
            partial_head: first_byte < start,
            partial_tail: end < end_byte,
        };
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
        parts.phase = Phase::Granted;
        self.stats.splits.add(1);
        self.write_grant(multiplexer, slot);
    }

    fn write_grant(&mut self, multiplexer: &mut Multiplexer, slot: Slot) {
        let shift = self.function.block_shift;
        let Some(parts) = self.slots.parts(slot) else { return };
        let Some(grant) = parts.grant.take() else { return };
        let mut sender = Sender {
            boxes: &mut multiplexer.parts,
            for_store: &mut self.for_store,
            through: false,
            quiescence: &mut self.quiescence,
            block_bytes: u64::from(self.function.geometry.block_bytes),
            slot,
            sent: 0,
        };
        let mut lacks_boxes = false;
        for extent in &grant.extents {
            let start = extent.first.0.checked_shl(shift).unwrap_or(u64::MAX);
            let end =
                extent.first.0.saturating_add(extent.count).checked_shl(shift).unwrap_or(u64::MAX);
            let at = parts.request.offset_bytes.saturating_add(parts.next_bytes);
            let end = end.saturating_sub(parts.request.offset_bytes).min(grant.end_bytes);
            if at < start || parts.next_bytes >= end || parts.result.is_err() {
                continue;
            }
            if !sender.send(parts, end, extent.physical, start, shift) {
                lacks_boxes = true;
                break;
            }
        }
        let sent = sender.sent;
        parts.grant = Some(grant);
        self.tagged = self.tagged.saturating_add(sent);
        if lacks_boxes {
            self.for_parts.push_back(slot);
        } else {
            self.report_grant(slot);
        }
    }

    /// Sends [`Question::Written`] once all writes to a grant's blocks have ended.
    fn report_grant(&mut self, slot: Slot) {
        let Some(parts) = self.slots.parts(slot) else { return };
        if parts.phase != Phase::Granted || parts.in_flight > 0 {
            return;
        }
        let Some(Grant { id, end_bytes, .. }) = parts.grant else { return };
        if parts.next_bytes < end_bytes && parts.result.is_ok() {
            return;
        }
        parts.grant = None;
        parts.phase = Phase::Linking;
        let all = parts.result.is_ok();
        if !all {
            // After an error the rest of the grant is not written, and needs no boxes.
            self.for_parts.retain(|queued| *queued != slot);
        }
        self.ask(slot, Question::Written { grant: id, all });
    }

    /// Handles the completion of a part.
    pub(super) fn take_back_part(
        &mut self,
        multiplexer: &mut Multiplexer,
        slot: Slot,
        part: Box<BlockRequest>,
    ) {
        let result = part.result;
        multiplexer.recycle(part);
        let Some(parts) = self.slots.parts(slot) else { return };
        parts.in_flight = parts.in_flight.saturating_sub(1);
        parts.result = parts.result.and(result);
        match parts.phase {
            Phase::Granted => self.report_grant(slot),
            Phase::Finishing => self.finish_if_done(slot),
            Phase::Ready | Phase::Asked | Phase::Linking => {}
        }
    }

    /// Resumes slots that are queued for boxes.
    pub(super) fn resume_for_parts(&mut self, multiplexer: &mut Multiplexer) {
        for _ in 0..self.for_parts.len() {
            if multiplexer.parts.is_empty() {
                return;
            }
            let Some(slot) = self.for_parts.pop_front() else { return };
            match self.slots.parts(slot).map(|parts| parts.phase) {
                Some(Phase::Granted) => self.write_grant(multiplexer, slot),
                Some(Phase::Ready) => self.resume(multiplexer, slot),
                // A slot that waits for an answer must not be freed before the answer.
                Some(Phase::Asked | Phase::Linking | Phase::Finishing) | None => {}
            }
        }
    }
}

/// Divides a request into parts and queues them for the store.
struct Sender<'a> {
    boxes: &'a mut sidecore_block::Batch,
    for_store: &'a mut StoreQueues,
    /// Whether the parts go through the filesystem.
    through: bool,
    quiescence: &'a mut crate::epochs::Quiescence,
    /// The store's unit of reads and writes.
    block_bytes: u64,
    slot: Slot,
    sent: usize,
}

impl Sender<'_> {
    /// Handles the next piece of the request's translation.
    fn take_piece(
        &mut self,
        parts: &mut Parts,
        piece: Piece,
        shift: u32,
        stop: &mut Option<Stop>,
    ) -> ControlFlow<()> {
        let operation = parts.request.operation;
        let start = piece.range.first.0.checked_shl(shift).unwrap_or(u64::MAX);
        let end = piece
            .range
            .first
            .0
            .saturating_add(piece.range.count)
            .checked_shl(shift)
            .unwrap_or(u64::MAX);
        let end = end.saturating_sub(parts.request.offset_bytes).min(parts.request.len_bytes);
        let reads = operation == Operation::Read;
        match (piece.mapping, &mut *stop) {
            // After missing blocks, only more missing blocks matter: they can be allocated
            // together.
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
                    *stop = Some(Stop::NoBoxes);
                }
                ControlFlow::Break(())
            }
            (Mapping::Hole, None) if operation != Operation::Write => {
                if reads {
                    // POSIX: a hole reads as zeros (thesis 5.3).
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

    /// Queues parts for the request's bytes up to `end_bytes`. They belong to an extent whose first
    /// byte is `start`, at block `physical`. False if there are too few boxes.
    fn send(
        &mut self,
        parts: &mut Parts,
        end_bytes: u64,
        physical: Plba,
        start: u64,
        shift: u32,
    ) -> bool {
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
                    // A piece of memory ends in the middle of a block: end the part before that
                    // block.
                    bound = part.segments.bind_part(&request.segments, parts.next_bytes, whole);
                }
                if bound == 0 {
                    // The guest divides a block into more pieces than a box has room for.
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
            self.for_store.push(part, self.through);
            self.sent = self.sent.saturating_add(1);
            parts.in_flight = parts.in_flight.saturating_add(1);
            parts.next_bytes = parts.next_bytes.saturating_add(bound);
        }
        true
    }

    /// Removes the last part from the queue; returns its offset on the store.
    fn take_back_last(&mut self, parts: &mut Parts) -> Option<u64> {
        let mut part = self.for_store.pop(self.through)?;
        let label = Label::from_bits(part.tag.take().map(sidecore_block::Tag::into_bits)?);
        self.quiescence.ended(label.parity, 1);
        self.sent = self.sent.saturating_sub(1);
        parts.in_flight = parts.in_flight.saturating_sub(1);
        let offset_bytes = part.offset_bytes;
        part.segments.release();
        self.boxes.push(part);
        Some(offset_bytes)
    }
}
