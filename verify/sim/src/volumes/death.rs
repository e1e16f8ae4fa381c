//! Deaths of the process while its guests live: every answered change must survive.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use sidecore_extent::BlockRange;
use sidecore_units::Vlba;
use sidecore_volume::{HeapMemory, LOG_ENTRY_BYTES, LOG_HEADER_BYTES, LogPlace};

use super::model::{CellId, Generation, State};
use super::tuning::Tuning;
use super::world::World;
use crate::history::{Step, System as _};

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

    /// A generation with the changes that were answered after it.
    pub(super) fn answered_since(&self, generation: &Generation) -> State {
        let mut state = generation.state.clone();
        for answered in self.answered.iter().skip(generation.answered) {
            let (Answered::Mapped { volume, .. } | Answered::Unmapped { volume, .. }) = answered;
            let Some(volume) = state.0.get_mut(volume) else { continue };
            let blocks = Rc::make_mut(&mut volume.cells);
            match answered {
                Answered::Mapped { cells, .. } => {
                    blocks.extend(cells.iter().map(|(block, cell)| (*block, *cell)))
                }
                Answered::Unmapped { range, .. } => {
                    blocks.retain(|block, _| !range.contains(Vlba(*block)))
                }
            }
        }
        state
    }
}
