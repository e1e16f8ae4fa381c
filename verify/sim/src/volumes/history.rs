//! From a seed to a history with many power cuts.

use std::rc::Rc;

use sidecore_volume::{FormatOptions, Volumes, format};

use super::Bug;
use super::cut::{Cutter, Image};
use super::disk::SimDisk;
use super::find;
use super::model::{Found, Generation, Mark, When, compare, fill};
use super::tuning::Tuning;
use super::world::{Ledger, World};
use crate::Random;
use crate::many::Total;
use crate::violation::{Violation, no_panic};

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
        Self { runs: 4, steps: 300, bug: None }
    }
}

/// The sum of a history's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Positions of the recordings at which the power was cut.
    pub cut_points: u64,
    /// Disks made for the cuts, opened and compared.
    pub disks: u64,
    /// Cuts during a commit that left the generation before it.
    pub fell_back: u64,
    /// Cuts during a commit that left the new generation.
    pub went_ahead: u64,
    /// The largest number of extents in a volume.
    pub most_extents: u64,
    /// Steps on the volumes.
    pub operations: u64,
    /// Steps refused because the disk was full or a quota reached.
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
        self.fell_back += other.fell_back;
        self.went_ahead += other.went_ahead;
        self.most_extents = self.most_extents.max(other.most_extents);
        self.operations += other.operations;
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
    let tuning = Tuning::draw(&mut random);
    let mut history = History { seed, run: 0, tuning, random, ledger: Ledger::default(), outcome: Outcome::default() };
    let former = history.ledger.stamps.give(None);
    let bytes: Vec<u8> = fill(former).iter().copied().cycle().take(tuning.disk_bytes).collect();
    let mut left = Left { bytes: history.format(bytes)?, ..Left::default() };
    for run in 0..options.runs {
        history.run = run;
        if run > 0 && history.random.once_in(10) {
            left = Left { bytes: history.format(left.bytes)?, ..Left::default() };
        }
        left = history.run(left, options, run + 1 == options.runs)?;
    }
    history.outcome.operations = history.ledger.operations;
    history.outcome.refusals = history.ledger.refusals;
    history.outcome.deaths = history.ledger.deaths;
    history.outcome.replays = history.ledger.replays;
    Ok(history.outcome)
}

/// The disk that a power cut leaves.
#[derive(Default)]
struct Left {
    bytes: Vec<u8>,
    found: Found,
    newest_id: Option<u64>,
}

struct History {
    seed: u64,
    run: u64,
    tuning: Tuning,
    random: Random,
    ledger: Ledger,
    outcome: Outcome,
}

impl History {
    fn violation(&self, when: String, what: String, trace: &[(usize, String)], position: usize) -> Box<Violation> {
        Violation::new((self.seed, self.run), format!("{when} ({:?})", self.tuning), what, trace, position)
    }

    /// Formats a disk with this content, with a power cut after every write and flush.
    fn format(&mut self, bytes: Vec<u8>) -> Result<Vec<u8>, Box<Violation>> {
        let disk = SimDisk::new(bytes);
        let mut uuid = [0; 16];
        uuid.fill_with(|| self.random.below(256) as u8);
        let label = format!("seed {}", self.seed);
        let options = FormatOptions { block_bytes: self.tuning.block_bytes, label, uuid, force: true };
        let trace = [(0, "format".to_owned())];
        format(&mut disk.clone(), &options)
            .map_err(|error| self.violation("formatting".to_owned(), error.to_string(), &trace, 1))?;
        let recording = disk.recording();
        let mut cutter = Cutter::new(&recording);
        while cutter.advance() {
            let position = cutter.position();
            self.outcome.cut_points += 1;
            self.outcome.disks += 1;
            let done = position == recording.log.len();
            let uuid_found = cutter.cut(&mut self.random, true, |image| {
                no_panic(|| match Volumes::open(image) {
                    // An incomplete format need not be a store, and may be the former one, damaged.
                    Ok(volumes) if volumes.uuid() == uuid && volumes.list().next().is_some() => {
                        Err("volumes in a store that was just formatted".to_owned())
                    }
                    Ok(volumes) => Ok(Some(volumes.uuid())),
                    Err(error) if done => Err(format!("open: {error}")),
                    Err(_) => Ok(None),
                })
            });
            let right = uuid_found.and_then(|found| match found {
                Some(found) if done && found != uuid => Err("the former store is back".to_owned()),
                _ => Ok(()),
            });
            right.map_err(|what| self.violation(format!("cut {position} of a format"), what, &trace, position))?;
        }
        Ok(disk.bytes())
    }

    /// Starts from `left`, takes the steps, and returns the disk that one of the power cuts leaves.
    fn run(&mut self, left: Left, options: &Options, is_last: bool) -> Result<Left, Box<Violation>> {
        let Left { bytes, found, newest_id } = left;
        let disk = SimDisk::new(bytes);
        let random = Random::new(self.random.below(u64::MAX));
        let (tuning, ledger) = (self.tuning, self.ledger.clone());
        let world = no_panic(|| World::new(random, tuning, options.bug, ledger, disk.clone(), &found, newest_id));
        let mut world = world.map_err(|what| self.violation("at the start".to_owned(), what, &[], 0))?;
        let result = no_panic(|| {
            world.run(options.steps)?;
            if is_last { world.delete_everything() } else { Ok(()) }
        });
        self.ledger = world.ledger.clone();
        let end = disk.position();
        result.map_err(|what| self.violation(format!("in use, at {end}"), what, &world.trace, usize::MAX))?;
        self.cut_everywhere(&world)
    }

    /// Cuts the power at every position of the recording, and returns the disk that one cut leaves.
    fn cut_everywhere(&mut self, world: &World) -> Result<Left, Box<Violation>> {
        let recording = world.disk.recording();
        let half = recording.log.len() as u64 / 2;
        let wanted = (half + self.random.below(half + 1)) as usize;
        let mut cutter = Cutter::new(&recording);
        let mut survivor = None;
        let mut last = None;
        let mut marks = world.marks.as_slice();
        while cutter.advance() {
            let position = cutter.position();
            while let [_, next, ..] = marks
                && next.from <= position
            {
                marks = &marks[1..];
            }
            let Some(mark) = marks.first() else { break };
            self.outcome.cut_points += 1;
            for _ in 0..=u64::from(cutter.is_uncertain()) {
                self.outcome.disks += 1;
                let keep = survivor.is_none() && position >= wanted && cutter.is_uncertain();
                let is_end = position == recording.log.len();
                // A torn commit may have left only one good copy of the metadata, until the next
                // commit.
                let may_damage = !is_end && (self.run == 0 || !Rc::ptr_eq(&mark.safe, &world.marks[0].safe));
                let flushed = cutter.flushed();
                let mut random = Random::new(self.random.below(u64::MAX));
                let seen = cutter.cut(&mut self.random, may_damage, |image| {
                    let seen = no_panic(|| inspect(image, self.tuning, &mut random, world, mark, flushed, position))?;
                    let bytes = ((keep || is_end) && !image.is_damaged()).then(|| image.bytes().to_vec());
                    Ok((seen, bytes))
                });
                let seen = seen.map_err(|what| {
                    let when = format!("power cut at {position} (flushed up to {flushed})");
                    self.violation(when, what, &world.trace, position)
                });
                let ((found, generation), bytes) = seen?;
                let extents = found.values().map(|volume| volume.info.extents).max();
                self.outcome.most_extents = self.outcome.most_extents.max(extents.unwrap_or(0));
                match mark.next {
                    Some(_) if Rc::ptr_eq(generation, &mark.safe) => self.outcome.fell_back += 1,
                    Some(_) => self.outcome.went_ahead += 1,
                    None => {}
                }
                if let Some(bytes) = bytes {
                    let left = Some(Left { bytes, found, newest_id: generation.newest_id });
                    *(if keep { &mut survivor } else { &mut last }) = left;
                }
            }
        }
        let left = survivor.or(last);
        left.ok_or_else(|| self.violation("afterwards".to_owned(), "no disk is left".to_owned(), &[], 0))
    }
}

/// Opens, checks and reads a disk, and compares its content with the generations that the cut may
/// leave. Returns the content and its generation.
fn inspect<'a>(
    image: &mut Image<'_>,
    tuning: Tuning,
    random: &mut Random,
    world: &World,
    mark: &'a Mark,
    flushed: usize,
    cut: usize,
) -> Result<(Found, &'a Rc<Generation>), String> {
    let mut volumes = Volumes::open_with(image, &tuning.open_options()).map_err(|error| format!("open: {error}"))?;
    if let Some(why) = volumes.read_only() {
        return Err(format!("opened read-only: {why}; damage: {:?}", volumes.damage()));
    }
    let is_damaged = image.is_damaged();
    let report = find::check(&mut volumes, image, is_damaged)?;
    let found = find::find(&mut volumes, image, random)?;
    let found = find::read(found, image.bytes(), tuning.block_bytes);
    let generations = [Some(&mark.safe), mark.next.as_ref()];
    let mut wrong = Vec::new();
    for (index, generation) in generations.into_iter().enumerate() {
        let Some(generation) = generation else { continue };
        // A commit takes effect only after a flush of everything that it refers to.
        if index > 0 && flushed < generation.taken {
            continue;
        }
        let when = When { taken: generation.taken, flushed, cut };
        match compare(&found, generation, &world.cells, &world.ledger.stamps, when, true) {
            Ok(()) => {
                find::check_space(&volumes, &report, generation.state.references().len() as u64)?;
                return Ok((found, generation));
            }
            Err(what) => wrong.push(format!("not the {} generation: {what}", ["safe", "next"][index])),
        }
    }
    Err(wrong.join("\n  and "))
}
