//! Frames of several requests, or of several answers.

use sidecore_link::Pieces;
use sidecore_vrio::port::{Part, Payload};

use super::{LinkPort, Place, RequestData, copy};

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
        for Part { head, payload } in parts {
            at =
                at.saturating_add(Place::of(pieces, &self.memory, &mut self.hint).write(at, &head));
            let len_bytes = payload.len_bytes();
            if len_bytes > 0 {
                self.put(pieces, at, payload);
                at = at.saturating_add(len_bytes);
            }
        }
        if at < end {
            let len_bytes = end.saturating_sub(at);
            self.put(pieces, at, Payload::Message { message: &[], len_bytes });
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
