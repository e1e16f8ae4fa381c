//! A run, a step at a time.

use std::collections::BTreeSet;

use sidecore_extent::BlockRange;
use sidecore_units::Vlba;
use sidecore_volume::{Disk, VolumeError, VolumeId, VolumeState};

use super::chunk::Chunk;
use super::fingerprints::{CAPACITY, Fingerprints, Place};
use super::plan::{Candidate, Looked, Looking, Plan, Window};
use super::remap::{change, guard, is_busy};
use super::seen::Seen;
use super::{DedupCounts, DedupOptions, compare, families};
use crate::ControllerError;
use crate::epochs::Epoch;
use crate::hypervisor::{Hypervisor, State};

/// The bytes that are compared together: filesystems of guests have blocks of this size or larger.
const UNIT_BYTES: u64 = 4096;
/// The bytes that are read at a time, and remapped at a time at most.
const CHUNK_BYTES: u64 = 256 << 10;
/// Commits that a remap waits for until there is room for its metadata. The space that one frees is
/// there a moment later.
const MAX_REFUSALS: u32 = 8;
/// Extents that are looked up at a time.
const SCAN_EXTENTS: usize = 64;

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DedupStep {
    /// So many bytes were read.
    Worked(u64),
    /// Writes to the blocks to be compared are in flight: step again later, or
    /// pass them.
    Waits,
    /// A remap needs space that a commit may free: step again after one.
    NeedsCommit,
    /// All volumes were looked at.
    Done,
}

/// The next step.
#[derive(Clone, Debug)]
enum Phase {
    /// Read the next blocks.
    Scan,
    /// Look for an equal of the next unit of the chunk.
    Match,
    /// Compare, when writes from before this epoch have ended.
    Guarded(Candidate, Plan, Epoch),
    /// Remap what was found to be equal.
    Equal(Candidate, Plan),
    Done,
}

/// A run, whose steps its caller takes.
#[derive(Debug)]
pub struct DedupRun {
    /// The groups to come, the next one last.
    groups: Vec<Vec<VolumeId>>,
    /// The group in progress, and its volumes to come, the next one last.
    members: BTreeSet<VolumeId>,
    volumes: Vec<VolumeId>,
    /// The next block of the last of `volumes`.
    next: u64,
    dry_run: bool,
    block_bytes: u64,
    unit_blocks: u64,
    key: u64,
    fingerprints: Fingerprints,
    seen: Seen,
    chunk: Chunk,
    phase: Phase,
    /// Attempts of the remap in progress that found no room for metadata.
    refusals: u32,
    counts: DedupCounts,
}

impl DedupRun {
    pub(super) fn new(
        hypervisor: &Hypervisor,
        options: &DedupOptions,
        key: u64,
    ) -> Result<Self, ControllerError> {
        let state = hypervisor.state();
        let volumes = &state.volumes;
        if !options.dry_run
            && let Some(why) = volumes.read_only()
        {
            let why = why.to_owned();
            let frozen = volumes.is_frozen();
            let error = if frozen {
                VolumeError::StoreDamaged(why)
            } else {
                VolumeError::StoreReadOnly(why)
            };
            return Err(error.into());
        }
        let find = |name: &String| {
            let found = volumes.find(name).map(|info| info.id);
            found.ok_or_else(|| ControllerError::NoSuchVolume(name.clone()))
        };
        let named = options.volumes.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let infos: Vec<_> = volumes.list().cloned().collect();
        let mut groups = families::groups(&infos, &named, options.across);
        let block_bytes = u64::from(volumes.block_bytes());
        let unit_blocks = UNIT_BYTES.checked_div(block_bytes).unwrap_or(1).max(1);
        let allocated = |id: &VolumeId| volumes.get(*id).map_or(0, |info| info.allocated_blocks);
        let total_blocks = groups.iter().flatten().map(allocated).fold(0, u64::saturating_add);
        groups.reverse();
        Ok(Self {
            groups,
            members: BTreeSet::new(),
            volumes: Vec::new(),
            next: 0,
            dry_run: options.dry_run,
            block_bytes,
            unit_blocks,
            key,
            fingerprints: Fingerprints::new(CAPACITY),
            seen: Seen::default(),
            chunk: Chunk::new(unit_blocks),
            phase: Phase::Scan,
            refusals: 0,
            counts: DedupCounts {
                total_bytes: total_blocks.saturating_mul(block_bytes),
                ..DedupCounts::default()
            },
        })
    }

    /// The bytes dealt with so far.
    #[must_use]
    pub fn counts(&self) -> DedupCounts {
        self.counts
    }

    /// Whether the next step changes mappings, if nothing has changed by then.
    #[must_use]
    pub fn is_about_to_remap(&self) -> bool {
        matches!(self.phase, Phase::Equal(..))
    }

    /// Takes the next step.
    pub(super) fn step(
        &mut self,
        hypervisor: &Hypervisor,
        disk: &mut dyn Disk,
    ) -> Result<DedupStep, ControllerError> {
        let read_before = self.counts.read_bytes;
        match std::mem::replace(&mut self.phase, Phase::Match) {
            Phase::Scan => self.scan(hypervisor, disk)?,
            Phase::Match => self.look_for_equals(hypervisor, disk)?,
            Phase::Guarded(candidate, plan, epoch) if !hypervisor.epochs.passed(epoch) => {
                self.phase = Phase::Guarded(candidate, plan, epoch);
                return Ok(DedupStep::Waits);
            }
            Phase::Guarded(candidate, plan, _) => self.compare(hypervisor, disk, candidate, plan),
            Phase::Equal(candidate, plan) => {
                if !self.remap(hypervisor, disk, &candidate, &plan)? {
                    return Ok(DedupStep::NeedsCommit);
                }
            }
            Phase::Done => {
                self.phase = Phase::Done;
                return Ok(DedupStep::Done);
            }
        }
        let read = self.counts.read_bytes.saturating_sub(read_before);
        hypervisor.stats.dedup_read_bytes.add(read);
        Ok(DedupStep::Worked(read))
    }

    /// Leaves the blocks that the run waits for.
    pub(super) fn pass(&mut self, hypervisor: &Hypervisor) {
        if let Phase::Guarded(candidate, ..) = self.phase {
            self.end_guard(hypervisor);
            self.phase = Phase::Match;
            self.leave_busy(candidate.window.forward);
        }
    }

    /// Ends the run early.
    pub(super) fn give_up(&mut self, hypervisor: &Hypervisor) {
        self.end_guard(hypervisor);
        self.phase = Phase::Done;
    }

    fn end_guard(&self, hypervisor: &Hypervisor) {
        hypervisor.state().volumes.end_guard();
    }

    fn bytes(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(self.block_bytes)
    }

    fn unit_bytes(&self) -> usize {
        usize::try_from(self.bytes(self.unit_blocks)).unwrap_or(usize::MAX)
    }

    // --- Scan ---

    /// Reads the next blocks that no volume before had.
    fn scan(
        &mut self,
        hypervisor: &Hypervisor,
        disk: &mut dyn Disk,
    ) -> Result<(), ControllerError> {
        self.phase = Phase::Scan;
        let Some(id) = self.volumes.last().copied() else {
            self.next_group();
            return Ok(());
        };
        let found = self.find_chunk(&mut hypervisor.state(), disk, id);
        match found {
            Ok(Some((first, physical, count))) => {
                let (place, bytes) = (self.bytes(physical), self.bytes(count));
                let unreadable = self.chunk.fill(
                    disk,
                    Place { volume: id, block: first },
                    (place, bytes),
                    self.unit_bytes(),
                    self.key,
                );
                self.counts.read_bytes = self.counts.read_bytes.saturating_add(bytes);
                self.count_unreadable(unreadable);
                self.phase = Phase::Match;
            }
            Ok(None) => {}
            Err(VolumeError::NoSuchVolume(_)) => self.next_volume(),
            Err(error) => {
                let name = hypervisor.state().name_of(id);
                hypervisor.events.note(
                    &hypervisor.name,
                    format!("deduplication leaves out volume \"{name}\": {error}"),
                );
                self.counts.skipped_volumes = self.counts.skipped_volumes.saturating_add(1);
                self.next_volume();
            }
        }
        Ok(())
    }

    fn next_group(&mut self) {
        match self.groups.pop() {
            None => self.phase = Phase::Done,
            Some(mut group) => {
                self.members = group.iter().copied().collect();
                self.fingerprints.clear();
                self.seen.clear();
                group.reverse();
                self.volumes = group;
                self.next = 0;
            }
        }
    }

    fn next_volume(&mut self) {
        self.volumes.pop();
        self.next = 0;
    }

    /// Looks up the next extents. Returns the first block of the volume and on the store, and the
    /// number of blocks, of the first ones that are new to the run.
    fn find_chunk(
        &mut self,
        state: &mut State,
        disk: &mut dyn Disk,
        id: VolumeId,
    ) -> Result<Option<(u64, u64, u64)>, VolumeError> {
        let info = state.volumes.get(id).ok_or(VolumeError::NoSuchVolume(id))?;
        let blocks = if info.state == VolumeState::Healthy { info.blocks } else { 0 };
        if self.next >= blocks {
            self.next_volume();
            return Ok(None);
        }
        let rest = BlockRange::between(Vlba(self.next), Vlba(blocks));
        let mapped = state.volumes.map(disk, id, rest, SCAN_EXTENTS)?;
        for extent in &mapped.extents {
            let (first, end) = (extent.first.0, extent.first.0.saturating_add(extent.count));
            let physical = extent.physical.0;
            if let Some((gap, gap_end)) =
                self.seen.first_gap(physical, physical.saturating_add(extent.count))
            {
                let into = |place: u64| first.saturating_add(place.saturating_sub(physical));
                if let Some(chunk) = self.chunk_in(into(gap), into(gap_end)) {
                    let (start, count) = chunk;
                    let place = physical.saturating_add(start.saturating_sub(first));
                    self.pass_to(first, start.saturating_add(count));
                    self.seen.add(gap, place.saturating_add(count));
                    return Ok(Some((start, place, count)));
                }
                // Less than a unit: the rest of the extent is looked at with the next call.
                self.seen.add(gap, gap_end);
                self.pass_to(first, into(gap_end));
                return Ok(None);
            }
            self.pass_to(first, end);
        }
        self.next = mapped.covered.end().map_or(blocks, |end| end.0).max(self.next);
        Ok(None)
    }

    /// Notes that the mapped blocks from `first` to `end` are passed, as far as they are new.
    fn pass_to(&mut self, first: u64, end: u64) {
        let passed = self.bytes(end.saturating_sub(first.max(self.next)));
        self.counts.passed_bytes = self.counts.passed_bytes.saturating_add(passed);
        self.next = end.max(self.next);
    }

    /// The first whole units of `first..end`, as many as are read at a time.
    fn chunk_in(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        let start = first.checked_next_multiple_of(self.unit_blocks)?;
        let most = CHUNK_BYTES.checked_div(self.block_bytes)?;
        let count = end.checked_sub(start)?.min(most);
        let count = count.saturating_sub(count.checked_rem(self.unit_blocks)?);
        (count > 0).then_some((start, count))
    }

    // --- Match ---

    /// Looks for a unit of the chunk that has an equal, and guards both.
    fn look_for_equals(
        &mut self,
        hypervisor: &Hypervisor,
        disk: &mut dyn Disk,
    ) -> Result<(), ControllerError> {
        let Some(candidate) = self.chunk.next_candidate(&mut self.fingerprints) else {
            self.phase = Phase::Scan;
            return Ok(());
        };
        let mut state = hypervisor.state();
        match self.look(&mut state, disk, &candidate)? {
            Looked::Stale => self.replace(),
            Looked::Gone => self.advance(self.unit_blocks),
            Looked::Kept(blocks) => {
                let blocks = blocks.min(candidate.window.forward);
                let kept = self.bytes(blocks);
                self.counts.kept_bytes = self.counts.kept_bytes.saturating_add(kept);
                self.advance(blocks);
            }
            Looked::Frees(plan) if self.dry_run => {
                drop(state);
                self.compare(hypervisor, disk, candidate, plan);
            }
            Looked::Frees(plan) if is_busy(&state, &candidate, &plan) => {
                drop(state);
                self.leave_busy(plan.window.forward);
            }
            Looked::Frees(plan) => {
                let epoch = guard(hypervisor, &mut state, &candidate, &plan);
                self.phase = Phase::Guarded(candidate, plan, epoch);
            }
        }
        Ok(())
    }

    fn look(
        &self,
        state: &mut State,
        disk: &mut dyn Disk,
        candidate: &Candidate,
    ) -> Result<Looked, VolumeError> {
        let (members, unit_blocks) = (&self.members, self.unit_blocks);
        Looking { volumes: &mut state.volumes, disk, members, unit_blocks }.look(candidate)
    }

    /// Notes the unit in place of the block that had its fingerprint.
    fn replace(&mut self) {
        self.chunk.replace(&mut self.fingerprints);
        self.phase = Phase::Match;
    }

    /// Continues behind so many blocks.
    fn advance(&mut self, blocks: u64) {
        self.chunk.advance(blocks);
        self.refusals = 0;
        self.phase = Phase::Match;
    }

    fn leave_busy(&mut self, blocks: u64) {
        let busy = self.bytes(blocks);
        self.counts.busy_bytes = self.counts.busy_bytes.saturating_add(busy);
        self.advance(blocks);
    }

    // --- Compare ---

    /// Compares the bytes: the window becomes the equal part of it.
    fn compare(
        &mut self,
        hypervisor: &Hypervisor,
        disk: &mut dyn Disk,
        candidate: Candidate,
        plan: Plan,
    ) {
        let window = plan.window;
        let found = match self.read_window(disk, &plan) {
            Ok(contents) => self.equal_part(&contents, window),
            Err(_) => {
                self.count_unreadable(self.bytes(window.forward));
                self.end_guard(hypervisor);
                return self.advance(window.forward);
            }
        };
        let Some(window) = found else {
            self.end_guard(hypervisor);
            return self.replace();
        };
        let (candidate, plan) = (Candidate { window, ..candidate }, Plan { window, ..plan });
        if self.dry_run {
            self.saved(&candidate, window.around(0).count);
            return self.advance(window.forward);
        }
        self.phase = Phase::Equal(candidate, plan);
    }

    /// The contents of the target, and of the source if there is one.
    fn read_window(
        &mut self,
        disk: &mut dyn Disk,
        plan: &Plan,
    ) -> std::io::Result<(Vec<u8>, Option<Vec<u8>>)> {
        let mut read = |at: u64| -> std::io::Result<Vec<u8>> {
            let range = plan.window.around(at);
            let mut bytes = vec![0; usize::try_from(self.bytes(range.count)).unwrap_or(0)];
            disk.read(self.bytes(range.first.0), &mut bytes)?;
            self.counts.read_bytes = self.counts.read_bytes.saturating_add(bytes.len() as u64);
            Ok(bytes)
        };
        Ok((read(plan.target)?, plan.source.map(&mut read).transpose()?))
    }

    fn equal_part(
        &self,
        (target, source): &(Vec<u8>, Option<Vec<u8>>),
        window: Window,
    ) -> Option<Window> {
        let unit_bytes = self.unit_bytes().max(1);
        let units = |blocks: u64| {
            usize::try_from(blocks.checked_div(self.unit_blocks).unwrap_or(0)).unwrap_or(0)
        };
        let blocks = |units: usize| (units as u64).saturating_mul(self.unit_blocks);
        let is_equal = |unit: usize| {
            let at = unit.saturating_mul(unit_bytes);
            let range = at..at.saturating_add(unit_bytes);
            match (target.get(range.clone()), source) {
                (Some(target), None) => compare::is_zero(target),
                (Some(target), Some(source)) => source.get(range) == Some(target),
                (None, _) => false,
            }
        };
        let all = units(window.back).saturating_add(units(window.forward));
        let (back, forward) = compare::around(units(window.back), all, is_equal)?;
        Some(Window { back: blocks(back), forward: blocks(forward) })
    }

    // --- Remap ---

    /// Remaps blocks that were equal when they were compared, unless one of them may have changed
    /// since. `false` if that needs a commit first.
    fn remap(
        &mut self,
        hypervisor: &Hypervisor,
        disk: &mut dyn Disk,
        candidate: &Candidate,
        compared: &Plan,
    ) -> Result<bool, ControllerError> {
        let mut state = hypervisor.state();
        let plan = match self.look(&mut state, disk, candidate)? {
            Looked::Frees(plan)
                if state.volumes.guard_holds()
                    && plan.source == compared.source
                    && plan.target == compared.target
                    && !is_busy(&state, candidate, &plan) =>
            {
                plan
            }
            _ => {
                state.volumes.end_guard();
                drop(state);
                self.leave_busy(candidate.window.forward);
                return Ok(true);
            }
        };
        let before = state.volumes.space().data;
        let changed = change(hypervisor, &mut state, disk, &plan);
        let freed = before.saturating_sub(state.volumes.space().data);
        state.volumes.end_guard();
        drop(state);
        if freed > 0 {
            self.saved(candidate, freed);
            hypervisor.stats.dedup_freed_bytes.add(self.bytes(freed));
        }
        hypervisor.commits.note_change();
        match changed {
            Ok(()) => {
                hypervisor.stats.dedup_remaps.add(1);
                self.counts.remaps = self.counts.remaps.saturating_add(1);
                self.advance(plan.window.forward);
                Ok(true)
            }
            Err(VolumeError::NoSpace { .. }) if self.refusals < MAX_REFUSALS => {
                self.refusals = self.refusals.saturating_add(1);
                self.phase = Phase::Match;
                Ok(false)
            }
            Err(VolumeError::NoSpace { .. }) => Err(ControllerError::NoRoomToRemap),
            Err(error) => Err(error.into()),
        }
    }

    fn count_unreadable(&mut self, bytes: u64) {
        self.counts.unreadable_bytes = self.counts.unreadable_bytes.saturating_add(bytes);
    }

    fn saved(&mut self, candidate: &Candidate, blocks: u64) {
        let bytes = self.bytes(blocks);
        self.counts.saved_bytes = self.counts.saved_bytes.saturating_add(bytes);
        if candidate.source.is_none() {
            self.counts.zero_bytes = self.counts.zero_bytes.saturating_add(bytes);
        }
    }
}
