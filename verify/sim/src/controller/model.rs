//! The data that guests of a controller may find on their disks, in use and after a power cut.
//!
//! The model has no blocks, trees or commits. It has only what guests and operators were told: the
//! end of a write, of a later flush, of a change.

use std::collections::{BTreeMap, BTreeSet};

use super::register::{Moment, Register, Write};
use crate::volumes::model::{Found, FoundVolume, Stamp, Stamps};

/// A volume as its guests and the operator know it.
#[derive(Clone, Debug)]
pub(super) struct ModelVolume {
    pub(super) name: String,
    pub(super) read_only: bool,
    /// In blocks.
    pub(super) size: u64,
    /// Deleted in the eyes of the operator.
    pub(super) is_gone: bool,
    exists: Register<bool>,
    blocks: Register<u64>,
    /// The sectors that were written; the others are zeroes.
    sectors: BTreeMap<u64, Register<Stamp>>,
    /// The sectors with a write that is not safe.
    unsafe_sectors: BTreeSet<u64>,
}

/// The writes of one request: sector and write.
pub(super) type Writes = Vec<(u64, Write)>;

impl ModelVolume {
    /// A new volume, all zeroes. Until a commit, a power cut may remove it.
    pub(super) fn new(name: String, size: u64, issued: Moment, now: Moment) -> Self {
        let mut exists = Register::holding([false], issued);
        let write = exists.begin(true, issued);
        exists.end(write, now, true);
        Self {
            name,
            read_only: false,
            size,
            is_gone: false,
            exists,
            blocks: Register::holding([size], issued),
            sectors: BTreeMap::new(),
            unsafe_sectors: BTreeSet::new(),
        }
    }

    /// A copy, which holds the data that this volume shows when the copy is `issued`, or data that
    /// is being written then.
    pub(super) fn copy(&self, name: String, read_only: bool, issued: Moment, now: Moment) -> Self {
        let copy = |(&sector, register): (&u64, &Register<Stamp>)| {
            (sector, Register::holding(register.shown(issued).collect::<Vec<_>>(), now))
        };
        let sectors = self.sectors.iter().map(copy).collect();
        let new = Self::new(name, self.size, issued, now);
        Self { read_only, sectors, ..new }
    }

    /// The model of a volume that was found on a disk.
    fn adopt(found: &FoundVolume, sectors_per_block: u64, now: Moment) -> Self {
        let info = &found.info;
        let mut sectors = BTreeMap::new();
        for (block, found) in &found.blocks {
            for (index, content) in (0..).zip(&found.sectors) {
                let (Ok(stamp) | Err(stamp)) = content;
                sectors.insert(block * sectors_per_block + index, Register::holding([*stamp], now));
            }
        }
        Self {
            name: info.name.clone(),
            read_only: info.read_only,
            size: info.blocks,
            is_gone: false,
            exists: Register::holding([true], now),
            blocks: Register::holding([info.blocks], now),
            sectors,
            unsafe_sectors: BTreeSet::new(),
        }
    }

    /// Notes the start of writes to some sectors.
    pub(super) fn begin(
        &mut self,
        stamps: impl IntoIterator<Item = (u64, Stamp)>,
        issued: Moment,
    ) -> Writes {
        let begin = |(sector, stamp)| {
            self.unsafe_sectors.insert(sector);
            let register = self
                .sectors
                .entry(sector)
                .or_insert_with(|| Register::holding([0], Moment::default()));
            (sector, register.begin(stamp, issued))
        };
        stamps.into_iter().map(begin).collect()
    }

    /// The sectors that were written.
    pub(super) fn written(&self) -> impl Iterator<Item = u64> {
        self.sectors.keys().copied()
    }

    /// Notes the end of these writes.
    pub(super) fn end(&mut self, writes: &Writes, now: Moment, succeeded: bool) {
        for (sector, write) in writes {
            if let Some(register) = self.sectors.get_mut(sector) {
                register.end(*write, now, succeeded);
            }
        }
    }

    /// Notes the end of a guest's flush, which was `asked` for then: its earlier writes are safe,
    /// and so is the volume they went to.
    pub(super) fn secure(&mut self, asked: Moment, position: usize) {
        self.secure_itself(asked, position);
        let sectors = &mut self.sectors;
        self.unsafe_sectors.retain(|sector| {
            let register = sectors.get_mut(sector);
            register.is_some_and(|register| register.secure(asked, position))
        });
    }

    /// Notes the end of an operator's change, which was `asked` for then.
    pub(super) fn secure_itself(&mut self, asked: Moment, position: usize) {
        let _ = (self.exists.secure(asked, position), self.blocks.secure(asked, position));
    }

    /// Notes a new size; sectors beyond it are zeroes if a later size shows them again.
    pub(super) fn resize(
        &mut self,
        blocks: u64,
        sectors_per_block: u64,
        issued: Moment,
        now: Moment,
    ) {
        self.size = blocks;
        let write = self.blocks.begin(blocks, issued);
        self.blocks.end(write, now, true);
        let cut_off: Vec<_> = self
            .sectors
            .range(blocks * sectors_per_block..)
            .map(|(sector, _)| (*sector, 0))
            .collect();
        let writes = self.begin(cut_off, issued);
        self.end(&writes, now, true);
    }

    /// Notes a deletion.
    pub(super) fn delete(&mut self, issued: Moment, now: Moment) {
        self.is_gone = true;
        let write = self.exists.begin(false, issued);
        self.exists.end(write, now, true);
    }

    /// Whether a guest that began to read at `since` may find `found`.
    pub(super) fn check_read(
        &self,
        sector: u64,
        since: Moment,
        found: Stamp,
    ) -> Result<(), Vec<Stamp>> {
        let Some(register) = self.sectors.get(&sector) else {
            return if found == 0 { Ok(()) } else { Err(vec![0]) };
        };
        if register.shown(since).any(|stamp| stamp == found) {
            Ok(())
        } else {
            Err(register.shown(since).collect())
        }
    }

    /// Whether a cut may leave the volume as `found`. A written sector holds one of the stamps that
    /// `allowed` gives, any other sector zeroes.
    fn check_left(
        &self,
        found: &FoundVolume,
        cut: usize,
        sectors_per_block: u64,
        stamps: &Stamps,
        allowed: impl Fn(u64, &Register<Stamp>) -> Vec<Stamp>,
    ) -> Result<(), String> {
        let info = &found.info;
        if !self.exists.left_at(cut).any(|exists| exists) {
            return Err("is there".to_owned());
        }
        if !self.blocks.left_at(cut).any(|blocks| blocks == info.blocks) {
            let sizes: Vec<_> = self.blocks.left_at(cut).collect();
            return Err(format!("has {} blocks instead of {sizes:?}", info.blocks));
        }
        if (&info.name, info.read_only) != (&self.name, self.read_only) {
            return Err(format!("is {info:?}"));
        }
        let check = |sector: u64, found: Stamp| match self.sectors.get(&sector) {
            None if found == 0 => Ok(()),
            Some(register) if allowed(sector, register).contains(&found) => Ok(()),
            register => {
                let left = register.into_iter().flat_map(|register| allowed(sector, register));
                let left: Vec<_> = left.map(|stamp| stamps.describe(stamp)).collect();
                Err(format!("sector {sector} is {} instead of {left:?}", stamps.describe(found)))
            }
        };
        for (block, found) in &found.blocks {
            for (index, content) in (0..).zip(&found.sectors) {
                let sector = block * sectors_per_block + index;
                let stamp = content
                    .map_err(|word| format!("sector {sector} is {word:#x}, and not alone"))?;
                check(sector, stamp)
                    .map_err(|what| format!("{what} (physical block {})", found.physical))?;
            }
        }
        let holes = self
            .sectors
            .keys()
            .filter(|sector| !found.blocks.contains_key(&(*sector / sectors_per_block)));
        holes.copied().try_for_each(|sector| check(sector, 0))
    }

    /// The first sector that a size which no operator was told of yet may show or hide.
    fn settled_sectors(&self, cut: usize, sectors_per_block: u64) -> u64 {
        self.blocks.left_at(cut).min().unwrap_or(0).saturating_mul(sectors_per_block)
    }
}

/// All volumes that existed since the start, by number.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) volumes: BTreeMap<u64, ModelVolume>,
    pub(super) sectors_per_block: u64,
    clock: u64,
}

impl Model {
    /// The model of what was found on a disk.
    pub(super) fn adopt(found: &Found, sectors_per_block: u64) -> Self {
        let mut model = Self { volumes: BTreeMap::new(), sectors_per_block, clock: 0 };
        let now = model.now(0);
        let adopt = |(&id, found): (&u64, &FoundVolume)| {
            (id, ModelVolume::adopt(found, sectors_per_block, now))
        };
        model.volumes = found.iter().map(adopt).collect();
        model
    }

    pub(super) const fn now(&mut self, position: usize) -> Moment {
        self.clock += 1;
        Moment { clock: self.clock, position }
    }

    /// The volumes that are not deleted.
    pub(super) fn present(&self) -> impl Iterator<Item = (u64, &ModelVolume)> {
        self.volumes.iter().filter(|(_, volume)| !volume.is_gone).map(|(id, volume)| (*id, volume))
    }

    /// The sectors of the blocks that lie entirely inside the given sectors.
    pub(super) fn whole_blocks(&self, sector: u64, count: u64) -> std::ops::Range<u64> {
        let spb = self.sectors_per_block;
        let (first, end) = (sector.next_multiple_of(spb), (sector + count) / spb * spb);
        first..end.max(first)
    }

    /// Whether a power cut at `cut` may leave `found`.
    ///
    /// # Errors
    /// The first difference.
    pub(super) fn check_left(
        &self,
        found: &Found,
        cut: usize,
        stamps: &Stamps,
    ) -> Result<(), String> {
        self.check_each(found, cut, |volume, found| {
            volume.check_left(found, cut, self.sectors_per_block, stamps, |_, register| {
                register.left_at(cut).collect()
            })
        })
    }

    /// Whether a death of the process `now` may leave `found`: all that guests were answered, and
    /// each change that no operator was told of yet either done or not.
    ///
    /// # Errors
    /// The first difference.
    pub(super) fn check_died(
        &self,
        found: &Found,
        now: Moment,
        stamps: &Stamps,
    ) -> Result<(), String> {
        let cut = now.position + 1;
        self.check_each(found, cut, |volume, found| {
            let settled = volume.settled_sectors(cut, self.sectors_per_block);
            volume.check_left(found, cut, self.sectors_per_block, stamps, |sector, register| {
                if sector < settled {
                    register.shown(now).collect()
                } else {
                    register.left_at(cut).collect()
                }
            })
        })
    }

    fn check_each(
        &self,
        found: &Found,
        cut: usize,
        check: impl Fn(&ModelVolume, &FoundVolume) -> Result<(), String>,
    ) -> Result<(), String> {
        if let Some(id) = found.keys().find(|id| !self.volumes.contains_key(id)) {
            return Err(format!("volume {id} was never made"));
        }
        for (id, volume) in &self.volumes {
            match found.get(id) {
                Some(found) => check(volume, found),
                None if volume.exists.left_at(cut).any(|exists| !exists) => Ok(()),
                None => Err("is not there".to_owned()),
            }
            .map_err(|what| format!("volume {id}: {what}"))?;
        }
        Ok(())
    }
}
