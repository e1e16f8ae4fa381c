//! Frames of several requests, or of several answers.

use sidecore_memory::Segments;
use sidecore_vrio::port::{Part, Payload};

use super::RequestData;
use super::place::Target;

impl Target<'_> {
    /// Writes the parts of a bundle, which have `payload_bytes` together.
    #[inline]
    pub(super) fn put_parts<'a, D: RequestData>(
        mut self,
        payload_bytes: usize,
        parts: impl Iterator<Item = Part<'a>>,
        data: &D,
        list: &mut Segments,
    ) {
        let mut at = 0_usize;
        // An iterator that calls back hands no part over through memory. One loop for both targets,
        // which the compiler makes part of its caller.
        parts.for_each(|Part { head, payload }| {
            self.write_at(at, &head);
            at = at.wrapping_add(head.len());
            let len_bytes = payload.len_bytes();
            if len_bytes > 0 {
                self.put_at(at, payload, data, list);
                at = at.wrapping_add(len_bytes);
            }
        });
        if at < payload_bytes {
            let len_bytes = payload_bytes.saturating_sub(at);
            self.put_at(at, Payload::Message { message: &[], len_bytes }, data, list);
        }
    }
}
