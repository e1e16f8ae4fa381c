//! The requests in a channel that need more than a detour.

use sidecore_block::{BlockError, BlockRequest, Detour, Tag};

use sidecore_extent::Extent;
use sidecore_units::Nanos;

use crate::mail::{GrantId, Slot};

/// The state of a request that consists of several operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its next byte can be translated, as soon as there are boxes for parts.
    Ready,
    /// The hypervisor side was asked about the blocks from the next byte on.
    Asked,
    /// The data of a grant is being written.
    Granted,
    /// That data is written; the hypervisor side maps the blocks.
    Linking,
    /// All of its parts are complete or in flight.
    Finishing,
}

/// Blocks that were allocated for a part of a request.
#[derive(Debug)]
pub(super) struct Grant {
    pub(super) id: GrantId,
    pub(super) extents: Vec<Extent>,
    /// The end of the grant: a byte offset in the request.
    pub(super) end_bytes: u64,
}

/// A request that is submitted in parts.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) request: Box<BlockRequest>,
    pub(super) phase: Phase,
    /// The blocks for its next bytes, in state `Granted`.
    pub(super) grant: Option<Grant>,
    /// Whether the whole blocks of a zeroing request were unmapped already.
    pub(super) unmapped: bool,
    /// The start of the last grant, in bytes of the request: the grant may have to be repeated.
    pub(super) grant_start_bytes: u64,
    /// Bytes of the request, from its start, that are complete or in flight.
    pub(super) next_bytes: u64,
    /// Parts in flight.
    pub(super) in_flight: u32,
    pub(super) result: Result<(), BlockError>,
}

impl Parts {
    pub(super) fn new(request: Box<BlockRequest>) -> Self {
        Self {
            request,
            phase: Phase::Ready,
            grant: None,
            unmapped: false,
            grant_start_bytes: 0,
            next_bytes: 0,
            in_flight: 0,
            result: Ok(()),
        }
    }

    /// Whether the request can be completed.
    pub(super) fn is_finished(&self) -> bool {
        self.in_flight == 0 && matches!(self.phase, Phase::Finishing)
    }
}

/// The front end's fields of a whole request that was submitted with a tag of the channel.
#[derive(Clone, Copy, Debug, Default)]
struct Whole {
    /// The bits of the front end's tag.
    tag: u64,
    offset_bytes: u64,
    detour: Detour,
}

/// As many slots as a channel's depth, for requests that need more than a detour. A slot holds a
/// request that was submitted whole, or in parts: in separate arrays, because the first kind is
/// small.
#[derive(Debug)]
pub(super) struct Slots {
    wholes: Vec<Whole>,
    parts: Vec<Option<Parts>>,
    free: Vec<Slot>,
}

impl Slots {
    pub(super) fn new(depth: usize) -> Self {
        let count = u32::try_from(depth).unwrap_or(u32::MAX);
        Self {
            wholes: (0..count).map(|_| Whole::default()).collect(),
            parts: (0..count).map(|_| None).collect(),
            free: (0..count).rev().collect(),
        }
    }

    /// Redirects a whole request to `offset_bytes`: a label replaces its tag. False, and nothing
    /// done, if it has no tag or no slot is free.
    pub(super) fn send_whole(
        &mut self,
        request: &mut BlockRequest,
        offset_bytes: u64,
        parity: bool,
    ) -> bool {
        if request.tag.is_none() {
            return false;
        }
        let Some(slot) = self.free.pop() else { return false };
        let tag = request
            .tag
            .replace(Label { slot, part: false, parity }.into_tag())
            .map_or(0, Tag::into_bits);
        let offset_bytes = std::mem::replace(&mut request.offset_bytes, offset_bytes);
        let detour = std::mem::take(&mut request.detour);
        if let Some(place) = self.wholes.get_mut(slot as usize) {
            *place = Whole { tag, offset_bytes, detour };
        }
        true
    }

    /// Restores the tag and offset of the whole request of `slot`, and frees the slot.
    pub(super) fn take_whole_back(&mut self, slot: Slot, request: &mut BlockRequest) {
        let Some(whole) = self.wholes.get(slot as usize) else { return };
        self.free.push(slot);
        request.tag = Some(Tag::from_bits(whole.tag));
        request.offset_bytes = whole.offset_bytes;
        request.detour = whole.detour;
    }

    /// Moves a request into a free slot.
    ///
    /// # Errors
    /// No slot is free; the request is returned.
    pub(super) fn insert_parts(&mut self, parts: Parts) -> Result<Slot, Parts> {
        let Some(slot) = self.free.pop() else { return Err(parts) };
        if let Some(place) = self.parts.get_mut(slot as usize) {
            *place = Some(parts);
        }
        Ok(slot)
    }

    /// Empties a slot.
    pub(super) fn take_parts(&mut self, slot: Slot) -> Option<Parts> {
        let parts = self.parts.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(parts)
    }

    pub(super) fn parts(&mut self, slot: Slot) -> Option<&mut Parts> {
        self.parts.get_mut(slot as usize)?.as_mut()
    }

    /// When the oldest request in parts was accepted.
    pub(super) fn oldest_in_parts(&self) -> Option<Nanos> {
        self.parts.iter().flatten().map(|parts| parts.request.taken_at).min()
    }

    /// The number of slots in use.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.wholes.len().saturating_sub(self.free.len())
    }
}

/// The tag of a request below this channel: its slot, whether it is a part of the request there,
/// and its parity for epoch-based reclamation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label {
    pub(super) slot: Slot,
    pub(super) part: bool,
    pub(super) parity: bool,
}

impl Label {
    #[inline]
    pub(super) const fn into_tag(self) -> Tag {
        Tag::from_bits((self.slot as u64) << 2 | (self.part as u64) << 1 | self.parity as u64)
    }

    #[inline]
    pub(super) const fn from_bits(bits: u64) -> Self {
        Self { slot: (bits >> 2) as Slot, part: bits & 2 != 0, parity: bits & 1 != 0 }
    }
}
