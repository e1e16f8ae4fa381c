//! Frames of several requests, or of several answers.

use sidecore_block::Operation;
use sidecore_units::Nanos;

use super::Core;
use super::requests::{request_body, segment_frame};
use crate::Reason;
use crate::channel::{Bundle, Channel, PART_DATA_MAX, take_parts};
use crate::port::{Part, Payload, Port, Seal};
use crate::wire::{AnswerBody, Kind, PART_HEADER_BYTES};

impl Core {
    /// Sends the first slots of those that have something to send in one frame. False if the link
    /// has no room; `None` if the first slot has a frame, or several, of its own.
    pub(super) fn send_bundle<S: Seal>(
        &mut self,
        now: Nanos,
        channel: &mut Channel<S>,
        port: &mut impl Port,
    ) -> Option<bool> {
        if !self.has_bundles || self.sending.len() < 2 {
            return None;
        }
        let room_bytes = channel.bundle_bytes(self.frame_bytes);
        let bundle = Bundle::of(room_bytes, &self.sending, |number| self.part_bytes(number))?;
        let parts = bundle.slots().iter().filter_map(|number| self.part(*number));
        if !channel.send_bundle(port, bundle.payload_bytes, parts) {
            return Some(false);
        }
        self.sending.drain(..bundle.slots().len());
        for number in bundle.slots() {
            if let Some(slot) = self.slots.get_mut(usize::from(*number)) {
                (slot.segments, slot.owes_frame, slot.is_listed) = (0, false, false);
                self.next_due = self.next_due.min(slot.sent(now));
            }
        }
        Some(true)
    }

    /// Size of the part that is all that a slot has to send; `None` if that is more, or too long.
    #[inline]
    fn part_bytes(&self, number: u16) -> Option<usize> {
        let slot = self.slots.get(usize::from(number))?;
        let entry = self.entries.get(usize::from(slot.entry?))?;
        self.devices.get(entry.device)?;
        if slot.segments == 0 {
            return slot.owes_frame.then_some(PART_HEADER_BYTES);
        }
        let is_one = slot.segments.is_power_of_two() && !slot.owes_frame;
        if !is_one || entry.request.operation != Operation::Write {
            return None;
        }
        let (_, len_bytes) = slot.cut.range(slot.segments.trailing_zeros())?;
        let is_short = len_bytes <= PART_DATA_MAX;
        is_short.then_some(PART_HEADER_BYTES.saturating_add(len_bytes as usize))
    }

    #[inline]
    fn part(&self, number: u16) -> Option<Part<'_>> {
        let slot = self.slots.get(usize::from(number))?;
        let entry = self.entries.get(usize::from(slot.entry?))?;
        let device = self.devices.get(entry.device)?;
        let body = request_body(number, slot, entry, (device.entry.device, device.entry.epoch));
        let (body, payload) = if slot.segments == 0 {
            (body, Payload::NONE)
        } else {
            segment_frame(slot, (entry, device), body, slot.segments.trailing_zeros(), &[])?
        };
        Some(Part::new(Kind::Request, &body.encode(), payload))
    }

    /// Takes a BUNDLE of answers. Each part fares as if it had come alone.
    pub(super) fn bundle<P: Port>(
        &mut self,
        now: Nanos,
        is_newest: bool,
        all_bytes: usize,
        received: &mut P::Received,
        port: &mut P,
    ) -> Result<(), Reason> {
        if !self.has_bundles {
            return Err(Reason::Kind);
        }
        take_parts(all_bytes, received, port, |part, received, port| {
            let (body, payload_bytes) = (AnswerBody::decode(&part.body), part.payload_bytes);
            let taken = match part.kind {
                Kind::Answer => self.answer(now, is_newest, &body, payload_bytes, received, port),
                Kind::Busy => self.busy(now, is_newest, &body, payload_bytes),
                _ => return Err(Reason::Kind),
            };
            if let Err(reason) = taken {
                self.stats.count_drop(reason);
            }
            Ok(())
        })
    }
}
