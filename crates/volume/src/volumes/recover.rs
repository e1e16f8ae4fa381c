//! From the death of one process to the next one's start: the log is replayed.

use std::sync::Arc;

use sidecore_extent::{BlockRange, Extent};
use sidecore_units::{Plba, Vlba};

use super::Volumes;
use super::blocks::inside;
use crate::allocator::Need;
use crate::disk::Disk;
use crate::error::VolumeError;
use crate::grant::Grant;
use crate::info::VolumeId;
use crate::log::{Change, Entry, Found, Log, LogMemory, LogPlace, SuperblockId, Survives, look};

/// The result of replaying the last process's log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Changes that were answered and are durable now.
    pub replayed: u64,
    /// Why changes may be missing that were answered to guests which are still there; `None` if
    /// nothing is missing.
    pub loss: Option<String>,
}

/// The use of the store's log.
enum Verdict {
    /// Entries to replay, from this number on.
    Replay { head: u64, entries: Vec<Result<Entry, String>>, has_loss: bool },
    /// There is nothing to replay: a new log is begun.
    Begin,
    /// Nothing to replay, and there should be: a new log is begun.
    Lost(String),
    /// Entries that do not belong to this state of the store.
    Unfit(String),
}

impl Volumes {
    /// Replays the log that a process has left in `memory`, and keeps a log there from now on. Call
    /// after [`open`](Self::open), before any guest is served; it commits. Errors make the store
    /// read only, and its log is kept.
    ///
    /// `place` is where the store is: a log of another place or boot is not this store's.
    pub fn recover(
        &mut self,
        disk: &mut dyn Disk,
        memory: Arc<dyn LogMemory>,
        place: &LogPlace,
    ) -> Recovery {
        let mut recovery = Recovery::default();
        let uuid = self.uuid();
        let verdict = self.verdict(look(memory.as_ref(), &uuid, place), place);
        if let Some(why) = &self.read_only {
            // Missing mappings would read as zeros.
            recovery.loss = match verdict {
                Verdict::Begin => None,
                Verdict::Replay { entries, has_loss: false, .. }
                    if !self.is_outstanding(&entries) =>
                {
                    None
                }
                Verdict::Replay { .. } => {
                    Some(format!("the log of what was answered cannot be replayed: {why}"))
                }
                Verdict::Lost(what) | Verdict::Unfit(what) => Some(what),
            };
            return recovery;
        }
        match verdict {
            Verdict::Replay { head, entries, has_loss } => {
                recovery.loss = has_loss.then(|| LOST_BEFORE.to_owned());
                self.log = Some(Log::resume(memory, (head, entries.len() as u64), self.durable));
                match self.replay(disk, head, &entries) {
                    Ok(replayed) => recovery.replayed = replayed,
                    Err(what) => return self.refuse(recovery, &what),
                }
            }
            Verdict::Unfit(what) => return self.refuse(recovery, &what),
            Verdict::Begin => {
                self.log = Some(Log::create(memory, &uuid, place, self.durable, false))
            }
            Verdict::Lost(what) => {
                recovery.loss = Some(what);
                self.log = Some(Log::create(memory, &uuid, place, self.durable, true));
            }
        }
        if self.superblock.in_use != Some(place.boot) {
            self.superblock.in_use = Some(place.boot);
            self.changed = true;
        }
        if let Err(error) = self.commit_now(disk) {
            return self.refuse(recovery, &error.to_string());
        }
        recovery
    }

    /// Keeps no log: the caller answers a change when it is durable. Nothing can be missing then,
    /// unless the last process kept one.
    pub fn recover_without_log(&mut self, boot: &[u8; 16]) -> Recovery {
        let was_in_use = self.superblock.in_use == Some(*boot);
        // There is no log now either: the next commit says so, unless one is missing. Then it is
        // missing until an orderly end.
        if !was_in_use {
            self.close();
        }
        Recovery {
            replayed: 0,
            loss: was_in_use.then(|| "the store was in use with a log, which is gone".to_owned()),
        }
    }

    /// The events that the log's memory survives, if there is a log.
    #[must_use]
    pub fn log_survives(&self) -> Option<Survives> {
        self.log.as_ref().map(Log::survives)
    }

    /// Whether the log is so full that a commit is wanted.
    #[must_use]
    pub fn log_wants_commit(&self) -> bool {
        self.log.as_ref().is_some_and(Log::is_half_full)
    }

    /// Entries that could still be reserved in the log, if there is one.
    #[must_use]
    pub fn log_room(&self) -> Option<u64> {
        self.log.as_ref().map(Log::room)
    }

    /// Entries in the log: changes that no commit has made durable.
    #[must_use]
    pub fn log_entries(&self) -> u64 {
        self.log.as_ref().map_or(0, Log::len)
    }

    /// Marks the store as closed with the next commit: no mappings change after this.
    pub fn close(&mut self) {
        if self.superblock.in_use.take().is_some() {
            self.changed = true;
        }
    }

    /// Gives the log's memory back, if the store was closed and nothing is left in the log. To be
    /// called when no more changes come.
    pub fn discard_log(&mut self) {
        let is_closed =
            self.superblock.in_use.is_none() && !self.changed && self.read_only.is_none();
        if is_closed
            && self.committing.is_none()
            && let Some(log) = self.log.take_if(|log| log.len() == 0)
        {
            log.discard();
        }
    }

    fn refuse(&mut self, mut recovery: Recovery, what: &str) -> Recovery {
        let why = format!("the log of what was answered cannot be replayed: {what}");
        recovery.loss = Some(why.clone());
        self.read_only.get_or_insert(why);
        recovery
    }

    fn verdict(&self, found: Found, place: &LogPlace) -> Verdict {
        let was_in_use = self.superblock.in_use == Some(place.boot);
        let lost = |what: &str| match was_in_use {
            true => Verdict::Lost(format!("the store was in use under this boot, and {what}")),
            false => Verdict::Begin,
        };
        match found {
            Found::Blank => lost("its log is gone"),
            Found::Foreign => lost("its log is another store's"),
            // A log of a store that was closed has nothing to say, damaged or not.
            Found::Damaged(_) if !was_in_use => Verdict::Begin,
            Found::Damaged(what) => Verdict::Unfit(what),
            // A program that closed the store has ended the guests' connections in order.
            Found::Log { builds_on, has_loss, head, entries }
                if builds_on.contains(&self.durable) =>
            {
                Verdict::Replay { head, entries, has_loss: has_loss && was_in_use }
            }
            // A program that closed or repaired the store since is responsible for these entries.
            Found::Log { entries, .. } if entries.is_empty() || !was_in_use => {
                lost("its log builds on another state of it")
            }
            Found::Log { builds_on: [SuperblockId { generation, .. }, _], .. } => {
                Verdict::Unfit(format!(
                    "it builds on generation {generation}, and the store has another generation {}",
                    self.durable.generation
                ))
            }
        }
    }

    /// Whether entries are left that no commit has made durable.
    fn is_outstanding(&self, entries: &[Result<Entry, String>]) -> bool {
        entries
            .iter()
            .any(|entry| entry.as_ref().map_or(true, |entry| entry.generation > self.generation))
    }

    /// Applies and commits the entries of one generation after the other.
    fn replay(
        &mut self,
        disk: &mut dyn Disk,
        head: u64,
        entries: &[Result<Entry, String>],
    ) -> Result<u64, String> {
        let durable = |entry: &&Result<Entry, String>| {
            entry.as_ref().is_ok_and(|entry| entry.generation <= self.generation)
        };
        let skipped = entries.iter().take_while(durable).count();
        let mut sequence = head.saturating_add(skipped as u64);
        if let Some(log) = &mut self.log {
            log.skip_to(sequence);
        }
        let entries = entries.get(skipped..).unwrap_or_default();
        // Before the first node is written anywhere.
        let fits: Vec<bool> = entries.iter().map(|entry| self.claim(entry)).collect();
        for (entry, fits) in entries.iter().zip(fits) {
            let entry = entry.as_ref().map_err(Clone::clone)?;
            // A generation without entries may be in between. The superblocks' slots go by parity,
            // and an entry is applied by the commit whose number it has.
            let behind = entry.generation.checked_sub(self.forest.generation);
            let steps = behind.filter(|steps| *steps <= MAX_STEPS);
            let what = || format!("entry {sequence} ({entry:?})");
            for _ in 0..steps.ok_or_else(|| format!("{} is of another time", what()))? {
                self.changed = true;
                self.commit_now(disk).map_err(|error| error.to_string())?;
            }
            if !fits {
                return Err(format!("{} names blocks that are not free", what()));
            }
            self.apply(disk, &entry.change)
                .map_err(|error| format!("{} does not fit: {error}", what()))?;
            sequence = sequence.saturating_add(1);
            if let Some(log) = &mut self.log {
                log.set_applied(sequence);
            }
        }
        self.commit_now(disk).map_err(|error| error.to_string())?;
        Ok(entries.len() as u64)
    }

    /// Keeps the blocks that an entry names from everybody else.
    fn claim(&mut self, entry: &Result<Entry, String>) -> bool {
        match entry {
            Ok(Entry { change: Change::Map { count, physical, .. }, .. }) => {
                self.forest.allocator.claim(*physical, *count)
            }
            _ => true,
        }
    }

    fn apply(&mut self, disk: &mut dyn Disk, change: &Change) -> Result<(), VolumeError> {
        // The process that has died had the room, but its nodes were others.
        let need = Need::Delete;
        match *change {
            Change::Map { volume, first, count, physical } => {
                let range = BlockRange { first: Vlba(first), count };
                let extents = vec![Extent {
                    first: Vlba(first),
                    count,
                    physical: Plba(physical),
                    shared: false,
                }];
                let grant = Grant { volume: VolumeId(volume), range, extents, charged_blocks: 0 };
                self.link_extents(disk, &grant, need)
            }
            Change::Unmap { volume, first, count } => {
                let id = VolumeId(volume);
                let range = BlockRange { first: Vlba(first), count };
                let inside = inside(range, self.changeable(id)?.info.blocks)?;
                self.unmap_for(disk, id, inside, need)
            }
        }
    }
}

/// Why changes are missing though this log has all of its own.
const LOST_BEFORE: &str =
    "an earlier process of this boot found the store in use, and its log gone";

/// Generations that entries can be ahead of the disk: the sealed transaction and the open one.
const MAX_STEPS: u64 = 1;
