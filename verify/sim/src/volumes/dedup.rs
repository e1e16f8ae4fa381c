//! Deduplication of blocks, a step at a time: they are guarded, compared and remapped, with other
//! steps between.

use std::rc::Rc;

use sidecore_extent::BlockRange;
use sidecore_units::{Plba, Vlba};
use sidecore_volume::{PhysicalRange, VolumeError, VolumeId};

use super::Bug;
use super::disk::SECTOR_BYTES;
use super::find;
use super::model::{Place, Stamp, fill};
use super::world::World;
use crate::history::{Step, System as _};

/// Two blocks that are compared, and where they lay when that began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    from: Place,
    to: Place,
    physical: [u64; 2],
    /// Whether they were found to be equal.
    is_equal: bool,
}

impl World {
    /// Takes the next step of a deduplication, or begins one.
    pub(super) fn dedup(&mut self) -> Step {
        match self.dedup.take() {
            None => self.begin_dedup(),
            Some(pair) if !pair.is_equal => self.compare_pair(pair),
            Some(pair) => self.end_dedup(pair),
        }
    }

    /// A block of the pair that is being compared, now and then: for writes that come between.
    pub(super) fn compared_block(&mut self) -> Option<(u64, u64)> {
        let pair = self.dedup.filter(|pair| pair.is_equal && self.random.once_in(8))?;
        let place = if self.random.once_in(2) { pair.from } else { pair.to };
        let writable = self.state.0.get(&place.volume).is_some_and(|volume| !volume.read_only);
        let served = self.served_blocks(place.volume)?;
        (writable && place.block < served).then_some((place.volume, place.block))
    }

    fn begin_dedup(&mut self) -> Step {
        let (Some(from), Some(to)) = (self.mapped_block(), self.mapped_block()) else {
            return Ok(());
        };
        if from == to || self.is_busy_at(from) || self.is_busy_at(to) {
            return Ok(());
        }
        if !self.random.once_in(4) {
            self.copy_block(from, to)?;
        }
        let (Some(one), Some(other)) = (self.physical_of(from)?, self.physical_of(to)?) else {
            return Ok(());
        };
        if one == other {
            return Ok(());
        }
        self.note(format!("compare {from:?} at {one} with {to:?} at {other}"));
        if self.bug != Some(Bug::RemapWithoutGuard) {
            let range = |first| PhysicalRange { first: Plba(first), count: 1 };
            self.volumes.guard(&[range(one), range(other)]);
        }
        self.dedup = Some(Pair { from, to, physical: [one, other], is_equal: false });
        Ok(())
    }

    /// A random block of a random volume or snapshot that is not a hole.
    fn mapped_block(&mut self) -> Option<Place> {
        (0..4).find_map(|_| self.any_mapped_block())
    }

    fn any_mapped_block(&mut self) -> Option<Place> {
        let volume = self.any_volume()?;
        let blocks = self.served_blocks(volume)?;
        let cells = Rc::clone(&self.state.0.get(&volume)?.cells);
        let index = self.random.below(cells.len().max(1) as u64) as usize;
        let block = *cells.keys().nth(index)?;
        (block < blocks).then_some(Place { volume, block })
    }

    fn is_busy_at(&self, place: Place) -> bool {
        self.is_busy(place.volume, BlockRange::new(Vlba(place.block), 1))
    }

    fn physical_of(&mut self, place: Place) -> Result<Option<u64>, String> {
        Ok(self.extent_of(place)?.map(|(physical, _)| physical))
    }

    /// Where a block lies, and whether it is shared; `None` for a hole, and for a volume that is
    /// gone or smaller by now.
    fn extent_of(&mut self, place: Place) -> Result<Option<(u64, bool)>, String> {
        if self.state.0.get(&place.volume).is_none_or(|volume| place.block >= volume.blocks) {
            return Ok(None);
        }
        let range = BlockRange::new(Vlba(place.block), 1);
        let disk = &mut self.disk.clone();
        let extents = find::extents(&mut self.volumes, disk, VolumeId(place.volume), range, 1)?;
        Ok(extents.first().map(|extent| (extent.physical.0, extent.shared)))
    }

    /// Writes the contents of a block, or zeros, to another one: in place, if that may be written.
    fn copy_block(&mut self, from: Place, to: Place) -> Step {
        let writable = self.state.0.get(&to.volume).is_some_and(|volume| !volume.read_only);
        let Some((physical, shared)) = self.extent_of(to)?.filter(|_| writable) else {
            return Ok(());
        };
        let cell_of = |world: &Self, place: Place| {
            world.state.0.get(&place.volume)?.cells.get(&place.block).copied()
        };
        let (Some(source), Some(target)) = (cell_of(self, from), cell_of(self, to)) else {
            return Ok(());
        };
        self.note(format!("{to:?} is written as {from:?}"));
        let (spb, zeros) = (self.sectors_per_block(), self.random.once_in(6));
        let stamp = |sector| self.cells.now(source, sector).filter(|_| !zeros).unwrap_or(0);
        let stamps: Vec<Stamp> = (0..spb as usize).map(stamp).collect();
        if shared {
            return self.write_fresh_block(to, &stamps);
        }
        let position = self.disk.position();
        for (sector, stamp) in stamps.iter().enumerate() {
            self.cells.write(target, sector, position, to, *stamp);
        }
        let data: Vec<u8> = stamps.iter().flat_map(|stamp| fill(*stamp)).collect();
        self.disk.write_sectors(physical * spb * SECTOR_BYTES as u64, &data).or(Ok(()))
    }

    fn contents(&self, physical: u64) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.tuning.block_bytes as usize];
        let offset_bytes = physical * u64::from(self.tuning.block_bytes);
        self.disk.read_sectors(offset_bytes, &mut bytes)?;
        Ok(bytes)
    }

    fn compare_pair(&mut self, pair: Pair) -> Step {
        let [one, other] = pair.physical.map(|physical| self.contents(physical));
        if let (Ok(one), Ok(other)) = (one, other)
            && one == other
        {
            self.note("... they are equal");
            self.dedup = Some(Pair { is_equal: true, ..pair });
        } else {
            self.volumes.end_guard();
        }
        Ok(())
    }

    fn end_dedup(&mut self, pair: Pair) -> Step {
        let Pair { from, to, physical: [one, other], .. } = pair;
        let holds = self.volumes.guard_holds() || self.bug == Some(Bug::RemapWithoutGuard);
        let is_there = self.physical_of(from)? == Some(one) && self.physical_of(to)? == Some(other);
        let step = if holds && is_there && !self.is_busy_at(from) && !self.is_busy_at(to) {
            self.remap(from, to, one)
        } else {
            Ok(())
        };
        self.volumes.end_guard();
        step
    }

    /// The contents that a block should have.
    fn model_of(&self, place: Place) -> Option<Vec<Option<Stamp>>> {
        let cell = *self.state.0.get(&place.volume)?.cells.get(&place.block)?;
        let sectors = 0..self.tuning.sectors_per_block();
        Some(sectors.map(|sector| self.cells.now(cell, sector)).collect())
    }

    fn remap(&mut self, from: Place, to: Place, physical: u64) -> Step {
        let is_zero =
            self.contents(physical).is_ok_and(|bytes| bytes.iter().all(|byte| *byte == 0));
        self.note(format!("remap {to:?} to {}", if is_zero { "a hole" } else { "the other" }));
        let disk = &mut self.disk.clone();
        let one_block = |place: Place| BlockRange::new(Vlba(place.block), 1);
        let remapped = if is_zero {
            self.volumes.remap_zeros(disk, VolumeId(to.volume), one_block(to))
        } else {
            self.volumes.remap(
                disk,
                (VolumeId(from.volume), one_block(from)),
                (VolumeId(to.volume), Vlba(to.block)),
            )
        };
        match remapped {
            Ok(()) => {}
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            Err(error) => return Err(format!("remap {to:?} to {from:?}: {error}")),
        }
        self.ledger.outcome.remaps += 1;
        if self.model_of(to) != self.model_of(from) {
            return Err(format!("{to:?} is remapped to {from:?}, which has other contents"));
        }
        let cell = self.state.0.get(&from.volume).and_then(|volume| volume.cells.get(&from.block));
        let cell = cell.copied().filter(|_| !is_zero);
        if let Some(volume) = self.state.0.get_mut(&to.volume) {
            let cells = Rc::make_mut(&mut volume.cells);
            match cell {
                Some(cell) => cells.insert(to.block, cell),
                None => cells.remove(&to.block),
            };
        }
        Ok(())
    }
}
