//! The bytes of frames, and the ways of payloads into them.

use sidecore_link::Pieces;
use sidecore_memory::{GuestMemory, Part, RegionHint, Segments, Span};
use sidecore_vrio::port::Payload;

use super::{RequestData, place};

/// Written behind a message, and in place of data that does not exist.
const ZEROS: [u8; 4096] = [0; 4096];

/// Where a payload is written.
pub(super) enum Target<'a> {
    /// To a frame, from a byte on.
    Frame(Place<'a>, usize),
    /// To private memory of its size, where it is sealed.
    Scratch(&'a mut [u8]),
}

impl Target<'_> {
    /// Writes a payload from byte `at` of the target on.
    #[inline]
    pub fn put_at<D: RequestData>(
        &mut self,
        at: usize,
        payload: Payload<'_>,
        data: &D,
        list: &mut Segments,
    ) {
        match self {
            Self::Frame(frame, from) => put(frame, from.saturating_add(at), payload, data, list),
            Self::Scratch(to) => {
                let rest = to.get_mut(at..).unwrap_or_default();
                let to = rest.get_mut(..payload.len_bytes()).unwrap_or_default();
                put_in_scratch(to, payload, data);
            }
        }
    }

    /// Writes bytes from byte `at` of the target on.
    #[inline]
    pub fn write_at(&mut self, at: usize, bytes: &[u8]) {
        match self {
            Self::Frame(frame, from) => frame.write(from.saturating_add(at), bytes),
            Self::Scratch(to) => copy(to.get_mut(at..).unwrap_or_default(), bytes),
        };
    }
}

/// Writes a payload to a frame, from byte `at` on.
#[inline]
fn put<D: RequestData>(
    frame: &Place<'_>,
    at: usize,
    payload: Payload<'_>,
    data: &D,
    list: &mut Segments,
) {
    let end = at.saturating_add(payload.len_bytes());
    let done = match payload {
        Payload::Message { message, .. } => frame.write(at, message),
        Payload::Kept(kept) => kept.fold(0, |done: usize, piece| {
            done.saturating_add(frame.write(at.saturating_add(done), piece))
        }),
        Payload::Data { request, offset_bytes, len_bytes } => {
            let len_bytes = len_bytes as usize;
            match (place(data, request, offset_bytes), frame) {
                (Some((segments, from)), Place::Span(span)) => {
                    span.copy_from((at, len_bytes), segments, from)
                }
                (Some((segments, skip_bytes)), Place::Pieces(pieces, memory)) => {
                    list.bind(memory);
                    let part = Part { skip_bytes, len_bytes };
                    let is_bound = pieces.push_to(list, at, len_bytes).is_ok();
                    if is_bound { segments.copy_to(part, list, 0) } else { 0 }
                }
                (None, _) => 0,
            }
        }
    };
    let mut at = at.saturating_add(done);
    while let Some(zeros) = ZEROS.get(..end.saturating_sub(at).min(ZEROS.len()))
        && !zeros.is_empty()
    {
        let written = frame.write(at, zeros);
        if written == 0 {
            break;
        }
        at = at.saturating_add(written);
    }
}

/// Copies a payload to private memory of its size.
fn put_in_scratch<D: RequestData>(to: &mut [u8], payload: Payload<'_>, data: &D) {
    let done = match payload {
        Payload::Message { message, .. } => copy(to, message),
        Payload::Kept(kept) => kept.fold(0, |done: usize, piece| {
            let rest = to.get_mut(done..).unwrap_or_default();
            done.saturating_add(copy(rest, piece))
        }),
        Payload::Data { request, offset_bytes, .. } => {
            let place = place(data, request, offset_bytes);
            place.map_or(0, |(segments, at)| segments.copy_to_slice(at, to))
        }
    };
    to.get_mut(done..).unwrap_or_default().fill(0);
}

/// The bytes of a frame: in one piece on most links.
pub(super) enum Place<'a> {
    Span(Span<'a>),
    Pieces(&'a Pieces, &'a GuestMemory),
}

impl<'a> Place<'a> {
    #[inline]
    pub fn of(pieces: &'a Pieces, memory: &'a GuestMemory, hint: &mut RegionHint) -> Self {
        pieces.span(memory, hint).map_or(Self::Pieces(pieces, memory), Self::Span)
    }

    /// Reads from byte `at` on. Returns the number of bytes.
    #[inline]
    pub fn read(&self, at: usize, to: &mut [u8]) -> usize {
        match self {
            Self::Span(span) => span.read(at, to),
            Self::Pieces(pieces, memory) => pieces.read(memory, at, to),
        }
    }

    /// Writes to byte `at` and after. Returns the number of bytes.
    #[inline]
    pub fn write(&self, at: usize, from: &[u8]) -> usize {
        match self {
            Self::Span(span) => span.write(at, from),
            Self::Pieces(pieces, memory) => pieces.write(memory, at, from),
        }
    }
}

/// Copies as much as there is in one and room in the other.
pub(super) fn copy(to: &mut [u8], from: &[u8]) -> usize {
    let len = to.len().min(from.len());
    if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
        to.copy_from_slice(from);
    }
    len
}
