//! Mappings and blocks on their way to be mapped.

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::Plba;

use crate::info::VolumeId;

/// A range of consecutive physical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PhysicalRange {
    /// The first one.
    pub first: Plba,
    /// How many there are.
    pub count: u64,
}

/// An answer of [`Volumes::map`](crate::Volumes::map).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The mappings in `covered`, in order; the rest of `covered` is a hole.
    pub extents: Vec<Extent>,
    /// The first part of the range asked for, as far as the answer goes.
    pub covered: BlockRange,
}

/// Blocks that are neither free nor mapped: a guest's data is written to them first, and then they
/// are [linked](crate::Volumes::link).
///
/// Linear: it has to go to `link` or to [`release`](crate::Volumes::release). Blocks of a dropped
/// grant are lost until the store is opened again.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "blocks of a dropped grant are lost until the store is opened again"]
pub struct Grant {
    pub(crate) volume: VolumeId,
    pub(crate) range: BlockRange,
    pub(crate) extents: Vec<Extent>,
    pub(crate) charged_blocks: u64,
}

impl Grant {
    /// The volume that the blocks are for.
    #[must_use]
    pub fn volume(&self) -> VolumeId {
        self.volume
    }

    /// The virtual blocks that they are for.
    #[must_use]
    pub fn range(&self) -> BlockRange {
        self.range
    }

    /// Where they lie: all of `range`, in order, none of it shared.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }
}
