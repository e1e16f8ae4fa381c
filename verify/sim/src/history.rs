//! A history: runs of a system on a disk, a power cut after every write and flush, and the checks
//! of the disks that the cuts leave.

use std::collections::BTreeSet;
use std::fmt::Debug;

use sidecore_controller::Answered;
use sidecore_volume::{OpenOptions, Recovery, Volumes};

use crate::Random;
use crate::many::Total;
use crate::violation::{Violation, no_panic};
use crate::volumes::cut::{Cutter, Image};
use crate::volumes::disk::SimDisk;
use crate::volumes::find;
use crate::volumes::model::{Found, Stamps, fill};
use crate::volumes::tuning::Tuning;

/// The length of a history.
#[derive(Clone, Copy, Debug)]
pub struct Options<B> {
    /// Runs. Each one starts from a disk that a power cut of the run before has left.
    pub runs: u64,
    /// Steps in each run.
    pub steps: u64,
    /// The duty to neglect.
    pub bug: Option<B>,
}

/// The sum of a history's events. A simulation leaves counts at zero that it does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Positions of the recordings at which the power was cut.
    pub cut_points: u64,
    /// Disks made for the cuts, opened and compared.
    pub disks: u64,
    /// Steps of guests, the operator and the controller.
    pub operations: u64,
    /// Steps and requests refused because the disk was full or a quota reached.
    pub refusals: u64,
    /// Deaths of the process.
    pub deaths: u64,
    /// Deaths that left changes to replay.
    pub replays: u64,
    /// Cuts during a commit that left the generation before it (volumes).
    pub fell_back: u64,
    /// Cuts during a commit that left the new generation (volumes).
    pub went_ahead: u64,
    /// The largest number of extents in a volume (volumes).
    pub most_extents: u64,
    /// Blocks that were found equal to others and became one with them.
    pub remaps: u64,
    /// Guests' requests that succeeded (controller).
    pub requests: u64,
    /// Requests that failed because the store failed (controller).
    pub failures: u64,
}

impl Total for Outcome {
    fn add(&mut self, other: Self) {
        self.cut_points += other.cut_points;
        self.disks += other.disks;
        self.operations += other.operations;
        self.refusals += other.refusals;
        self.deaths += other.deaths;
        self.replays += other.replays;
        self.fell_back += other.fell_back;
        self.went_ahead += other.went_ahead;
        self.most_extents = self.most_extents.max(other.most_extents);
        self.remaps += other.remaps;
        self.requests += other.requests;
        self.failures += other.failures;
    }
}

/// State that continues over power cuts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) stamps: Stamps,
    /// The number of names that were given.
    pub(crate) names: u64,
    /// The clock, in seconds.
    pub(crate) now_unix_s: u64,
    pub(crate) outcome: Outcome,
}

/// The result of a step: an error says which check failed.
pub(crate) type Step = Result<(), String>;

/// A step of a run, after the position of the recording before it.
pub(crate) type Traced = (usize, String);

/// The place of a power cut in a recording.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) position: usize,
    /// All events before this position were flushed.
    pub(crate) flushed: usize,
}

/// The disk that a power cut leaves.
pub(crate) struct Left<S: System> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) found: Found,
    pub(crate) kept: S::Kept,
}

impl<S: System> Left<S> {
    /// A disk that was just formatted.
    fn formatted(bytes: Vec<u8>) -> Self {
        Self { bytes, found: Found::new(), kept: S::Kept::default() }
    }
}

/// The parts of a system that a history reads and writes.
pub(crate) struct Parts<'a> {
    pub(crate) random: &'a mut Random,
    pub(crate) tuning: &'a Tuning,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) disk: &'a SimDisk,
    pub(crate) trace: &'a mut Vec<Traced>,
}

/// A system from its start on a disk to the next power cut, with its model.
pub(crate) trait System: Sized {
    type Bug: Copy;
    /// The choices that hold for a whole history.
    type Manner: Copy + Debug;
    /// Knowledge about a disk besides its content.
    type Kept: Default;
    /// One in so many starts formats the disk again.
    const STARTS_PER_FORMAT: u64;

    fn draw(random: &mut Random) -> Self::Manner;
    fn tuning(manner: &Self::Manner) -> &Tuning;

    /// Makes an empty store on a disk with this content.
    fn format(history: &mut History<Self>, bytes: Vec<u8>) -> Result<Vec<u8>, Box<Violation>>;

    /// Starts on a disk whose whole content, `found`, is safe.
    fn start(
        random: Random,
        manner: Self::Manner,
        bug: Option<Self::Bug>,
        ledger: Ledger,
        disk: SimDisk,
        found: &Found,
        kept: Self::Kept,
    ) -> Result<Self, String>;

    /// Takes so many steps. The last run of a history may end it.
    fn run(&mut self, steps: u64, is_last: bool) -> Step;

    /// Ends a run whose check has failed, and whose requests in flight will therefore not end.
    fn abandon(&mut self) {}

    fn parts(&mut self) -> Parts<'_>;

    /// Whether the next run may start from a disk that a cut here leaves. At the end it always may.
    fn may_survive(cutter: &Cutter<'_>) -> bool;

    /// Whether a cut here leaves a second copy of the metadata, if all of its sectors are there.
    fn has_second_copy(&self, position: usize) -> bool;

    /// Compares the content of a disk with what the cut may leave.
    fn check_cut(
        &self,
        found: &Found,
        cut: Cut,
        outcome: &mut Outcome,
    ) -> Result<Self::Kept, String>;

    /// A copy of the log that the death of the process would leave.
    fn log_at_death(&self) -> Answered;

    /// Compares the content of a disk with what the death of the process may leave.
    fn check_death(&mut self, found: &Found) -> Step;

    /// Notes the step that follows.
    fn note(&mut self, what: impl Into<String>) {
        let Parts { ledger, disk, trace, .. } = self.parts();
        ledger.outcome.operations += 1;
        trace.push((disk.position(), what.into()));
    }

    /// Checks the state that a death of the process now would leave, on a copy; the run continues.
    fn die(&mut self) -> Step {
        self.parts().ledger.outcome.deaths += 1;
        self.note("the process could die here");
        let log = self.log_at_death();
        let Parts { random, tuning, ledger, disk, .. } = self.parts();
        let mut disk = SimDisk::new(disk.bytes());
        if random.once_in(2) {
            // A second death, in the middle of the replay.
            disk.fail_after(Some(random.below(24)));
            let _ = revive(&mut disk, &tuning.open_options(), &log);
            disk = SimDisk::new(disk.bytes());
        }
        let (mut volumes, recovery) = revive(&mut disk, &tuning.open_options(), &log)?;
        if let Some(why) = recovery.loss.or_else(|| volumes.read_only().map(str::to_owned)) {
            return Err(format!("after a death: {why}"));
        }
        ledger.outcome.replays += u64::from(recovery.replayed > 0);
        find::check(&mut volumes, &mut disk.clone(), false)
            .map_err(|what| format!("after a death: {what}"))?;
        let mut random = Random::new(random.below(u64::MAX));
        let found = find::find(&mut volumes, &mut disk.clone(), &mut random)?;
        let found = find::read(found, &disk.bytes(), tuning.block_bytes);
        self.check_death(&found)
            .map_err(|what| format!("after a death ({} replayed): {what}", recovery.replayed))
    }
}

/// Opens a store after the death of the process.
fn revive(
    disk: &mut SimDisk,
    options: &OpenOptions,
    log: &Answered,
) -> Result<(Volumes, Recovery), String> {
    let volumes = Volumes::open_with(disk, options);
    let mut volumes = volumes.map_err(|error| format!("open after a death: {error}"))?;
    let recovery = match log {
        Answered::InLog(memory, place) => volumes.recover(disk, memory.clone(), place),
        Answered::WhenDurable(boot) => volumes.recover_without_log(boot),
        Answered::WithTheStore => Recovery::default(),
    };
    Ok((volumes, recovery))
}

/// A history in progress.
pub(crate) struct History<S: System> {
    pub(crate) seed: u64,
    run: u64,
    pub(crate) manner: S::Manner,
    pub(crate) random: Random,
    pub(crate) ledger: Ledger,
}

/// Runs the history of `seed`, with a power cut after every write and flush.
pub(crate) fn run<S: System>(
    seed: u64,
    options: &Options<S::Bug>,
) -> Result<Outcome, Box<Violation>> {
    let mut random = Random::new(seed);
    let manner = S::draw(&mut random);
    let mut history = History::<S> { seed, run: 0, manner, random, ledger: Ledger::default() };
    let former = fill(history.ledger.stamps.give(None));
    let bytes = former.iter().copied().cycle().take(history.tuning().disk_bytes).collect();
    let mut left = Left::<S>::formatted(S::format(&mut history, bytes)?);
    for run in 0..options.runs {
        history.run = run;
        if run > 0
            && S::STARTS_PER_FORMAT < u64::MAX
            && history.random.once_in(S::STARTS_PER_FORMAT)
        {
            left = Left::formatted(S::format(&mut history, left.bytes)?);
        }
        left = history.run(left, options, run + 1 == options.runs)?;
    }
    Ok(history.ledger.outcome)
}

impl<S: System> History<S> {
    pub(crate) fn tuning(&self) -> &Tuning {
        S::tuning(&self.manner)
    }

    pub(crate) fn violation(
        &self,
        when: &str,
        what: String,
        trace: &[Traced],
        position: usize,
    ) -> Box<Violation> {
        Violation::new(
            (self.seed, self.run),
            format!("{when} ({:?})", self.manner),
            what,
            trace,
            position,
        )
    }

    /// Starts from `left`, takes the steps, and returns the disk that one of the power cuts leaves.
    fn run(
        &mut self,
        left: Left<S>,
        options: &Options<S::Bug>,
        is_last: bool,
    ) -> Result<Left<S>, Box<Violation>> {
        let Left { bytes, found, kept } = left;
        let disk = SimDisk::new(bytes);
        let random = Random::new(self.random.below(u64::MAX));
        let ledger = self.ledger.clone();
        let start =
            || S::start(random, self.manner, options.bug, ledger, disk.clone(), &found, kept);
        let mut system =
            no_panic(start).map_err(|what| self.violation("at the start", what, &[], 0))?;
        let result = no_panic(|| system.run(options.steps, is_last));
        self.ledger = system.parts().ledger.clone();
        if let Err(what) = result {
            system.abandon();
            let when = format!("in use, at {}", disk.position());
            return Err(self.violation(&when, what, system.parts().trace, usize::MAX));
        }
        self.cut_everywhere(&mut system)
    }

    /// Cuts the power at every position of the recording, and returns the disk that one cut leaves.
    fn cut_everywhere(&mut self, system: &mut S) -> Result<Left<S>, Box<Violation>> {
        let recording = system.parts().disk.recording();
        let trace = std::mem::take(system.parts().trace);
        let system = &*system;
        let half = recording.log.len() as u64 / 2;
        let wanted = (half + self.random.below(half + 1)) as usize;
        let mut cutter = Cutter::new(&recording);
        let mut survivor = None;
        while cutter.advance() {
            let (position, flushed) = (cutter.position(), cutter.flushed());
            let is_end = position == recording.log.len();
            self.ledger.outcome.cut_points += 1;
            for _ in 0..=u64::from(cutter.is_uncertain()) {
                self.ledger.outcome.disks += 1;
                let survives =
                    survivor.is_none() && position >= wanted && (is_end || S::may_survive(&cutter));
                // A torn commit may have left only one good copy of the metadata, until the next
                // commit.
                let may_damage = !is_end && (self.run == 0 || system.has_second_copy(position));
                let mut random = Random::new(self.random.below(u64::MAX));
                let mut outcome = self.ledger.outcome;
                let left: Result<_, String> = cutter.cut(&mut self.random, may_damage, |image| {
                    let (found, kept) = no_panic(|| {
                        let found = inspect(image, S::tuning(&self.manner), &mut random)?;
                        let kept =
                            system.check_cut(&found, Cut { position, flushed }, &mut outcome)?;
                        Ok((found, kept))
                    })?;
                    let survives = survives && !image.is_damaged();
                    Ok(survives.then(|| Left { bytes: image.bytes().to_vec(), found, kept }))
                });
                self.ledger.outcome = outcome;
                let when = || format!("power cut at {position} (flushed up to {flushed})");
                survivor = survivor
                    .or(left.map_err(|what| self.violation(&when(), what, &trace, position))?);
            }
        }
        survivor.ok_or_else(|| self.violation("afterwards", "no disk is left".to_owned(), &[], 0))
    }
}

/// Opens, checks and reads a disk.
fn inspect(image: &mut Image<'_>, tuning: &Tuning, random: &mut Random) -> Result<Found, String> {
    let mut volumes = Volumes::open_with(image, &tuning.open_options())
        .map_err(|error| format!("open: {error}"))?;
    if let Some(why) = volumes.read_only() {
        return Err(format!("opened read-only: {why}; damage: {:?}", volumes.damage()));
    }
    let is_damaged = image.is_damaged();
    let report = find::check(&mut volumes, image, is_damaged)?;
    let found = find::find(&mut volumes, image, random)?;
    let found = find::read(found, image.bytes(), tuning.block_bytes);
    let blocks = found.values().flat_map(|volume| volume.blocks.values());
    let places: BTreeSet<u64> = blocks.map(|block| block.physical).collect();
    find::check_space(&volumes, &report, places.len() as u64)?;
    Ok(found)
}
