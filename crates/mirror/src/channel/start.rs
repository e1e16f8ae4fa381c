//! Requests that start, as far as the plan, regions, overlaps and parts allow.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore_block::{BlockError, Operation, Tag};
use sidecore_units::Nanos;

use super::{Blocked, MirrorChannel, count};
use crate::legs::LegSet;
use crate::mail::Message;
use crate::parts::{Label, Number, PART_BYTES};
use crate::rules::Rule;
use crate::table::Place;

/// Bytes that are copied out of guest memory in one poll.
const POLL_BYTES: u64 = 256 << 10;
/// The most bytes of a part without data: what it holds of overlaps takes time, too.
const ZEROES_BYTES: u64 = 4 << 20;

/// The progress of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// All of it has started.
    Started,
    /// A part of it has started, and there is more.
    More,
    /// It has to wait.
    Blocked,
}

impl MirrorChannel {
    /// Starts queued requests, as many as can be.
    pub(super) fn start(&mut self, now: Nanos) {
        let is_new = self.shared.plan().version != self.plan.version;
        if self.table.queued.is_empty() && !is_new {
            return;
        }
        let gauge = Arc::clone(&self.gauge);
        let (plan, parity) = gauge.enter(&self.shared);
        if plan.version != self.plan.version {
            self.adopt(plan);
        }
        self.blocked = Blocked { by_keeper: plan.is_paused, by_others: false };
        let mut copied_bytes = 0_u64;
        let mut has_progress = !plan.is_paused;
        while std::mem::take(&mut has_progress) {
            for _ in 0..self.table.queued.len() {
                let Some(place) = self.table.queued.pop_front() else { break };
                let progress = self.start_next(place, parity, &mut copied_bytes);
                // A part may have failed at once, and its request with it.
                let is_queued = self.table.get(place).is_some_and(|entry| entry.is_queued);
                if progress != Progress::Started && is_queued {
                    self.table.queued.push_back(place);
                    has_progress |= progress == Progress::More;
                }
            }
        }
        gauge.leave();
        for line in self.lines.iter_mut().flatten() {
            if !line.outbound.is_empty() {
                line.channel.submit(now, &mut line.outbound);
            }
        }
    }

    fn start_next(&mut self, place: Place, parity: usize, copied_bytes: &mut u64) -> Progress {
        let Some(request) = self.table.get(place).and_then(|entry| entry.request.as_deref()) else {
            return Progress::Started;
        };
        match request.operation {
            Operation::Read => self.start_read(place),
            Operation::Flush => self.start_flush(place),
            _ => self.start_part(place, parity, copied_bytes),
        }
    }

    /// Sends a read to the leg that is read, or to another one that has not failed it.
    fn start_read(&mut self, place: Place) -> Progress {
        let Some(entry) = self.table.get_mut(place) else { return Progress::Started };
        entry.is_queued = false;
        let others = self.plan.required.without(entry.tried);
        let leg = if others.has(self.plan.read) { Some(self.plan.read) } else { others.lowest() };
        let line = leg.and_then(|leg| Some((leg, self.lines.get_mut(leg)?.as_mut()?)));
        let Some(mut request) = entry.request.take() else { return Progress::Started };
        let Some((leg, line)) = line else {
            request.result = Err(BlockError::EIO);
            (entry.tag, entry.offset_bytes) =
                (request.tag.take().map(Tag::into_bits), request.offset_bytes);
            let request = self.table.read_ended(place, request);
            self.ended.push(request);
            return Progress::Started;
        };
        entry.offset_bytes = request.offset_bytes;
        entry.tag = request.tag.take().map(Tag::into_bits);
        request.offset_bytes = request.offset_bytes.saturating_add(self.shared.layout.data_bytes);
        request.tag = Some(Label::Read(place, leg).tag());
        line.outbound.push(request);
        self.gauge.did(1);
        Progress::Started
    }

    fn start_flush(&mut self, place: Place) -> Progress {
        let Some((number, part)) = self.parts.take() else { return Progress::Blocked };
        (part.of, part.offset_bytes, part.len_bytes) = (place, 0, 0);
        part.is_flush = true;
        if let Some(entry) = self.table.get_mut(place) {
            entry.is_queued = false;
        }
        self.send(place, number, Operation::Flush, self.plan.required);
        Progress::Started
    }

    /// Starts the next part of a write, or of a range to be zeroed.
    fn start_part(&mut self, place: Place, parity: usize, copied_bytes: &mut u64) -> Progress {
        let Some(entry) = self.table.get(place) else { return Progress::Started };
        let Some(request) = entry.request.as_deref() else { return Progress::Started };
        let has_data = request.operation == Operation::Write;
        let operation = match request.operation {
            // Legs may discard in ways of their own; zeros are the same on each.
            Operation::Discard => Operation::WriteZeroes { may_unmap: true },
            other => other,
        };
        let skip_bytes = entry.next_bytes;
        let offset_bytes = request.offset_bytes.saturating_add(skip_bytes);
        let most_bytes = if has_data { PART_BYTES } else { ZEROES_BYTES };
        let rest_bytes = request.len_bytes.saturating_sub(skip_bytes);
        let len_bytes = rest_bytes.min(most_bytes);
        if !self.parts.has_free() {
            return Progress::Blocked;
        }
        if *copied_bytes >= POLL_BYTES {
            self.blocked.by_others = true;
            return Progress::Blocked;
        }
        if !self.are_open(place, offset_bytes, len_bytes)
            && self.shared.neglected.keeps(Rule::MarkFirst)
        {
            self.blocked.by_keeper = true;
            return Progress::Blocked;
        }
        let may_overlap = !self.shared.neglected.keeps(Rule::Overlap);
        if !self.shared.stripes.hold(offset_bytes, len_bytes) && !may_overlap {
            self.blocked.by_others = true;
            return Progress::Blocked;
        }
        let Some((number, part)) = self.parts.take() else { return Progress::Blocked };
        (part.of, part.offset_bytes, part.len_bytes) = (place, offset_bytes, len_bytes);
        (part.is_flush, part.parity) = (false, parity);
        let legs = self.legs_of(offset_bytes, len_bytes);
        if has_data {
            *copied_bytes = copied_bytes.saturating_add(len_bytes);
            self.copy(place, number, skip_bytes);
        }
        let has_more = len_bytes < rest_bytes;
        if let Some(entry) = self.table.get_mut(place) {
            entry.next_bytes = skip_bytes.saturating_add(len_bytes);
            entry.is_queued = has_more;
        }
        self.send(place, number, operation, legs);
        if has_more { Progress::More } else { Progress::Started }
    }

    /// Makes the private copy of a part.
    fn copy(&mut self, place: Place, number: Number, skip_bytes: u64) {
        if let Some(request) = self.table.get(place).and_then(|entry| entry.request.as_deref()) {
            // The request was checked: its memory is as long as its range.
            let is_whole = self.parts.fill(number, &request.segments, skip_bytes);
            debug_assert!(is_whole, "a request of less memory than bytes");
        }
    }

    /// Whether writes to these regions may start; asks the keeper to open them otherwise.
    fn are_open(&mut self, place: Place, offset_bytes: u64, len_bytes: u64) -> bool {
        let (first, end) = self.shared.layout.regions_of(offset_bytes, len_bytes);
        let openings = self.shared.openings.load(Ordering::Acquire);
        if (first..end).all(|region| self.shared.open.has(region)) {
            for region in first..end {
                if !self.shared.touched.has(region) {
                    self.shared.touched.set(region);
                }
            }
            return true;
        }
        if let Some(entry) = self.table.get_mut(place)
            && entry.asked != Some(openings)
        {
            entry.asked = Some(openings);
            let _ = self.shared.keeper.send(Message::Open(first, end));
        }
        false
    }

    /// The legs that a write goes to: those in sync, and the one that is copied to if it has one of
    /// the write's regions already.
    fn legs_of(&self, offset_bytes: u64, len_bytes: u64) -> LegSet {
        let (first, end) = self.shared.layout.regions_of(offset_bytes, len_bytes);
        if self.plan.copied.is_empty() {
            return self.plan.required;
        }
        // The other regions are copied later, with these bytes.
        let is_equal = (first..end).any(|region| self.shared.equal.has(region));
        if is_equal { self.plan.required.with(self.plan.copied) } else { self.plan.required }
    }

    /// Queues the requests of a part for its legs.
    fn send(&mut self, place: Place, number: Number, operation: Operation, legs: LegSet) {
        let data_bytes = self.shared.layout.data_bytes;
        for leg in legs.numbers() {
            let Some(line) = self.lines.get_mut(leg).and_then(Option::as_mut) else {
                // It could not be opened, and the keeper knows.
                if let Some(part) = self.parts.get_mut(number) {
                    part.failed = part.failed.with(LegSet::of(leg));
                    part.error = part.error.or(Some(BlockError::EIO));
                }
                continue;
            };
            let Some(mut request) = self.parts.request(number, leg, operation, data_bytes) else {
                continue;
            };
            if let Some(entry) = self.table.get(place)
                && let Some(of) = entry.request.as_deref()
            {
                request.taken_at = of.taken_at;
                if operation == Operation::Write && !self.shared.neglected.keeps(Rule::PrivateCopy)
                {
                    let at = request.offset_bytes.saturating_sub(data_bytes);
                    let skip_bytes = at.saturating_sub(of.offset_bytes);
                    request.segments.bind_part(&of.segments, skip_bytes, request.len_bytes);
                }
            }
            line.outbound.push(request);
        }
        if let Some(entry) = self.table.get_mut(place) {
            entry.in_flight = entry.in_flight.saturating_add(1);
        }
        let Some(part) = self.parts.get_mut(number) else { return };
        let (is_flush, parity, is_nowhere) = (part.is_flush, part.parity, part.pending.is_empty());
        if is_nowhere {
            return self.conclude(number);
        }
        count(&self.gauge, is_flush, parity, 1);
    }
}
