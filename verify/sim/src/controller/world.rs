//! A controller in use by random guests and a random operator.

use std::sync::Arc;

use sidecore_controller::{Answered, Controller, ControllerOptions, DedupRun};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;
use sidecore_volume::{FormatOptions, HeapMemory, format};

use super::Bug;
use super::death::Keeping;
use super::guest::{Guest, Requests};
use super::model::Model;
use super::register::Moment;
use super::settle::Settling;
use super::store::{Manner, SimStore};
use crate::Random;
use crate::history::{Cut, History, Ledger, Outcome, Parts, Step, System, Traced};
use crate::violation::Violation;
use crate::volumes::cut::Cutter;
use crate::volumes::disk::SimDisk;
use crate::volumes::model::{Found, Stamp};
use crate::volumes::tuning::Tuning;

/// The choices of a history beside the [`Tuning`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// See [`Manner::delay`].
    delay: u64,
    /// See [`Manner::requests_per_fault`].
    requests_per_fault: u64,
    /// Sectors at each end of a volume that most requests go to.
    pub(super) hot_sectors: u64,
    btlb_entries: usize,
    /// One in so many steps is a step of the hypervisor side.
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

/// A controller from its start to the next power cut, with its model.
pub(super) struct World {
    pub(super) random: Random,
    pub(super) tuning: Tuning,
    pub(super) habits: Habits,
    pub(super) bug: Option<Bug>,
    pub(super) ledger: Ledger,
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
    pub(super) dedup: Option<DedupRun>,
    /// Contents that guests write in many places.
    pub(super) common: Vec<Stamp>,
    pub(super) time: Nanos,
    pub(super) is_committing: bool,
    /// The number of steps that are nested in the controller's work.
    pub(super) depth: u32,
    /// A commit has failed: the store is read-only.
    pub(super) has_failed: bool,
    /// The position of the first commit's end, from which on a second copy of the metadata exists.
    pub(super) first_commit: Option<usize>,
    /// A check that failed in the middle of the controller's work.
    pub(super) wrong: Option<String>,
    /// Each step, with the position of the recording before it.
    pub(super) trace: Vec<Traced>,
}

impl System for World {
    type Bug = Bug;
    type Manner = (Tuning, Habits);
    type Kept = ();
    const STARTS_PER_FORMAT: u64 = u64::MAX;

    fn draw(random: &mut Random) -> (Tuning, Habits) {
        (Tuning::draw(random), Habits::draw(random))
    }

    fn tuning((tuning, _): &(Tuning, Habits)) -> &Tuning {
        tuning
    }

    fn format(history: &mut History<Self>, bytes: Vec<u8>) -> Result<Vec<u8>, Box<Violation>> {
        let disk = SimDisk::new(bytes);
        let block_bytes = history.tuning().block_bytes;
        let options = FormatOptions {
            block_bytes,
            label: "simulated".to_owned(),
            uuid: [7; 16],
            force: true,
        };
        let formatted = format(&mut disk.clone(), &options);
        formatted.map_err(|error| history.violation("formatting", error.to_string(), &[], 0))?;
        Ok(disk.bytes())
    }

    fn start(
        mut random: Random,
        (tuning, habits): (Tuning, Habits),
        bug: Option<Bug>,
        ledger: Ledger,
        disk: SimDisk,
        found: &Found,
        (): (),
    ) -> Result<Self, String> {
        let Habits { delay, requests_per_fault, btlb_entries, .. } = habits;
        let manner = Manner { delay, requests_per_fault, bug };
        let store = SimStore::new(disk.clone(), Random::new(random.below(u64::MAX)), manner);
        // After a power cut, no guest has unfinished changes.
        let keeping = Keeping::draw(&mut random, &tuning, habits.has_log);
        let options = ControllerOptions {
            btlb_entries,
            tree_memory_bytes: 1 << 20,
            answered: keeping.answered(bug),
            ..ControllerOptions::default()
        };
        let controller = Controller::without_threads(
            "simulated",
            Arc::new(store.clone()),
            &options,
            None,
            &mut store.clone(),
        );
        let controller = controller.map_err(|error| format!("open: {error}"))?;
        if bug == Some(Bug::LyingFlushes) {
            disk.lie_about_flushes();
        }
        Ok(Self {
            random,
            tuning,
            habits,
            bug,
            ledger,
            disk,
            store,
            controller,
            keeping,
            model: Model::adopt(found, tuning.sectors_per_block() as u64),
            requests: Requests::new(),
            core: CoreContext::default(),
            guests: Vec::new(),
            settling: Vec::new(),
            dedup: None,
            common: Vec::new(),
            time: Nanos(1),
            is_committing: false,
            depth: 0,
            has_failed: false,
            first_commit: None,
            wrong: None,
            trace: Vec::new(),
        })
    }

    /// Takes so many steps, or fewer if the disk fails for good, and ends all requests.
    fn run(&mut self, steps: u64, _is_last: bool) -> Step {
        for _ in 0..steps {
            if self.has_failed {
                break;
            }
            self.step()?;
        }
        self.finish()
    }

    /// Leaks the guests: their requests in flight will never end.
    fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.guests));
    }

    fn parts(&mut self) -> Parts<'_> {
        let Self { random, tuning, ledger, disk, trace, .. } = self;
        Parts { random, tuning, ledger, disk, trace }
    }

    fn may_survive(_cutter: &Cutter<'_>) -> bool {
        true
    }

    fn has_second_copy(&self, position: usize) -> bool {
        self.first_commit.is_some_and(|first| position >= first)
    }

    fn check_cut(&self, found: &Found, cut: Cut, _outcome: &mut Outcome) -> Step {
        self.model.check_left(found, cut.position, &self.ledger.stamps)
    }

    fn log_at_death(&self) -> Answered {
        let log =
            self.keeping.log.as_ref().map(|log| Arc::new(HeapMemory::of_words(log.to_words())));
        Keeping { log, ..self.keeping.clone() }.answered(self.bug)
    }

    fn check_death(&mut self, found: &Found) -> Step {
        let now = self.now();
        self.model.check_died(found, now, &self.ledger.stamps)
    }
}

impl World {
    fn finish(&mut self) -> Step {
        self.drain()?;
        self.store.stop_failing();
        if !self.has_failed {
            for _ in 0..4 {
                self.attach()?;
            }
        }
        self.read_everything()?;
        // After a failed commit, the disk differs from the state in memory.
        if self.has_failed { Ok(()) } else { self.check() }
    }

    /// A random step.
    pub(super) fn step(&mut self) -> Step {
        self.perhaps_die()?;
        if self.random.once_in(self.habits.steps_per_service) {
            return self.serve();
        }
        if self.dedup.is_some() && self.random.once_in(12) {
            return self.dedup();
        }
        match self.random.below(64) {
            0..22 => self.send_request(),
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
            62 | 63 => self.dedup(),
            _ => self.serve(),
        }
    }

    pub(super) fn now(&mut self) -> Moment {
        self.model.now(self.disk.position())
    }

    pub(super) fn store_position(&self) -> usize {
        self.disk.position()
    }

    pub(super) fn any_volume(&mut self) -> Option<u64> {
        let count = self.model.present().count();
        let index = self.random.below(count.max(1) as u64) as usize;
        self.model.present().nth(index).map(|(id, _)| id)
    }
}
