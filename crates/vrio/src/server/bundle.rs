//! Frames of several answers, or of several requests.

use sidecore_units::Nanos;

use super::slot::Slot;
use super::{Server, answer_to, place_of};
use crate::Reason;
use crate::channel::{Bundle, PART_DATA_MAX, take_parts};
use crate::port::{Part, Payload, Peer, Port, Seal};
use crate::wire::{AnswerBody, Kind, PART_HEADER_BYTES, RequestBody};

impl<S: Seal> Server<S> {
    /// Sends the first slots of those that owe something in one frame. False if the link has no
    /// room; `None` if the first slot has a frame, or several, of its own.
    pub(super) fn send_bundle(&mut self, now: Nanos, port: &mut impl Port) -> Option<bool> {
        if !self.has_bundles || self.sending.len() < 2 {
            return None;
        }
        let room_bytes = self.channel.bundle_bytes(self.terms.frame_bytes);
        let bundle = Bundle::of(room_bytes, &self.sending, |index| {
            part_bytes(self.slots.get(usize::from(index))?)
        })?;
        let (place, limits) = (self.place, (self.limit(), self.devices_version));
        let Self { channel, slots, .. } = self;
        let parts = bundle.slots().iter().filter_map(|index| {
            let slot = slots.get(usize::from(*index))?;
            part(slot, place_of(place, *index), &answer_to(slot, now, limits))
        });
        if !channel.send_bundle(port, bundle.payload_bytes, parts) {
            return Some(false);
        }
        self.sending.drain(..bundle.slots().len());
        for index in bundle.slots() {
            if let Some(slot) = self.slots.get_mut(usize::from(*index)) {
                (slot.segments, slot.owes_answer, slot.owes_busy) = (0, false, false);
                slot.is_listed = false;
            }
        }
        self.announced = self.credit();
        Some(true)
    }

    /// Takes a BUNDLE of requests. Each part fares as if it had come alone.
    pub(super) fn bundle<P: Port>(
        &mut self,
        (now, from): (Nanos, Peer),
        all_bytes: usize,
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        if !self.has_bundles {
            return Err(Reason::Kind);
        }
        take_parts(all_bytes, received, port, |part, received, port| {
            if part.kind != Kind::Request {
                return Err(Reason::Kind);
            }
            let body = RequestBody::decode(&part.body);
            let frame = (&body, part.payload_bytes);
            if let Err(reason) = self.request((now, from), frame, received, port) {
                self.stats.count_drop(reason);
            }
            Ok(())
        })
    }
}

/// Size of the part that is all that a slot owes; `None` if that is more, or too long.
#[inline]
fn part_bytes(slot: &Slot) -> Option<usize> {
    if slot.segments == 0 {
        let is_busy = slot.owes_busy && slot.is_unfinished();
        return (slot.owes_answer != is_busy).then_some(PART_HEADER_BYTES);
    }
    if slot.owes_busy || slot.owes_answer || !slot.segments.is_power_of_two() {
        return None;
    }
    let (_, len_bytes) = slot.cut.range(slot.segments.trailing_zeros())?;
    let is_short = len_bytes <= PART_DATA_MAX;
    is_short.then_some(PART_HEADER_BYTES.saturating_add(len_bytes as usize))
}

/// The part of a slot whose data are `place`'s and whose request `answer` names.
#[inline]
fn part<'a>(slot: &Slot, place: u64, answer: &AnswerBody) -> Option<Part<'a>> {
    if slot.owes_answer {
        let body = AnswerBody { status: slot.status, ..*answer };
        return Some(Part::new(Kind::Answer, &body.encode(), Payload::NONE));
    }
    if slot.segments == 0 {
        return Some(Part::new(Kind::Busy, &slot.busy(answer).encode(), Payload::NONE));
    }
    let (offset_bytes, len_bytes) = slot.cut.range(slot.segments.trailing_zeros())?;
    let body = AnswerBody { offset_bytes, len_bytes: slot.cut.len_bytes(), ..*answer };
    let payload = Payload::Data { request: place, offset_bytes, len_bytes };
    Some(Part::new(Kind::Answer, &body.encode(), payload))
}
