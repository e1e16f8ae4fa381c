//! A controller in use, with its guests and its operator, at random.

use std::sync::Arc;

use sidecore_controller::{Controller, ControllerOptions};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;
use sidecore_volume::OpenOptions;

use super::Bug;
use super::death::Keeping;
use super::guest::{Guest, Requests};
use super::model::Model;
use super::register::Moment;
use super::settle::Settling;
use super::store::{Manner, SimStore};
use crate::Random;
use crate::volumes::disk::SimDisk;
use crate::volumes::model::Found;
use crate::volumes::tuning::Tuning;
use crate::volumes::world::Lore;

/// How a step ends: with what is wrong, if something is.
pub(super) type Step = Result<(), String>;

/// What sort of history a seed gives, beside the [`Tuning`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// See [`Manner::delay`].
    delay: u64,
    /// See [`Manner::requests_per_fault`].
    requests_per_fault: u64,
    /// Sectors at a volume's ends that everybody likes.
    pub(super) hot_sectors: u64,
    btlb_entries: usize,
    /// One in so many steps is the hypervisor side's.
    steps_per_service: u64,
    /// Whether there is a log of answered changes.
    has_log: bool,
}

impl Habits {
    pub(super) fn draw(random: &mut Random) -> Self {
        Self {
            delay: [1, 2, 6][random.below(3) as usize],
            requests_per_fault: [200, u64::MAX, u64::MAX][random.below(3) as usize],
            hot_sectors: [4, 16, 64, 512][random.below(4) as usize],
            btlb_entries: [0, 1, 8][random.below(3) as usize],
            steps_per_service: [2, 4, 12][random.below(3) as usize],
            has_log: !random.once_in(4),
        }
    }
}

/// A controller from one start to the next power cut, and what is known of it.
pub(super) struct World {
    pub(super) random: Random,
    pub(super) tuning: Tuning,
    pub(super) habits: Habits,
    pub(super) bug: Option<Bug>,
    pub(super) lore: Lore,
    pub(super) disk: SimDisk,
    pub(super) store: SimStore,
    pub(super) controller: Arc<Controller>,
    pub(super) keeping: Keeping,
    pub(super) model: Model,
    pub(super) requests: Requests,
    /// All guests are on one sidecore.
    pub(super) core: CoreContext,
    pub(super) guests: Vec<Guest>,
    pub(super) settling: Vec<Settling>,
    pub(super) time: Nanos,
    pub(super) is_committing: bool,
    /// How deep in the controller's work further steps are taken.
    pub(super) depth: u32,
    /// A commit has failed, so that nothing changes any more.
    pub(super) has_failed: bool,
    /// From here on, the metadata that was found is not the only one.
    pub(super) first_commit: Option<usize>,
    /// Requests that ended well, and those that the store's failures ended.
    pub(super) successes: u64,
    pub(super) failures: u64,
    /// Deaths of the process, and those of them that left something to replay.
    pub(super) deaths: u64,
    pub(super) replays: u64,
    /// What was wrong in the middle of the controller's work.
    pub(super) wrong: Option<String>,
    /// The position of the recording before each step, and what the step was.
    pub(super) trace: Vec<(usize, String)>,
}

impl World {
    /// Goes on with what was found on a disk, which holds nothing that is not safe.
    pub(super) fn new(
        mut random: Random,
        (tuning, habits): (Tuning, Habits),
        bug: Option<Bug>,
        lore: Lore,
        disk: SimDisk,
        found: &Found,
    ) -> Result<Self, String> {
        let Habits { delay, requests_per_fault, btlb_entries, .. } = habits;
        let manner = Manner { delay, requests_per_fault, bug };
        let store = SimStore::new(disk.clone(), Random::new(random.below(u64::MAX)), manner);
        // The power was gone: no guest is there any more.
        let keeping = Keeping::draw(&mut random, &tuning, habits.has_log);
        let options = ControllerOptions {
            btlb_entries,
            tree_memory_bytes: 1 << 20,
            answered: keeping.answered(bug),
            ..ControllerOptions::default()
        };
        let controller =
            Controller::without_threads("simulated", Arc::new(store.clone()), &options, None, &mut store.clone());
        let controller = controller.map_err(|error| format!("open: {error}"))?;
        if bug == Some(Bug::LyingFlushes) {
            disk.lie_about_flushes();
        }
        Ok(Self {
            random,
            tuning,
            habits,
            bug,
            lore,
            disk,
            store,
            controller,
            keeping,
            model: Model::adopt(found, tuning.sectors_per_block() as u64),
            requests: Requests::new()?,
            core: CoreContext::default(),
            guests: Vec::new(),
            settling: Vec::new(),
            time: Nanos(1),
            is_committing: false,
            depth: 0,
            has_failed: false,
            first_commit: None,
            successes: 0,
            failures: 0,
            deaths: 0,
            replays: 0,
            wrong: None,
            trace: Vec::new(),
        })
    }

    /// Takes so many steps, or fewer if the disk fails for good, and sees to it that all ends.
    pub(super) fn run(&mut self, steps: u64) -> Step {
        for _ in 0..steps {
            if self.has_failed {
                break;
            }
            self.step()?;
        }
        self.finish()
    }

    fn finish(&mut self) -> Step {
        self.drain()?;
        self.store.behave();
        if !self.has_failed {
            for _ in 0..4 {
                self.attach()?;
            }
        }
        self.read_everything()?;
        // What a commit that failed has left on the disk is not what is in memory.
        if self.has_failed { Ok(()) } else { self.check() }
    }

    /// Something happens.
    pub(super) fn step(&mut self) -> Step {
        self.perhaps_die()?;
        if self.random.once_in(self.habits.steps_per_service) {
            return self.serve();
        }
        match self.random.below(64) {
            0..22 => self.ask(),
            22..52 => self.poll_some(),
            52 | 53 if self.controller.wants_commit() => self.commit(),
            54 if self.random.once_in(2) => self.commit(),
            55..58 => self.manage(),
            58 => self.forget(),
            59 => self.attach(),
            60 => {
                self.detach();
                Ok(())
            }
            61 if self.random.once_in(8) => self.check(),
            _ => self.serve(),
        }
    }

    /// The next moment.
    pub(super) fn now(&mut self) -> Moment {
        self.model.now(self.disk.position())
    }

    pub(super) fn store_position(&self) -> usize {
        self.disk.position()
    }

    /// Notes what is about to be done.
    pub(super) fn tell(&mut self, what: impl Into<String>) {
        self.lore.operations += 1;
        self.trace.push((self.disk.position(), what.into()));
    }

    pub(super) fn any_volume(&mut self) -> Option<u64> {
        let count = self.model.present().count();
        let index = self.random.below(count.max(1) as u64) as usize;
        self.model.present().nth(index).map(|(id, _)| id)
    }

    /// Leaves everything as it is: requests that are under way have no end.
    pub(super) fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.guests));
    }

    /// How disks of this history are opened.
    pub(super) const fn open_options(&self) -> OpenOptions {
        self.tuning.open_options()
    }
}
