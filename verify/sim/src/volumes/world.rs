//! Volumes in use by random guests, with the controller's part.

use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use sidecore_controller::Answered as LogAtDeath;
use sidecore_volume::{
    Commit, CommitError, Disk, Freed, HeapMemory, LogPlace, Recovery, VolumeId, Volumes,
};

use super::Bug;
use super::cut::Cutter;
use super::death::{Answered, log_memory, place};
use super::dedup::Pair;
use super::disk::SimDisk;
use super::find;
use super::format::format_and_cut;
use super::guest::FreshWrite;
use super::model::{Cells, Found, Generation, Mark, ModelVolume, Place, State, When, compare};
use super::tuning::Tuning;
use crate::Random;
use crate::history::{Cut, History, Ledger, Outcome, Parts, Step, System, Traced};
use crate::violation::Violation;

/// Volumes from one start to the next power cut, and their model.
pub(super) struct World {
    pub(super) random: Random,
    pub(super) tuning: Tuning,
    pub(super) bug: Option<Bug>,
    pub(super) ledger: Ledger,
    pub(super) disk: SimDisk,
    pub(super) volumes: Volumes,
    /// The memory that outlives the process.
    pub(super) log: Arc<HeapMemory>,
    pub(super) place: LogPlace,
    /// The log before the last change was answered.
    pub(super) log_before: Vec<u64>,
    /// Answered changes other than writes in place, in order.
    pub(super) answered: Vec<Answered>,
    pub(super) state: State,
    /// The largest id ever used, which no new volume may have.
    pub(super) newest_id: Option<u64>,
    pub(super) cells: Cells,
    pub(super) marks: Vec<Mark>,
    pub(super) fresh_writes: Vec<FreshWrite>,
    /// The blocks that a deduplication compares.
    pub(super) dedup: Option<Pair>,
    /// Freed blocks that wait, and the step at which they may be reused.
    freed: Vec<(Freed, u64)>,
    steps: u64,
    committing: bool,
    /// A check that failed while a commit was being written.
    failed: Option<String>,
    /// Each step, with the position of the recording before it.
    pub(super) trace: Vec<Traced>,
}

impl System for World {
    type Bug = Bug;
    type Manner = Tuning;
    /// The largest id ever used.
    type Kept = Option<u64>;
    const STARTS_PER_FORMAT: u64 = 10;

    fn draw(random: &mut Random) -> Tuning {
        Tuning::draw(random)
    }

    fn tuning(tuning: &Tuning) -> &Tuning {
        tuning
    }

    fn format(history: &mut History<Self>, bytes: Vec<u8>) -> Result<Vec<u8>, Box<Violation>> {
        format_and_cut(history, bytes)
    }

    fn start(
        mut random: Random,
        tuning: Tuning,
        bug: Option<Bug>,
        ledger: Ledger,
        disk: SimDisk,
        found: &Found,
        newest_id: Option<u64>,
    ) -> Result<Self, String> {
        let mut volumes = Volumes::open_with(&mut disk.clone(), &tuning.open_options())
            .map_err(|error| format!("open: {error}"))?;
        // After a power cut, no guest has unfinished changes, whatever the disk's log marker says.
        let (log, place) = (log_memory(&tuning), place(random.below(u64::MAX)));
        let recovery = volumes.recover(&mut disk.clone(), log.clone(), &place);
        if recovery != Recovery::default() {
            return Err(format!("after a power cut: {recovery:?}"));
        }
        if bug == Some(Bug::LyingFlushes) {
            disk.lie_about_flushes();
        }
        let (state, cells) = adopt(found, tuning.sectors_per_block());
        let safe = Rc::new(Generation {
            taken: disk.position(),
            state: state.clone(),
            newest_id,
            answered: 0,
        });
        let marks = vec![Mark { from: 0, safe, next: None }];
        Ok(Self {
            random,
            tuning,
            bug,
            ledger,
            disk,
            volumes,
            log_before: log.to_words(),
            log,
            place,
            answered: Vec::new(),
            state,
            newest_id,
            cells,
            marks,
            fresh_writes: Vec::new(),
            dedup: None,
            freed: Vec::new(),
            steps: 0,
            committing: false,
            failed: None,
            trace: Vec::new(),
        })
    }

    fn run(&mut self, steps: u64, is_last: bool) -> Step {
        self.take_steps(steps)?;
        if is_last { self.delete_everything() } else { Ok(()) }
    }

    fn parts(&mut self) -> Parts<'_> {
        let Self { random, tuning, ledger, disk, trace, .. } = self;
        Parts { random, tuning, ledger, disk, trace }
    }

    fn may_survive(cutter: &Cutter<'_>) -> bool {
        cutter.is_uncertain()
    }

    fn has_second_copy(&self, position: usize) -> bool {
        !Rc::ptr_eq(&self.mark_at(position).safe, &self.marks[0].safe)
    }

    fn check_cut(
        &self,
        found: &Found,
        cut: Cut,
        outcome: &mut Outcome,
    ) -> Result<Option<u64>, String> {
        let Cut { position, flushed } = cut;
        let mark = self.mark_at(position);
        let mut wrong = Vec::new();
        for (name, generation) in [("safe", Some(&mark.safe)), ("next", mark.next.as_ref())] {
            let Some(generation) = generation else { continue };
            // A commit takes effect only after a flush of everything that it refers to.
            if name == "next" && flushed < generation.taken {
                continue;
            }
            let when = When { taken: generation.taken, flushed, cut: position };
            if let Err(what) =
                compare(found, generation, &self.cells, &self.ledger.stamps, when, true)
            {
                wrong.push(format!("not the {name} generation: {what}"));
                continue;
            }
            let extents = found.values().map(|volume| volume.info.extents).max();
            outcome.most_extents = outcome.most_extents.max(extents.unwrap_or(0));
            outcome.fell_back += u64::from(mark.next.is_some() && name == "safe");
            outcome.went_ahead += u64::from(name == "next");
            return Ok(generation.newest_id);
        }
        Err(wrong.join("\n  and "))
    }

    fn log_at_death(&self) -> LogAtDeath {
        let words = match self.bug {
            Some(Bug::AnswerBeforeLog) => self.log_before.clone(),
            _ => self.log.to_words(),
        };
        LogAtDeath::InLog(Arc::new(HeapMemory::of_words(words)), self.place)
    }

    fn check_death(&mut self, found: &Found) -> Step {
        let when = When { taken: usize::MAX, flushed: usize::MAX, cut: usize::MAX };
        let Some(mark) = self.marks.last() else {
            return Err("no generation was ever safe".to_owned());
        };
        let mut wrong = Vec::new();
        for generation in [Some(&mark.safe), mark.next.as_ref()].into_iter().flatten() {
            let state = self.answered_since(generation);
            let expected = Generation { taken: usize::MAX, state, newest_id: None, answered: 0 };
            match compare(found, &expected, &self.cells, &self.ledger.stamps, when, false) {
                Ok(()) => return Ok(()),
                Err(what) => wrong.push(what),
            }
        }
        Err(wrong.join("\n  and "))
    }
}

impl World {
    /// The generations that a cut at this position may leave. The first mark is at position 0.
    fn mark_at(&self, position: usize) -> &Mark {
        let later = self.marks.partition_point(|mark| mark.from <= position);
        &self.marks[later - 1]
    }

    /// Takes so many steps, or fewer if the volumes become read-only because the disk failed.
    fn take_steps(&mut self, steps: u64) -> Step {
        for _ in 0..steps {
            if self.volumes.read_only().is_some() {
                return Ok(());
            }
            self.step()?;
        }
        self.verify()
    }

    fn step(&mut self) -> Step {
        self.perhaps_die()?;
        self.steps += 1;
        self.ledger.now_unix_s += self.random.below(3);
        self.reuse_expired();
        match self.random.below(64) {
            0..16 => self.guest_write(),
            16..34 => self.advance_fresh_write(),
            34..38 => self.discard(),
            38..42 => self.guest_flush(),
            42..44 => self.read_something(),
            44 if self.random.once_in(4) => self.verify(),
            45 if self.random.once_in(2) => self.commit(),
            46..49 => self.share(),
            49 => self.fragment(),
            50..58 => self.manage(),
            58..62 => self.dedup(),
            _ => self.advance_fresh_write(),
        }
    }

    /// Reuses blocks that have waited long enough.
    fn reuse_expired(&mut self) {
        let now = self.steps;
        let (over, waiting) =
            std::mem::take(&mut self.freed).into_iter().partition(|(_, until)| *until <= now);
        self.freed = waiting;
        let over: Vec<(Freed, u64)> = over;
        for (freed, _) in over {
            self.note("reuse");
            self.volumes.reuse(freed);
        }
    }

    /// Reuses all freed blocks: no earlier step is in progress.
    pub(super) fn reuse_all(&mut self) {
        self.note("reuse everything");
        for (freed, _) in std::mem::take(&mut self.freed) {
            self.volumes.reuse(freed);
        }
    }

    pub(super) const fn is_committing(&self) -> bool {
        self.committing
    }

    /// Makes a guest's writes safe.
    fn guest_flush(&mut self) -> Step {
        let Some(id) = self.any_volume() else { return Ok(()) };
        if !self.volumes.is_dirty(VolumeId(id)) {
            self.note(format!("flush of volume {id}, of which the metadata is safe"));
            self.check_safe(id)?;
            // The guest learns of a failure.
            return self.disk.flush_all().or(Ok(()));
        }
        if self.committing {
            // The guest waits for this commit, and for the next one.
            return Ok(());
        }
        if self.bug == Some(Bug::FlushWithoutCommit) {
            self.note("flush without a commit");
            let generation = self.generation();
            self.disk.flush_all().map_err(|error| error.to_string())?;
            self.mark(generation, None);
            return Ok(());
        }
        self.commit()
    }

    /// Checks the volume crate's claim that all changes of the volume are safe.
    fn check_safe(&self, id: u64) -> Step {
        let safe = self.marks.last().and_then(|mark| mark.safe.state.0.get(&id));
        if safe == self.state.0.get(&id) {
            Ok(())
        } else {
            Err(format!(
                "volume {id} is said to be safe, and is {:?} and not {safe:?}",
                self.state.0.get(&id)
            ))
        }
    }

    fn generation(&self) -> Rc<Generation> {
        Rc::new(Generation {
            taken: self.disk.position(),
            state: self.state.clone(),
            newest_id: self.newest_id,
            answered: self.answered.len(),
        })
    }

    fn mark(&mut self, safe: Rc<Generation>, next: Option<Rc<Generation>>) {
        self.marks.push(Mark { from: self.disk.position(), safe, next });
    }

    /// Makes all changes safe. Waiting guests and operators are told when this returns.
    pub(super) fn commit(&mut self) -> Step {
        if self.committing {
            return Ok(());
        }
        self.note("commit");
        let generation = self.generation();
        let Some(commit) = self.volumes.begin_commit() else {
            self.disk.flush_all().map_err(|error| error.to_string())?;
            self.mark(generation, None);
            return Ok(());
        };
        self.log_before = self.log.to_words();
        let Some(safe) = self.marks.last().map(|mark| Rc::clone(&mark.safe)) else {
            return Err("no generation was ever safe".to_owned());
        };
        self.mark(safe, Some(Rc::clone(&generation)));
        if self.random.once_in(self.tuning.commits_per_failure) {
            let succeeds = self.random.below(16);
            self.disk.fail_after(Some(succeeds));
        }
        let result = self.write_commit(&commit);
        self.disk.fail_after(None);
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        let succeeded = result.is_ok();
        self.note(if succeeded { "commit is safe" } else { "commit failed" });
        let freed = self.volumes.end_commit(commit, result);
        self.log_before = self.log.to_words();
        if !succeeded {
            return if self.volumes.read_only().is_some() {
                Ok(())
            } else {
                Err("a commit failed, and they go on".to_owned())
            };
        }
        self.mark(generation, None);
        let until = self.steps + self.random.below(self.tuning.longest_reuse_delay);
        self.freed.push((freed, until));
        Ok(())
    }

    fn write_commit(&mut self, commit: &Commit) -> Result<(), CommitError> {
        self.committing = true;
        let result = commit.write(&mut DuringCommit { world: self });
        self.committing = false;
        result
    }

    /// Compares everything with the model, without a cut.
    pub(super) fn verify(&mut self) -> Step {
        self.note("verify");
        find::check(&mut self.volumes, &mut self.disk.clone(), false)?;
        let found = find::find(&mut self.volumes, &mut self.disk.clone(), &mut self.random)?;
        let found = find::read(found, &self.disk.bytes(), self.tuning.block_bytes);
        let generation = Generation {
            taken: usize::MAX,
            state: self.state.clone(),
            newest_id: None,
            answered: 0,
        };
        let when = When { taken: usize::MAX, flushed: usize::MAX, cut: usize::MAX };
        compare(&found, &generation, &self.cells, &self.ledger.stamps, when, false)
            .map_err(|what| format!("in use: {what}"))
    }
}

/// The disk that a commit is written to, with steps between the writes.
struct DuringCommit<'a> {
    world: &'a mut World,
}

impl DuringCommit<'_> {
    fn die(&mut self) {
        if self.world.failed.is_none() {
            self.world.failed = self.world.perhaps_die().err();
        }
    }

    fn meanwhile(&mut self) {
        while self.world.failed.is_none()
            && self.world.random.once_in(self.world.tuning.writes_per_meanwhile)
        {
            if let Err(what) = self.world.step() {
                self.world.failed = Some(what);
            }
        }
    }
}

impl Disk for DuringCommit<'_> {
    fn size_bytes(&self) -> u64 {
        self.world.disk.size_bytes()
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.world.disk.read(offset_bytes, buffer)
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.die();
        self.meanwhile();
        self.world.disk.write(offset_bytes, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.die();
        self.meanwhile();
        self.world.disk.flush()?;
        self.meanwhile();
        Ok(())
    }
}

/// The model of what was found: blocks at the same place are the same cell.
fn adopt(found: &Found, sectors_per_block: usize) -> (State, Cells) {
    let (mut state, mut cells, mut places) = (State::default(), Cells::default(), BTreeMap::new());
    for (&id, volume) in found {
        let mut blocks = BTreeMap::new();
        for (&block, found) in &volume.blocks {
            let cell = *places.entry(found.physical).or_insert_with(|| {
                let cell = cells.make(sectors_per_block);
                for (sector, content) in found.sectors.iter().enumerate() {
                    let (Ok(stamp) | Err(stamp)) = content;
                    cells.write(cell, sector, 0, Place { volume: id, block }, *stamp);
                }
                cell
            });
            blocks.insert(block, cell);
        }
        let info = &volume.info;
        let volume = ModelVolume {
            name: info.name.clone(),
            blocks: info.blocks,
            quota_blocks: info.quota_blocks,
            read_only: info.read_only,
            origin: info.origin.map(|id| id.0),
            created_at_unix_s: info.created_at_unix_s,
            cells: Rc::new(blocks),
        };
        state.0.insert(id, volume);
    }
    (state, cells)
}
