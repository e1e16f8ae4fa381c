//! Blocks that were read together, and the search for equals of them.

use sidecore_volume::{Disk, VolumeId};

use super::compare;
use super::fingerprints::{Fingerprints, Place, fingerprint};
use super::plan::{Candidate, Window};

/// The contents of some blocks that are compared together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Unreadable,
    Zeros,
    Print(u64),
}

/// Blocks that were read: consecutive in a volume, and on the store.
#[derive(Debug)]
pub(super) struct Chunk {
    volume: VolumeId,
    first: u64,
    units: Vec<Unit>,
    /// The unit to look at next.
    at: usize,
    unit_blocks: u64,
    bytes: Vec<u8>,
}

impl Chunk {
    /// A chunk without blocks, to be [filled](Self::fill).
    pub(super) fn new(unit_blocks: u64) -> Self {
        let (units, bytes) = (Vec::new(), Vec::new());
        Self { volume: VolumeId(0), first: 0, units, at: 0, unit_blocks, bytes }
    }

    /// Reads blocks, which begin at `place` in their volume, unit by unit if some of them cannot be
    /// read. Returns the number of bytes that cannot be.
    pub(super) fn fill(
        &mut self,
        disk: &mut dyn Disk,
        place: Place,
        (offset_bytes, len_bytes): (u64, u64),
        unit_bytes: usize,
        key: u64,
    ) -> u64 {
        (self.volume, self.first, self.at) = (place.volume, place.block, 0);
        self.units.clear();
        self.bytes.clear();
        self.bytes.resize(usize::try_from(len_bytes).unwrap_or(0), 0);
        let is_whole = disk.read(offset_bytes, &mut self.bytes).is_ok();
        let (mut at, mut unreadable_bytes) = (offset_bytes, 0_u64);
        for unit in self.bytes.chunks_mut(unit_bytes.max(1)) {
            let len_bytes = unit.len() as u64;
            self.units.push(if !is_whole && disk.read(at, unit).is_err() {
                unreadable_bytes = unreadable_bytes.saturating_add(len_bytes);
                Unit::Unreadable
            } else if compare::is_zero(unit) {
                Unit::Zeros
            } else {
                Unit::Print(fingerprint(key, unit))
            });
            at = at.saturating_add(len_bytes);
        }
        unreadable_bytes
    }

    /// The next unit with an equal, which is left to be looked at; other units go to the table.
    pub(super) fn next_candidate(&mut self, table: &mut Fingerprints) -> Option<Candidate> {
        loop {
            let at = self.at;
            let target = self.place_of(at);
            let (source, forward) = match *self.units.get(at)? {
                Unit::Unreadable => (None, 0),
                Unit::Zeros => (None, self.units_from(at, |_, unit| unit == Unit::Zeros)),
                Unit::Print(print) => match table.get(print) {
                    Some(source) => (Some(source), self.equal_units(at, source, table)),
                    None => {
                        table.set(print, target);
                        (None, 0)
                    }
                },
            };
            if forward > 0 {
                let is_run = source.is_some() && table.is_sample();
                let back = if is_run { self.bare_units_before(at, table) } else { 0 };
                let window = Window { back: self.blocks(back), forward: self.blocks(forward) };
                return Some(Candidate { source, target, window });
            }
            self.at = at.saturating_add(1);
        }
    }

    /// Units in front of one that may be equal as well: they were passed because the table has only
    /// a sample.
    fn bare_units_before(&self, at: usize, table: &Fingerprints) -> usize {
        let before = self.units.get(..at).unwrap_or_default();
        let is_bare =
            |unit: &&Unit| matches!(unit, Unit::Print(print) if table.get(*print).is_none());
        before.iter().rev().take_while(is_bare).count()
    }

    fn blocks(&self, units: usize) -> u64 {
        (units as u64).saturating_mul(self.unit_blocks)
    }

    fn place_of(&self, unit: usize) -> Place {
        Place { volume: self.volume, block: self.first.saturating_add(self.blocks(unit)) }
    }

    fn units_from(&self, at: usize, is: impl Fn(usize, Unit) -> bool) -> usize {
        let units = self.units.iter().enumerate().skip(at);
        units.take_while(|(index, unit)| is(*index, **unit)).count()
    }

    /// The number of units from this one on that may be equal to those from `source` on.
    fn equal_units(&self, at: usize, source: Place, table: &Fingerprints) -> usize {
        self.units_from(at, |index, unit| {
            let into = self.blocks(index.saturating_sub(at));
            let place = Place { block: source.block.saturating_add(into), ..source };
            match unit {
                Unit::Print(print) => {
                    table.get(print).map_or(table.is_sample(), |found| found == place)
                }
                Unit::Unreadable | Unit::Zeros => false,
            }
        })
    }

    /// Notes the unit as the first one with its fingerprint, and passes it.
    pub(super) fn replace(&mut self, table: &mut Fingerprints) {
        if let Some(Unit::Print(print)) = self.units.get(self.at) {
            table.set(*print, self.place_of(self.at));
        }
        self.advance(self.unit_blocks);
    }

    /// Passes so many blocks, a unit at least.
    pub(super) fn advance(&mut self, blocks: u64) {
        let units = blocks.checked_div(self.unit_blocks).unwrap_or(1).max(1);
        self.at = self.at.saturating_add(usize::try_from(units).unwrap_or(usize::MAX));
    }
}
