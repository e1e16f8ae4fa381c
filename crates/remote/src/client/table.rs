//! The requests of a session: each goes to the engine in one part or in several.

use std::collections::VecDeque;

use sidecore_block::{BlockError, BlockRequest, Operation};
use sidecore_memory::Segments;
use sidecore_units::Nanos;
use sidecore_vrio::Request;
use sidecore_vrio::wire::MAX_REQUEST_BYTES;

use crate::RequestData;
use crate::nic::NicBuffers;

/// The most bytes of a part with data.
const PART_BYTES: u64 = MAX_REQUEST_BYTES as u64;
/// The most bytes of a part without: its sectors are counted in 32 bits.
const RANGE_PART_BYTES: u64 = 1 << 40;
/// A tag is a slot, and above it the number of a part.
const SLOT_BITS: u32 = 16;

/// The number of a line, by which requests come and go back.
pub(super) type LineNumber = usize;

/// A request in a session.
#[derive(Debug, Default)]
struct Slot {
    /// `None` if the slot is free.
    request: Option<Box<BlockRequest>>,
    line: LineNumber,
    /// The device's number at the IOhost.
    device: u16,
    given_at: Nanos,
    /// The start of the next part.
    next_bytes: u64,
    /// Not all of it has gone to the engine.
    is_queued: bool,
    /// Parts that the engine has.
    in_flight: u32,
    result: Option<BlockError>,
}

/// A part for the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartOf {
    pub(super) tag: u64,
    pub(super) device: u16,
    pub(super) request: Request,
}

/// The requests of a session.
#[derive(Debug, Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Slots with parts for the engine. One part of each in turn, so that a long request does not
    /// keep the others waiting.
    queued: VecDeque<u16>,
    /// New requests are held: those that are here are the last ones for now.
    holds: bool,
    /// The requests that are held, in the order of their arrival.
    held: VecDeque<u16>,
    pub(super) nics: NicBuffers,
}

impl Table {
    /// Makes room for `total` requests, or for as many as there are names for.
    pub(super) fn reserve(&mut self, total: usize) {
        let first = self.slots.len();
        let end = total.min(usize::from(u16::MAX)).max(first);
        self.slots.resize_with(end, Slot::default);
        self.free.reserve(end);
        self.queued.reserve(end);
        self.held.reserve(end);
        self.free.extend((first..end).rev().filter_map(|slot| u16::try_from(slot).ok()));
    }

    /// Requests that are here.
    pub(super) fn len(&self) -> usize {
        self.slots.len().saturating_sub(self.free.len())
    }

    /// Whether a part waits for the engine.
    #[inline]
    pub(super) fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Requests that are held.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Requests that are here and are not held.
    pub(super) fn unanswered(&self) -> usize {
        self.len().saturating_sub(self.held.len())
    }

    /// Holds new requests from now on, or lets them go.
    pub(super) fn hold(&mut self, holds: bool) {
        self.holds = holds;
        if !holds {
            self.queued.append(&mut self.held);
        }
    }

    /// Takes a request for the device with this number; gives it back if there is no room.
    #[inline(always)]
    pub(super) fn insert(
        &mut self,
        now: Nanos,
        (line, device): (LineNumber, u16),
        request: Box<BlockRequest>,
    ) -> Result<(), Box<BlockRequest>> {
        let Some(number) = self.free.pop() else { return Err(request) };
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return Err(request) };
        *slot = Slot {
            request: Some(request),
            line,
            device,
            given_at: now,
            is_queued: true,
            ..Slot::default()
        };
        let queue = if self.holds { &mut self.held } else { &mut self.queued };
        queue.push_back(number);
        Ok(())
    }

    /// The part that is to go to the engine next. It has gone when [`sent`](Self::sent) is called.
    #[inline]
    pub(super) fn next_part(&self) -> Option<PartOf> {
        let number = *self.queued.front()?;
        let slot = self.slots.get(usize::from(number))?;
        let request = slot.request.as_ref()?;
        let rest_bytes = request.len_bytes.saturating_sub(slot.next_bytes);
        let most_bytes = part_bytes(request.operation);
        // Nearly all requests have one part: no division.
        let part = match slot.next_bytes {
            0 => 0,
            next_bytes => next_bytes.checked_div(most_bytes).unwrap_or(0),
        };
        Some(PartOf {
            tag: u64::from(number) | part.wrapping_shl(SLOT_BITS),
            device: slot.device,
            request: match request.operation {
                Operation::Flush => Request::FLUSH,
                operation => Request {
                    operation,
                    offset_bytes: request.offset_bytes.saturating_add(slot.next_bytes),
                    len_bytes: rest_bytes.min(most_bytes),
                    fua: request.write_through,
                },
            },
        })
    }

    /// The engine has the part of [`next_part`](Self::next_part). Returns whether the request has
    /// more of them.
    #[inline]
    pub(super) fn sent(&mut self, part: &PartOf) -> bool {
        let Some(number) = self.queued.pop_front() else { return false };
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return false };
        slot.in_flight = slot.in_flight.wrapping_add(1);
        slot.next_bytes = slot.next_bytes.wrapping_add(part.request.len_bytes);
        let len_bytes = slot.request.as_ref().map_or(0, |request| request.len_bytes);
        slot.is_queued = slot.next_bytes < len_bytes;
        if slot.is_queued {
            self.queued.push_back(number);
        }
        slot.is_queued
    }

    /// A part has ended. Returns the request and its line when it was the last one.
    #[inline(always)]
    pub(super) fn part_ended(
        &mut self,
        tag: u64,
        result: Result<(), BlockError>,
    ) -> Option<(LineNumber, Box<BlockRequest>)> {
        let number = number_of(tag);
        let slot = self.slots.get_mut(usize::from(number))?;
        slot.in_flight = slot.in_flight.saturating_sub(1);
        slot.result = slot.result.or(result.err());
        if slot.is_queued && slot.result.is_some() {
            // The rest would not save it.
            slot.is_queued = false;
            self.queued.retain(|queued| *queued != number);
        }
        self.take_if_over(number)
    }

    /// Fails what is queued and has no part at the engine, of one device or of all, with this
    /// error, and lets the others end as their parts do.
    pub(super) fn fail_queued(
        &mut self,
        device: Option<u16>,
        error: BlockError,
        ended: &mut Vec<(LineNumber, Box<BlockRequest>)>,
    ) {
        let queued = std::mem::take(&mut self.queued);
        self.queued = self.fail(queued, device, error, ended);
        self.fail_held(device, error, ended);
    }

    /// Fails requests that are held, of one device or of all.
    pub(super) fn fail_held(
        &mut self,
        device: Option<u16>,
        error: BlockError,
        ended: &mut Vec<(LineNumber, Box<BlockRequest>)>,
    ) {
        let held = std::mem::take(&mut self.held);
        self.held = self.fail(held, device, error, ended);
    }

    /// Fails requests of a queue, and returns the queue with the others.
    fn fail(
        &mut self,
        mut queue: VecDeque<u16>,
        device: Option<u16>,
        error: BlockError,
        ended: &mut Vec<(LineNumber, Box<BlockRequest>)>,
    ) -> VecDeque<u16> {
        queue.retain(|number| {
            if let Some(slot) = self.slots.get_mut(usize::from(*number)) {
                if device.is_some_and(|device| slot.device != device) {
                    return true;
                }
                slot.is_queued = false;
                slot.result = slot.result.or(Some(error));
            }
            ended.extend(self.take_if_over(*number));
            false
        });
        queue
    }

    #[inline]
    fn take_if_over(&mut self, number: u16) -> Option<(LineNumber, Box<BlockRequest>)> {
        let slot = self.slots.get_mut(usize::from(number))?;
        if slot.is_queued || slot.in_flight > 0 {
            return None;
        }
        let mut request = slot.request.take()?;
        request.result = slot.result.map_or(Ok(()), Err);
        self.free.push(number);
        Some((slot.line, request))
    }

    /// When the oldest request was given, of one line or of all.
    pub(super) fn oldest(&self, line: Option<LineNumber>) -> Option<Nanos> {
        let held = self.slots.iter().filter(|slot| slot.request.is_some());
        let of_line = held.filter(|slot| line.is_none_or(|line| slot.line == line));
        of_line.map(|slot| slot.given_at).min()
    }

    /// Whether a line has requests here.
    pub(super) fn has_requests_of(&self, line: LineNumber) -> bool {
        self.slots.iter().any(|slot| slot.request.is_some() && slot.line == line)
    }
}

impl RequestData for Table {
    #[inline]
    fn segments(&self, tag: u64) -> Option<&Segments> {
        if NicBuffers::is_name(tag) {
            return self.nics.segments(tag);
        }
        let slot = self.slots.get(usize::from(number_of(tag)))?;
        Some(&slot.request.as_ref()?.segments)
    }

    #[inline]
    fn first_byte(&self, tag: u64) -> u64 {
        if NicBuffers::is_name(tag) {
            return 0;
        }
        tag.wrapping_shr(SLOT_BITS).saturating_mul(PART_BYTES)
    }
}

#[allow(clippy::cast_possible_truncation)] // the bits of the slot
const fn number_of(tag: u64) -> u16 {
    tag as u16
}

const fn part_bytes(operation: Operation) -> u64 {
    match operation {
        Operation::Read | Operation::Write | Operation::Flush => PART_BYTES,
        Operation::Discard | Operation::WriteZeroes { .. } => RANGE_PART_BYTES,
    }
}
