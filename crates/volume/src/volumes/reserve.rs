//! Space on the disk for the reserve of the metadata.
//!
//! A store may lie on a file with holes, on a filesystem that gets full. Then a delete or a
//! discard, which would free space, needs some first: for the nodes of its transaction. So the
//! places that the next nodes go to are allocated in the file ahead, and are not discarded. Nodes
//! go to the highest free places, and more of them are allocated than a transaction may use of the
//! reserve.

use sidecore_units::Plba;

use super::Volumes;
use crate::commit::Freed;
use crate::grant::PhysicalRange;
use crate::ranges::RangeSet;

impl Volumes {
    /// Where the next nodes go, as far as the disk was not asked to have space there. Empty as long
    /// as there is enough of it.
    #[must_use]
    pub fn unbacked(&self) -> Vec<PhysicalRange> {
        if self.read_only.is_some() {
            return Vec::new();
        }
        let node_blocks = self.superblock.geometry().node_blocks();
        let Some(slots) = self.forest.allocator.next_slots(self.disk_is_full.is_some()) else {
            return Vec::new();
        };
        let mut ranges = RangeSet::default();
        for slot in slots.into_iter().filter(|slot| !self.backed.overlaps(*slot, node_blocks)) {
            ranges.cover(slot, node_blocks);
        }
        ranges.iter().map(|(first, count)| PhysicalRange { first: Plba(first), count }).collect()
    }

    /// Records that the disk has space there, or that it is full, with its error.
    pub fn set_backed(&mut self, ranges: &[PhysicalRange], full: Option<String>) {
        for range in ranges {
            self.backed.cover(range.first.0, range.count);
        }
        if full.is_none() && !ranges.is_empty() {
            self.forest.allocator.note_backed();
        }
        if full.is_some() || self.kept.is_none() {
            self.disk_is_full = full;
        }
    }

    /// The freed blocks that the disk may forget: not those that metadata may need again.
    #[must_use]
    pub fn discardable(&self, freed: &Freed) -> Vec<PhysicalRange> {
        let mut ranges = Vec::new();
        for PhysicalRange { first, count } in freed.ranges() {
            let mut at = first.0;
            let end = at.saturating_add(count);
            for (first, count) in self.backed.inside(at, count) {
                if at < first {
                    ranges.push(PhysicalRange { first: Plba(at), count: first.saturating_sub(at) });
                }
                at = first.saturating_add(count);
            }
            if at < end {
                ranges.push(PhysicalRange { first: Plba(at), count: end.saturating_sub(at) });
            }
        }
        ranges
    }
}
