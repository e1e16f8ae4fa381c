//! Parts of requests: each with a private copy of its data, and a unit for intents.

use std::io;

use sidecore_block::{BlockError, BlockRequest, Operation, Tag as RequestTag};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, SharedPages};

use crate::journal::Parity;
use crate::table::Place;
use crate::tag::Tag;

/// The most blocks of a part.
pub(crate) const PART_BLOCKS: usize = 16;
/// Room for the data of a part.
const DATA_BYTES: u64 = 64 << 10;
/// Room for the data of a part and a unit of intents.
const PART_BYTES: u64 = DATA_BYTES + 4096;

/// The number of a part.
pub(crate) type Number = usize;

/// The owner of a request at the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Label {
    /// A guest's read.
    Read(Place),
    /// The data of a part.
    Data(Number),
    /// The intents of a part and of those behind it.
    Intents(Number),
    /// The flush of these intents.
    IntentsFlush(Number),
    /// A unit of tags of the checkpoint.
    Unit(usize),
    /// A flush of the checkpoint.
    Flush,
}

const KINDS: u64 = 8;

impl Label {
    #[inline]
    pub(crate) fn tag(self) -> RequestTag {
        let word = |kind: u64, number: usize| (number as u64).wrapping_mul(KINDS) | kind;
        RequestTag::from_bits(match self {
            Self::Read(place) => word(0, place),
            Self::Data(number) => word(1, number),
            Self::Intents(number) => word(2, number),
            Self::IntentsFlush(number) => word(3, number),
            Self::Unit(number) => word(4, number),
            Self::Flush => word(5, 0),
        })
    }

    #[inline]
    pub(crate) fn of(request: &BlockRequest) -> Option<Self> {
        let bits = request.tag.as_ref()?.bits();
        let number = usize::try_from(bits / KINDS).ok()?;
        Some(match bits % KINDS {
            0 => Self::Read(number),
            1 => Self::Data(number),
            2 => Self::Intents(number),
            3 => Self::IntentsFlush(number),
            4 => Self::Unit(number),
            _ => Self::Flush,
        })
    }
}

/// The data that a part moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Work {
    /// A read of blocks that are not written meanwhile.
    #[default]
    Read,
    Write,
    /// A write of zeros.
    Zero,
    /// A write that has failed with this error: the blocks are read to see its effect.
    Look(BlockError),
}

/// Blocks of a request that are held.
#[derive(Default)]
pub(crate) struct Part {
    pub(crate) of: Place,
    pub(crate) skip_bytes: u64,
    pub(crate) work: Work,
    pub(crate) first: u64,
    pub(crate) count: usize,
    /// The tags of the blocks before the write, and after it.
    pub(crate) old: [Tag; PART_BLOCKS],
    pub(crate) new: [Tag; PART_BLOCKS],
    pub(crate) parity: Parity,
    /// The next part whose intents are in the same slot.
    pub(crate) next: Option<Number>,
    /// `None` while the store has it.
    data: Option<Box<BlockRequest>>,
    intents: Option<Box<BlockRequest>>,
}

impl Part {
    /// The blocks, with their tags before the write and after it.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u64, Tag, Tag)> {
        let tags = self.old.iter().zip(&self.new).take(self.count);
        (self.first..).zip(tags).map(|(block, (old, new))| (block, *old, *new))
    }
}

/// The parts of a channel.
pub(crate) struct Parts {
    parts: Vec<Part>,
    free: Vec<Number>,
    pages: SharedPages,
}

impl Parts {
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let len_bytes = (count as u64).checked_mul(PART_BYTES);
        let len_bytes = len_bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let len_bytes = len_bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let blank = || {
            let request = || Some(BlockRequest::blank(1));
            Part { data: request(), intents: request(), ..Part::default() }
        };
        Ok(Self {
            parts: std::iter::repeat_with(blank).take(count).collect(),
            free: (0..count).rev().collect(),
            pages: SharedPages::new("sidecore-integrity", len_bytes)?,
        })
    }

    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether a part is in use.
    pub(crate) fn has_used(&self) -> bool {
        self.free.len() < self.parts.len()
    }

    #[inline]
    pub(crate) fn take(&mut self) -> Option<Number> {
        self.free.pop()
    }

    #[inline]
    pub(crate) fn give_back(&mut self, number: Number) {
        self.free.push(number);
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: Number) -> Option<&mut Part> {
        self.parts.get_mut(number)
    }

    /// The request for the data of a part, with `len_bytes` of its pages.
    #[inline]
    pub(crate) fn data(&mut self, number: Number, len_bytes: u64) -> Option<Box<BlockRequest>> {
        let mut request = self.parts.get_mut(number)?.data.take()?;
        bind(&mut request, self.pages.memory(), (number, 0), len_bytes);
        request.tag = Some(Label::Data(number).tag());
        Some(request)
    }

    /// The request for the intents of a part, with `len_bytes` of its pages.
    #[inline]
    pub(crate) fn intents(&mut self, number: Number, len_bytes: u64) -> Option<Box<BlockRequest>> {
        let mut request = self.parts.get_mut(number)?.intents.take()?;
        bind(&mut request, self.pages.memory(), (number, DATA_BYTES), len_bytes);
        request.operation = Operation::Write;
        request.tag = Some(Label::Intents(number).tag());
        Some(request)
    }

    #[inline]
    pub(crate) fn put_data(&mut self, number: Number, mut request: Box<BlockRequest>) {
        request.tag.take().map(RequestTag::into_bits);
        if let Some(part) = self.parts.get_mut(number) {
            part.data = Some(request);
        }
    }

    #[inline]
    pub(crate) fn put_intents(&mut self, number: Number, mut request: Box<BlockRequest>) {
        request.tag.take().map(RequestTag::into_bits);
        if let Some(part) = self.parts.get_mut(number) {
            part.intents = Some(request);
        }
    }
}

/// Has a request refer to pages of a part.
#[inline]
fn bind(
    request: &mut BlockRequest,
    pages: &GuestMemory,
    (number, skip_bytes): (Number, u64),
    len_bytes: u64,
) {
    request.result = Ok(());
    request.len_bytes = len_bytes;
    request.segments.bind(pages);
    if len_bytes > 0 {
        let start = (number as u64).saturating_mul(PART_BYTES).saturating_add(skip_bytes);
        // The pages are one region, of which this is a part.
        let hint = &mut RegionHint::default();
        let pushed = request.segments.push(GuestAddress(start), len_bytes, hint);
        debug_assert!(pushed.is_ok(), "{pushed:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_names_its_owner() {
        for label in [
            Label::Read(0),
            Label::Read(70),
            Label::Data(3),
            Label::Intents(0),
            Label::IntentsFlush(9),
            Label::Unit(31),
            Label::Flush,
        ] {
            let mut request = BlockRequest::blank(0);
            request.tag = Some(label.tag());
            assert_eq!(Label::of(&request), Some(label));
            request.tag.take().map(RequestTag::into_bits);
        }
    }
}
