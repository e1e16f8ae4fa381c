//! Checkpoints: all writes that have ended become durable, with their tags.
//!
//! A checkpoint begins an era, and waits for the writes of the last one. In rounds it copies the
//! tags of some units, flushes the store, and writes the copies: so no tag is written before its
//! data is durable. When the tags are durable, too, the slots of the last era are free.

use std::io;

use sidecore_block::{BlockError, BlockRequest, Operation, Tag};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};

use super::IntegrityChannel;
use crate::journal::Parity;
use crate::layout::Layout;
use crate::parts::Label;
use crate::rules::Rule;
use crate::tag::{SECTOR_BYTES, TAGS_PER_SECTOR, encode_sector};

/// Units of a round.
const ROUND: usize = 32;
/// Requests of a checkpoint at the store, at once.
pub(super) const MOST_REQUESTS: usize = ROUND + 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    /// Writes of the last era are in flight.
    Drain,
    /// Data is being flushed, for the units of this round.
    DataFlush,
    /// Units are being written.
    Units,
    /// The tags are being flushed.
    LastFlush,
}

/// See the module.
pub(super) struct Checkpoint {
    phase: Phase,
    number: u64,
    /// Of the last era.
    parity: Parity,
    /// The first unit that has not been looked at.
    next: u64,
    /// The units of this round.
    units: [u64; ROUND],
    count: usize,
    /// Units of this round at the store.
    pending: usize,
    has_flushed: bool,
    has_written: bool,
    has_failed: bool,
    requests: Vec<Option<Box<BlockRequest>>>,
    flush: Option<Box<BlockRequest>>,
    pages: SharedPages,
}

impl Checkpoint {
    pub(super) fn new(layout: &Layout) -> io::Result<Self> {
        let unit_bytes = usize::try_from(layout.unit_bytes).unwrap_or(SECTOR_BYTES);
        let len_bytes = unit_bytes.saturating_mul(ROUND);
        Ok(Self {
            phase: Phase::Idle,
            number: 0,
            parity: 0,
            next: 0,
            units: [0; ROUND],
            count: 0,
            pending: 0,
            has_flushed: false,
            has_written: false,
            has_failed: false,
            requests: (0..ROUND).map(|_| Some(BlockRequest::blank(1))).collect(),
            flush: Some(BlockRequest::blank(1)),
            pages: SharedPages::new("sidecore-integrity-tags", len_bytes)?,
        })
    }

    pub(super) fn is_active(&self) -> bool {
        self.phase != Phase::Idle
    }

    fn begin(&mut self, number: u64, parity: Parity) {
        self.phase = Phase::Drain;
        (self.number, self.parity, self.next) = (number, parity, 0);
        (self.has_flushed, self.has_written, self.has_failed) = (false, false, false);
    }
}

impl IntegrityChannel {
    /// Answers flushes whose checkpoint has ended.
    pub(super) fn answer_flushes(&mut self) {
        let ended = self.shared.journal.ended();
        let has_failed = self.shared.journal.has_failed();
        for index in (0..self.flushes.len()).rev() {
            let Some((place, begun)) = self.flushes.get(index).copied() else { continue };
            // One that began after the flush has all writes that had ended before it.
            let result = match ended > begun {
                true => Ok(()),
                false if has_failed && !self.checkpoint.is_active() => Err(BlockError::EIO),
                false => continue,
            };
            self.flushes.swap_remove(index);
            self.table.part_began(place, 0);
            self.ended.extend(self.table.part_ended(place, result));
        }
    }

    /// Begins a checkpoint if one is wanted, and goes on with it.
    pub(super) fn advance_checkpoint(&mut self) {
        if !self.checkpoint.is_active() {
            let is_wanted = self.wants_checkpoint || !self.flushes.is_empty();
            if !is_wanted {
                return;
            }
            if self.shared.journal.has_failed() {
                self.is_blocked = true;
                return;
            }
            let Some(number) = self.shared.journal.begin() else {
                // Another channel makes one.
                self.is_blocked = true;
                return;
            };
            self.checkpoint.begin(number, self.shared.journal.turn());
        }
        if self.checkpoint.phase != Phase::Drain {
            return;
        }
        if self.shared.journal.has_failed() {
            // A write of the last era may never end. The next poll answers the flushes.
            self.is_blocked = true;
            return self.end_checkpoint(false);
        }
        let is_drained = self.shared.journal.is_drained(self.checkpoint.parity);
        if !is_drained && self.shared.neglected.keeps(Rule::Drain) {
            self.is_blocked = true;
            return;
        }
        self.next_round();
    }

    /// Copies the tags of the next dirty units.
    fn next_round(&mut self) {
        self.checkpoint.count = 0;
        for index in 0..ROUND {
            let Some(unit) = self.shared.tags.take_dirty(self.checkpoint.next) else { break };
            self.checkpoint.next = unit.saturating_add(1);
            if let Some(place) = self.checkpoint.units.get_mut(index) {
                *place = unit;
            }
            self.checkpoint.count = index.saturating_add(1);
            self.copy_unit(index, unit);
        }
        if self.checkpoint.count == 0 {
            return self.last_flush();
        }
        if self.shared.neglected.keeps(Rule::DataThenTag) {
            return self.send_flush(Phase::DataFlush);
        }
        self.send_units();
    }

    fn unit_at(&self, unit: u64) -> u64 {
        let skip_bytes = unit.saturating_mul(self.shared.layout.unit_bytes.into());
        self.shared.layout.tags_at().saturating_add(skip_bytes)
    }

    /// Copies the tags of a unit, as they are now, to its pages.
    fn copy_unit(&mut self, index: usize, unit: u64) {
        let layout = self.shared.layout;
        let at_bytes = self.unit_at(unit);
        let first = unit.saturating_mul(layout.tags_per_unit());
        for (sector, bytes) in (0..).zip(self.unit.chunks_exact_mut(SECTOR_BYTES)) {
            let at_bytes = at_bytes.saturating_add((SECTOR_BYTES as u64).saturating_mul(sector));
            let first = first.saturating_add(TAGS_PER_SECTOR.saturating_mul(sector));
            let tag_of = |block| self.shared.tags.get(block);
            encode_sector(&self.shared.sums, at_bytes, bytes, tag_of, first);
        }
        let at = (index as u64).saturating_mul(layout.unit_bytes.into());
        let memory = self.checkpoint.pages.memory();
        let put = memory.write_slice(GuestAddress(at), &self.unit, &mut RegionHint::default());
        debug_assert!(put.is_ok(), "{put:?}");
    }

    fn send_units(&mut self) {
        self.checkpoint.phase = Phase::Units;
        self.checkpoint.has_written = true;
        let unit_bytes = u64::from(self.shared.layout.unit_bytes);
        for index in 0..self.checkpoint.count {
            let unit = self.checkpoint.units.get(index).copied().unwrap_or(0);
            let offset_bytes = self.unit_at(unit);
            let checkpoint = &mut self.checkpoint;
            let request = checkpoint.requests.get_mut(index).and_then(Option::take);
            let Some(mut request) = request else { continue };
            request.operation = Operation::Write;
            (request.offset_bytes, request.len_bytes) = (offset_bytes, unit_bytes);
            request.write_through = self.writes_through;
            request.result = Ok(());
            request.tag = Some(Label::Unit(index).tag());
            request.segments.bind(checkpoint.pages.memory());
            let start = GuestAddress((index as u64).saturating_mul(unit_bytes));
            let pushed = request.segments.push(start, unit_bytes, &mut RegionHint::default());
            debug_assert!(pushed.is_ok(), "{pushed:?}");
            checkpoint.pending = checkpoint.pending.saturating_add(1);
            self.outbound.push(request);
        }
    }

    pub(super) fn unit_came_back(&mut self, index: usize, mut request: Box<BlockRequest>) {
        request.tag.take().map(Tag::into_bits);
        let checkpoint = &mut self.checkpoint;
        checkpoint.has_failed |= request.result.is_err();
        checkpoint.pending = checkpoint.pending.saturating_sub(1);
        if let Some(place) = checkpoint.requests.get_mut(index) {
            *place = Some(request);
        }
        if checkpoint.pending > 0 {
            return;
        }
        if checkpoint.has_failed || self.shared.journal.has_failed() {
            return self.end_checkpoint(false);
        }
        self.next_round();
    }

    /// Makes the tags durable, and the data if no round has.
    fn last_flush(&mut self) {
        let Checkpoint { has_flushed, has_written, .. } = self.checkpoint;
        let is_volatile = self.shared.is_volatile && !self.writes_through;
        let has_volatile_tags = has_written && is_volatile;
        let is_kept = self.shared.neglected.keeps(Rule::TagThenReuse);
        if !has_flushed || (has_volatile_tags && is_kept) {
            return self.send_flush(Phase::LastFlush);
        }
        self.end_checkpoint(true);
    }

    fn send_flush(&mut self, phase: Phase) {
        self.checkpoint.phase = phase;
        self.checkpoint.has_flushed = true;
        let Some(mut request) = self.checkpoint.flush.take() else { return };
        request.operation = Operation::Flush;
        request.result = Ok(());
        request.tag = Some(Label::Flush.tag());
        self.outbound.push(request);
    }

    pub(super) fn checkpoint_flushed(&mut self, mut request: Box<BlockRequest>) {
        request.tag.take().map(Tag::into_bits);
        // An error of the kernel is reported once: this flush may have succeeded because another
        // queue's has had it.
        let has_failed = request.result.is_err() || self.shared.journal.has_failed();
        self.checkpoint.flush = Some(request);
        match self.checkpoint.phase {
            _ if has_failed => self.end_checkpoint(false),
            Phase::DataFlush => self.send_units(),
            _ => self.end_checkpoint(true),
        }
    }

    fn end_checkpoint(&mut self, has_succeeded: bool) {
        self.checkpoint.phase = Phase::Idle;
        let has_succeeded = has_succeeded && !self.shared.journal.has_failed();
        if has_succeeded {
            self.shared.tags.are_durable();
        } else {
            self.fail_store("the checksums could not be made durable");
        }
        self.shared.journal.end(self.checkpoint.number, has_succeeded);
    }

    /// Has all later writes and flushes fail: what the store holds is known when it is opened
    /// again.
    #[cold]
    pub(super) fn fail_store(&mut self, reason: &str) {
        self.shared.journal.fail();
        self.shared.findings.fail(format!(
            "all writes and flushes fail: {reason}; end the VMM of this virtio-blk or NVMe disk \
             and start it again, or restart the daemon: the store is opened again then"
        ));
    }

    /// Ends a checkpoint whose channel is dropped.
    pub(super) fn abandon_checkpoint(&mut self) {
        if self.checkpoint.is_active() {
            self.end_checkpoint(false);
        }
    }
}
