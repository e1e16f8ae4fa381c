//! Deduplication under the guests, a step at a time.

use sidecore_controller::{ControllerError, DedupOptions, DedupStep};
use sidecore_volume::VolumeError;

use super::world::World;
use crate::history::{Step, System as _};
use crate::volumes::model::Stamp;

/// Sectors that a deduplication compares together, if blocks are not larger.
const UNIT_SECTORS: u64 = 8;
/// Different contents of such sectors that guests write often.
const CONTENTS: u64 = 3;

impl World {
    /// Contents for a guest's write to these sectors: such as are nowhere else, or some of the few
    /// that are everywhere.
    pub(super) fn stamps_to_write(
        &mut self,
        volume: u64,
        sectors: std::ops::Range<u64>,
    ) -> Vec<(u64, Stamp)> {
        if self.random.once_in(2) {
            let give = |sector| (sector, self.ledger.stamps.give(Some((volume, sector))));
            return sectors.map(give).collect();
        }
        if self.common.is_empty() {
            let give = |sector| self.ledger.stamps.give(Some((0, sector)));
            self.common = (0..CONTENTS * UNIT_SECTORS).map(give).collect();
        }
        let first = self.random.below(CONTENTS) * UNIT_SECTORS;
        let common = |sector| {
            let index = (first + sector % UNIT_SECTORS) as usize;
            (sector, self.common.get(index).copied().unwrap_or(0))
        };
        sectors.map(common).collect()
    }

    /// Sectors around these that a deduplication compares together, as far as the guest has them.
    pub(super) fn whole_units(&mut self, (sector, count): (u64, u64), sectors: u64) -> (u64, u64) {
        let first = sector / UNIT_SECTORS * UNIT_SECTORS;
        let longest = (sector - first + count).next_multiple_of(UNIT_SECTORS).min(4 * UNIT_SECTORS);
        (first, longest.min(sectors - first))
    }

    /// Takes some steps of a deduplication, or begins one.
    pub(super) fn dedup(&mut self) -> Step {
        if self.has_failed {
            return Ok(());
        }
        let Some(mut run) = self.dedup.take() else {
            let options =
                DedupOptions { across: !self.random.once_in(4), ..DedupOptions::default() };
            self.note(format!("deduplicate, across families: {}", options.across));
            let run = self.controller.begin_dedup(&options, 1);
            self.dedup = Some(run.map_err(|error| error.to_string())?);
            return Ok(());
        };
        let steps = 1 + self.random.below(16);
        for _ in 0..steps {
            let about_to_remap = run.is_about_to_remap();
            let remaps = run.counts().remaps;
            let step = self.controller.step_dedup(&mut run, &mut self.store.clone());
            let remapped = run.counts().remaps - remaps;
            if about_to_remap {
                self.note(format!("a remap: {}", if remapped > 0 { "done" } else { "left" }));
            }
            self.ledger.outcome.remaps += remapped;
            match step {
                Ok(DedupStep::Worked(_)) => {}
                Ok(DedupStep::Waits) => break,
                Ok(DedupStep::NeedsCommit) => {
                    self.commit()?;
                    break;
                }
                Ok(DedupStep::Done) => return Ok(()),
                Err(error) => {
                    self.controller.end_dedup(&mut run);
                    return self.dedup_failed(&error);
                }
            }
            // Here a guest may write, before what was compared is remapped.
            if run.is_about_to_remap() && self.random.once_in(2) {
                break;
            }
        }
        self.dedup = Some(run);
        Ok(())
    }

    fn dedup_failed(&mut self, error: &ControllerError) -> Step {
        match error {
            ControllerError::NoRoomToRemap | ControllerError::Volume(VolumeError::DiskFull(_)) => {
                self.ledger.outcome.refusals += 1;
                Ok(())
            }
            ControllerError::Volume(VolumeError::StoreReadOnly(_))
                if self.has_failed || self.is_committing =>
            {
                Ok(())
            }
            _ => Err(format!("deduplication: {error}")),
        }
    }
}
