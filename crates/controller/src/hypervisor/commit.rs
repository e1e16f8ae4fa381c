//! From changes in memory to durable ones. Guests' flushes that come while a
//! transaction is being written are served together by the next one.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sidecore_block::BlockError;
use sidecore_volume::{Disk, VolumeId, Volumes};

use super::{Hypervisor, State};
use crate::mail::{Answer, ReplyTo};

/// Who wants a commit.
#[derive(Default)]
pub(crate) struct CommitQueue {
    inner: Mutex<Wanted>,
    changed: Condvar,
}

#[derive(Default)]
struct Wanted {
    /// Guests' flushes.
    flushes: Vec<ReplyTo>,
    /// Operations of the operator's.
    operations: Vec<SyncSender<Result<(), String>>>,
    /// Somebody needs the space that it frees.
    now: bool,
    /// Somebody waits for tree nodes.
    attention: bool,
    /// Since when there is something to commit.
    dirty_since: Option<Instant>,
    stop: bool,
}

/// What the committing thread is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextCommit {
    /// Commit.
    Now,
    /// Nothing for now: look after what waits for a grace period.
    Later,
    /// Commit a last time and end.
    Stop,
}

impl CommitQueue {
    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A guest flushes. After the end, nobody makes anything durable any more.
    pub(crate) fn ask(&self, reply_to: ReplyTo) {
        let mut wanted = self.wanted();
        if wanted.stop {
            drop(wanted);
            reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        }
        wanted.flushes.push(reply_to);
        self.changed.notify_all();
    }

    /// An operation waits for the next commit that begins from now on; after the
    /// end, its reply is dropped.
    pub(crate) fn ask_for_operation(&self, reply: SyncSender<Result<(), String>>) {
        let mut wanted = self.wanted();
        if !wanted.stop {
            wanted.operations.push(reply);
            self.changed.notify_all();
        }
    }

    /// A commit is wanted soon.
    pub(crate) fn want(&self) {
        self.wanted().now = true;
        self.changed.notify_all();
    }

    /// Somebody waits for nodes that a grace period will free.
    pub(super) fn call(&self) {
        self.wanted().attention = true;
        self.changed.notify_all();
    }

    /// Something has changed that nobody waits for.
    pub(super) fn note_change(&self) {
        let mut wanted = self.wanted();
        if wanted.dirty_since.is_none() {
            wanted.dirty_since = Some(Instant::now());
            self.changed.notify_all();
        }
    }

    /// Ends the waiting for good.
    pub(crate) fn stop(&self) {
        self.wanted().stop = true;
        self.changed.notify_all();
    }

    /// Waits until there is something to do: a commit that is wanted or overdue by
    /// `interval`, or at the latest after `patience`.
    pub(crate) fn wait(&self, interval: Duration, patience: Option<Duration>) -> NextCommit {
        let mut wanted = self.wanted();
        loop {
            if wanted.stop {
                return NextCommit::Stop;
            }
            if wanted.now || !wanted.flushes.is_empty() || !wanted.operations.is_empty() {
                return NextCommit::Now;
            }
            let overdue = wanted.dirty_since.map(|since| interval.saturating_sub(since.elapsed()));
            if overdue == Some(Duration::ZERO) {
                return NextCommit::Now;
            }
            if std::mem::take(&mut wanted.attention) {
                return NextCommit::Later;
            }
            let timeout = overdue.into_iter().chain(patience).min();
            wanted = match timeout {
                None => self.changed.wait(wanted).unwrap_or_else(PoisonError::into_inner),
                Some(timeout) => {
                    let (next, waited) =
                        self.changed.wait_timeout(wanted, timeout).unwrap_or_else(PoisonError::into_inner);
                    if waited.timed_out() && patience.is_some() && overdue.is_none_or(|overdue| overdue > timeout) {
                        return NextCommit::Later;
                    }
                    next
                }
            };
        }
    }
}

/// Whether the store had no space, which may change.
fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::StorageFull
}

impl Hypervisor {
    /// Makes everything durable that was changed until now, and answers everybody
    /// who asked for that until now. Only one thread may commit.
    ///
    /// A commit that the store has no space for is kept, and tried again at the next call.
    ///
    /// # Errors
    /// The store's. Unless it is full, nothing can be changed any more then.
    pub(crate) fn commit(&self, disk: &mut dyn Disk) -> io::Result<()> {
        // Whoever asks later waits for the next one.
        let (flushes, operations) = {
            let mut wanted = self.commits.wanted();
            wanted.now = false;
            wanted.dirty_since = None;
            (std::mem::take(&mut wanted.flushes), std::mem::take(&mut wanted.operations))
        };
        let transaction = {
            let mut state = self.state();
            let transaction = state.transaction;
            state.transaction = transaction.saturating_add(1);
            transaction
        };
        let generation = self.state().volumes.generation();
        let result = self.write_transactions(transaction, disk);
        self.note_result(&result, transaction);
        let has_emptied_the_log = {
            let state = self.state();
            state.volumes.generation() > generation && state.volumes.log_survives().is_some()
        };
        // Whoever waits for room in the log has it now; if the commit failed, whoever waits
        // for space would wait for ever, and is answered otherwise from now on.
        if result.is_err() || has_emptied_the_log {
            let waiting = std::mem::take(&mut self.state().for_space);
            for message in waiting {
                self.serve(message, disk);
            }
        }
        self.show_withheld(&result, disk);
        for reply_to in flushes {
            reply_to.reply(match &result {
                Ok(()) => Answer::Done,
                Err(error) if is_full(error) => Answer::Failed(BlockError::NoSpace),
                Err(_) => Answer::Failed(BlockError::EIO),
            });
        }
        for reply in operations {
            // Whoever asked may have stopped waiting.
            let _ = reply.send(result.as_ref().map_err(ToString::to_string).copied());
        }
        result
    }

    /// Writes what is sealed already, if the store had no space for it, and then what was
    /// changed until now.
    fn write_transactions(&self, transaction: u64, disk: &mut dyn Disk) -> io::Result<()> {
        loop {
            let (commit, is_kept) = {
                let mut state = self.state();
                let is_kept = state.volumes.has_kept_commit();
                (state.volumes.begin_commit(), is_kept)
            };
            let Some(commit) = commit else { return self.flush(transaction, disk) };
            let written = commit.write(disk);
            let told = written.as_ref().map_err(|error| {
                let kind = if error.is_full() { io::ErrorKind::StorageFull } else { io::ErrorKind::Other };
                io::Error::new(kind, error.to_string())
            });
            let told = told.copied();
            let mut state = self.state();
            let freed = state.volumes.end_commit(commit, written);
            state.limbo.free_later(freed, &self.epochs);
            self.serve_sizes(&mut state);
            drop(state);
            self.stats.commits.add(1);
            if told.is_err() || !is_kept {
                return told;
            }
        }
    }

    /// The share of the store that is in use, if it is nearly full.
    pub(crate) fn too_full(&self, volumes: &Volumes) -> Option<u8> {
        let space = volumes.space();
        let used = u128::from(space.total.saturating_sub(space.free)).saturating_mul(100);
        let percent = used.checked_div(u128::from(space.total)).unwrap_or(0);
        let percent = u8::try_from(percent).unwrap_or(100);
        (percent >= self.warn_used_percent && self.warn_used_percent < 100).then_some(percent)
    }

    /// Makes an event of it when the store gets nearly full, and when it is not so any more.
    pub(crate) fn note_fullness(&self) {
        let percent = self.too_full(&self.state().volumes);
        let before = self.is_nearly_full.swap(percent.is_some(), Ordering::AcqRel);
        match percent {
            Some(percent) if !before => {
                let warn = self.warn_used_percent;
                let what = format!("{percent} % of the store are in use, which is nearly full ({warn} % and more)");
                self.events.note(&self.name, what);
            }
            None if before => self.events.note(&self.name, "the store is not nearly full any more".to_owned()),
            _ => {}
        }
    }

    /// Sees to it that the store has space where the next nodes go. Without it, no fresh
    /// blocks are given out, so that what is left is there for deletes and discards.
    pub(crate) fn back_reserve(&self, disk: &mut dyn Disk) {
        let (ranges, block_bytes) = {
            let state = self.state();
            (state.volumes.unbacked(), u64::from(state.volumes.block_bytes()))
        };
        let mut backed = Vec::new();
        let mut full = None;
        for range in &ranges {
            let bytes = |blocks: u64| blocks.saturating_mul(block_bytes);
            match disk.allocate(bytes(range.first.0), bytes(range.count)) {
                Ok(()) => backed.push(*range),
                Err(error) => {
                    full = Some(error.to_string());
                    break;
                }
            }
        }
        let was_full = {
            let mut state = self.state();
            let was_full = state.volumes.disk_is_full().is_some();
            state.volumes.set_backed(&backed, full.clone());
            was_full && state.volumes.disk_is_full().is_none()
        };
        if was_full {
            self.events.note(&self.name, "the store has space for metadata again".to_owned());
        }
        if let Some(why) = &full {
            let what =
                format!("the store has no space for the metadata's reserve, fresh blocks are not written: {why}");
            self.events.note(&self.name, what);
            // Once more, without being asked.
            self.commits.note_change();
        }
    }

    /// There is nothing to commit: flushes the store.
    fn flush(&self, transaction: u64, disk: &mut dyn Disk) -> io::Result<()> {
        let refused = self.state().volumes.cannot_commit().map(|why| io::Error::other(why.to_owned()));
        if let Some(error) = refused.filter(|_| self.has_uncommitted(transaction)) {
            return Err(error);
        }
        disk.flush().inspect_err(|error| self.flush_failed(error))
    }

    /// The store has lost, perhaps, what was written to it: no commit may build on that.
    pub(super) fn flush_failed(&self, error: &io::Error) {
        self.state().volumes.flush_failed(error);
        self.events.note(&self.name, format!("the store could not be flushed, no volume is changed any more: {error}"));
    }

    /// Takes note of how it went, for who waits and for the operator.
    fn note_result(&self, result: &io::Result<()>, transaction: u64) {
        let was_full = self.is_full.swap(result.as_ref().is_err_and(is_full), Ordering::AcqRel);
        match result {
            Ok(()) => {
                self.durable.store(transaction, Ordering::Release);
                if was_full {
                    self.events.note(&self.name, "the store has space again: all is durable that was kept".to_owned());
                }
            }
            Err(error) if is_full(error) => {
                // Once more, without being asked.
                self.commits.note_change();
                let what = format!("the store is full: what was changed is kept until it has space: {error}");
                self.events.note(&self.name, what);
            }
            Err(error) => {
                let what = format!("the metadata could not be written, nothing changes any more: {error}");
                self.events.note(&self.name, what);
            }
        }
    }

    /// Serves the sizes that have become durable.
    fn serve_sizes(&self, state: &mut State) {
        let durable = state.volumes.generation();
        let changed = std::mem::take(&mut state.sizes);
        let (due, later) = changed.into_iter().partition(|(_, (generation, _))| *generation <= durable);
        state.sizes = later;
        let due: BTreeMap<VolumeId, (u64, u64)> = due;
        for id in due.into_keys() {
            let blocks = state.served_blocks(id);
            let Some(open) = state.open.get_mut(&id) else { continue };
            open.tree.resize(blocks);
            let retired = open.tree.take_retired();
            state.limbo.retire(retired, &self.epochs);
        }
    }

    /// The store is about to be closed in order: the next commit says so.
    pub(crate) fn close(&self) {
        self.state().volumes.close();
    }

    /// Whether a volume has changes that no commit has made durable, up to
    /// `transaction`.
    fn has_uncommitted(&self, transaction: u64) -> bool {
        let durable = self.durable.load(Ordering::Acquire);
        let changed = |changed: u64| changed > durable && changed <= transaction;
        self.state().open.values().any(|open| changed(open.state.changed.load(Ordering::Acquire)))
    }
}
