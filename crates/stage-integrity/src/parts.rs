//! Parts of requests: each with a private copy of its data, and a unit for intents.

use std::io;

use sidecore_block::{
    BlockError, BlockRequest, BounceParts, Operation, PartNumber as Number, Place,
    Tag as RequestTag,
};

use crate::journal::Parity;
use crate::tag::Tag;

/// The most blocks of a part.
pub(crate) const PART_BLOCKS: usize = 16;
/// Room for the data of a part.
const DATA_BYTES: u64 = 64 << 10;
/// Room for the data of a part and a unit of intents.
const PART_BYTES: u64 = DATA_BYTES + 4096;

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
    /// A request of the opening.
    Opening,
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
            Self::Opening => word(6, 0),
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
            5 => Self::Flush,
            _ => Self::Opening,
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
    /// A write that has failed with this error: the blocks are read to see its effect, so many more
    /// times if that fails.
    Look(BlockError, u8),
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
pub(crate) struct Parts(BounceParts<Part>);

impl Parts {
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        let blank = || {
            let request = || Some(BlockRequest::blank(1));
            Part { data: request(), intents: request(), ..Part::default() }
        };
        Ok(Self(BounceParts::new("sidecore-integrity", count, PART_BYTES, blank)?))
    }

    pub(crate) fn has_free(&self) -> bool {
        self.0.has_free()
    }

    /// Whether a part is in use.
    pub(crate) fn has_used(&self) -> bool {
        self.0.has_used()
    }

    #[inline]
    pub(crate) fn take(&mut self) -> Option<Number> {
        self.0.take()
    }

    #[inline]
    pub(crate) fn give_back(&mut self, number: Number) {
        self.0.give_back(number);
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: Number) -> Option<&mut Part> {
        self.0.get_mut(number)
    }

    /// The request for the data of a part, with `len_bytes` of its pages.
    #[inline]
    pub(crate) fn data(&mut self, number: Number, len_bytes: u64) -> Option<Box<BlockRequest>> {
        let mut request = self.0.get_mut(number)?.data.take()?;
        self.0.bind(&mut request, (number, 0), len_bytes);
        request.len_bytes = len_bytes;
        request.tag = Some(Label::Data(number).tag());
        Some(request)
    }

    /// The request for the intents of a part, with `len_bytes` of its pages.
    #[inline]
    pub(crate) fn intents(&mut self, number: Number, len_bytes: u64) -> Option<Box<BlockRequest>> {
        let mut request = self.0.get_mut(number)?.intents.take()?;
        self.0.bind(&mut request, (number, DATA_BYTES), len_bytes);
        request.len_bytes = len_bytes;
        request.operation = Operation::Write;
        request.tag = Some(Label::Intents(number).tag());
        Some(request)
    }

    #[inline]
    pub(crate) fn put_data(&mut self, number: Number, mut request: Box<BlockRequest>) {
        request.tag.take().map(RequestTag::into_bits);
        if let Some(part) = self.0.get_mut(number) {
            part.data = Some(request);
        }
    }

    #[inline]
    pub(crate) fn put_intents(&mut self, number: Number, mut request: Box<BlockRequest>) {
        request.tag.take().map(RequestTag::into_bits);
        if let Some(part) = self.0.get_mut(number) {
            part.intents = Some(request);
        }
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
            Label::Opening,
        ] {
            let mut request = BlockRequest::blank(0);
            request.tag = Some(label.tag());
            assert_eq!(Label::of(&request), Some(label));
            request.tag.take().map(RequestTag::into_bits);
        }
    }
}
