//! Frames of several requests, or of several answers.

use sidecore_link::Pieces;
use sidecore_vrio::port::{Part, Payload};

use super::{LinkPort, Place, RequestData, copy, put};

impl<D: RequestData> LinkPort<D> {
    /// Writes the parts of a bundle to a frame, from byte `at` on.
    #[inline]
    pub(super) fn put_parts<'a>(
        &mut self,
        pieces: &Pieces,
        mut at: usize,
        payload_bytes: usize,
        parts: impl Iterator<Item = Part<'a>>,
    ) {
        let end = at.saturating_add(payload_bytes);
        let Self { data, memory, hint, list, .. } = self;
        let frame = Place::of(pieces, memory, hint);
        for Part { head, payload } in parts {
            at = at.saturating_add(frame.write(at, &head));
            let len_bytes = payload.len_bytes();
            if len_bytes > 0 {
                put(&frame, at, payload, data, list);
                at = at.saturating_add(len_bytes);
            }
        }
        if at < end {
            let zeros = Payload::Message { message: &[], len_bytes: end.saturating_sub(at) };
            put(&frame, at, zeros, data, list);
        }
    }

    /// Copies the parts of a bundle to the scratch buffer.
    pub(super) fn put_parts_in_scratch<'a>(
        &mut self,
        payload_bytes: usize,
        parts: impl Iterator<Item = Part<'a>>,
    ) {
        let mut at = 0_usize;
        for Part { head, payload } in parts {
            at = at.saturating_add(copy(self.scratch.get_mut(at..).unwrap_or_default(), &head));
            let len_bytes = payload.len_bytes();
            self.put_in_scratch(at, payload);
            at = at.saturating_add(len_bytes);
        }
        self.scratch.get_mut(at..payload_bytes).unwrap_or_default().fill(0);
    }
}
