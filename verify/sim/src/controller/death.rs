//! Deaths of the process while its guests live: every answered change must survive.

use std::sync::Arc;

use sidecore_controller::Answered;
use sidecore_volume::{HeapMemory, LogPlace};

use super::Bug;
use super::world::World;
use crate::Random;
use crate::history::{Step, System as _};
use crate::volumes::death::{log_memory, place};
use crate::volumes::tuning::Tuning;

/// The log that keeps answered changes over a death.
#[derive(Clone, Debug)]
pub(super) struct Keeping {
    /// The memory that outlives the process; `None` if changes are answered when they are durable.
    pub(super) log: Option<Arc<HeapMemory>>,
    pub(super) place: LogPlace,
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
}
