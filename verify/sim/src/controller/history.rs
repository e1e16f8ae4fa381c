//! From a seed to a history with many power cuts.

use std::collections::BTreeSet;

use sidecore_volume::{FormatOptions, Volumes, format};

use super::Bug;
use super::world::{Habits, World};
use crate::Random;
use crate::many::Total;
use crate::violation::{Violation, no_panic};
use crate::volumes::cut::{Cutter, Image};
use crate::volumes::disk::SimDisk;
use crate::volumes::find;
use crate::volumes::model::{Found, fill};
use crate::volumes::tuning::Tuning;
use crate::volumes::world::Ledger;

/// The length of a history.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Runs. Each one starts from a disk that a power cut of the run before has left.
    pub runs: u64,
    /// Steps in each run.
    pub steps: u64,
    /// The duty to neglect.
    pub bug: Option<Bug>,
}

impl Default for Options {
    fn default() -> Self {
        Self { runs: 3, steps: 1200, bug: None }
    }
}

/// The sum of a history's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Positions of the recordings at which the power was cut.
    pub cut_points: u64,
    /// Disks made for the cuts, opened and compared.
    pub disks: u64,
    /// Steps of guests, the operator and the controller.
    pub operations: u64,
    /// Guests' requests that succeeded.
    pub requests: u64,
    /// Requests that failed because the store failed.
    pub failures: u64,
    /// Requests refused because the disk was full or a quota reached.
    pub refusals: u64,
    /// Deaths of the process.
    pub deaths: u64,
    /// Deaths that left changes to replay.
    pub replays: u64,
}

impl Total for Outcome {
    fn add(&mut self, other: Self) {
        self.cut_points += other.cut_points;
        self.disks += other.disks;
        self.operations += other.operations;
        self.requests += other.requests;
        self.failures += other.failures;
        self.refusals += other.refusals;
        self.deaths += other.deaths;
        self.replays += other.replays;
    }
}

/// Runs the history of `seed`, with a power cut after every write and flush.
///
/// # Errors
/// A check that failed.
pub fn run(seed: u64, options: &Options) -> Result<Outcome, Box<Violation>> {
    let mut random = Random::new(seed);
    let (tuning, habits) = (Tuning::draw(&mut random), Habits::draw(&mut random));
    let (ledger, outcome) = (Ledger::default(), Outcome::default());
    let mut history = History { seed, run: 0, tuning, habits, random, ledger, outcome };
    let mut left = history.format()?;
    for run in 0..options.runs {
        history.run = run;
        left = history.run(left, options)?;
    }
    history.outcome.operations = history.ledger.operations;
    history.outcome.refusals = history.ledger.refusals;
    Ok(history.outcome)
}

/// The disk that a power cut leaves.
#[derive(Default)]
struct Left {
    bytes: Vec<u8>,
    found: Found,
}

struct History {
    seed: u64,
    run: u64,
    tuning: Tuning,
    habits: Habits,
    random: Random,
    ledger: Ledger,
    outcome: Outcome,
}

impl History {
    fn violation(&self, when: &str, what: String, trace: &[(usize, String)], position: usize) -> Box<Violation> {
        let when = format!("{when} ({:?}, {:?})", self.tuning, self.habits);
        Violation::new((self.seed, self.run), when, what, trace, position)
    }

    /// Formats a disk that is full of a former owner's data.
    fn format(&mut self) -> Result<Left, Box<Violation>> {
        let former = fill(self.ledger.stamps.give(None));
        let disk = SimDisk::new(former.iter().copied().cycle().take(self.tuning.disk_bytes).collect());
        let block_bytes = self.tuning.block_bytes;
        let options = FormatOptions { block_bytes, label: "simulated".to_owned(), uuid: [7; 16], force: true };
        match format(&mut disk.clone(), &options) {
            Ok(()) => Ok(Left { bytes: disk.bytes(), found: Found::new() }),
            Err(error) => Err(self.violation("formatting", error.to_string(), &[], 0)),
        }
    }

    /// Starts from `left`, takes the steps, and returns the disk that one of the power cuts leaves.
    fn run(&mut self, Left { bytes, found }: Left, options: &Options) -> Result<Left, Box<Violation>> {
        let disk = SimDisk::new(bytes);
        let random = Random::new(self.random.below(u64::MAX));
        let (manner, ledger) = ((self.tuning, self.habits), self.ledger.clone());
        let world = no_panic(|| World::new(random, manner, options.bug, ledger, disk.clone(), &found));
        let mut world = world.map_err(|what| self.violation("at the start", what, &[], 0))?;
        let result = no_panic(|| world.run(options.steps));
        self.ledger = world.ledger.clone();
        self.outcome.requests += world.successes;
        self.outcome.failures += world.failures;
        self.outcome.deaths += world.deaths;
        self.outcome.replays += world.replays;
        if let Err(what) = result {
            world.abandon();
            return Err(self.violation(&format!("in use, at {}", disk.position()), what, &world.trace, usize::MAX));
        }
        self.cut_everywhere(&world)
    }

    /// Cuts the power at every position of the recording, and returns the disk that one cut leaves.
    fn cut_everywhere(&mut self, world: &World) -> Result<Left, Box<Violation>> {
        let recording = world.disk.recording();
        let half = recording.log.len() as u64 / 2;
        let wanted = (half + self.random.below(half + 1)) as usize;
        let mut cutter = Cutter::new(&recording);
        let mut survivor = None;
        while cutter.advance() {
            let position = cutter.position();
            self.outcome.cut_points += 1;
            for _ in 0..=u64::from(cutter.is_uncertain()) {
                self.outcome.disks += 1;
                // A torn commit may have left only one good copy of the metadata, until the next
                // commit.
                let is_alone = self.run > 0 && world.first_commit.is_none_or(|first| position < first);
                let is_end = position == recording.log.len();
                let mut random = Random::new(self.random.below(u64::MAX));
                let keep = position >= wanted && survivor.is_none();
                let seen = cutter.cut(&mut self.random, !is_end && !is_alone, |image| {
                    let found = no_panic(|| inspect(image, &mut random, world, position))?;
                    Ok((keep && !image.is_damaged()).then(|| Left { bytes: image.bytes().to_vec(), found }))
                });
                let seen: Result<_, String> = seen;
                let flushed = cutter.flushed();
                let when = || format!("power cut at {position} (flushed up to {flushed})");
                let left = seen.map_err(|what| self.violation(&when(), what, &world.trace, position))?;
                survivor = survivor.or(left);
            }
        }
        survivor.ok_or_else(|| self.violation("afterwards", "no disk is left".to_owned(), &[], 0))
    }
}

/// Opens, checks and reads a disk, and compares its content with what the cut may leave.
fn inspect(image: &mut Image<'_>, random: &mut Random, world: &World, cut: usize) -> Result<Found, String> {
    let options = world.open_options();
    let mut volumes = Volumes::open_with(image, &options).map_err(|error| format!("open: {error}"))?;
    if let Some(why) = volumes.read_only() {
        return Err(format!("opened read-only: {why}; damage: {:?}", volumes.damage()));
    }
    let is_damaged = image.is_damaged();
    let report = find::check(&mut volumes, image, is_damaged)?;
    let found = find::find(&mut volumes, image, random)?;
    let found = find::read(found, image.bytes(), world.tuning.block_bytes);
    world.model.check_left(&found, cut, &world.ledger.stamps)?;
    let blocks = found.values().flat_map(|volume| volume.blocks.values());
    let places: BTreeSet<u64> = blocks.map(|block| block.physical).collect();
    find::check_space(&volumes, &report, places.len() as u64)?;
    Ok(found)
}
