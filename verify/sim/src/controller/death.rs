//! Deaths of the process while its guests live: every answered change must survive.

use std::sync::Arc;

use sidecore_controller::Answered;
use sidecore_volume::{HeapMemory, LogPlace, Recovery, Volumes};

use super::Bug;
use super::world::{Step, World};
use crate::Random;
use crate::volumes::death::{log_memory, place};
use crate::volumes::disk::SimDisk;
use crate::volumes::find;
use crate::volumes::tuning::Tuning;

/// The log that keeps answered changes over a death.
#[derive(Clone, Debug)]
pub(super) struct Keeping {
    /// The memory that outlives the process; `None` if changes are answered when they are durable.
    log: Option<Arc<HeapMemory>>,
    place: LogPlace,
}

impl Keeping {
    /// The log of a new boot.
    pub(super) fn draw(random: &mut Random, tuning: &Tuning, has_log: bool) -> Self {
        Self { log: has_log.then(|| log_memory(tuning)), place: place(random.below(u64::MAX)) }
    }

    /// The controller's option for when it answers.
    pub(super) fn answered(&self, bug: Option<Bug>) -> Answered {
        match &self.log {
            _ if bug == Some(Bug::NoLog) => Answered::WithTheStore,
            Some(log) => Answered::InLog(log.clone(), self.place),
            None => Answered::WhenDurable(self.place.boot),
        }
    }
}

impl World {
    /// Lets the process die, at a random chance.
    pub(super) fn perhaps_die(&mut self) -> Step {
        // After a failed commit, the state in memory differs from the disk's.
        if self.has_failed || !self.random.once_in(8 * self.tuning.chances_per_death) {
            return Ok(());
        }
        self.die()
    }

    /// Checks the state that a death of the process now would leave, on a copy; the run continues.
    fn die(&mut self) -> Step {
        self.deaths += 1;
        self.note("the process could die here");
        let keeping = Keeping {
            log: self.keeping.log.as_ref().map(|log| Arc::new(HeapMemory::of_words(log.to_words()))),
            ..self.keeping.clone()
        };
        let mut disk = SimDisk::new(self.disk.bytes());
        if self.random.once_in(2) {
            // A second death, in the middle of the replay.
            disk.fail_after(Some(self.random.below(24)));
            let _ = self.revive(&mut disk, &keeping);
            disk = SimDisk::new(disk.bytes());
        }
        let (mut volumes, recovery) = self.revive(&mut disk, &keeping)?;
        if let Some(why) = recovery.loss.or_else(|| volumes.read_only().map(str::to_owned)) {
            return Err(format!("after a death: {why}"));
        }
        self.replays += u64::from(recovery.replayed > 0);
        find::check(&mut volumes, &mut disk.clone(), false).map_err(|what| format!("after a death: {what}"))?;
        let mut random = Random::new(self.random.below(u64::MAX));
        let found = find::find(&mut volumes, &mut disk.clone(), &mut random)?;
        let found = find::read(found, &disk.bytes(), self.tuning.block_bytes);
        let now = self.now();
        self.model
            .check_died(&found, now, &self.ledger.stamps)
            .map_err(|what| format!("after a death ({} replayed): {what}", recovery.replayed))
    }

    fn revive(&self, disk: &mut SimDisk, keeping: &Keeping) -> Result<(Volumes, Recovery), String> {
        let volumes = Volumes::open_with(disk, &self.open_options());
        let mut volumes = volumes.map_err(|error| format!("open after a death: {error}"))?;
        let recovery = match keeping.answered(self.bug) {
            Answered::InLog(memory, place) => volumes.recover(disk, memory, &place),
            Answered::WhenDurable(boot) => volumes.recover_without_log(&boot),
            Answered::WithTheStore => Recovery::default(),
        };
        Ok((volumes, recovery))
    }
}
