//! The requests that a channel has under way.

use sidecore_block::{BlockError, BlockRequest, Detour, Tag};

use sidecore_extent::Extent;
use sidecore_units::Nanos;

use crate::mail::{GrantId, Slot};

/// Where a request stands that is more than one piece of I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It can go on: from the next byte, as soon as there are boxes for parts.
    Ready,
    /// The hypervisor side has been asked about the blocks from the next byte on.
    Asked,
    /// The data of a grant is on its way.
    Granted,
    /// That data is written; the hypervisor side maps it.
    Linking,
    /// All of it is done or on its way.
    Finishing,
}

/// Blocks that were allocated for a part of a request.
#[derive(Debug)]
pub(super) struct Grant {
    pub(super) id: GrantId,
    pub(super) extents: Vec<Extent>,
    /// First byte of the request behind it.
    pub(super) end_bytes: u64,
}

/// A request that goes to the store in parts.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) request: Box<BlockRequest>,
    pub(super) stage: Stage,
    /// The blocks that its next bytes go to, in stage `Granted`.
    pub(super) grant: Option<Grant>,
    /// Whether its whole blocks were unmapped already, if that is what it wants.
    pub(super) unmapped: bool,
    /// Where the last grant began, in the request: it may have to be done again.
    pub(super) grant_start_bytes: u64,
    /// Bytes of it, from its start, that are done or on their way.
    pub(super) next_bytes: u64,
    /// Parts on their way.
    pub(super) under_way: u32,
    pub(super) result: Result<(), BlockError>,
}

impl Parts {
    pub(super) fn new(request: Box<BlockRequest>) -> Self {
        Self {
            request,
            stage: Stage::Ready,
            grant: None,
            unmapped: false,
            grant_start_bytes: 0,
            next_bytes: 0,
            under_way: 0,
            result: Ok(()),
        }
    }

    /// Whether nothing more happens to it.
    pub(super) fn is_finished(&self) -> bool {
        self.under_way == 0 && matches!(self.stage, Stage::Finishing)
    }
}

/// The front end's part of a whole request that went to the store with a tag of the channel.
#[derive(Clone, Copy, Debug, Default)]
struct Whole {
    /// The bits of the front end's tag.
    tag: u64,
    offset_bytes: u64,
    detour: Detour,
}

/// As many slots as a channel's depth, for requests that need more than a detour. A slot holds one that went whole, or
/// one that goes in parts: apart, because the first kind is small.
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

    /// Sends a whole request to `offset_bytes`: its tag becomes a label. False, and nothing done, if it has no tag or all
    /// slots are taken.
    pub(super) fn send_whole(&mut self, request: &mut BlockRequest, offset_bytes: u64, parity: bool) -> bool {
        if request.tag.is_none() {
            return false;
        }
        let Some(slot) = self.free.pop() else { return false };
        let tag = request.tag.replace(Label { slot, part: false, parity }.into_tag()).map_or(0, Tag::into_bits);
        let offset_bytes = std::mem::replace(&mut request.offset_bytes, offset_bytes);
        let detour = std::mem::take(&mut request.detour);
        if let Some(place) = self.wholes.get_mut(slot as usize) {
            *place = Whole { tag, offset_bytes, detour };
        }
        true
    }

    /// Takes the whole request of `slot` back: its tag and offset are its own again, and the slot is free.
    pub(super) fn take_whole_back(&mut self, slot: Slot, request: &mut BlockRequest) {
        let Some(whole) = self.wholes.get(slot as usize) else { return };
        self.free.push(slot);
        request.tag = Some(Tag::from_bits(whole.tag));
        request.offset_bytes = whole.offset_bytes;
        request.detour = whole.detour;
    }

    /// Puts it into a free slot.
    ///
    /// # Errors
    /// There is none: it comes back.
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

    /// When the oldest request that goes in parts was taken.
    pub(super) fn oldest_in_parts(&self) -> Option<Nanos> {
        self.parts.iter().flatten().map(|parts| parts.request.taken_at).min()
    }

    /// How many are taken.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.wholes.len().saturating_sub(self.free.len())
    }
}

/// What a request on its way to the store is tagged with: its slot, whether it is a
/// part of the request there, and what the grace period wants to know.
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
