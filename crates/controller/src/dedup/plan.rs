//! The mappings that a remap would change, and whether that frees anything.
//!
//! Snapshots and clones have a shared block at the same virtual block. So all references to a block
//! are found by looking there in all volumes, except for those that an earlier remap made
//! elsewhere. Such a block may stay: it is free only when its last reference has moved, and a later
//! run may move one more of them.

use std::collections::BTreeSet;

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::{Plba, Vlba};
use sidecore_volume::{Disk, PhysicalRange, VolumeError, VolumeId, VolumeState, Volumes};

use super::fingerprints::Place;

/// Extents looked up at a time: a window has no more blocks.
const MAX_EXTENTS: usize = 1024;
/// A remap of shared blocks makes nodes that several volumes share each volume's own. So each
/// volume has to free this part of a node at least: a leaf has room for many remaps.
const NODE_SHARE_BYTES: u64 = 64;

/// Blocks around one that has an equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Blocks in front of it.
    pub(super) back: u64,
    /// Blocks from it on.
    pub(super) forward: u64,
}

impl Window {
    fn blocks(self) -> u64 {
        self.back.saturating_add(self.forward)
    }

    /// The blocks around block `at`.
    pub(super) fn around(self, at: u64) -> BlockRange {
        BlockRange { first: Vlba(at.saturating_sub(self.back)), count: self.blocks() }
    }

    fn clip(&mut self, other: Self) {
        self.back = self.back.min(other.back);
        self.forward = self.forward.min(other.forward);
    }

    /// Leaves the first blocks from the block itself on, at most `most`, if it has more than those.
    fn shorten(&mut self, most: u64) {
        if self.blocks() > most {
            *self = Self { back: 0, forward: self.forward.min(most) };
        }
    }
}

/// Equal blocks, or blocks of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The block with the fingerprint; `None` for zeros.
    pub(super) source: Option<Place>,
    /// The block that is equal to it.
    pub(super) target: Place,
    pub(super) window: Window,
}

/// A remap that frees blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The rest of the candidate's window.
    pub(super) window: Window,
    /// Where the block with the fingerprint lies, and its equal.
    pub(super) source: Option<u64>,
    pub(super) target: u64,
    /// The block that stays; `None` for zeros.
    pub(super) keep: Option<Place>,
    /// The mappings that are changed: this block of these volumes.
    pub(super) block: u64,
    pub(super) volumes: Vec<VolumeId>,
}

impl Plan {
    /// The physical blocks around these.
    pub(super) fn physical(&self) -> Vec<PhysicalRange> {
        let range = |at: u64| {
            let range = self.window.around(at);
            PhysicalRange { first: Plba(range.first.0), count: range.count }
        };
        self.source.into_iter().chain([self.target]).map(range).collect()
    }
}

/// The result of looking at a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Looked {
    /// Blocks would become free.
    Frees(Plan),
    /// The block with the fingerprint is not mapped any more.
    Stale,
    /// The block is not mapped any more, or the two are one already.
    Gone,
    /// These blocks are kept by others, or would free too little.
    Kept(u64),
}

/// A look at volumes, under the lock of the hypervisor side.
pub(super) struct Looking<'a> {
    pub(super) volumes: &'a mut Volumes,
    pub(super) disk: &'a mut dyn Disk,
    /// The volumes whose blocks may become one.
    pub(super) members: &'a BTreeSet<VolumeId>,
    /// Blocks that are compared together.
    pub(super) unit_blocks: u64,
}

/// A part of an extent around a block.
#[derive(Clone, Copy, Debug)]
struct Around {
    physical: u64,
    shared: bool,
}

/// One of the two places, and the volumes that have its blocks.
struct Side {
    place: Place,
    volumes: Vec<VolumeId>,
    /// Volumes that are not of the run have them too.
    is_kept: bool,
}

impl Looking<'_> {
    /// Plans the remap of a candidate.
    pub(super) fn look(&mut self, candidate: &Candidate) -> Result<Looked, VolumeError> {
        let mut window = candidate.window;
        let Some(target) = self.around(candidate.target, &mut window)? else {
            return Ok(Looked::Gone);
        };
        let mut source = None;
        if let Some(place) = candidate.source {
            let Some(found) = self.around(place, &mut window)? else { return Ok(Looked::Stale) };
            if found.physical == target.physical {
                return Ok(Looked::Gone);
            }
            window.shorten(found.physical.abs_diff(target.physical));
            source = Some((place, found));
        }
        let mut moved = self.side(candidate.target, target, &mut window)?;
        let mut keep = source.map(|(place, _)| place);
        if let Some((place, found)) = source
            && (moved.is_kept || moved.volumes.len() > 1)
        {
            let other = self.side(place, found, &mut window)?;
            if !other.is_kept && (moved.is_kept || other.volumes.len() < moved.volumes.len()) {
                keep = Some(moved.place);
                moved = other;
            }
        }
        if let Some(keep) = keep
            && moved.volumes.contains(&keep.volume)
        {
            window.shorten(keep.block.abs_diff(moved.place.block));
        }
        let whole =
            |blocks: u64| blocks.saturating_sub(blocks.checked_rem(self.unit_blocks).unwrap_or(0));
        let all = window.forward.max(1);
        window = Window { back: whole(window.back), forward: whole(window.forward) };
        let freed_bytes = window.blocks().saturating_mul(u64::from(self.volumes.block_bytes()));
        let least_bytes = NODE_SHARE_BYTES.saturating_mul(moved.volumes.len() as u64);
        if moved.is_kept || window.forward == 0 || freed_bytes < least_bytes {
            return Ok(Looked::Kept(all));
        }
        Ok(Looked::Frees(Plan {
            window,
            source: source.map(|(_, found)| found.physical),
            target: target.physical,
            keep,
            block: moved.place.block,
            volumes: moved.volumes,
        }))
    }

    fn mappings(
        &mut self,
        volume: VolumeId,
        at: u64,
        window: Window,
    ) -> Result<Vec<Extent>, VolumeError> {
        let blocks = self.volumes.get(volume).map_or(0, |info| info.blocks);
        let range = window.around(at);
        let count = range.count.min(blocks.saturating_sub(range.first.0));
        if count == 0 {
            return Ok(Vec::new());
        }
        let range = BlockRange { count, ..range };
        Ok(self.volumes.map(self.disk, volume, range, MAX_EXTENTS)?.extents)
    }

    /// Where a block lies; the window is clipped to the extent with it.
    fn around(&mut self, place: Place, window: &mut Window) -> Result<Option<Around>, VolumeError> {
        let extents = match self.mappings(place.volume, place.block, *window) {
            Err(VolumeError::NoSuchVolume(_)) => return Ok(None),
            extents => extents?,
        };
        let at = Vlba(place.block);
        let Some(extent) = extents.iter().find(|extent| extent.range().contains(at)) else {
            return Ok(None);
        };
        window.clip(part_of(extent, place.block));
        let into = place.block.saturating_sub(extent.first.0);
        Ok(Some(Around { physical: extent.physical.0.saturating_add(into), shared: extent.shared }))
    }

    /// The volumes that have the block at the same place; the window is clipped so that it is the
    /// same volumes for all of its blocks.
    fn side(
        &mut self,
        place: Place,
        found: Around,
        window: &mut Window,
    ) -> Result<Side, VolumeError> {
        let mut side = Side { place, volumes: vec![place.volume], is_kept: false };
        if !found.shared {
            return Ok(side);
        }
        let others: Vec<VolumeId> = self
            .volumes
            .list()
            .filter(|info| info.id != place.volume && info.state == VolumeState::Healthy)
            .map(|info| info.id)
            .collect();
        let line = found.physical.wrapping_sub(place.block);
        for other in others {
            let extents = self.mappings(other, place.block, *window)?;
            let same = |extent: &&Extent| extent.physical.0.wrapping_sub(extent.first.0) == line;
            for extent in extents.iter().filter(same) {
                let end = extent.first.0.saturating_add(extent.count);
                if extent.range().contains(Vlba(place.block)) {
                    window.clip(part_of(extent, place.block));
                    side.volumes.push(other);
                    side.is_kept |= !self.members.contains(&other);
                } else if extent.first.0 > place.block {
                    let ahead = extent.first.0.saturating_sub(place.block);
                    window.forward = window.forward.min(ahead);
                } else {
                    window.back = window.back.min(place.block.saturating_sub(end));
                }
            }
        }
        Ok(side)
    }
}

/// The part of an extent in front of a block in it, and from the block on.
fn part_of(extent: &Extent, block: u64) -> Window {
    let end = extent.first.0.saturating_add(extent.count);
    Window { back: block.saturating_sub(extent.first.0), forward: end.saturating_sub(block) }
}
