//! Requests: which may be sent, their attempts, and their ends.

use sidecore_block::{BlockError, Operation};
use sidecore_units::Nanos;

use super::device::Device;
use super::entry::{Entry, Origin};
use super::slots::Slot;
use super::{Core, OWN_REQUESTS};
use crate::channel::Channel;
use crate::port::{Payload, Port, Seal};
use crate::request::result_of;
use crate::segmentation::{bits, segment_bytes};
use crate::wire::{AnswerBody, Kind, RequestBody, answer_state, request_flag, status};
use crate::{Reason, Request, Rule, Segmentation};

/// So many of the engine's own requests are left to replays; the others are flushes'.
const REPLAYS_MAX: u16 = OWN_REQUESTS - 8;
/// Tries after which a client gives up that neglects to leave errors to the owner.
const TRIES_MAX: u32 = 4;

/// How an entry fared that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// It has a slot now.
    Started,
    /// It has ended without one.
    Ended,
    /// It waits.
    Waits,
}

impl Core {
    /// Makes an entry of a request; `None` if there is none left.
    #[inline(always)]
    pub(super) fn accept(
        &mut self,
        origin: Origin,
        device: usize,
        request: Request,
    ) -> Option<u16> {
        let is_own = !matches!(origin, Origin::Guest { .. });
        if is_own && self.own_requests >= OWN_REQUESTS {
            return None;
        }
        let index = self.blank.pop()?;
        let order = self.next_order;
        self.next_order = order.wrapping_add(1);
        let entry = self.entries.get_mut(usize::from(index))?;
        *entry = Entry { origin, device, request, order, ..Entry::default() };
        if request.operation.is_write() {
            self.writes.add(index, origin == Origin::Replay, (device, order), &request);
        }
        self.own_requests = self.own_requests.saturating_add(u16::from(is_own));
        Some(index)
    }

    /// Makes an entry blank again, and returns its origin.
    #[inline(always)]
    fn release(&mut self, index: u16) -> Option<Origin> {
        let place = self.entries.get_mut(usize::from(index))?;
        // All of it is written when the next request gets the entry.
        let origin = std::mem::replace(&mut place.origin, Origin::None);
        if place.request.operation.is_write() {
            self.writes.remove(index);
        }
        let is_own = !matches!(origin, Origin::Guest { .. });
        self.own_requests = self.own_requests.saturating_sub(u16::from(is_own));
        self.blank.push(index);
        Some(origin)
    }

    /// Starts what can be started of the waiting entries, in their order.
    pub(super) fn start_waiting(&mut self, port: &mut impl Port) {
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front() else { return };
            if self.start(index, port) == Start::Waits {
                self.waiting.push_back(index);
            }
        }
    }

    /// Whether a request that waits, or a write that is to be replayed, may have its turn now.
    #[inline]
    pub(super) fn may_start(&self) -> bool {
        let has_own =
            |device: &Device| device.replay.is_some() || device.owes_flush() || device.is_claimed();
        let waits = || !self.waiting.is_empty() || self.devices.iter().any(has_own);
        self.looks_again && waits()
    }

    /// Sends writes of the replay logs again, in the order of their answers.
    pub(super) fn replay(&mut self, port: &mut impl Port) {
        for device in 0..self.devices.len() {
            while let Some(position) = self.next_replay(device) {
                if self.own_requests >= REPLAYS_MAX {
                    return;
                }
                let Some(log) = self.devices.get(device).map(|device| &device.log) else { break };
                let Some((record, request)) = log.at(position) else { break };
                let Some(index) = self.accept(Origin::Replay, device, request) else { return };
                if let Some(entry) = self.entries.get_mut(usize::from(index)) {
                    entry.record = Some(record);
                }
                match self.start(index, port) {
                    Start::Started => self.replay_started(device, 1),
                    Start::Ended => self.replay_started(device, 0),
                    Start::Waits => {
                        // The next one would overtake it.
                        self.release(index);
                        break;
                    }
                }
            }
        }
    }

    /// The position of the write that is to be replayed next.
    fn next_replay(&self, device: usize) -> Option<u64> {
        let device = self.devices.get(device)?;
        let replay = device.replay.filter(|replay| replay.next < replay.end)?;
        if self.options.neglected.keeps(Rule::ReplayOrder) {
            return Some(replay.next);
        }
        // From the last one to the first.
        let base = device.log.base();
        replay.end.checked_sub(replay.next.checked_sub(base)?.checked_add(1)?)
    }

    fn replay_started(&mut self, device: usize, unanswered: usize) {
        let Some(device) = self.devices.get_mut(device) else { return };
        if let Some(replay) = &mut device.replay {
            replay.next = replay.next.saturating_add(1);
            replay.unanswered = replay.unanswered.saturating_add(unanswered);
            self.stats.replayed.add(1);
        }
        device.end_replay();
        self.looks_again |= device.replay.is_none();
    }

    /// Gives an entry a slot, if nothing is in its way.
    #[inline]
    pub(super) fn start(&mut self, index: u16, port: &mut impl Port) -> Start {
        let Some(entry) = self.entries.get(usize::from(index)) else { return Start::Ended };
        let Some(device) = self.devices.get_mut(entry.device) else { return Start::Ended };
        let neglected = self.options.neglected;
        let may_go = match entry.origin {
            Origin::Replay => device.is_attached,
            Origin::Guest { .. } if device.claims => false,
            _ => device.is_ready() || (device.is_attached && !neglected.keeps(Rule::ReplayFirst)),
        };
        if !may_go {
            return Start::Waits;
        }
        let request = entry.request;
        let refusal = match request.operation {
            Operation::Flush => device.lost.take().map_or(Ok(()), Err),
            _ => request.check(&device.entry),
        };
        let segment = segment_bytes(self.frame_bytes, self.tag_bytes, device.entry.block_bytes);
        let cut = Segmentation::new(request.data_bytes(), segment, device.entry.block_bytes);
        let cut = match (refusal, cut) {
            (Ok(()), Some(cut)) => cut,
            (Err(error), _) => return self.refuse(index, error),
            (Ok(()), None) => return self.refuse(index, BlockError::OutOfBounds),
        };
        if neglected.keeps(Rule::Overlap) && !self.writes.is_empty() && self.is_held_back(index) {
            return Start::Waits;
        }
        let asked_frames = if request.operation == Operation::Read { cut.count() } else { 1 };
        let all_asked = self.asked_frames.wrapping_add(asked_frames);
        let has_room = self.asked_frames == 0 || all_asked <= self.options.receive_frames;
        if !has_room && neglected.keeps(Rule::ReceiveRing) {
            return Start::Waits;
        }
        let Some(number) = self.free_slots.lowest(self.slot_limit) else { return Start::Waits };
        if request.operation != Operation::Read {
            match self.keep(index, port) {
                Start::Started => {}
                other => return other,
            }
        }
        self.give_slot(index, number, (cut, asked_frames));
        Start::Started
    }

    fn refuse(&mut self, index: u16, error: BlockError) -> Start {
        self.end(index, Err(error));
        Start::Ended
    }

    /// Whether an entry overlaps a write that was accepted before it and is unanswered.
    #[inline]
    fn is_held_back(&mut self, index: u16) -> bool {
        let Some(entry) = self.entries.get(usize::from(index)) else { return false };
        if let Some((behind, order)) = entry.behind
            && self.writes.has(behind, order)
        {
            return true;
        }
        let is_replay = entry.origin == Origin::Replay;
        let behind = self.writes.in_the_way(is_replay, (entry.device, entry.order), &entry.request);
        let Some(entry) = self.entries.get_mut(usize::from(index)) else { return false };
        entry.behind = behind;
        if behind.is_some() && !std::mem::replace(&mut entry.was_held_back, true) {
            self.stats.held_back.add(1);
        }
        behind.is_some()
    }

    /// Keeps a private copy of a write that may be lost after its answer.
    #[inline]
    fn keep(&mut self, index: u16, port: &mut impl Port) -> Start {
        let Some(entry) = self.entries.get(usize::from(index)).copied() else {
            return Start::Ended;
        };
        let request = &entry.request;
        let Some(device) = self.devices.get_mut(entry.device) else { return Start::Ended };
        if request.operation == Operation::Flush {
            let covers = device.log.end();
            if let Some(entry) = self.entries.get_mut(usize::from(index)) {
                entry.covers = covers;
            }
            return Start::Started;
        }
        let Origin::Guest { tag } = entry.origin else { return Start::Started };
        if entry.record.is_some() || !request.operation.is_write() {
            return Start::Started;
        }
        if request.fua || !device.keeps_writes() {
            // It is durable, so there is no need to keep it. But an older write must not come back
            // over it in a replay: that one is made durable before.
            let overlaps = device.log.overlaps(request);
            return if overlaps { self.make_room(index, entry.device) } else { Start::Started };
        }
        let data_bytes =
            if request.operation == Operation::Write { request.data_bytes() } else { 0 };
        let Some(record) = device.log.reserve(request, data_bytes) else {
            return self.make_room(index, entry.device);
        };
        device
            .log
            .write(record, data_bytes, |offset_bytes, piece| port.load(tag, offset_bytes, piece));
        if let Some(entry) = self.entries.get_mut(usize::from(index)) {
            entry.record = Some(record);
        }
        Start::Started
    }

    /// Flushes, so that the replay log is empty for the write at `index`.
    fn make_room(&mut self, index: u16, number: usize) -> Start {
        let Some(device) = self.devices.get_mut(number) else { return Start::Ended };
        if device.is_flushing || device.log.base() == device.log.end() {
            return Start::Waits;
        }
        if let Some(error) = device.lost {
            // The last flush or a replay failed: so does the write that needs a flush. The caller's
            // next flush tells of the answered writes that are lost.
            return self.refuse(index, error);
        }
        self.flush(number);
        Start::Waits
    }

    #[inline(always)]
    fn give_slot(&mut self, index: u16, number: u16, (cut, asked_frames): (Segmentation, u32)) {
        let timeout = self.round_trip.timeout(&self.options.timing);
        let Some(entry) = self.entries.get_mut(usize::from(index)) else { return };
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return };
        entry.slot = Some(number);
        let has_payload = entry.request.has_payload();
        *slot = Slot {
            sequence: slot.sequence.wrapping_add(1),
            entry: Some(index),
            cut,
            segments: if has_payload { cut.all() } else { 0 },
            owes_frame: !has_payload,
            timeout,
            due: Nanos::MAX,
            is_listed: slot.is_listed,
            asked_frames,
            ..Slot::default()
        };
        self.free_slots.take(number);
        self.asked_frames = self.asked_frames.wrapping_add(asked_frames);
        self.list(number);
    }

    #[inline]
    fn list(&mut self, number: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return };
        if slot.owes() && !slot.is_listed {
            slot.is_listed = true;
            self.sending.push_back(number);
        }
    }

    /// Sends frames of slots, as far as the link has room.
    #[inline]
    pub(super) fn send_slots<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        port: &mut impl Port,
    ) {
        while let Some(number) = self.sending.front().copied() {
            self.has_room = match self.send_bundle(now, channel, port) {
                Some(was_sent) => was_sent,
                None => {
                    let was_sent = self.send_slot(now, number, channel, port);
                    if was_sent {
                        self.unlist();
                    }
                    was_sent
                }
            };
            if !self.has_room {
                return;
            }
        }
    }

    /// Takes the first slot out of the list of those that have something to send.
    #[inline]
    pub(super) fn unlist(&mut self) {
        let number = self.sending.pop_front();
        let slot = number.and_then(|number| self.slots.get_mut(usize::from(number)));
        if let Some(slot) = slot {
            slot.is_listed = false;
        }
    }

    fn send_slot<S: Seal>(
        &mut self,
        now: Nanos,
        number: u16,
        channel: &mut Channel<S>,
        port: &mut impl Port,
    ) -> bool {
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return true };
        let Some(entry) = slot.entry.and_then(|index| self.entries.get(usize::from(index))) else {
            return true;
        };
        let Some(device) = self.devices.get(entry.device) else { return true };
        let body = request_body(number, slot, entry, (device.entry.device, device.entry.epoch));
        let range = entry.request.range().encode();
        for segment in bits(slot.segments) {
            let Some((body, payload)) = segment_frame(slot, (entry, device), body, segment, &range)
            else {
                continue;
            };
            let rest = slot.segments & slot.segments.wrapping_sub(1);
            let body = body.encode();
            if !channel.send(port, Kind::Request, Some(&body), payload) {
                return false;
            }
            slot.segments = rest;
        }
        if slot.owes_frame {
            if !channel.send(port, Kind::Request, Some(&body.encode()), Payload::NONE) {
                return false;
            }
            slot.owes_frame = false;
        }
        self.next_due = self.next_due.min(slot.sent(now));
        true
    }

    /// Begins the next attempt of each request whose timer has ended.
    pub(super) fn expire(&mut self, now: Nanos) {
        self.next_due = Nanos::MAX;
        let mut next = 0;
        // The free ones are not looked at: they are most of some hundred cache lines.
        while let Some(number) = self.free_slots.next_taken(next) {
            next = number.saturating_add(1);
            let Some(slot) = self.slots.get_mut(usize::from(number)) else { return };
            let Some(index) = slot.entry.filter(|_| !slot.owes()) else { continue };
            if slot.due > now {
                self.next_due = self.next_due.min(slot.due);
                continue;
            }
            if slot.tries >= TRIES_MAX && !self.options.neglected.keeps(Rule::OwnersErrors) {
                self.end(index, Err(BlockError::EIO));
                continue;
            }
            let has_payload = self
                .entries
                .get(usize::from(index))
                .is_some_and(|entry| entry.request.has_payload());
            slot.next_attempt(has_payload, &self.options);
            let counter =
                if slot.is_acknowledged { &self.stats.asks } else { &self.stats.retransmissions };
            counter.add(1);
            self.list(number);
        }
    }

    /// Takes an ANSWER.
    pub(super) fn answer<P: Port>(
        &mut self,
        now: Nanos,
        is_newest: bool,
        body: &AnswerBody,
        payload_bytes: usize,
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        self.limits(is_newest, body.slot_limit, body.devices_version);
        let index = self.named(now, body)?;
        let entry = self.entries.get(usize::from(index)).ok_or(Reason::Unasked)?;
        let slot = self.slots.get_mut(usize::from(body.slot)).ok_or(Reason::Unasked)?;
        if entry.request.operation != Operation::Read {
            if payload_bytes > 0 {
                return Err(Reason::Segment);
            }
            self.end(index, result_of(body.status));
            return Ok(());
        }
        if body.attempt != slot.attempt && self.options.neglected.keeps(Rule::Attempts) {
            return Err(Reason::Attempt);
        }
        if body.status != status::OK {
            self.end(index, result_of(body.status));
            return Ok(());
        }
        let segment = slot.cut.index_of(body.offset_bytes, payload_bytes);
        let segment =
            segment.filter(|_| body.len_bytes == slot.cut.len_bytes()).ok_or(Reason::Segment)?;
        let bit = 1_u64.checked_shl(segment).unwrap_or(0);
        if slot.received & bit != 0 {
            return Err(Reason::Duplicate);
        }
        slot.received |= bit;
        // The IOhost sends the segments in their order.
        slot.has_gap = (1..bit).contains(&(slot.cut.all() & !slot.received));
        slot.due = now.after(slot.timeout);
        if slot.has_gap {
            slot.due = slot.due.min(now.after(self.round_trip.reordering()));
            self.next_due = self.next_due.min(slot.due);
        }
        if let Origin::Guest { tag } = entry.origin {
            port.store(received, tag, body.offset_bytes);
        }
        if slot.received == slot.cut.all() {
            self.end(index, Ok(()));
        }
        Ok(())
    }

    /// Takes a BUSY.
    pub(super) fn busy(
        &mut self,
        now: Nanos,
        is_newest: bool,
        body: &AnswerBody,
        payload_bytes: usize,
    ) -> Result<(), Reason> {
        self.limits(is_newest, body.slot_limit, body.devices_version);
        if payload_bytes > 0 {
            return Err(Reason::Malformed);
        }
        let index = self.named(now, body)?;
        let has_payload =
            self.entries.get(usize::from(index)).is_some_and(|entry| entry.request.has_payload());
        let ask_after = self.options.timing.ask_after;
        let slot = self.slots.get_mut(usize::from(body.slot)).ok_or(Reason::Unasked)?;
        if body.attempt != slot.attempt {
            return Err(Reason::Attempt);
        }
        match body.state {
            answer_state::ASSEMBLING if has_payload => {
                slot.segments |= body.segments & slot.cut.all();
                slot.due = now.after(slot.timeout);
            }
            answer_state::EXECUTING => {
                if !slot.is_acknowledged {
                    slot.timeout = ask_after;
                    slot.tries = 0;
                }
                slot.is_acknowledged = true;
                slot.segments = 0;
                slot.due = now.after(slot.timeout);
            }
            _ => return Err(Reason::Malformed),
        }
        self.next_due = self.next_due.min(slot.due);
        self.list(body.slot);
        Ok(())
    }

    /// The entry of the request that an ANSWER or a BUSY names. Measures the round trip, too.
    #[inline]
    fn named(&mut self, now: Nanos, body: &AnswerBody) -> Result<u16, Reason> {
        let slot = self.slots.get_mut(usize::from(body.slot)).ok_or(Reason::Unasked)?;
        let index = slot.entry.filter(|_| slot.sequence == body.sequence).ok_or(Reason::Unasked)?;
        let entry = self.entries.get(usize::from(index)).ok_or(Reason::Unasked)?;
        let device =
            self.devices.get(entry.device).filter(|device| device.entry.device == body.device);
        let device = device.ok_or(Reason::Unasked)?;
        if device.entry.epoch != body.epoch {
            return Err(Reason::Epoch);
        }
        if body.attempt == slot.attempt
            && !slot.owes()
            && !std::mem::replace(&mut slot.is_measured, true)
        {
            let taken = now.since(slot.sent_at);
            self.round_trip.sample(taken.since(Nanos(body.held_ns.into())));
            self.plan_telling(now);
        }
        Ok(index)
    }

    /// Ends a request.
    pub(super) fn end(&mut self, index: u16, result: Result<(), BlockError>) {
        let Some(origin) = self.release(index) else { return };
        self.looks_again = true;
        // Nothing but its origin has changed.
        let Some(entry) = self.entries.get(usize::from(index)) else { return };
        if let Some(number) = entry.slot {
            self.free_slot(number);
        }
        let Some(entry) = self.entries.get(usize::from(index)) else { return };
        let flush_covers = self.options.neglected.keeps(Rule::FlushCovers);
        let Some(device) = self.devices.get_mut(entry.device) else { return };
        if entry.request.operation == Operation::Flush && result.is_ok() {
            let covers = if flush_covers { entry.covers } else { device.log.end() };
            device.log.covered(covers);
        }
        match origin {
            Origin::Guest { tag } => {
                match entry.record {
                    Some(record) if result.is_ok() => device.log.answered(record),
                    Some(record) => device.log.cancel(record),
                    None => {}
                }
                self.guest_requests = self.guest_requests.saturating_sub(1);
                device.guest_requests = device.guest_requests.saturating_sub(1);
                self.stats.requests.add(1);
                self.completed.push_back((tag, result));
            }
            Origin::Replay => {
                if let Some(replay) = &mut device.replay {
                    replay.unanswered =
                        replay.unanswered.saturating_sub(usize::from(entry.slot.is_some()));
                }
                device.lost = device.lost.or(result.err());
                device.end_replay();
            }
            Origin::OwnFlush => {
                device.is_flushing = false;
                if let Err(error) = result {
                    self.stats.abandoned.add(device.flush_failed(entry.covers, error));
                    self.untold.devices |= device.is_untold;
                }
            }
            Origin::None => {}
        }
    }

    #[inline]
    fn free_slot(&mut self, number: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return };
        self.asked_frames = self.asked_frames.saturating_sub(slot.asked_frames);
        // All but the number is written when the next request gets the slot.
        slot.entry = None;
        (slot.segments, slot.owes_frame) = (0, false);
        self.free_slots.give(number);
    }

    /// The session is over: what the caller has submitted waits for the next one, in its order, and
    /// the engine's own requests are given up.
    pub(super) fn requeue(&mut self) {
        self.waiting.clear();
        self.given_up.clear();
        self.sending.clear();
        self.slots.fill(Slot::default());
        self.free_slots.reset(0);
        self.asked_frames = 0;
        self.next_due = Nanos::MAX;
        for index in 0..u16::try_from(self.entries.len()).unwrap_or(u16::MAX) {
            let Some(entry) = self.entries.get_mut(usize::from(index)) else { break };
            match entry.origin {
                Origin::None => {}
                Origin::Guest { .. } => {
                    entry.slot = None;
                    self.waiting.push_back(index);
                }
                Origin::Replay | Origin::OwnFlush => {
                    self.release(index);
                }
            }
        }
        let entries = &self.entries;
        let order = |index: &u16| entries.get(usize::from(*index)).map_or(0, |entry| entry.order);
        self.waiting.make_contiguous().sort_unstable_by_key(order);
    }
}

/// The frame of a segment of a slot's data, of a request with this body.
#[inline]
pub(super) fn segment_frame<'a>(
    slot: &Slot,
    (entry, device): (&Entry, &'a Device),
    body: RequestBody,
    segment: u32,
    range: &'a [u8],
) -> Option<(RequestBody, Payload<'a>)> {
    let (offset_bytes, len_bytes) = slot.cut.range(segment)?;
    let may_be_lost = slot.cut.count() > 1 || slot.attempt > 0;
    let is_last = slot.segments & slot.segments.wrapping_sub(1) == 0;
    // The last one asks for what is missing then.
    let ask = if is_last && may_be_lost { request_flag::ASK } else { 0 };
    let body = RequestBody { offset_bytes, flags: body.flags | ask, ..body };
    let payload = match (entry.request.operation, entry.record, entry.origin) {
        (Operation::Write, Some(record), _) => {
            Payload::Kept(device.log.read(record, offset_bytes, len_bytes))
        }
        (Operation::Write, None, Origin::Guest { tag }) => {
            Payload::Data { request: tag, offset_bytes, len_bytes }
        }
        _ => Payload::Message { message: range, len_bytes: range.len() },
    };
    Some((body, payload))
}

/// The body of a request's frames, but for the offset.
#[inline]
pub(super) fn request_body(
    number: u16,
    slot: &Slot,
    entry: &Entry,
    (device, epoch): (u16, u64),
) -> RequestBody {
    let flag = |is_set: bool, flag: u16| if is_set { flag } else { 0 };
    RequestBody {
        device,
        slot: number,
        epoch,
        sequence: slot.sequence,
        attempt: slot.attempt,
        flags: flag(entry.request.fua, request_flag::FUA)
            | flag(slot.asks, request_flag::ASK)
            | flag(entry.origin == Origin::Replay, request_flag::REPLAY),
        offset_bytes: 0,
        len_bytes: slot.cut.len_bytes(),
        wanted: if entry.request.operation == Operation::Read {
            slot.cut.all() & !slot.received
        } else {
            0
        },
        header: entry.request.header(),
    }
}
