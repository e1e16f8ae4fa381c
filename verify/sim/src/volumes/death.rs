//! Deaths of the process while its guests live: every answered change must survive.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use sidecore_extent::BlockRange;
use sidecore_units::Vlba;
use sidecore_volume::{HeapMemory, LOG_ENTRY_BYTES, LOG_HEADER_BYTES, LogPlace, Recovery, Volumes};

use super::Bug;
use super::disk::SimDisk;
use super::find;
use super::model::{CellId, Generation, State, When, compare};
use super::tuning::Tuning;
use super::world::{Step, World};
use crate::Random;

/// A change of mappings that a guest got an answer for.
#[derive(Clone, Debug)]
pub(super) enum Answered {
    /// Blocks of a volume became these cells.
    Mapped { volume: u64, cells: BTreeMap<u64, CellId> },
    /// Blocks of a volume became a hole.
    Unmapped { volume: u64, range: BlockRange },
}

pub(crate) fn log_memory(tuning: &Tuning) -> Arc<HeapMemory> {
    Arc::new(HeapMemory::new(LOG_HEADER_BYTES + tuning.log_entries * LOG_ENTRY_BYTES))
}

/// The disk's identity in the boot of this name.
pub(crate) fn place(boot: u64) -> LogPlace {
    let mut name = [0; 16];
    name[..8].copy_from_slice(&boot.to_le_bytes());
    LogPlace { device: 1, inode: 2, boot: name }
}

impl World {
    /// Lets the process die, at a random chance.
    pub(super) fn perhaps_die(&mut self) -> Step {
        if self.random.once_in(self.tuning.chances_per_death) { self.die() } else { Ok(()) }
    }

    /// Checks the state that a death of the process now would leave, on a copy; the run continues.
    fn die(&mut self) -> Step {
        self.ledger.deaths += 1;
        self.note("the process could die here");
        let words = match self.bug {
            Some(Bug::AnswerBeforeLog) => self.log_before.clone(),
            _ => self.log.to_words(),
        };
        let memory = Arc::new(HeapMemory::of_words(words));
        let mut disk = SimDisk::new(self.disk.bytes());
        if self.random.once_in(2) {
            // A second death, in the middle of the replay.
            disk.fail_after(Some(self.random.below(24)));
            let _ = self.revive(&mut disk, &memory);
            disk = SimDisk::new(disk.bytes());
        }
        let (mut volumes, recovery) = self.revive(&mut disk, &memory)?;
        if let Some(why) = recovery.loss.or_else(|| volumes.read_only().map(str::to_owned)) {
            return Err(format!("after a death: {why}"));
        }
        self.ledger.replays += u64::from(recovery.replayed > 0);
        find::check(&mut volumes, &mut disk.clone(), false).map_err(|what| format!("after a death: {what}"))?;
        let mut random = Random::new(self.random.below(u64::MAX));
        let found = find::find(&mut volumes, &mut disk.clone(), &mut random)?;
        let found = find::read(found, &disk.bytes(), self.tuning.block_bytes);
        let when = When { taken: usize::MAX, flushed: usize::MAX, cut: usize::MAX };
        let Some(mark) = self.marks.last() else { return Err("no generation was ever safe".to_owned()) };
        let mut wrong = Vec::new();
        for generation in [Some(&mark.safe), mark.next.as_ref()].into_iter().flatten() {
            let state = self.answered_since(generation);
            let expected = Generation { taken: usize::MAX, state, newest_id: None, answered: 0 };
            match compare(&found, &expected, &self.cells, &self.ledger.stamps, when, false) {
                Ok(()) => return Ok(()),
                Err(what) => wrong.push(what),
            }
        }
        Err(format!("after a death ({} replayed): {}", recovery.replayed, wrong.join("\n  and ")))
    }

    fn revive(&self, disk: &mut SimDisk, memory: &Arc<HeapMemory>) -> Result<(Volumes, Recovery), String> {
        let volumes = Volumes::open_with(disk, &self.tuning.open_options());
        let mut volumes = volumes.map_err(|error| format!("open after a death: {error}"))?;
        let recovery = volumes.recover(disk, memory.clone(), &self.place);
        Ok((volumes, recovery))
    }

    /// A generation with the changes that were answered after it.
    fn answered_since(&self, generation: &Generation) -> State {
        let mut state = generation.state.clone();
        for answered in self.answered.iter().skip(generation.answered) {
            let (Answered::Mapped { volume, .. } | Answered::Unmapped { volume, .. }) = answered;
            let Some(volume) = state.0.get_mut(volume) else { continue };
            let blocks = Rc::make_mut(&mut volume.cells);
            match answered {
                Answered::Mapped { cells, .. } => blocks.extend(cells.iter().map(|(block, cell)| (*block, *cell))),
                Answered::Unmapped { range, .. } => blocks.retain(|block, _| !range.contains(Vlba(*block))),
            }
        }
        state
    }
}
