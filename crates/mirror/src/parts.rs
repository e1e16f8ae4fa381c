//! Parts of requests: what goes to several legs, from one private copy.

use std::io;

use sidecore_block::{BlockError, BlockRequest, Operation, Tag};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, Segments, SharedPages};

use crate::legs::{LegSet, MAX_LEGS};
use crate::table::Place;

/// The most bytes of a part with data.
pub(crate) const PART_BYTES: u64 = 64 << 10;

/// The number of a part.
pub(crate) type Number = usize;

/// A part: a piece of a write, a range to be zeroed, or a flush.
pub(crate) struct Part {
    pub(crate) of: Place,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    pub(crate) is_flush: bool,
    /// Of writes, at its start.
    pub(crate) parity: usize,
    /// Legs that it is at.
    pub(crate) pending: LegSet,
    /// Legs that have it.
    pub(crate) done: LegSet,
    /// Legs that have failed it.
    pub(crate) failed: LegSet,
    pub(crate) error: Option<BlockError>,
    /// Whether its request has been told of its end.
    pub(crate) is_answered: bool,
    /// A request for each leg; `None` if there is no such leg, or the request is there.
    requests: [Option<Box<BlockRequest>>; MAX_LEGS],
}

impl Part {
    fn blank() -> Self {
        Self {
            of: 0,
            offset_bytes: 0,
            len_bytes: 0,
            is_flush: false,
            parity: 0,
            pending: LegSet::EMPTY,
            done: LegSet::EMPTY,
            failed: LegSet::EMPTY,
            error: None,
            is_answered: false,
            requests: Default::default(),
        }
    }
}

/// The parts of a channel, each with pages of its own.
pub(crate) struct Parts {
    parts: Vec<Part>,
    free: Vec<Number>,
    /// Parts that the keeper has to decide about.
    pub(crate) held: Vec<Number>,
    pages: SharedPages,
}

/// The leg and the part, or the read, that a request at a leg is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Label {
    Part(Number, usize),
    Read(Place, usize),
}

const READ: u64 = 1 << 63;

impl Label {
    #[inline]
    pub(crate) fn tag(self) -> Tag {
        let word = |number: usize, leg: usize| (number as u64) << 8 | leg as u64;
        Tag::from_bits(match self {
            Self::Part(number, leg) => word(number, leg),
            Self::Read(place, leg) => word(place, leg) | READ,
        })
    }

    #[inline]
    pub(crate) fn from_bits(bits: u64) -> Self {
        let number = usize::try_from((bits & !READ) >> 8).unwrap_or(usize::MAX);
        let leg = usize::try_from(bits & 0xff).unwrap_or(MAX_LEGS);
        if bits & READ == 0 { Self::Part(number, leg) } else { Self::Read(number, leg) }
    }
}

impl Parts {
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let too_many = || io::Error::from(io::ErrorKind::OutOfMemory);
        let part_bytes = usize::try_from(PART_BYTES).map_err(|_| too_many())?;
        let len_bytes = count.checked_mul(part_bytes).ok_or_else(too_many)?;
        Ok(Self {
            parts: (0..count).map(|_| Part::blank()).collect(),
            free: (0..count).rev().collect(),
            held: Vec::with_capacity(count),
            pages: SharedPages::new("sidecore-mirror", len_bytes)?,
        })
    }

    /// The pages of all parts.
    pub(crate) fn memory(&self) -> &GuestMemory {
        self.pages.memory()
    }

    /// Makes requests for a leg. Allocates the first time.
    pub(crate) fn add_leg(&mut self, leg: usize) {
        for part in &mut self.parts {
            if let Some(place) = part.requests.get_mut(leg)
                && !part.pending.has(leg)
            {
                place.get_or_insert_with(|| BlockRequest::blank(1));
            }
        }
    }

    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a free part.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<(Number, &mut Part)> {
        let number = self.free.pop()?;
        let part = self.parts.get_mut(number)?;
        part.pending = LegSet::EMPTY;
        part.done = LegSet::EMPTY;
        part.failed = LegSet::EMPTY;
        part.error = None;
        part.is_answered = false;
        Some((number, part))
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: Number) -> Option<&mut Part> {
        self.parts.get_mut(number)
    }

    /// Gives a part back that no leg has any more.
    #[inline]
    pub(crate) fn give_back(&mut self, number: Number) {
        self.free.push(number);
    }

    /// Copies the guest's data of a part that was taken to its pages. False if the guest's memory
    /// is too short.
    #[inline]
    pub(crate) fn fill(&mut self, number: Number, guest: &Segments, skip_bytes: u64) -> bool {
        let Some(part) = self.parts.get_mut(number) else { return false };
        let Ok(len_bytes) = usize::try_from(part.len_bytes) else { return false };
        let Some(request) = part.requests.iter_mut().flatten().next() else { return false };
        bind(request, self.pages.memory(), number, part.len_bytes);
        let whole = sidecore_memory::Part { skip_bytes, len_bytes };
        guest.copy_to(whole, &request.segments, 0) == len_bytes
    }

    /// The request of a part for one leg, whose data starts at `data_bytes`. `None` if there is no
    /// such leg.
    #[inline]
    pub(crate) fn request(
        &mut self,
        number: Number,
        leg: usize,
        operation: Operation,
        data_bytes: u64,
    ) -> Option<Box<BlockRequest>> {
        let part = self.parts.get_mut(number)?;
        let mut request = part.requests.get_mut(leg)?.take()?;
        request.operation = operation;
        request.offset_bytes = match operation {
            Operation::Flush => 0,
            _ => part.offset_bytes.saturating_add(data_bytes),
        };
        request.len_bytes = part.len_bytes;
        let copied_bytes = if operation == Operation::Write { part.len_bytes } else { 0 };
        bind(&mut request, self.pages.memory(), number, copied_bytes);
        request.write_through = false;
        request.result = Ok(());
        request.tag = Some(Label::Part(number, leg).tag());
        part.pending = part.pending.with(LegSet::of(leg));
        Some(request)
    }

    /// Takes a request back from a leg, with its result.
    #[inline]
    pub(crate) fn came_back(
        &mut self,
        number: Number,
        leg: usize,
        request: Box<BlockRequest>,
    ) -> Option<&mut Part> {
        let part = self.parts.get_mut(number)?;
        part.pending = part.pending.without(LegSet::of(leg));
        match request.result {
            Ok(()) => part.done = part.done.with(LegSet::of(leg)),
            Err(error) => {
                part.failed = part.failed.with(LegSet::of(leg));
                part.error = part.error.or(Some(error));
            }
        }
        *part.requests.get_mut(leg)? = Some(request);
        Some(part)
    }
}

/// Has a request refer to the pages of a part.
#[inline]
fn bind(request: &mut BlockRequest, pages: &GuestMemory, number: Number, len_bytes: u64) {
    request.segments.bind(pages);
    if len_bytes > 0 {
        let start = GuestAddress((number as u64).saturating_mul(PART_BYTES));
        // The pages are one region, of which this is a part.
        let pushed = request.segments.push(start, len_bytes, &mut RegionHint::default());
        debug_assert!(pushed.is_ok(), "{pushed:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_names_its_part_or_read_and_the_leg() {
        for label in [Label::Part(0, 0), Label::Part(77, 7), Label::Read(0, 1), Label::Read(9, 7)] {
            assert_eq!(Label::from_bits(label.tag().into_bits()), label);
        }
    }
}
