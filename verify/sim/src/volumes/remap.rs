//! Changes of mappings without data: discards, and blocks that become shared.

use std::rc::Rc;

use sidecore_extent::BlockRange;
use sidecore_units::Vlba;
use sidecore_volume::{VolumeError, VolumeId};

use super::death::Answered;
use super::manage::Needs;
use super::world::World;
use crate::history::{Step, System as _};

impl World {
    /// Discards random blocks.
    pub(super) fn discard(&mut self) -> Step {
        let Some((id, sector, count)) = self.pick(false) else { return Ok(()) };
        let range = self.blocks_of(sector, count);
        if self.is_busy(id, range) {
            return Ok(());
        }
        self.note(format!(
            "discard {} blocks from {} on, of volume {id}",
            range.count, range.first
        ));
        self.unmap(id, range)
    }

    fn unmap(&mut self, id: u64, range: BlockRange) -> Step {
        let mut is_there = true;
        let done = self.until_there_is_space(Needs::OfShared, |world| {
            // A commit that this operation waited for may have deleted or shrunk the volume.
            is_there =
                world.served_blocks(id).is_some_and(|blocks| range.first.0 + range.count <= blocks);
            if !is_there {
                return Ok(());
            }
            world.log_before = world.log.to_words();
            world.volumes.unmap(&mut world.disk.clone(), VolumeId(id), range)
        })?;
        if !done || !is_there {
            return Ok(());
        }
        self.answered.push(Answered::Unmapped { volume: id, range });
        if let Some(volume) = self.state.0.get_mut(&id) {
            Rc::make_mut(&mut volume.cells).retain(|block, _| !range.contains(Vlba(*block)));
        }
        Ok(())
    }

    /// Makes random blocks share the cells of others.
    pub(super) fn share(&mut self) -> Step {
        let (Some((from, sector, count)), Some((to, to_sector, _))) =
            (self.pick(true), self.pick(false))
        else {
            return Ok(());
        };
        let spb = self.sectors_per_block();
        let (to_block, to_blocks) = (to_sector / spb, self.served_blocks(to).unwrap_or(0));
        let mut source = self.blocks_of(sector, count);
        source.count = source.count.min(to_blocks - to_block);
        let target = BlockRange::new(Vlba(to_block), source.count);
        if self.is_busy(to, target) || from == to && source.intersect(target).is_some() {
            return Ok(());
        }
        self.note(format!(
            "share {} blocks of volume {from} from {} on",
            source.count, source.first
        ));
        self.note(format!("... at block {to_block} of volume {to}"));
        self.share_blocks(from, source, to, to_block)
    }

    fn share_blocks(&mut self, from: u64, source: BlockRange, to: u64, to_block: u64) -> Step {
        match self.volumes.share(
            &mut self.disk.clone(),
            (VolumeId(from), source),
            (VolumeId(to), Vlba(to_block)),
        ) {
            Ok(()) => {}
            Err(VolumeError::NoSpace { .. }) => return self.refused(),
            Err(VolumeError::QuotaExceeded { .. }) if self.has_quota(to) => return self.refused(),
            Err(error) => {
                return Err(format!("share {source:?} of {from} at {to_block} of {to}: {error}"));
            }
        }
        let cells =
            self.state.0.get(&from).map(|volume| Rc::clone(&volume.cells)).unwrap_or_default();
        if let Some(volume) = self.state.0.get_mut(&to) {
            let target_cells = Rc::make_mut(&mut volume.cells);
            for index in 0..source.count {
                match cells.get(&(source.first.0 + index)) {
                    Some(cell) => target_cells.insert(to_block + index, *cell),
                    None => target_cells.remove(&(to_block + index)),
                };
            }
        }
        Ok(())
    }

    /// Makes many extents in a row: discards every second block, or makes it share a block of a
    /// volume, in such an order that no two of them form one extent.
    pub(super) fn fragment(&mut self) -> Step {
        let (Some(from), Some((to, sector, _))) = (self.any_volume(), self.pick(false)) else {
            return Ok(());
        };
        let blocks = self.served_blocks(to).unwrap_or(0);
        let mut first = sector / self.sectors_per_block();
        if self.random.once_in(2) && blocks / 2 < self.tuning.most_fragments {
            first = 0;
        }
        let count = self.random.below(((blocks - first) / 2).min(self.tuning.most_fragments) + 1);
        let target = BlockRange::new(Vlba(first), 2 * count);
        if self.is_busy(to, target) {
            return Ok(());
        }
        let outside = |block: &&u64| from != to || !target.contains(Vlba(**block));
        let sources = self
            .state
            .0
            .get(&from)
            .into_iter()
            .flat_map(|volume| volume.cells.keys())
            .filter(outside);
        let sources: Vec<u64> =
            if self.random.once_in(4) { Vec::new() } else { sources.copied().collect() };
        let what = if sources.is_empty() {
            "are discarded".to_owned()
        } else {
            format!("are shared from volume {from}")
        };
        self.note(format!("{count} second blocks of volume {to} from {first} on {what}"));
        for (index, block) in (first..).step_by(2).enumerate().take(count as usize) {
            let refusals = self.ledger.outcome.refusals;
            if sources.is_empty() {
                self.unmap(to, BlockRange::new(Vlba(block), 1))?;
            } else {
                let source = sources[sources.len() - 1 - index % sources.len()];
                self.share_blocks(from, BlockRange::new(Vlba(source), 1), to, block)?;
            }
            if self.ledger.outcome.refusals > refusals || self.volumes.read_only().is_some() {
                break;
            }
        }
        Ok(())
    }
}
